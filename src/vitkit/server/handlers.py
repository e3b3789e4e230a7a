"""Request handlers of the worker process: decode images, and encode the model's outputs.

Everything that parses untrusted bodies is here and runs in the worker: JSON, base64 and image files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vitkit.core.errors import VitkitError, summarize
from vitkit.core.shapes import Float, Tensor
from vitkit.data.decode import decode
from vitkit.data.decode_limits import DecodeLimits
from vitkit.inference.top_classes import top_classes
from vitkit.server import kserve
from vitkit.server.ipc import JSON, HTTPError, Message, WorkerResponse, encode_json
from vitkit.server.models import ServedModel

SUPPORTED_FILES = "send an unmodified JPEG, PNG, WebP, AVIF, HEIC, GIF, BMP, TIFF or PPM file"
SMALLER_IMAGE = "send a smaller image"


@dataclass(kw_only=True)
class Job:
    """A request in the worker: its images once they are decoded, and for each image an error or None."""

    id: int
    header: Message
    model: ServedModel
    images: Float[Tensor, "B C H W"] | None = None
    errors: list[str | None] = field(default_factory=list)
    inference: kserve.InferenceRequest | None = None
    decode_seconds: float = 0.0

    @property
    def count(self) -> int:
        """Number of images to process."""
        return 0 if self.images is None else len(self.images)

    @property
    def is_attention(self) -> bool:
        """Whether the request asks for attention maps, which take a forward pass of their own."""
        return bool(self.header["task"] == "attention")

    def encode_response(self, response: WorkerResponse) -> tuple[Message, bytes]:
        """Return the response to the request as a message."""
        return {"id": self.id, "status": response.status, "headers": response.headers}, response.body


# Before the model


def prepare(job: Job, body: bytes, *, decode_limits: DecodeLimits, max_images: int) -> None:
    """Decode the images of a request. Raise an `HTTPError` if none can be processed."""
    model = job.model
    if job.header["task"] == "infer":
        shape = (model.preprocessing.channels, *model.image_size)
        spec = kserve.InputSpec(shape=shape, num_classes=len(model.labels), max_images=max_images)
        job.inference = kserve.parse_request(body, json_size=job.header["json_size"], spec=spec)
        if job.inference.pixels is not None:
            job.images = torch.from_numpy(job.inference.pixels)
        else:
            job.images = concatenate([_preprocess(file, model, decode_limits) for file in job.inference.files or ()])
        return
    files: Sequence[str | bytes] = _parse_list(body, max_images=max_images) if job.header["is_list"] else [body]
    images, failures = [], list[tuple[int, str, str | None]]()  # exceptions would keep the decoded data alive
    for file in files:
        try:
            content = kserve.decode_base64(file) if isinstance(file, str) else file
            images.append(_preprocess(content, model, decode_limits))
            job.errors.append(None)
        except HTTPError as error:
            job.errors.append(error.message)
            failures.append((error.status, error.message, error.hint))
    if not images:
        status, message, hint = failures[0]
        raise HTTPError(status, message, hint=hint)
    job.images = concatenate(images)


def _parse_list(body: bytes, *, max_images: int) -> list[str]:
    # base64 has no commas: a list of a million numbers is rejected without parsing it.
    if (count := body.count(b",") + 1) > max_images:
        raise HTTPError(413, f"too many images: expected at most {max_images}, got {count:,}")
    files = kserve.parse_json(body)
    if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
        raise HTTPError(400, 'expected a JSON list of files in base64: ["…", "…"]')
    return files


def _preprocess(file: bytes, model: ServedModel, decode_limits: DecodeLimits) -> Float[Tensor, "1 C H W"]:
    preprocessing = model.preprocessing
    try:
        image = decode(file, channels=preprocessing.channels, limits=decode_limits)
        return preprocessing.normalize(torch.from_numpy(preprocessing.to_pixels(image))[None])
    except VitkitError as error:
        is_too_large = error.message.startswith(("too many ", "too large "))  # pixels, frames, bytes
        hint = error.hint or (SMALLER_IMAGE if is_too_large else SUPPORTED_FILES)
        raise HTTPError(422, summarize(error), hint=hint) from None
    except MemoryError:
        raise HTTPError(422, "the image is too large for the memory", hint=SMALLER_IMAGE) from None


def concatenate(batches: Sequence[Tensor]) -> Tensor:
    """Concatenate batches; a single one is not copied."""
    return batches[0] if len(batches) == 1 else torch.cat(list(batches))


# After the model


def build_response(job: Job, features: Float[Tensor, "B F"], logits: Float[Tensor, "B Y"]) -> WorkerResponse:
    """Encode the response to a prediction, features or KServe request."""
    if not all(np.isfinite(values.numpy()).all() for values in (logits, features)):
        raise HTTPError(422, "the model's output is not finite", hint="the pixels may be far out of range")
    if job.inference is not None:
        outputs: dict[str, Any] = {"features": features.numpy()}
        if labels := job.model.labels:
            outputs |= {"logits": logits.numpy(), "probabilities": logits.softmax(dim=1).numpy()}
            outputs["label"] = [labels[index] for index in logits.argmax(dim=1).tolist()]
        return kserve.encode_response(job.inference, model=job.model.name, outputs=outputs)
    if job.header["task"] == "features":
        results: list[dict[str, Any]] = [{"features": row} for row in features.tolist()]
    else:
        top, nearest = job.header["top"], job.header["nearest"]
        results = [{"predictions": row} for row in _top_classes(job, logits.softmax(dim=1), "probability", top)]
        if nearest:
            similarity = job.model.class_similarity(features)
            for result, row in zip(results, _top_classes(job, similarity, "similarity", nearest), strict=True):
                result["nearest"] = row
    if not job.header["is_list"]:
        return _json_response({"model": job.model.name, **results[0]})
    remaining = iter(results)
    entries = [{"error": error} if error is not None else next(remaining) for error in job.errors]
    return _json_response({"model": job.model.name, "results": entries})


def _top_classes(job: Job, scores: Float[Tensor, "B Y"], key: str, top: int) -> list[list[dict[str, Any]]]:
    labels = job.model.labels
    return [[{"label": labels[index], key: score} for index, score in row] for row in top_classes(scores, count=top)]


def process_attention(job: Job) -> WorkerResponse:
    """Compute the attention maps of one image and encode them."""
    assert job.images is not None
    model, image, header = job.model, job.images[:1], job.header
    response: dict[str, Any] = {"model": model.name, "grid": list(model.model.config.grid)}  # type: ignore[union-attr]
    if header["layer"] is not None:
        layer, head = header["layer"], header["head"]
        patches = _round(model.compute_patch_attention(image, layer=layer, head=head))
        return _json_response(response | {"layer": layer, "head": "mean" if head is None else head, "patches": patches})
    rollout, maps, logits = model.compute_attention(image)
    probabilities = logits[None].softmax(dim=1)
    predictions = _top_classes(job, probabilities, "probability", header["top"])[0] if model.labels else []
    response |= {"layers": len(maps), "heads": maps.shape[1], "predictions": predictions}
    return _json_response(response | {"rollout": _round(rollout), "maps": _round(maps)})


def _round(values: Tensor) -> Any:
    return np.round(values.double().numpy(), 5).tolist()


def _json_response(value: object) -> WorkerResponse:
    try:
        return WorkerResponse(200, {"content-type": JSON}, encode_json(value))
    except ValueError:  # JSON has no NaN and no infinity
        raise HTTPError(422, "the model's output is not finite") from None
