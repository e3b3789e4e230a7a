"""Conversion of a model to another weight format.

Tensors are converted one at a time while the file is written, so that memory holds one copy of the weights and one
tensor. What was written is read back and compared with the model.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from vitkit.core.config import apply_settings, flatten_settings, format_settings, to_mapping
from vitkit.core.environment import release_freed_memory
from vitkit.core.errors import WeightsError, did_you_mean, summarize
from vitkit.core.files import commit_directory, write_json
from vitkit.core.formatting import shorten_list
from vitkit.core.result import Result
from vitkit.core.shapes import Tensor
from vitkit.model.config import ViTConfig
from vitkit.typing import ModelSource
from vitkit.weights import artifact as artifact_io
from vitkit.weights.adapt_bundle import AdaptRequest, adapt_bundle
from vitkit.weights.bundle import ModelBundle, affects_logits, diff_settings, format_change, reference_logits
from vitkit.weights.describe import describe_preprocessing, equal_values, load_described
from vitkit.weights.formats.base import Format
from vitkit.weights.formats.registry import FORMATS
from vitkit.weights.io.readers import SUFFIXES, open_tensors
from vitkit.weights.io.writers import save_npz, save_safetensors, save_torch
from vitkit.weights.load import check_shapes, find_format, identify, resolve_source, source_name
from vitkit.weights.rules import Rule, apply_rules
from vitkit.zoo.variants import ModelConfig

FIXED_SETTINGS: dict[str, tuple[object, ...]] = {
    "block.activation": ("gelu_erf", "gelu_tanh"),
    "block.norm_eps": (1e-6, 1e-5),
    "backbone.origin": ("timm", "google"),
    "origin": ("timm", "google"),
}
"""Settings that other libraries fix, with the values they use. Changing one changes the logits, not the tensors."""
REPORT_HINT = "do not use it, and report this as a bug"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, repr=False)
class ConversionResult(Result):
    """Outcome of a conversion.

    `dropped` lists what the format cannot store: tensors by name, labels and preprocessing by description. `differs`
    lists what its library does differently or reads differently.
    """

    source: str
    source_format: str
    path: Path
    format: str
    model: str
    tensors: int
    changes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def convert_source(
    source: ModelSource,
    out: Path,
    *,
    to: str,
    settings: Mapping[str, object],
    format: str | None,  # noqa: A002  the word users type
    overwrite: bool,
    allow_loss: bool,
) -> ConversionResult:
    """Write a model in another format, read it back, and compare every value."""
    release_freed_memory()
    target = find_format(to)
    as_directory = target is None or target.file_type == "safetensors"
    check_output(out, source=source, format=format, overwrite=overwrite, as_directory=as_directory)
    info, bundle = load_described(source, format=format)
    logger.info("read %s: %s, %s", info.file, info.title, info.model)
    if info.dropped and not allow_loss:
        message = f"{info.file}: tensors would be left out or combined: {shorten_list(info.dropped, limit=3)}"
        raise WeightsError(message, hint="--allow-loss (allow_loss=True) accepts the loss, and lists them")
    config, changes = change_config(bundle, settings, source=source_name(source))
    bundle, dropped = fit_format(target, replace(bundle, config=config), allow_loss=allow_loss)
    write_output(out, lambda path: write_format(target, path, bundle), as_directory=as_directory)
    check = read_back(target, out, bundle)
    return ConversionResult(
        source=info.file,
        source_format=info.format,
        path=out,
        format=to,
        model=info.model,
        tensors=len(bundle.state),
        changes=tuple(changes),
        dropped=(*info.dropped, *dropped, *check.dropped),
        differs=(*preprocessing_differences(target, bundle), *check.settings),
        notes=info.notes,
    )


def fit_format(target: Format | None, bundle: ModelBundle, *, allow_loss: bool) -> tuple[ModelBundle, tuple[str, ...]]:
    """Return a model without the head if the format cannot hold it, and the names of the tensors that are left out.

    Without `allow_loss` that is an error. A format that cannot hold the rest of the model is one in any case.
    """
    if target is None or not (reason := target.unsupported_reason(bundle.config)) or not bundle.config.num_classes:
        return bundle, ()
    encoder, _ = adapt_bundle(bundle, AdaptRequest(num_classes=0))
    if target.unsupported_reason(encoder.config):
        return bundle, ()
    dropped = tuple(sorted(bundle.state.keys() - encoder.state.keys()))
    if not allow_loss:
        raise WeightsError(
            f"{target.title} cannot represent this model: {reason}",
            hint=f"{_suggest_formats(target, bundle.config)}; or --allow-loss (allow_loss=True), which leaves out "
            + ", ".join(dropped),
        )
    return encoder, dropped


def change_config(
    bundle: ModelBundle, settings: Mapping[str, object], *, source: Path | str
) -> tuple[ModelConfig, list[str]]:
    """Return the configuration with settings applied, and a description of each change; tensors must stay the same."""
    config = apply_settings(bundle.config, settings)
    if config == bundle.config:
        return config, []
    try:
        check_shapes(bundle.state, config, path=Path(source))
    except WeightsError as error:
        hint = "vitkit weights adapt changes image size, patches, channels, classes and pooling"
        raise WeightsError(f"these settings change the model's tensors: {summarize(error)}", hint=hint) from error
    return config, [
        format_change(key, pair) + (": logits change" if affects_logits(key) else "")
        for key, pair in diff_settings(bundle.config, config).items()
    ]


# Writing


class ConvertedTensors(Mapping[str, Tensor]):
    """Tensors of a model under a format's names, each converted on access."""

    def __init__(self, rules: Sequence[Rule], state: Mapping[str, Tensor]) -> None:
        self.state = state
        self.rules = {name: (rule, index) for rule in rules for index, name in enumerate(rule.theirs)}

    def __getitem__(self, name: str) -> Tensor:
        rule, index = self.rules[name]
        return rule.conversion.write([self.state[ours] for ours in rule.ours])[index].contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)


def write_format(target: Format | None, out: Path | str, bundle: ModelBundle) -> None:
    """Write a model to a file, or for timm and Hugging Face to a directory with its configuration.

    None is vitkit's artifact.
    """
    out = Path(out)
    if target is None:
        artifact_io.write_artifact(out, bundle)
        return
    if reason := target.unsupported_reason(bundle.config):
        message = f"{target.title} cannot represent this model: {reason}"
        raise WeightsError(message, hint=_suggest_formats(target, bundle.config))
    if out.is_dir():  # what is overwritten is no longer an artifact
        for name in (artifact_io.CHECKSUMS, artifact_io.REFERENCE, artifact_io.LABELS):
            (out / name).unlink(missing_ok=True)
    tensors = ConvertedTensors(target.rules(bundle.config, None), bundle.state)
    if target.file_type == "npz":
        save_npz(out, tensors)
    elif target.file_type == "torch":
        save_torch(out, tensors, target.container)
    else:
        _write_directory(target, out, bundle, tensors)


def _write_directory(target: Format, out: Path, bundle: ModelBundle, tensors: Mapping[str, Tensor]) -> None:
    if out.suffix == ".safetensors":
        raise WeightsError(f"{out}: {target.title} needs a config.json beside the weights", hint="name a directory")
    if target.make_config and isinstance(bundle.config, ViTConfig):
        config = target.make_config(bundle.config, bundle.labels)
    else:
        config, _ = artifact_io.timm_config_json(bundle)
    out.mkdir(parents=True, exist_ok=True)
    save_safetensors(out / artifact_io.WEIGHTS, tensors, {"format": "pt"})
    write_json(out / artifact_io.CONFIG, config)
    write_json(out / artifact_io.PREPROCESSING, bundle.preprocessing.to_hub())


def _suggest_formats(target: Format, config: ModelConfig) -> str:
    able = ["vitkit", *(name for name, entry in FORMATS.items() if not entry.unsupported_reason(config))]
    settings = suggest_settings(target, config)
    otherwise = f"; or add {' '.join(format_settings(settings))}, which changes the logits" if settings else ""
    return f"formats that can: {', '.join(able)}{otherwise}"


def suggest_settings(target: Format, config: ModelConfig) -> dict[str, object]:
    """Return the fewest settings that make a format able to represent a model of the same tensors; {} if none do."""
    current = flatten_settings(to_mapping(config))
    # A gated MLP has other tensors than one with a GELU.
    able = {key: values for key, values in FIXED_SETTINGS.items() if key in current and current[key] != "swiglu"}
    choices = product(*([None, *((key, value) for value in values)] for key, values in able.items()))
    candidates = sorted((dict(filter(None, choice)) for choice in choices), key=len)
    return next((each for each in candidates if not target.unsupported_reason(apply_settings(config, each))), {})


# Reading back


@dataclass(frozen=True, kw_only=True)
class ReadBack:
    """Comparison of a written file with the model: what was dropped, and which settings the file states differently."""

    dropped: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


def read_back(target: Format | None, path: Path, bundle: ModelBundle) -> ReadBack:
    """Read a written model tensor by tensor; a value or logit that differs is an error."""
    if target is None:
        _check_tensors(artifact_io.read_artifact(path).state.items(), bundle, path=path)
        return ReadBack()
    with open_tensors(path) as tensors:
        weights = identify(tensors, format=target.name)
        weights.key_match.check()
        _check_tensors(apply_rules(weights.rules, tensors), bundle, path=path)
    dropped = [] if weights.labels == bundle.labels else [f"the names of {len(bundle.labels):,} classes"]
    if weights.preprocessing != bundle.preprocessing:
        dropped.append(f"the preprocessing: {describe_preprocessing(bundle.preprocessing)}")
    settings = _check_settings(bundle, weights.config, path=path)
    return ReadBack(dropped=tuple(dropped), settings=tuple(settings))


def _check_tensors(tensors: Iterable[tuple[str, Tensor]], bundle: ModelBundle, *, path: Path) -> None:
    """Compare tensors with the model's; only one of them is in memory at a time."""
    remaining = set(bundle.state)
    for name, tensor in tensors:
        expected = bundle.state.get(name)
        if expected is None or not equal_values(expected, tensor):
            raise WeightsError(f"{path}: {name} is not what was written", hint=REPORT_HINT)
        remaining.remove(name)
    if remaining:
        raise WeightsError(f"{path}: {min(remaining)} was not written", hint=REPORT_HINT)


def _check_settings(bundle: ModelBundle, config: ModelConfig, *, path: Path) -> list[str]:
    """Describe the settings that a file states differently; an error if they change the logits."""
    pairs = diff_settings(bundle.config, config)
    changes = [format_change(key, pair) for key, pair in pairs.items()]
    if not isinstance(config, ViTConfig) or not config.positions.is_additive:
        # The model takes images of any size, so its file need not state one.
        config = replace(config, image_size=bundle.config.image_size)
    if config != bundle.config and any(map(affects_logits, pairs)):
        models = (bundle.build_model(), replace(bundle, config=config).build_model())
        expected, actual = (reference_logits(model.float()) for model in models)
        if not torch.equal(expected.nan_to_num(), actual.nan_to_num()):
            message = f"{path}: its logits differ from those of the model that was written: {', '.join(changes)}"
            raise WeightsError(message, hint=REPORT_HINT)
    return changes


def preprocessing_differences(target: Format | None, bundle: ModelBundle) -> list[str]:
    """Describe where the format's own library preprocesses images differently, although its files state everything."""
    if target is None or target.file_type != "safetensors":  # the other formats do not store preprocessing
        return []
    preprocessing, library, differences = bundle.preprocessing, "timm" if target.name == "timm" else "transformers", []
    if not preprocessing.antialias:
        differences.append(f"resizing without antialias: {library} always uses antialiasing, so its pixels differ")
    if library == "transformers" and preprocessing.resize != "squash":
        differences.append("center crop: transformers rounds its offset down, which can shift it by one pixel")
    return differences


# Output


def check_output(
    out: Path,
    *,
    source: ModelSource,
    overwrite: bool,
    as_directory: bool,
    format: str | None = None,  # noqa: A002  the word users type
) -> None:
    """Raise an error if the source cannot be found or `out` cannot be written, before time is spent."""
    path = resolve_source(source, format=format)
    parent = out.absolute().parent
    if not parent.is_dir():
        neighbors = [entry.name for entry in parent.parent.iterdir()] if parent.parent.is_dir() else []
        hint = did_you_mean(parent.name, neighbors) or f"create it first: mkdir -p {out.parent}"
        raise WeightsError(f"{out.parent}: no such directory", hint=hint)
    if out.exists():
        if isinstance(path, Path) and out.resolve() in (path.resolve(), path.resolve().parent):
            raise WeightsError(f"{out} is the source itself", hint="choose another output path")
        if as_directory != out.is_dir():
            expected, got = ("a directory", "a file") if as_directory else ("a file", "a directory")
            raise WeightsError(
                f"{out}: cannot be written", expected=expected, got=got, hint="choose another output path"
            )
        if not overwrite and (out.is_file() or any(out.iterdir())):
            raise WeightsError(f"{out} already exists", hint="--force (overwrite=True) replaces it")
    elif as_directory and out.is_symlink():
        raise WeightsError(f"{out}: a broken link", hint="choose another output path")
    if as_directory and out.suffix in (*SUFFIXES, ".ckpt"):
        message = f"{out}: the output is a directory, with configuration and preprocessing beside the weights"
        raise WeightsError(message, hint=f"name it {out.with_suffix('')}")


def write_output(out: Path, write: Callable[[Path], None], *, as_directory: bool) -> None:
    """Write to a new path atomically; the files of an existing directory are replaced one by one."""
    if as_directory and not out.exists():
        commit_directory(out, write)
    else:
        write(out)
