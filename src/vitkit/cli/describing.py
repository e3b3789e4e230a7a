"""A file of weights goes in, what it is comes out, in words and for scripts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.cli.output import format_count

if TYPE_CHECKING:
    from vitkit.checkpoints.formats.format import Format
    from vitkit.checkpoints.native import Artefact
    from vitkit.data.transforms import Preprocessing
    from vitkit.zoo.variants import ModelConfig

OURS = "vitkit"
"""What our own artefact is called beside the names of the other formats."""
OUR_TITLE = "vitkit's own"
SHOWN = 8
"""Of a long list of names a person sees so many; --json gives all."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a file of weights is, whole or not."""

    place: str
    format: str
    title: str
    name: str
    config: "ModelConfig"
    preprocessing: "Preprocessing"
    labels: tuple[str, ...]
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """How many numbers the whole model learns."""
        from vitkit.zoo.lookup import create

        return sum(parameter.numel() for parameter in create(self.config, device="meta").parameters())

    def to_json(self) -> dict[str, Any]:
        """What scripts rely on."""
        from vitkit.core.config import to_mapping

        return {
            "file": self.place,
            "format": self.format,
            "title": self.title,
            "model": self.name,
            "classes": self.config.classes,
            "image_size": self.config.image_size,
            "channels": self.config.channels,
            "parameters": self.parameters,
            "missing": list(self.missing),
            "extra": list(self.extra),
            "preprocessing": to_mapping(self.preprocessing),
            "labels": None if are_numbers(self.labels) else list(self.labels),
            "notes": list(self.notes),
            "dtypes": list(self.dtypes),
            "config": to_mapping(self.config),
        }

    def sections(self) -> Mapping[str, Sequence[tuple[str, str]]]:
        """What a person reads."""
        return {
            self.place: [
                ("format", f"{self.title} ({self.format})"),
                ("model", self.name),
                *sizes_in_words(self.config),
                ("parameters", f"{self.parameters:,} ({format_count(self.parameters)})"),
                *([("numbers", ", ".join(self.dtypes))] if self.dtypes else []),
                ("labels", labels_in_words(self.labels)),
                ("preprocessing", preprocessing_in_words(self.preprocessing)),
                *(("note", note) for note in self.notes),
            ],
            f"Missing: {len(self.missing):,}": [("–", name) for name in some(self.missing)],
            f"Extra: {len(self.extra):,}": [("+", name) for name in some(self.extra)],
        }


# Files


def place_of(path: Path, *, format: str | None = None) -> Path:  # noqa: A002  the word users type
    """Where to read: at the path, where a `hub:` name is kept, or in the folder of an artefact whose file is named."""
    from vitkit.checkpoints.hub import located
    from vitkit.checkpoints.native import CHECKSUMS, WEIGHTS

    place = located(path)
    check_exists(place)
    is_part = place.name == WEIGHTS and (place.parent / CHECKSUMS).is_file() and format in (None, OURS)
    return place.parent if is_part else place


def is_ours(path: Path, format: str | None) -> bool:  # noqa: A002  the word users type
    """Whether a folder is to be read as our own artefact."""
    from vitkit.checkpoints.native import CHECKSUMS

    return format == OURS or (format is None and (path / CHECKSUMS).is_file())


def describe(path: Path, *, format: str | None) -> Description:  # noqa: A002
    """What the weights at a path are; tensors that are missing in them or left over are told, not refused."""
    from vitkit.checkpoints import foreign, native
    from vitkit.checkpoints.files.readers import open_tensors

    find_format(format)
    place = place_of(path, format=format)
    if is_ours(place, format):
        return describe_artefact(native.load(place), place=str(path))
    with explaining(place, format=format), open_tensors(place) as tensors:
        found = foreign.identify(tensors, format=format)
        return Description(
            place=str(path),
            format=found.format.name,
            title=found.format.title,
            name=found.name,
            config=found.config,
            preprocessing=found.preprocessing,
            labels=found.labels,
            missing=found.fit.missing,
            extra=found.fit.extra,
            notes=found.notes,
            dtypes=tuple(sorted({str(dtype).removeprefix("torch.") for dtype in tensors.dtypes.values()})),
        )


@contextmanager
def explaining(place: Path, *, format: str | None) -> Iterator[None]:  # noqa: A002
    """Say of a file that is not of the format that was named of which it looks to be."""
    from vitkit.checkpoints import foreign
    from vitkit.checkpoints.files.readers import open_tensors
    from vitkit.core.errors import WeightsError

    try:
        yield
    except WeightsError as error:
        if format in (None, OURS) or not place.exists():
            raise
        with open_tensors(place) as tensors:
            known = (each for each in foreign.FORMATS if each.recognises(tensors.shapes, tensors.about))
            looks = next(known, None)
        if looks is None or looks.name == format:
            raise
        message = f"{place}: not read as {format}: {error.message}"
        raise WeightsError(message, hint=f"it looks like {looks.name}; leave --format out") from error


def describe_artefact(artefact: "Artefact", *, place: str) -> Description:
    """What an artefact of ours is."""
    from vitkit.zoo.lookup import create

    wanted = create(artefact.config, device="meta").state_dict().keys()
    return Description(
        place=place,
        format=OURS,
        title=OUR_TITLE,
        name=artefact.name,
        config=artefact.config,
        preprocessing=artefact.preprocessing,
        labels=artefact.labels,
        missing=tuple(sorted(wanted - artefact.state.keys())),
        extra=tuple(sorted(artefact.state.keys() - wanted)),
        dtypes=tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in artefact.state.values()})),
    )


def load(path: Path, *, format: str | None) -> "tuple[Description, Artefact]":  # noqa: A002
    """What the weights at a path are, and the model in them; its format is looked for once."""
    from vitkit.checkpoints import foreign, native

    find_format(format)
    place = place_of(path, format=format)
    if is_ours(place, format):
        artefact = native.load(place)
        return describe_artefact(artefact, place=str(path)), artefact
    description = describe(path, format=format)
    return description, foreign.load_as_stored(place, format=description.format)


def check_exists(path: Path) -> None:
    """Refuse a path with nothing at it, and name the nearest neighbour."""
    from vitkit.core.errors import WeightsError, did_you_mean

    if path.exists() or path.is_symlink():
        return
    folder = path.parent
    beside = [str(folder / entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    raise WeightsError(f"{path}: no such file", hint=did_you_mean(str(path), beside) or "check the path")


def find_format(name: str | None) -> "Format | None":
    """The format of a name; None for our own. An unknown name is an error with the nearest that is known.

    >>> find_format("google").title, find_format("vitkit")
    ("Google's vision_transformer", None)
    """
    from vitkit.checkpoints.foreign import FORMATS, format_called
    from vitkit.core.errors import UnknownNameError, did_you_mean

    names = [OURS, *(known.name for known in FORMATS)]
    if name is None or name == OURS:
        return None
    if name not in names:
        hint = did_you_mean(name, names) or f"known formats: {', '.join(names)}"
        raise UnknownNameError(f"no format of weights is called {name}", hint=hint)
    return format_called(name)


# Words


def some(names: Sequence[str]) -> list[str]:
    """The first of many names, and how many more there are.

    >>> some(["a", "b"]), some([str(number) for number in range(10)])[-2:]
    (['a', 'b'], ['7', '… and 2 more, all of them with --json'])
    """
    more = [f"… and {len(names) - SHOWN:,} more, all of them with --json"] if len(names) > SHOWN else []
    return [*names[:SHOWN], *more]


def counted(count: int, thing: str) -> str:
    """How many there are of a thing.

    >>> counted(1, "head"), counted(3, "head")
    ('1 head', '3 heads')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def sizes_in_words(config: "ModelConfig") -> list[tuple[str, str]]:
    """The sizes of a model, a line for each kind."""
    from vitkit.core.shapes import sides
    from vitkit.model.config import ViTConfig

    channels = "" if config.channels == 3 else f", {counted(config.channels, 'channel')}"
    images = ("images", f"{sides(config.image_size)}{channels}")
    classes = ("classes", f"{config.classes:,}" if config.classes else "none: it gives features")
    if not isinstance(config, ViTConfig):
        return [("sizes", f"{config.width:,} wide, {'-'.join(map(str, config.units))} units"), images, classes]
    patches = "cells of a ResNet" if config.backbone else f"patches of {sides(config.patch_size)}"
    layers, heads = counted(config.depth, "layer"), counted(config.heads, "head")
    block, pooling = config.block, {"class": "the class token", "mean": "the mean", "map": "attention"}[config.pooling]
    return [
        ("sizes", f"{layers}, {config.width:,} wide, {heads}, MLP {config.mlp_dim:,}"),
        images,
        ("tokens", f"{config.prefix + config.patches}: {sides(config.grid)} {patches}, {config.prefix} in front"),
        ("computes", f"{block.activation}, norm eps {block.norm_eps:g}, pools by {pooling}"),
        ("positions", f"{config.positions.kind}, resampled as {config.positions.origin} does"),
        classes,
    ]


def are_numbers(labels: Sequence[str]) -> bool:
    """Whether labels are only the numbers of the classes.

    >>> are_numbers(("0", "1")), are_numbers(("cat", "dog"))
    (True, False)
    """
    return tuple(labels) == tuple(map(str, range(len(labels))))


def labels_in_words(labels: Sequence[str]) -> str:
    """The first labels.

    >>> labels_in_words(("cat", "dog")), labels_in_words(("0", "1"))
    ('cat, dog', 'none: classes have numbers only')
    """
    if are_numbers(labels):
        return "none: classes have numbers only" if labels else "none"
    first = ", ".join(labels[:SHOWN])
    return f"{first} … and {len(labels) - SHOWN:,} more" if len(labels) > SHOWN else first


def preprocessing_in_words(found: "Preprocessing") -> str:
    """What is done to a picture before the model sees it.

    >>> from vitkit.data.transforms import Preprocessing
    >>> preprocessing_in_words(Preprocessing(antialias=False))
    'squash to 224×224, bilinear without antialias, mean 0.5, deviation 0.5'
    """
    from vitkit.core.shapes import sides

    size, resized = sides(found.image_size), found.resized
    framing = {
        "squash": f"squash to {size}",
        "squash_crop": f"squash to {sides(resized)}, take the middle {size}",
        "crop": f"resize to cover {sides(resized)}, take the middle {size}",
    }[found.resize]
    smooth = "" if found.antialias else " without antialias"
    mean, deviation = (
        " ".join(f"{number:g}" for number in (numbers[:1] if len(set(numbers)) == 1 else numbers))
        for numbers in (found.mean, found.deviation)
    )
    return f"{framing}, {found.filter}{smooth}, mean {mean}, deviation {deviation}"
