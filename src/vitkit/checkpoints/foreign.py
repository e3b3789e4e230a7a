"""A file of weights of any origin goes in, the model in it with its preprocessing and labels comes out; and back.

path → readers → names and shapes → the format that knows them → its rules → our tensors
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitkit.checkpoints import native
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
from vitkit.core.shapes import Tensor, pair
from vitkit.data.image_processors import unread
from vitkit.data.transforms import Preprocessing, preprocessing
from vitkit.zoo.lookup import create, name_of
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
    """What a file of weights is."""

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
        """What is said beside the file, or else what the origin's own code feeds the model."""
        if self.fed is not None:
            return self.fed
        return preprocessing(self.format.origin, image_size=self.config.image_size, channels=self.config.channels)

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
    fed, notes = preprocessing_beside(tensors.path, config, about=tensors.about)
    return Found(
        format=chosen,
        config=config,
        rules=rules,
        fit=found,
        about=tensors.about,
        notes=(*tensors.notes, *notes),
        fed=fed,
    )


def preprocessing_beside(path: Path, config: ModelConfig, *, about: About) -> tuple[Preprocessing | None, list[str]]:
    """What the files beside weights say of preprocessing, for the model; and notes on what is not as they say.

    Hugging Face has a preprocessor_config.json, timm a part of config.json.
    """
    file, notes = (path if path.is_dir() else path.parent) / native.PREPROCESSING, []
    if file.is_file():
        data = read_json(file)
        said: Preprocessing | None = Preprocessing.from_hub(data)
        if unknown := unread(data):
            notes.append(f"{file.name}: {len(unknown)} unknown and not followed: {', '.join(unknown)}")
    else:
        said = preprocessing_told(about.config)
    if said is None:
        return None, notes
    fed = replace(said, image_size=config.image_size)
    if pair(said.image_size) != pair(fed.image_size):  # DINOv2's files say 224, and its positions 518
        sizes = ["×".join(map(str, pair(size))) for size in (said.image_size, fed.image_size)]
        notes.append(f"preprocessing is said to give {sizes[0]}, the model takes {sizes[1]}: adapt can change it")
    if fed.channels != config.channels:
        mean, deviation = (sum(numbers) / len(numbers) for numbers in (fed.mean, fed.deviation))
        fed = replace(fed, channels=config.channels, mean=(mean,), deviation=(deviation,))
        notes.append(f"preprocessing is said to be of {said.channels} channels, the model takes {config.channels}")
    return fed, notes


def load(path: Path | str, *, format: str | None = None) -> Artefact:  # noqa: A002
    """The model in a file, folder or `hub:` name of any format; what is missing in it or left over is an error."""
    path = located(path)
    if format == "vitkit" or (format is None and (native.is_ours(path) or not has_weights(path))):
        return native.load(path)
    with open_tensors(path) as tensors:
        found = identify(tensors, format=format)
        found.fit.check()
        state = dict(read(found.rules, tensors))
    check_shapes(state, found.config, path=Path(path))
    return Artefact(
        name=found.name,
        config=found.config,
        state=state,
        preprocessing=found.preprocessing,
        labels=found.labels,
    )


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
