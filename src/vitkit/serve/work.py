"""The body of a request goes in, prepared images come out; the model's numbers go in, the answer's body comes out.

All that looks at what strangers sent is here, and runs in the worker process: JSON, base64, image files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vitkit.core.errors import VitkitError
from vitkit.core.shapes import Float, Tensor
from vitkit.data.decode import Gate, decode
from vitkit.serve import kserve
from vitkit.serve.answers import JSON, Refusal, encoded
from vitkit.serve.models import Served
from vitkit.serve.wire import Message

CANNOT_BE_READ = "send a JPEG, PNG, WebP, GIF, BMP, TIFF or PPM file as it is"
SMALLER = "send a smaller one"


@dataclass(kw_only=True)
class Job:
    """A request on its way: what it asks, its images once they are prepared, and why some are not."""

    id: int
    asked: Message
    served: Served
    images: Float[Tensor, "B C H W"] | None = None
    errors: list[str | None] = field(default_factory=list)
    wish: kserve.Wish | None = None
    began: float = 0.0

    @property
    def count(self) -> int:
        """How many images there are to compute."""
        return 0 if self.images is None else len(self.images)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer: its status, its headers, its body."""

    status: int
    body: bytes
    headers: dict[str, str]


def refused(refusal: Refusal) -> Reply:
    """A refusal as an answer."""
    return Reply(status=refusal.status, body=refusal.body(), headers={"content-type": JSON} | refusal.headers)


# Before the model


def prepare(job: Job, body: bytes, *, gate: Gate, most: int) -> None:
    """Read the images of a request, each on its own; a Refusal where there is none to compute."""
    kind = job.asked["do"]
    if kind == "infer":
        _prepare_inference(job, body, gate=gate, most=most)
        return
    files = _based_files(body, most=most) if job.asked["json"] else [body]
    prepared, why = [], list[tuple[int, str, str | None]]()  # a refusal itself would hold on to all that was read
    for file in files:
        try:
            prepared.append(_prepared(kserve.unbased(file) if isinstance(file, str) else file, job.served, gate))
            job.errors.append(None)
        except Refusal as refusal:
            job.errors.append(refusal.error)
            why.append((refusal.status, refusal.error, refusal.hint))
    if not prepared:
        status, error, hint = why[0]
        raise Refusal(status, error, hint=hint)
    job.images = joined(prepared)


def _prepare_inference(job: Job, body: bytes, *, gate: Gate, most: int) -> None:
    how = job.served.preprocessing
    height, width = job.served.sides
    bounds = kserve.Bounds(sides=(how.channels, height, width), classes=len(job.served.labels), images=most)
    job.wish = kserve.wish(body, json_size=job.asked["json_size"], bounds=bounds)
    if job.wish.pixels is not None:
        job.images = torch.from_numpy(job.wish.pixels)
    else:
        job.images = joined([_prepared(file, job.served, gate) for file in job.wish.files or ()])
    job.errors = [None] * len(job.images)


def _based_files(body: bytes, *, most: int) -> list[str]:
    if (commas := body.count(b",")) >= most:  # there are none in base64, and a million numbers are not worth reading
        raise Refusal(413, f"too many images: expected at most {most}, got {commas + 1:,}")
    given = kserve.parsed(body)
    if not isinstance(given, list) or not given or not all(isinstance(text, str) for text in given):
        raise Refusal(400, 'expected a JSON list of files in base64: ["…", "…"]')
    if len(given) > most:
        raise Refusal(413, f"too many images: expected at most {most}, got {len(given)}")
    return given


def _prepared(file: bytes, served: Served, gate: Gate) -> Float[Tensor, "1 C H W"]:
    how = served.preprocessing
    try:
        picture = decode(file, channels=how.channels, gate=gate)
        return how.normalise(torch.from_numpy(how.pixels(picture))[None])
    except VitkitError as error:
        is_too_much = error.message.startswith(("too many ", "too large "))  # pixels, frames, bytes for the memory
        raise Refusal(422, str(error), hint=error.hint or (SMALLER if is_too_much else CANNOT_BE_READ)) from None
    except MemoryError:
        raise Refusal(422, "the image is too large for the memory", hint=SMALLER) from None


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Several batches as one; one as it is, without a copy.

    >>> joined([torch.zeros(1, 3), torch.ones(2, 3)]).shape
    torch.Size([3, 3])
    """
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


# After the model


def finish(job: Job, features: Float[Tensor, "B F"], logits: Float[Tensor, "B Y"]) -> Reply:
    """The answer to a prediction, features or inference."""
    if not all(np.isfinite(numbers.numpy()).all() for numbers in (logits, features)):
        raise Refusal(422, "the model's answer is not a finite number", hint="the pixels may be far out of range")
    if job.wish is not None:
        return _inferred(job, features, logits)
    if job.asked["do"] == "features":
        each: list[dict[str, Any]] = [{"features": row} for row in features.tolist()]
    else:
        each = predictions(job, features, logits)
    name = job.served.name
    if not job.asked["json"]:
        return _json({"model": name, **each[0]})
    found = iter(each)
    results = [{"error": error} if error is not None else next(found) for error in job.errors]
    return _json({"model": name, "results": results})


def predictions(job: Job, features: Float[Tensor, "B F"], logits: Float[Tensor, "B Y"]) -> list[dict[str, Any]]:
    """The likeliest classes of each image and, where asked for, the nearest."""
    said = [{"predictions": _named(job, row, "probability", job.asked["top"])} for row in logits.softmax(dim=1)]
    if nearest := job.asked["nearest"]:
        rows = job.served.nearness(features)
        return [one | {"nearest": _named(job, row, "similarity", nearest)} for one, row in zip(said, rows, strict=True)]
    return said


def _named(job: Job, numbers: Float[Tensor, "Y"], what: str, top: int) -> list[dict[str, Any]]:
    return [{"label": label, what: value} for label, value in job.served.predictor.likeliest(numbers, top=top)]


def _inferred(job: Job, features: Float[Tensor, "B F"], logits: Float[Tensor, "B Y"]) -> Reply:
    assert job.wish is not None
    labels = job.served.labels
    found: dict[str, Any] = {"features": features.numpy()}
    if labels:
        chosen = logits.argmax(dim=1).tolist()
        found |= {"logits": logits.numpy(), "probabilities": logits.softmax(dim=1).numpy()}
        found |= {"label": [labels[number] for number in chosen]}
    body, headers = kserve.answer(job.wish, model=job.served.name, found=found)
    return Reply(status=200, body=body, headers=headers)


def attend(job: Job) -> Reply:
    """The answer to a question about attention, computed here: one image, seen from the token that the head reads."""
    assert job.images is not None
    served, image, asked = job.served, job.images[:1], job.asked
    grid = list(served.model.config.grid)  # type: ignore[union-attr]
    if asked["layer"] is not None:
        layer, head = asked["layer"], asked["head"]
        seen = served.patches(image, layer=layer, head=head)
        said = {"grid": grid, "layer": layer, "head": "mean" if head is None else head, "patches": _rounded(seen)}
        return _json({"model": served.name, **said})
    looked = served.look(image)
    layers, heads = looked.maps.shape[:2]
    said = {"grid": grid, "layers": layers, "heads": heads, "predictions": []}
    if served.labels:
        said["predictions"] = _named(job, looked.logits.softmax(dim=0), "probability", asked["top"])
    return _json({"model": served.name, **said, "rollout": _rounded(looked.rollout), "maps": _rounded(looked.maps)})


def _rounded(numbers: Tensor) -> Any:
    return np.round(numbers.double().numpy(), 5).tolist()


def _json(value: object) -> Reply:
    try:
        return Reply(status=200, body=encoded(value), headers={"content-type": JSON})
    except ValueError:  # a number that is not finite, which JSON cannot say
        raise Refusal(422, "the model's answer is not a finite number") from None
