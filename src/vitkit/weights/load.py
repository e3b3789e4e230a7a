"""Identification of weight files, loading of models from a path or hub name, and saving as an artifact.

The first registered format that matches a file's names and shapes infers the configuration and the rules that map the
file's tensors to vitkit's.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from vitkit.core.errors import ConfigError, WeightsError, did_you_mean
from vitkit.core.files import replace_directory
from vitkit.core.shapes import Tensor
from vitkit.core.sizes import Size, format_size, pair
from vitkit.data.image_processors import find_unknown_keys
from vitkit.data.layouts.files import is_image
from vitkit.data.preprocessing import Preprocessing, get_preprocessing
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT
from vitkit.typing import ModelSource
from vitkit.typing import Path as PathType
from vitkit.weights import artifact as artifact_io
from vitkit.weights.adapt_bundle import AdaptRequest, adapt_bundle
from vitkit.weights.bundle import ModelBundle, are_class_numbers
from vitkit.weights.formats.base import FileMetadata, Format
from vitkit.weights.formats.huggingface import MODEL_TYPES, read_labels
from vitkit.weights.formats.registry import FORMATS, detect_format, get_format, parse_format
from vitkit.weights.formats.timm.config import find_changed_keys, read_preprocessing
from vitkit.weights.hub import PREFIX, NotCachedError, hub_cache_dir, is_hub_name, is_offline, resolve_hub_name
from vitkit.weights.io.checks import read_json
from vitkit.weights.io.readers import INDEX, SUFFIXES, TensorFile, open_tensors
from vitkit.weights.rules import KeyMatch, Rule, apply_rules, match_keys
from vitkit.weights.run_checkpoint import is_unfinished_run, read_unfinished_run
from vitkit.zoo.imagenet import imagenet_names
from vitkit.zoo.pretrained import PretrainedWeights, find_pretrained_file, find_pretrained_name, get_pretrained_names
from vitkit.zoo.registry import Model, create, get_model_name, set_defaults
from vitkit.zoo.variants import ModelConfig

WEIGHT_FILES = (*SUFFIXES, INDEX)
EMBEDDED = "embedded"
"""Name of the weights that come with the package."""
EMBEDDED_DIR = Path(__file__).parent / EMBEDDED


@dataclass(frozen=True, kw_only=True)
class IdentifiedWeights:
    """Format, model and metadata of a weight file.

    `declared_preprocessing` is what a file beside the weights or their publisher specifies; None if neither does.
    """

    format: Format
    config: ModelConfig
    rules: Sequence[Rule]
    key_match: KeyMatch
    metadata: FileMetadata
    notes: tuple[str, ...] = ()
    declared_preprocessing: Preprocessing | None = None

    @property
    def name(self) -> str:
        """Name of the model."""
        return get_model_name(self.config)

    @property
    def preprocessing(self) -> Preprocessing:
        """Declared preprocessing, else that of the origin's code, at the model's image size."""
        config = self.config
        if self.declared_preprocessing is not None:
            return _fit_preprocessing(self.declared_preprocessing, config)
        preset = self.format.preset or self.format.name.replace("-", "_")
        return get_preprocessing(preset, image_size=config.image_size, channels=config.channels)

    @property
    def input_size(self) -> Size:
        """Image size that the origin's code evaluates at: the model's, unless that code resamples positions."""
        stored, default = self.config.image_size, self.format.input_size
        if default is None:
            return stored
        if self.declared_preprocessing:
            return self.declared_preprocessing.image_size
        return default if min(pair(stored)) > default else stored

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names from the file's config.json or, if it was published so, of ImageNet; else class numbers."""
        labels = labels_from_config(self.metadata.config, num_classes=self.config.num_classes)
        is_unnamed = len(labels) == len(imagenet_names()) and are_class_numbers(labels)
        return imagenet_names() if is_unnamed and self._is_of_imagenet() else labels

    def _is_of_imagenet(self) -> bool:
        """Return whether the file is named as a published one, or has timm's tag of weights of ImageNet-1k."""
        stated = self.metadata.config.get("pretrained_cfg")
        tag = stated.get("tag") if isinstance(stated, Mapping) else None
        is_published = find_pretrained_file(self.metadata.file_name, format=self.format.name) is not None
        return is_published or str(tag).endswith("in1k")

    def to_bundle(self, state: dict[str, Tensor]) -> ModelBundle:
        """Return the bundle of the converted tensors `state` and this description."""
        return ModelBundle(
            name=self.name, config=self.config, state=state, preprocessing=self.preprocessing, labels=self.labels
        )


def identify(tensors: TensorFile, *, format: str | None = None) -> IdentifiedWeights:  # noqa: A002  the word users type
    """Identify a weight file, as the named format or the first that recognizes it.

    `timm:` and the name of an architecture give what the tensors of a file without config.json do not determine.
    """
    chosen, architecture = parse_format(format) if format else (detect_format(tensors.shapes, tensors.metadata), None)
    metadata = replace(tensors.metadata, is_declared=format is not None, architecture=architecture)
    if chosen is None:
        raise _unknown_format(tensors)
    config = _infer_config(tensors, chosen, metadata)
    rules = chosen.rules(config, tensors.shapes)
    declared, notes = find_preprocessing(tensors.path, config, metadata=metadata, format=chosen)
    weights = IdentifiedWeights(
        format=chosen,
        config=config,
        rules=rules,
        key_match=match_keys(rules, tensors.shapes, ignored=chosen.ignored_names),
        metadata=metadata,
        notes=(*tensors.notes, *notes),
        declared_preprocessing=declared,
    )
    return replace(weights, notes=(*weights.notes, *_size_notes(weights)))


def _unknown_format(tensors: TensorFile) -> WeightsError:
    if isinstance(model_type := tensors.metadata.config.get("model_type"), str):
        message = f"{tensors.path}: transformers' {model_type} is not supported"
        return WeightsError(message, hint=f"vitkit reads {', '.join(MODEL_TYPES)}")
    if any("root_block/" in name or name.endswith("conv_root/kernel") for name in tensors.shapes):
        message = f"{tensors.path}: a ResNet with big_vision's names is not supported"
        return WeightsError(message, hint="vitkit reads the files of Big Transfer, such as BiT-M-R50x1.npz")
    return WeightsError(
        f"{tensors.path}: unknown weight format",
        expected=", ".join(entry.title for entry in FORMATS.values()),
        got=", ".join(list(tensors.shapes)[:3]) + " …",
        hint="if you know the format, name it with --format",
    )


def _infer_config(tensors: TensorFile, chosen: Format, metadata: FileMetadata) -> ModelConfig:
    try:
        return chosen.infer_config(tensors.shapes, metadata)
    except WeightsError as error:
        detected = detect_format(tensors.shapes, tensors.metadata)
        if detected in (None, chosen):
            raise
        hint = f"it looks like {detected.name}; leave --format out"
        raise WeightsError(f"{tensors.path}: cannot be read as {chosen.name}: {error.message}", hint=hint) from error


def find_format(name: str | None) -> Format | None:
    """Return the format of that name, or None for vitkit's own artifacts."""
    return None if name in (None, artifact_io.FORMAT_NAME) else get_format(name)


def format_title(name: str) -> str:
    """Return the title of a format."""
    return artifact_io.FORMAT_TITLE if name == artifact_io.FORMAT_NAME else get_format(name).title


def find_preprocessing(
    path: Path,
    config: ModelConfig,
    *,
    metadata: FileMetadata,
    format: Format,  # noqa: A002  the word users type
) -> tuple[Preprocessing | None, list[str]]:
    """Return the declared preprocessing of a weight file, and notes on keys that are not supported.

    Sources, in this order: preprocessor_config.json (Hugging Face) unless timm's config.json contradicts it,
    config.json (timm), and the table of published files, by file name.
    """
    file, notes = (path if path.is_dir() else path.parent) / artifact_io.PREPROCESSING, list[str]()
    if file.is_file():
        data = read_json(file)
        unknown = find_unknown_keys(data)
        notes = [f"{file.name}: {len(unknown)} unsupported keys ignored: {', '.join(unknown)}"] if unknown else []
        from_hub = Preprocessing.from_hub(data)
        if not (changed := find_changed_keys(metadata.config, from_hub)):
            return from_hub, notes
        notes = [f"{file.name} ignored: config.json, which timm reads, has another {', '.join(changed)}"]
    if (declared := read_preprocessing(metadata.config)) is not None:
        return declared, notes
    row = find_pretrained_file(path.name, format=format.name)
    if row is None or pair(row.image_size) != pair(config.image_size) or config.channels != row.config.channels:
        return None, []
    return row.preprocessing, [f"preprocessing of the published file of this name: {row.source}"]


def _fit_preprocessing(declared: Preprocessing, config: ModelConfig) -> Preprocessing:
    fitted = replace(declared, image_size=config.image_size)
    if fitted.channels == config.channels:
        return fitted
    mean, deviation = (sum(values) / len(values) for values in (fitted.mean, fitted.std))
    return replace(fitted, channels=config.channels, mean=(mean,), std=(deviation,))


def _size_notes(weights: IdentifiedWeights) -> list[str]:
    """Describe where stored positions, declared preprocessing and the model disagree on image size or channels."""
    config, declared, notes = weights.config, weights.declared_preprocessing, []
    size = format_size(config.image_size)
    if pair(weights.input_size) != pair(config.image_size):
        used = format_size(weights.input_size)
        notes.append(f"position embeddings are stored for {size}; loading resamples them to {used}, as the origin does")
    elif declared is not None and pair(declared.image_size) != pair(config.image_size):
        notes.append(f"declared preprocessing is for {format_size(declared.image_size)}, the model takes {size}")
    if declared is not None and declared.channels != config.channels:
        notes.append(f"declared preprocessing has {declared.channels} channels, the model takes {config.channels}")
    return notes


def has_weights(path: Path) -> bool:
    """Return whether a path is a file, or a directory with a weight file in it."""
    return path.is_file() or (path.is_dir() and any(entry.name.endswith(WEIGHT_FILES) for entry in path.iterdir()))


def check_shapes(state: Mapping[str, Tensor], config: ModelConfig, *, path: Path) -> None:
    """Raise an error that names the first tensor whose name or shape is not the model's."""
    expected = {name: tensor.shape for name, tensor in create(config, device="meta").state_dict().items()}
    for name in sorted(expected.keys() | state.keys()):
        if name not in state or name not in expected or state[name].shape != expected[name]:
            raise WeightsError(
                f"{path}: {name} does not fit the model",
                expected=" × ".join(map(str, expected[name])) if name in expected else "no such tensor",
                got=" × ".join(map(str, state[name].shape)) if name in state else "no such tensor",
            )


def labels_from_config(config: Mapping[str, object], *, num_classes: int) -> tuple[str, ...]:
    """Return the class names in a config.json of Hugging Face or timm, else class numbers."""
    names = read_labels(config) or config.get("label_names")
    if isinstance(names, list | tuple) and len(names) == num_classes:
        return tuple(map(str, names))
    return tuple(map(str, range(num_classes)))


# Sources


def resolve_source(source: ModelSource, *, format: str | None = None) -> Path | Model:  # noqa: A002
    """Return the local path of a source, downloading from the hub if necessary, or the model itself.

    A string is an existing path, a `hub:` name, the name of a published model or "embedded", in this order. The weight
    file of an artifact stands for the artifact. An unknown format is an error.
    """
    if format not in (None, artifact_io.FORMAT_NAME):
        parse_format(format)
    if isinstance(source, nn.Module):
        return unwrap_model(source)
    path = Path(check_source(source))
    if not path.exists():
        name = str(path)
        if name == EMBEDDED:
            return EMBEDDED_DIR
        weights = None if name.startswith(PREFIX) else find_pretrained_name(name)
        if weights is None and not name.startswith(PREFIX):
            raise _not_found(path)
        path = resolve_hub_name(name) if weights is None else _download_published(weights)
    is_part = path.name == artifact_io.WEIGHTS and (path.parent / artifact_io.CHECKSUMS).is_file()
    return path.parent if is_part and reads_as_artifact(path.parent, format) else path


def source_name(source: ModelSource) -> str:
    """Return how messages and results name a source: as it was given, or the name of the model."""
    if isinstance(source, nn.Module):
        model = unwrap_model(source)
        set_defaults(model)
        return model.name
    return os.fspath(check_source(source))


def check_source(source: object) -> str | os.PathLike[str]:
    """Return a path or name, or raise WeightsError for another kind of object."""
    if isinstance(source, str | os.PathLike):
        if is_image(os.fspath(source)) and not Path(source).is_dir():
            raise WeightsError(f"{source} is an image, not a model", hint="the model is the first argument")
        return source
    hint = "a state dict is for model.load_state_dict" if isinstance(source, Mapping) else None
    expected = "a path, a name, a run or a model"
    raise WeightsError(f"a {type(source).__name__} is not a source of a model", expected=expected, hint=hint)


def source_path(source: ModelSource) -> Path | None:
    """Return the path of a source that exists on this machine, without downloading; None for a name or a model."""
    if isinstance(source, nn.Module):
        return None
    path = Path(source_name(source))
    return path if path.exists() else None


def unwrap_model(module: nn.Module) -> Model:
    """Return the model inside the wrappers of `torch.compile` and of DistributedDataParallel."""
    while not isinstance(module, ViT | BiT):
        inner = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            raise WeightsError(
                f"{type(module).__name__} is not a model of vitkit",
                expected="a ViT or BiT",
                hint="for a module that contains one, pass that part of it, such as module.model",
            )
        module = inner
    return module


def _download_published(weights: PretrainedWeights) -> Path:
    try:
        return resolve_hub_name(weights.source)
    except NotCachedError as error:
        name = weights.source.removeprefix(PREFIX)
        title = name.removeprefix("timm/").partition(".")[0] if weights.format == "timm" else name
        message = f"{title}: not in the hub cache ({hub_cache_dir()}), and the hub cannot be reached"
        connect = "unset HF_HUB_OFFLINE and connect once" if is_offline() else "connect once"
        raise NotCachedError(message, hint=f'{connect}, or pass "path/to/weights"') from error


def _not_found(path: Path) -> WeightsError:
    name, parent = str(path), path.absolute().parent
    entries = [entry for entry in parent.iterdir() if entry.exists()] if parent.is_dir() else []
    hint = did_you_mean(name, [str(path.with_name(entry.name)) for entry in entries])
    hint = hint or did_you_mean(name, get_pretrained_names())
    message = f"{name}: no such file or directory"
    if is_hub_name(f"{PREFIX}{name}") and not name.endswith(WEIGHT_FILES):
        message += ", and no published model of that name"
        hint = hint or f'for Hugging Face: vitkit.load("{PREFIX}{name}")'
    return WeightsError(message, hint=hint or "name a run, a weight file, hub:owner/name or embedded")


def reads_as_artifact(path: Path, format: str | None) -> bool:  # noqa: A002
    """Return whether a path is read as an artifact or run. A directory without weights is, for the error message."""
    if format is not None:
        return format == artifact_io.FORMAT_NAME
    return artifact_io.is_artifact(path) or is_unfinished_run(path) or not has_weights(path)


# Loading and saving


def load(
    source: ModelSource,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    format: str | None = None,  # noqa: A002  the word users type
) -> Model:
    """Load a model as its author evaluated it: in eval mode, with `.preprocess`, `.labels` and `.config`."""
    return load_bundle(source, format=format).build_model(keep_dtype=True).to(device=device, dtype=dtype)


def open_model(source: ModelSource, *, device: str | torch.device = "cpu") -> Model:
    """Return a model in memory itself, with a name, labels and preprocessing if it has none; load any other source."""
    if not isinstance(source, Model):
        return load(source, device=device)
    set_defaults(source)
    return source


def load_bundle(source: ModelSource, *, format: str | None = None) -> ModelBundle:  # noqa: A002
    """Load weights with their configuration, preprocessing and labels, for the image size their origin evaluates at.

    A tensor that is missing or left over is an error.
    """
    bundle, input_size = _read(source, format=format)
    if pair(input_size) == pair(bundle.config.image_size):
        return bundle
    return adapt_bundle(bundle, AdaptRequest(image_size=input_size))[0]


def load_stored_bundle(source: ModelSource, *, format: str | None = None) -> ModelBundle:  # noqa: A002
    """Load a bundle for the image size of its stored position embeddings, without resampling them."""
    return _read(source, format=format)[0]


def _read(source: ModelSource, *, format: str | None) -> tuple[ModelBundle, Size]:  # noqa: A002
    """Return the stored model and the image size that its origin evaluates at."""
    path = resolve_source(source, format=format)
    if not isinstance(path, Path) or reads_as_artifact(path, format):
        bundle = read_own(path)[0]
        if path == EMBEDDED_DIR:  # stored in 16 bits to keep the package small
            bundle = replace(bundle, state={name: tensor.float() for name, tensor in bundle.state.items()})
        return bundle, bundle.config.image_size
    with open_tensors(path) as tensors:
        weights = identify(tensors, format=format)
        weights.key_match.check()
        state = dict(apply_rules(weights.rules, tensors))
    check_shapes(state, weights.config, path=path)
    return weights.to_bundle(state), weights.input_size


def read_own(source: Path | Model) -> tuple[ModelBundle, tuple[str, ...]]:
    """Return a model that is not of another library, with notes: of an artifact, an unfinished run, or in memory."""
    if not isinstance(source, Path):
        return make_bundle(source, copy=True), ()
    if is_unfinished_run(source):
        bundle, checkpoint = read_unfinished_run(source)
        return bundle, (f"the run is not finished: its model at {checkpoint}",)
    return artifact_io.read_artifact(source), ()


def make_bundle(model: Model, *, copy: bool = False) -> ModelBundle:
    """Return a model in memory as a bundle."""
    set_defaults(model)
    state = {name: tensor.detach().clone() if copy else tensor.detach() for name, tensor in model.state_dict().items()}
    return ModelBundle(
        name=model.name, config=model.config, state=state, preprocessing=model.preprocess, labels=model.labels
    )


def save(
    model: nn.Module, path: PathType, *, labels: Sequence[str] | None = None, preprocessing: Preprocessing | None = None
) -> Path:
    """Write an artifact that vitkit, timm and transformers load, whole or not at all; return its path."""
    bundle = make_bundle(unwrap_model(model))
    config = bundle.config
    labels = bundle.labels if labels is None else tuple(labels)
    if len(labels) != config.num_classes:
        raise ConfigError("wrong number of labels", expected=f"{config.num_classes} labels", got=len(labels))
    preprocessing = bundle.preprocessing if preprocessing is None else preprocessing
    if preprocessing.channels != config.channels:
        message = "the preprocessing has another number of channels than the model"
        raise ConfigError(message, expected=f"{config.channels} channels", got=preprocessing.channels)
    bundle = replace(bundle, labels=labels, preprocessing=preprocessing)
    check_replaceable(Path(path))
    replace_directory(Path(path), lambda directory: artifact_io.write_artifact(directory, bundle))
    return Path(path)


def check_replaceable(path: Path) -> None:
    """Raise an error unless a path is new, an empty directory, or an artifact with nothing beside it."""
    if not path.exists():
        return
    if not path.is_dir():
        raise WeightsError(f"{path} is a file", expected="a directory", hint="choose another path")
    names = sorted(entry.name for entry in path.iterdir())
    others = [name for name in names if name not in artifact_io.ALL_FILES]
    if others or (names and not artifact_io.is_artifact(path)):
        examples = ", ".join((others or names)[:3])
        raise WeightsError(
            f"{path} holds other files: {examples}",
            expected="an artifact or an empty directory",
            hint="choose another path",
        )
