"""A model and a format go in, the model is written in it and read back; or is not, with the reason and a way out.

`vitkit weights convert` and `vitkit export` both do their work here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.cli.comparing import pair_in_words
from vitkit.cli.describing import preprocessing_in_words

if TYPE_CHECKING:
    from vitkit.checkpoints.formats.format import Format
    from vitkit.checkpoints.native import Artefact
    from vitkit.core.shapes import Tensor
    from vitkit.zoo.variants import ModelConfig

SILENT = ("dropout.", "head.bias", "positions.origin")
"""Settings that matter in training, at the start of it or at another image size, and not to the answers of now."""
REMEDIES = {
    "block.activation": ("gelu_erf", "gelu_tanh"),
    "block.norm_eps": ("1e-6", "1e-5"),
    "backbone.origin": ("timm", "google"),
    "origin": ("timm", "google"),
}
"""Settings that other libraries take for granted, with the values that they do: they change answers, not tensors."""


def changed(artefact: "Artefact", settings: Sequence[str], *, place: Path) -> "tuple[ModelConfig, list[str]]":
    """The configuration with the user's settings, and in words what they change; tensors must stay what they are."""
    from vitkit.checkpoints.compare import differing, flat
    from vitkit.checkpoints.foreign import check_shapes
    from vitkit.core.config import apply_overrides, to_mapping
    from vitkit.core.errors import WeightsError

    config = apply_overrides(artefact.config, settings)
    if config == artefact.config:
        return config, []
    try:
        check_shapes(artefact.state, config, path=place)
    except WeightsError as error:
        raise WeightsError(
            f"these settings make it a model of other tensors: {error}",
            hint="vitkit weights adapt changes image size, patches, channels, classes and pooling",
        ) from error
    pairs = differing(flat(to_mapping(artefact.config)), flat(to_mapping(config)))
    return config, [
        pair_in_words(key, pair) + ("" if key.startswith(SILENT) else ": logits change") for key, pair in pairs.items()
    ]


def write(to: "Format | None", out: Path, artefact: "Artefact") -> None:
    """Write the model in a format; None is our own."""
    from vitkit.checkpoints import native
    from vitkit.checkpoints.convert import write_as
    from vitkit.checkpoints.foreign import FORMATS
    from vitkit.core.errors import WeightsError

    if to is None:
        native.save(out, artefact)
        return
    if reason := to.refuses(artefact.config):
        # write_as would refuse it too, but cannot say what would do, and knows nothing of settings.
        able = ["vitkit", *(known.name for known in FORMATS if not known.refuses(artefact.config))]
        settings = remedy(to, artefact.config)
        otherwise = f"; or add {' '.join(settings)}, and the model answers otherwise" if settings else ""
        raise WeightsError(
            f"{to.title} cannot hold this model: {reason}", hint=f"these can: {', '.join(able)}{otherwise}"
        )
    if out.is_dir():  # what is there is an artefact of ours no more
        for name in (native.CHECKSUMS, native.REFERENCE, native.LABELS):
            (out / name).unlink(missing_ok=True)
    write_as(to, out, artefact)


def remedy(to: "Format", config: "ModelConfig") -> list[str]:
    """The fewest settings by which the tensors, as they are, become a model that the format can hold; none if none do.

    >>> from vitkit.checkpoints.foreign import format_called
    >>> from vitkit.zoo.lookup import configure
    >>> remedy(format_called("torchvision"), configure("B/16")), remedy(format_called("bit"), configure("B/16"))
    (['block.activation=gelu_erf'], [])
    """
    from vitkit.checkpoints.compare import flat
    from vitkit.core.config import apply_overrides, to_mapping

    known = flat(to_mapping(config))
    # A gated MLP has other tensors than one of a GELU.
    able = {key: values for key, values in REMEDIES.items() if key in known and known[key] != "swiglu"}
    choices = product(*([None, *(f"{key}={value}" for value in values)] for key, values in able.items()))
    tried = sorted(([setting for setting in chosen if setting] for chosen in choices), key=len)
    return next((settings for settings in tried if not to.refuses(apply_overrides(config, settings))), [])


@dataclass(frozen=True, kw_only=True)
class ReadBack:
    """What was found where a model was written: its tensors number for number, and in words what did not come back.

    `lost` is to be kept by other means. `settings` read otherwise matter to training or at another image size alone.
    """

    tensors: int
    lost: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


def read_back(to: "Format | None", out: Path, artefact: "Artefact") -> ReadBack:
    """Read what was written, tensor by tensor; one that is not as it was, or a model that is another, is an error."""
    from vitkit.checkpoints import foreign, native
    from vitkit.checkpoints.files.readers import open_tensors
    from vitkit.checkpoints.mapping import read

    if to is None:
        check_tensors(native.load(out).state.items(), artefact, place=out)
        return ReadBack(tensors=len(artefact.state))
    with open_tensors(out) as tensors:
        found = foreign.identify(tensors, format=to.name)
        found.fit.check()
        check_tensors(read(found.rules, tensors), artefact, place=out)
    lost = [] if found.labels == artefact.labels else [f"the names of {len(artefact.labels):,} classes"]
    if found.preprocessing != artefact.preprocessing:
        lost.append(f"the preprocessing: {preprocessing_in_words(artefact.preprocessing)}")
    settings = read_otherwise(artefact, found.config, place=out)
    return ReadBack(tensors=len(artefact.state), lost=tuple(lost), settings=tuple(settings))


def check_tensors(found: Iterable["tuple[str, Tensor]"], artefact: "Artefact", *, place: Path) -> None:
    """Refuse tensors that are not those of the model, number for number; one of them is in memory at a time."""
    from vitkit.core.errors import WeightsError

    left = set(artefact.state)
    for name, tensor in found:
        written = artefact.state.get(name)
        if written is None or not same_numbers(written, tensor):
            raise WeightsError(f"{place}: {name} is not what was written", hint="do not use it, and report this")
        left.remove(name)
    if left:
        raise WeightsError(f"{place}: {min(left)} was not written", hint="do not use it, and report this")


def same_numbers(one: "Tensor", other: "Tensor") -> bool:
    """Whether two tensors are the same, number for number. A difference takes memory: it is for what is not equal."""
    import torch

    from vitkit.checkpoints.compare import largest_difference

    if one.shape != other.shape:
        return False
    return (one.dtype == other.dtype and torch.equal(one, other)) or largest_difference(one, other) == 0


def read_otherwise(artefact: "Artefact", found: "ModelConfig", *, place: Path) -> list[str]:
    """The settings that a file gives back otherwise, in words; such as change the answer to an image are an error."""
    import torch

    from vitkit.checkpoints.compare import differing, flat
    from vitkit.checkpoints.reference import answers
    from vitkit.core.config import to_mapping
    from vitkit.core.errors import WeightsError
    from vitkit.model.config import ViTConfig

    pairs = differing(flat(to_mapping(artefact.config)), flat(to_mapping(found)))
    words = [pair_in_words(key, pair) for key, pair in pairs.items()]
    if not isinstance(found, ViTConfig) or not found.positions.is_additive:
        # It takes images of any size, so that its file need not say one.
        found = replace(found, image_size=artefact.config.image_size)
    if found != artefact.config and not all(key.startswith(SILENT) for key in pairs):
        models = (artefact.model(), replace(artefact, config=found).model())
        ours, theirs = (answers(model.float()) for model in models)
        if not torch.equal(ours.nan_to_num(), theirs.nan_to_num()):
            raise WeightsError(
                f"{place}: it answers otherwise than the model that was written: {', '.join(words)}",
                hint="do not use it, and report this",
            )
    return words


def done_otherwise(to: "Format | None", artefact: "Artefact") -> list[str]:
    """What of the preprocessing the format's own library does in another way, though the files tell us all of it."""
    if to is None or to.writes != "safetensors":  # the other formats say nothing of preprocessing
        return []
    how, library, words = artefact.preprocessing, "timm" if to.name == "timm" else "transformers", []
    if not how.antialias:
        words.append(f"resizing without antialias: {library} always smooths, and its pixels differ from these")
    if library == "transformers" and how.resize != "squash":
        words.append("the place of the centre crop: transformers rounds it down, which can be one pixel aside")
    return words


def check_out(out: Path, *, file: Path, force: bool, as_folder: bool) -> None:
    """Refuse a place that cannot be written to, or that holds something, before time is spent."""
    from vitkit.core.errors import WeightsError, did_you_mean

    folder = out.absolute().parent
    if not folder.is_dir():
        beside = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = did_you_mean(folder.name, beside) or f"make it first: mkdir -p {out.parent}"
        raise WeightsError(f"{out.parent}: no such folder", hint=hint)
    if not out.exists():
        return
    if file.exists() and out.resolve() in (file.resolve(), file.resolve().parent):
        raise WeightsError(f"{out} is what is read", hint="choose another place for OUT")
    if as_folder != out.is_dir():
        expected, got = ("a folder", "a file") if as_folder else ("a file", "a folder")
        raise WeightsError(f"{out}: cannot be written", expected=expected, got=got, hint="choose another place for OUT")
    if not force and (out.is_file() or any(out.iterdir())):
        raise WeightsError(f"{out} is there already", hint="--force writes over it")
