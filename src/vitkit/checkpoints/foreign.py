"""A file of weights of any origin goes in, the model in it with its preprocessing and labels comes out; and back.

path → readers → names and shapes → the format that knows them → its rules → our tensors
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitkit.checkpoints import native
from vitkit.checkpoints.adapt import with_image_size
from vitkit.checkpoints.files.guards import read_json
from vitkit.checkpoints.files.readers import INDEX, SUFFIXES, TensorFile, open_tensors
from vitkit.checkpoints.formats.bit import BIT
from vitkit.checkpoints.formats.format import About, Format
from vitkit.checkpoints.formats.google import BIG_VISION, GOOGLE
from vitkit.checkpoints.formats.huggingface import HF_DEIT, HF_DINOV2, HF_VIT, HF_VIT_MAE, hub_labels
from vitkit.checkpoints.formats.timm import DEIT, DINOV2, DINOV3, MAE, TIMM
from vitkit.checkpoints.formats.timm_config import preprocessing_told
from vitkit.checkpoints.formats.torchvision import TORCHVISION
from vitkit.checkpoints.hub import located
from vitkit.checkpoints.mapping import Fit, Rule, fit, read
from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import UnknownNameError, WeightsError, did_you_mean
from vitkit.core.shapes import Size, Tensor, pair, sides
from vitkit.data.image_processors import unread
from vitkit.data.transforms import Preprocessing, preprocessing
from vitkit.zoo.lookup import create, name_of
from vitkit.zoo.published import published_file
from vitkit.zoo.variants import ModelConfig

WEIGHT_FILES = (*SUFFIXES, INDEX)
FORMATS: tuple[Format, ...] = (
    *(GOOGLE, BIG_VISION, BIT),
    *(HF_VIT, HF_DEIT, HF_VIT_MAE, HF_DINOV2),
    TORCHVISION,
    *(DINOV3, DINOV2, MAE, DEIT, TIMM),
)
"""Every format but our own, those before others whose files the others would recognise too."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a file of weights is. `fed` is what is said of its preprocessing, beside it or by whoever published it."""

    format: Format
    config: ModelConfig
    rules: Sequence[Rule]
    fit: Fit
    about: About
    notes: tuple[str, ...] = ()
    fed: Preprocessing | None = None

    @property
    def name(self) -> str:
        """What to call the model."""
        return name_of(self.config)

    @property
    def preprocessing(self) -> Preprocessing:
        """What is said of the file, or else what the origin's own code does, at the size of the file's model."""
        config = self.config
        if self.fed is not None:
            return _for_model(self.fed, config)
        return preprocessing(self.format.origin, image_size=config.image_size, channels=config.channels)

    @property
    def fed_size(self) -> Size:
        """The size of the images that the origin's own code feeds: the model's, unless it then resamples positions."""
        stored, habit = self.config.image_size, self.format.input_size
        if habit is None:
            return stored
        return self.fed.image_size if self.fed else (habit if min(pair(stored)) > habit else stored)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, where the file's config.json has them; else their numbers."""
        return labels_in(self.about.config, classes=self.config.classes)


def format_called(name: str) -> Format:
    """The format of that name.

    >>> format_called("google").writes
    'npz'
    """
    for known in FORMATS:
        if known.name == name:
            return known
    names = [known.name for known in FORMATS]
    hint = did_you_mean(name, names) or f"known formats: {', '.join(names)}"
    raise UnknownNameError(f"no format of weights is called {name}", hint=hint)


def identify(tensors: TensorFile, *, format: str | None = None) -> Found:  # noqa: A002  the word users type
    """What a file of weights is: of the format that is named, or of the first that recognises it."""
    chosen = format_called(format) if format else None
    if chosen is None:
        chosen = next((known for known in FORMATS if known.recognises(tensors.shapes, tensors.about)), None)
    if chosen is None:
        raise WeightsError(
            f"{tensors.path}: the names in it are of no known format",
            expected=", ".join(known.title for known in FORMATS),
            got=", ".join(list(tensors.shapes)[:3]) + " …",
            hint="name the format with --format if you know it",
        )
    config = chosen.describe(tensors.shapes, tensors.about)
    rules = chosen.rules(config, tensors.shapes)
    found = fit(rules, tensors.shapes, ignored=chosen.ignored)
    fed, notes = preprocessing_said(tensors.path, config, about=tensors.about, format=chosen)
    recognised = Found(
        format=chosen,
        config=config,
        rules=rules,
        fit=found,
        about=tensors.about,
        notes=(*tensors.notes, *notes),
        fed=fed,
    )
    return replace(recognised, notes=(*recognised.notes, *_notes_on_sizes(recognised)))


def preprocessing_said(
    path: Path,
    config: ModelConfig,
    *,
    about: About,
    format: Format,  # noqa: A002  the word users type
) -> tuple[Preprocessing | None, list[str]]:
    """What is said of the preprocessing of weights, and notes on what of it is not followed.

    Hugging Face has a preprocessor_config.json beside them, timm a part of config.json, and a file of a published name
    is fed as its publisher does.
    """
    file = (path if path.is_dir() else path.parent) / native.PREPROCESSING
    if file.is_file():
        data = read_json(file)
        unknown = unread(data)
        names = f"{file.name}: {len(unknown)} unknown and not followed: {', '.join(unknown)}"
        return Preprocessing.from_hub(data), [names] if unknown else []
    if (told := preprocessing_told(about.config)) is not None:
        return told, []
    row = published_file(path.name, format=format.name)
    if row is None or pair(row.image_size) != pair(config.image_size) or config.channels != row.config.channels:
        return None, []
    return row.preprocessing, [f"fed as the published file of this name: {row.source}"]


def _for_model(said: Preprocessing, config: ModelConfig) -> Preprocessing:
    """What is said of preprocessing, for the size and the channels of the model."""
    fed = replace(said, image_size=config.image_size)
    if fed.channels == config.channels:
        return fed
    mean, deviation = (sum(numbers) / len(numbers) for numbers in (fed.mean, fed.deviation))
    return replace(fed, channels=config.channels, mean=(mean,), deviation=(deviation,))


def _notes_on_sizes(found: Found) -> list[str]:
    """In words where what is said, what is fed and what the model takes are not one."""
    config, said, notes = found.config, found.fed, []
    takes = sides(config.image_size)
    if pair(found.fed_size) != pair(config.image_size):
        fed = sides(found.fed_size)
        notes.append(f"positions are for {takes}; its own code feeds {fed} and resamples them, and so does loading")
    elif said is not None and pair(said.image_size) != pair(config.image_size):
        notes.append(f"preprocessing is said to give {sides(said.image_size)}, the model takes {takes}")
    if said is not None and said.channels != config.channels:
        notes.append(f"preprocessing is said to be of {said.channels} channels, the model takes {config.channels}")
    return notes


def load(path: Path | str, *, format: str | None = None) -> Artefact:  # noqa: A002
    """The model in a file, folder or `hub:` name of any format, for images as its origin feeds them.

    What is missing in it or left over is an error.
    """
    artefact, fed_size = _loaded(path, format=format)
    if pair(fed_size) == pair(artefact.config.image_size):
        return artefact
    return with_image_size(artefact, fed_size)[0]


def load_as_stored(path: Path | str, *, format: str | None = None) -> Artefact:  # noqa: A002
    """The model as `load` has it, but for images of the size that its stored positions are for."""
    return _loaded(path, format=format)[0]


def _loaded(path: Path | str, *, format: str | None) -> tuple[Artefact, Size]:  # noqa: A002
    """The model as it is stored, and the size of images that its origin feeds it."""
    path = located(path)
    if format == "vitkit" or (format is None and (native.is_ours(path) or not has_weights(path))):
        ours = native.load(path)
        return ours, ours.config.image_size
    with open_tensors(path) as tensors:
        found = identify(tensors, format=format)
        found.fit.check()
        state = dict(read(found.rules, tensors))
    check_shapes(state, found.config, path=Path(path))
    stored = Artefact(
        name=found.name,
        config=found.config,
        state=state,
        preprocessing=found.preprocessing,
        labels=found.labels,
    )
    return stored, found.fed_size


def has_weights(path: Path) -> bool:
    """Whether there is a file of weights to look at: it, or one in the folder."""
    return path.is_file() or (path.is_dir() and any(entry.name.endswith(WEIGHT_FILES) for entry in path.iterdir()))


def check_shapes(state: Mapping[str, Tensor], config: ModelConfig, *, path: Path) -> None:
    """Refuse tensors that are not those of the model, by name."""
    wanted = {name: tensor.shape for name, tensor in create(config, device="meta").state_dict().items()}
    for name in sorted(wanted.keys() | state.keys()):
        if name not in state or name not in wanted or state[name].shape != wanted[name]:
            raise WeightsError(
                f"{path}: {name} is not the model's",
                expected=" × ".join(map(str, wanted[name])) if name in wanted else "no such tensor",
                got=" × ".join(map(str, state[name].shape)) if name in state else "nothing",
            )


def labels_in(config: Mapping[str, object], *, classes: int) -> tuple[str, ...]:
    """The names of the classes in a config.json of Hugging Face or timm; numbers where it has none.

    >>> labels_in({"id2label": {"1": "dog", "0": "cat"}}, classes=2), labels_in({}, classes=2)
    (('cat', 'dog'), ('0', '1'))
    """
    listed = hub_labels(config) or config.get("label_names")
    if isinstance(listed, list | tuple) and len(listed) == classes:
        return tuple(map(str, listed))
    return tuple(map(str, range(classes)))
