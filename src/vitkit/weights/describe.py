"""Description of a weight file, and differences between two models of any format."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from vitkit.core.result import Result, select
from vitkit.core.shapes import Tensor
from vitkit.core.sizes import Size, format_size
from vitkit.data.preprocessing import Preprocessing
from vitkit.typing import ModelSource
from vitkit.weights import artifact as artifact_io
from vitkit.weights.bundle import ModelBundle, ValuePair, are_class_numbers, diff_settings
from vitkit.weights.io.readers import open_tensors
from vitkit.weights.load import (
    IdentifiedWeights,
    identify,
    load_stored_bundle,
    read_own,
    reads_as_artifact,
    resolve_source,
    source_name,
)
from vitkit.weights.rules import KeyMatch, find_lost
from vitkit.zoo.cost import count_parameters
from vitkit.zoo.registry import create
from vitkit.zoo.variants import ModelConfig


@dataclass(frozen=True, kw_only=True, repr=False)
class WeightsInfo(Result):
    """Description of a weight file. It can be loaded only if nothing is missing or extra.

    `dropped` are tensors that a loaded model does not have, such as a decoder, or that it combines with others.
    """

    file: str
    format: str
    title: str
    model: str
    config: ModelConfig
    preprocessing: Preprocessing
    labels: tuple[str, ...]
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """Number of classes; 0 if the model has no head."""
        return self.config.num_classes

    @property
    def image_size(self) -> Size:
        """Image size of the stored weights."""
        return self.config.image_size

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the complete model."""
        return count_parameters(self.config)

    def to_dict(self) -> dict[str, object]:
        """Return the output of `vitkit weights info --json`."""
        return {
            **select(self, "file", "format", "title", "model", "classes", "image_size"),
            "channels": self.config.channels,
            **select(self, "parameters", "missing", "extra", "dropped", "preprocessing"),
            "labels": None if are_class_numbers(self.labels) else list(self.labels),
            **select(self, "notes", "dtypes", "config"),
        }


def describe_source(source: ModelSource, *, format: str | None = None) -> WeightsInfo:  # noqa: A002  the word users type
    """Identify a model of any format. Missing and extra tensors are listed, not refused."""
    path = resolve_source(source, format=format)
    if not isinstance(path, Path) or reads_as_artifact(path, format):
        return _describe_own(*read_own(path), source)
    with open_tensors(path) as tensors:
        weights = identify(tensors, format=format)
        match = weights.key_match
        info = _describe(weights, source, match=match, dtypes=tensors.dtypes.values(), notes=weights.notes)
        dropped = (*match.ignored, *(() if match.missing else find_lost(weights.rules, tensors)))
        return replace(info, format=weights.format.name, title=weights.format.title, dropped=dropped)


def load_described(source: ModelSource, *, format: str | None = None) -> tuple[WeightsInfo, ModelBundle]:  # noqa: A002
    """Return the description of a source and the model in it, at the image size it is stored for."""
    path = resolve_source(source, format=format)
    if not isinstance(path, Path) or reads_as_artifact(path, format):
        bundle, notes = read_own(path)
        return _describe_own(bundle, notes, source), bundle
    info = describe_source(source, format=format)
    return info, load_stored_bundle(path, format=format)


def _describe_own(bundle: ModelBundle, notes: tuple[str, ...], source: ModelSource) -> WeightsInfo:
    expected = create(bundle.config, device="meta").state_dict().keys()
    names = bundle.state.keys()
    match = KeyMatch(missing=tuple(sorted(expected - names)), extra=tuple(sorted(names - expected)))
    dtypes = (tensor.dtype for tensor in bundle.state.values())
    return _describe(bundle, source, match=match, dtypes=dtypes, notes=notes)


def _describe(
    model: ModelBundle | IdentifiedWeights,
    source: ModelSource,
    *,
    match: KeyMatch,
    dtypes: Iterable[torch.dtype],
    notes: tuple[str, ...],
) -> WeightsInfo:
    """Return the description of a model as one of vitkit's own."""
    return WeightsInfo(
        file=source_name(source),
        format=artifact_io.FORMAT_NAME,
        title=artifact_io.FORMAT_TITLE,
        model=model.name,
        config=model.config,
        preprocessing=model.preprocessing,
        labels=model.labels,
        missing=match.missing,
        extra=match.extra,
        notes=notes,
        dtypes=tuple(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})),
    )


def describe_preprocessing(preprocessing: Preprocessing) -> str:
    """Describe a preprocessing in one line.

    >>> describe_preprocessing(Preprocessing(antialias=False))
    'squash to 224×224, bilinear without antialias, mean 0.5, std 0.5'
    """
    size, resized = format_size(preprocessing.image_size), format_size(preprocessing.resize_size)
    resize = {
        "squash": f"squash to {size}",
        "squash_crop": f"squash to {resized}, center crop {size}",
        "crop": f"resize to cover {resized}, center crop {size}",
    }[preprocessing.resize]
    antialias = "" if preprocessing.antialias else " without antialias"
    mean, std = (
        " ".join(f"{value:g}" for value in (values[:1] if len(set(values)) == 1 else values))
        for values in (preprocessing.mean, preprocessing.std)
    )
    return f"{resize}, {preprocessing.interpolation}{antialias}, mean {mean}, std {std}"


# Differences


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Largest absolute difference of a tensor that both models have.

    `max_difference` is None if the shapes differ, or if only one of the tensors has a value that is not finite.
    """

    name: str
    shape: tuple[int, ...]
    other_shape: tuple[int, ...]
    max_difference: float | None

    @property
    def is_same(self) -> bool:
        """Whether all values are equal."""
        return self.max_difference == 0.0


@dataclass(frozen=True, kw_only=True, repr=False)
class WeightsDiff(Result):
    """Differences between two models, with tensors under vitkit's names."""

    tensors: tuple[TensorDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    config: Mapping[str, ValuePair]
    preprocessing: Mapping[str, ValuePair]
    labels_differ: bool
    a: WeightsInfo | None = None
    b: WeightsInfo | None = None

    @property
    def max_difference(self) -> float | None:
        """Largest difference of any value; None if nothing can be compared or a difference is not finite."""
        comparable = [tensor.max_difference for tensor in self.tensors if tensor.shape == tensor.other_shape]
        values = [difference for difference in comparable if difference is not None]
        return max(values) if values and len(values) == len(comparable) else None

    @property
    def same_weights(self) -> bool:
        """Whether both models have the same tensors with the same values."""
        return all(tensor.is_same for tensor in self.tensors) and not (self.only_a or self.only_b)

    @property
    def is_same(self) -> bool:
        """Whether weights, configuration, preprocessing and labels are all the same."""
        return self.same_weights and not (self.config or self.preprocessing or self.labels_differ)

    def to_dict(self) -> dict[str, object]:
        """Return the output of `vitkit weights diff --json`."""
        sources = {"a": self.a, "b": self.b}
        return {
            "max_difference": self.max_difference,
            "same": self.is_same,
            **select(self, "same_weights", "tensors"),
            "reshaped": [tensor.name for tensor in self.tensors if tensor.shape != tensor.other_shape],
            **select(self, "only_a", "only_b", "config", "preprocessing", "labels_differ"),
        } | {key: {"file": info.file, "format": info.format} for key, info in sources.items() if info}


def diff_sources(a: tuple[ModelSource, str | None], b: tuple[ModelSource, str | None]) -> WeightsDiff:
    """Compare two models of any format, tensor by tensor; each is a source and its format."""
    for source, name in (a, b):  # a missing file is reported before the other is read
        resolve_source(source, format=name)
    (info_a, bundle_a), (info_b, bundle_b) = (load_described(source, format=name) for source, name in (a, b))
    return replace(diff_bundles(bundle_a, bundle_b), a=info_a, b=info_b)


def diff_bundles(a: ModelBundle, b: ModelBundle) -> WeightsDiff:
    """Compare two loaded models."""
    shared = [name for name in a.state if name in b.state]
    return WeightsDiff(
        tensors=tuple(_diff_tensors(name, a.state[name], b.state[name]) for name in shared),
        only_a=tuple(name for name in a.state if name not in b.state),
        only_b=tuple(name for name in b.state if name not in a.state),
        config=diff_settings(a.config, b.config),
        preprocessing=diff_settings(a.preprocessing, b.preprocessing),
        labels_differ=a.labels != b.labels,
    )


def _diff_tensors(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    difference = max_abs_difference(a, b) if a.shape == b.shape else None
    return TensorDifference(name=name, shape=tuple(a.shape), other_shape=tuple(b.shape), max_difference=difference)


def max_abs_difference(a: Tensor, b: Tensor) -> float | None:
    """Return the largest absolute difference of two tensors of one shape; None if it is not finite.

    Equal infinities and NaNs in the same position count as equal.
    """
    if a.numel() == 0:
        return 0.0
    precision = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(precision), b.to(precision)
    same = (a == b) | (a.isnan() & b.isnan())
    largest = float((a - b).abs().masked_fill(same, 0.0).max())
    return largest if math.isfinite(largest) else None


def equal_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and values, NaNs included."""
    if a.shape != b.shape:
        return False
    # torch.equal needs no memory for a difference, and is enough for all but NaNs and other dtypes.
    return (a.dtype == b.dtype and torch.equal(a, b)) or max_abs_difference(a, b) == 0
