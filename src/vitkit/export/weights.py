"""Weights that were written for another library go in, with the model that they are of; the proof of them comes out.

They are asked about images as vitkit reads them, and as the library that they are for does, where it is installed. In
a folder they have labels, preprocessing and an example beside them, as a program has.
"""

from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from vitkit.checkpoints import foreign
from vitkit.checkpoints.files.readers import open_tensors
from vitkit.checkpoints.formats.huggingface import hub_config
from vitkit.checkpoints.formats.timm import TIMM
from vitkit.checkpoints.formats.timm_config import timm_config
from vitkit.checkpoints.native import CONFIG, LABELS, Artefact, write_json
from vitkit.checkpoints.native import PREPROCESSING as PROCESSOR
from vitkit.checkpoints.verify import LIBRARIES, model_of_its_library, timm_call, transformers_answer, verify_own
from vitkit.core.errors import WeightsError
from vitkit.core.files import write_text
from vitkit.core.shapes import pair
from vitkit.export.example import example
from vitkit.export.exporting import EXAMPLE, PREPROCESSING, compared, tried_example
from vitkit.export.images import ProofImages
from vitkit.export.program import FEATURES, LOGITS, Program
from vitkit.export.proof import check, judged
from vitkit.export.runtime import Numbers, Run
from vitkit.export.words import preprocessing_json
from vitkit.model.config import ViTConfig

FILES = {"npz": "model.npz", "torch": "model.pth"}
"""What weights that are one file are called in a folder."""


def add_words(folder: Path, artefact: Artefact) -> None:
    """Put labels and preprocessing beside weights; vitkit reads them there, too, where the format itself is silent."""
    write_json(folder / LABELS, list(artefact.labels))
    write_json(folder / PREPROCESSING, preprocessing_json(artefact.preprocessing))
    if not (folder / CONFIG).exists():
        size, channels = artefact.config.image_size, artefact.config.channels
        sizes = {"image_size": size if isinstance(size, int) else list(size), "input_size": [channels, *pair(size)]}
        write_json(folder / CONFIG, {"label_names": list(artefact.labels), **sizes})
        write_json(folder / PROCESSOR, artefact.preprocessing.to_hub())


def proved_weights(
    to: str, place: Path, artefact: Artefact, *, title: str, images: ProofImages | None
) -> dict[str, object]:
    """The figures of weights that give the model's answers; such as do not are an error."""
    again = for_images_of(artefact, foreign.load_as_stored(place, format=None if to == "vitkit" else to))
    model, theirs = (judged(Program(each.model().float())) for each in (artefact, again))
    found, about = compared(theirs, artefact, model=model, images=images)
    check(found, title=title)
    proof = {
        "format": to,
        "runtime": f"vitkit {metadata.version('vitkit')}",
        "against": f"the model before it was written, on torch {torch.__version__}, float32",
        **about,
        **found.to_json(),
    }
    words = [f"read by vitkit, {found.in_words()}"]
    if to == "vitkit":
        check_reference(place)
        return proof | {"words": words[0]}
    proof["library"] = library = in_its_library(to, place, artefact, model=model, images=images)
    skipped = library.get("skipped")
    words.append(f"not by its library: {skipped}" if skipped else f"by {library['against']}, {library.pop('words')}")
    if place.is_dir():
        proof["example"] = tried = with_example(to, place, artefact, skipped=skipped, images=images)
        words += [f"{EXAMPLE} agrees on {tried['images']} files"] if "images" in tried else []
    return proof | {"words": "; ".join(words)}


def for_images_of(artefact: Artefact, again: Artefact) -> Artefact:
    """A model that was read back, for images of the size that it had: some take any, and their files say none."""
    config = again.config
    if isinstance(config, ViTConfig) and config.positions.is_additive:
        return again
    return replace(again, config=replace(config, image_size=artefact.config.image_size))


def check_reference(place: Path) -> None:
    """Refuse an artefact of ours that does not give the answer which it keeps."""
    found = verify_own(place)
    if not found.agrees:
        raise WeightsError(f"{place}: it does not give {found.against}", got=found.max_difference, hint="report this")


# Their library


def in_its_library(
    to: str, place: Path, artefact: Artefact, *, model: Run, images: ProofImages | None
) -> dict[str, object]:
    """How near the library that the weights are for comes to the model's answers; or why it was not asked."""
    name = LOGITS if artefact.config.classes else FEATURES
    with open_tensors(place) as tensors:
        try:
            against, ask = model_of_its_library(foreign.identify(tensors, format=to), tensors)
        except WeightsError as error:
            return {"skipped": error.message}

        def theirs(pixels: Numbers) -> dict[str, Numbers]:
            return {name: ask(torch.from_numpy(pixels)).numpy()}

        def ours(pixels: Numbers) -> dict[str, Numbers]:
            return {name: model(pixels)[name]}

        found, _ = compared(theirs, artefact, model=ours, images=images)
    check(found, title=f"{against} on what was written")
    return {"against": against, "words": found.in_words(), **found.to_json()}


def with_example(
    to: str, folder: Path, artefact: Artefact, *, skipped: object, images: ProofImages | None
) -> dict[str, object]:
    """Write an example.py and run it; or why there is none, or nobody ran it."""
    text = example_for(to, artefact)
    if text is None:
        return {"skipped": "no library is known that loads such a folder"}
    if skipped and find_spec(LIBRARIES[to]) is not None:  # it is here and cannot: neither could the example
        return {"skipped": skipped}
    write_text(folder / EXAMPLE, text)
    return {"skipped": skipped} if skipped else tried_example(folder, artefact, images=images, library=LIBRARIES[to])


def example_for(to: str, artefact: Artefact) -> str | None:
    """The text of an example.py in which the library loads the weights from their folder; None where none does."""
    config = artefact.config
    more: dict[str, str] = {}
    if to == "timm":
        runtime = "timm"
    elif LIBRARIES.get(to) == "transformers" and isinstance(config, ViTConfig) and to != "huggingface-mae":
        runtime = "huggingface"
        architectures = hub_config(config, (), to=foreign.format_called(to))["architectures"]
        assert isinstance(architectures, list)
        try:
            more = {"kind": architectures[0], "answer": transformers_answer(config)}
        except WeightsError:
            return None
    elif to == "google" and not TIMM.refuses(config):
        runtime = "npz"
        architecture, args = timm_call(timm_config(config), classes=config.classes)
        listed = "\n".join(f"    {name}={value!r}," for name, value in args.items())
        more = {"architecture": architecture, "args": listed}
    else:
        return None
    return example(artefact.preprocessing, runtime=runtime, file=FILES["npz"], classes=config.classes, more=more)
