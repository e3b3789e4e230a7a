"""A model and a format go in, the model is written in it; or is not, with the reason, before anything is lost."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.cli.comparing import pair_in_words
from vitkit.cli.describing import describe, preprocessing_in_words

if TYPE_CHECKING:
    from vitkit.checkpoints.formats.format import Format
    from vitkit.checkpoints.native import Artefact
    from vitkit.zoo.variants import ModelConfig

SILENT = ("dropout.", "head.bias", "positions.origin")
"""Settings that matter in training, at the start of it or at another image size, and not to the answers of now."""


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
        able = [known.name for known in FORMATS if not known.refuses(artefact.config)]
        raise WeightsError(
            f"{to.title} cannot hold this model: {reason}",
            hint=f"these can: {', '.join(['vitkit', *able])}; or change the model by settings, and with it its answers",
        )
    if out.is_dir():  # what is there is an artefact of ours no more
        for name in (native.CHECKSUMS, native.REFERENCE, native.LABELS):
            (out / name).unlink(missing_ok=True)
    write_as(to, out, artefact)


def left_behind(to: "Format | None", out: Path, artefact: "Artefact") -> list[str]:
    """What the format has no place for, in words, found by looking at what was written: keep it by other means."""
    if to is None:
        return []
    found = describe(out, format=to.name)
    lost = [] if found.labels == artefact.labels else [f"the names of {len(artefact.labels):,} classes"]
    if found.preprocessing != artefact.preprocessing:
        lost.append(f"the preprocessing: {preprocessing_in_words(artefact.preprocessing)}")
    return lost


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
