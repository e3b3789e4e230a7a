"""Terminal output of `vitkit weights`."""

import math
from collections.abc import Mapping, Sequence

from vitkit.cli.console import print_sections, stdout_console
from vitkit.core.formatting import format_count, format_plural, format_value, safe_text, shorten_list
from vitkit.core.sizes import format_size
from vitkit.model.config import ViTConfig
from vitkit.weights.adapt import AdaptResult
from vitkit.weights.bundle import are_class_numbers
from vitkit.weights.convert import ConversionResult
from vitkit.weights.describe import TensorDifference, WeightsDiff, WeightsInfo, describe_preprocessing
from vitkit.weights.load import format_title
from vitkit.weights.verify import VerificationResult
from vitkit.zoo.variants import ModelConfig

MAX_ROWS = 8
"""Rows shown of a long list; --json has all."""
Rows = list[tuple[str, str]]


def print_info(info: WeightsInfo) -> None:
    """Print the description of a weight file."""
    model = [
        ("format", f"{info.title} ({info.format})"),
        ("model", info.model),
        *_sizes(info.config),
        ("parameters", f"{info.parameters:,} ({format_count(info.parameters)})"),
        *([("dtypes", ", ".join(info.dtypes))] if info.dtypes else []),
        ("labels", _labels(info.labels)),
        ("preprocessing", describe_preprocessing(info.preprocessing)),
        *(("note", note) for note in info.notes),
    ]
    print_sections(
        {
            info.file: model,
            f"Missing: {len(info.missing):,}": [("–", name) for name in _truncate(info.missing)],
            f"Extra: {len(info.extra):,}": [("+", name) for name in _truncate(info.extra)],
            f"Not in the loaded model: {len(info.dropped):,}": [("–", name) for name in _truncate(info.dropped)],
        }
    )


def _sizes(config: ModelConfig) -> Rows:
    channels = "" if config.channels == 3 else f", {format_plural(config.channels, 'channel')}"
    images = ("images", f"{format_size(config.image_size)}{channels}")
    classes = ("classes", f"{config.num_classes:,}" if config.num_classes else "none: it returns features")
    if not isinstance(config, ViTConfig):
        return [("sizes", f"{config.width:,} wide, {'-'.join(map(str, config.units))} units"), images, classes]
    patches = "ResNet features" if config.backbone else f"patches of {format_size(config.patch_size)}"
    layers, heads = format_plural(config.depth, "layer"), format_plural(config.heads, "head")
    block = config.block
    return [
        ("sizes", f"{layers}, {config.width:,} wide, {heads}, MLP {config.mlp_dim:,}"),
        images,
        ("tokens", f"{config.prefix + config.patches}: {format_size(config.grid)} {patches}, {config.prefix} in front"),
        ("computation", f"{block.activation}, norm eps {block.norm_eps:g}, {config.pooling} pooling"),
        ("positions", f"{config.positions.kind}, resampled as by {config.positions.origin}"),
        classes,
    ]


def _labels(labels: Sequence[str]) -> str:
    if are_class_numbers(labels):
        return "none: classes are numbered" if labels else "none"
    return ", ".join(labels[:MAX_ROWS]) + (f" … and {len(labels) - MAX_ROWS:,} more" if len(labels) > MAX_ROWS else "")


def _truncate(names: Sequence[str]) -> list[str]:
    more = [f"… and {len(names) - MAX_ROWS:,} more (see --json)"] if len(names) > MAX_ROWS else []
    return [*names[:MAX_ROWS], *more]


def print_conversion(result: ConversionResult) -> None:
    """Print the result of a conversion."""
    rows = [
        ("from", f"{result.source}, {format_title(result.source_format)}"),
        ("to", format_title(result.format)),
        ("model", f"{result.model}, {result.tensors:,} tensors"),
        *(("note", note) for note in result.notes),
        *(("changed", change) for change in result.changes),
        *(("dropped", loss) for loss in _truncate(result.dropped)),
        *(("differs", difference) for difference in result.differs),
    ]
    print_sections({f"Written: {result.path}": rows})


def print_diff(diff: WeightsDiff) -> None:
    """Print the differences of two models, largest first."""
    differing = sorted(
        (tensor for tensor in diff.tensors if not tensor.is_same),
        key=lambda tensor: math.inf if tensor.max_difference is None else tensor.max_difference,
        reverse=True,
    )
    reshaped = any(tensor.shape != tensor.other_shape for tensor in diff.tensors)
    largest = "not finite" if diff.max_difference is None else f"{diff.max_difference:g}"
    largest += " where shapes agree" if reshaped else ""
    summary = [
        ("formats", " and ".join(info.title for info in (diff.a, diff.b) if info)),
        ("tensors", f"{len(diff.tensors):,} in both, {len(diff.tensors) - len(differing):,} of them identical"),
        ("largest difference", largest if diff.tensors else "nothing to compare"),
        ("configuration", "differs" if diff.config else "the same"),
        ("preprocessing", "differs" if diff.preprocessing else "the same"),
        ("labels", "differ" if diff.labels_differ else "the same"),
    ]
    rows = [(tensor.name, _difference(tensor)) for tensor in differing[:MAX_ROWS]]
    if len(differing) > MAX_ROWS:
        rows.append(("…", f"and {len(differing) - MAX_ROWS:,} more (see --json)"))
    print_sections(
        {
            "Comparison": summary,
            "Tensors that differ": rows,
            f"Only in the first: {len(diff.only_a):,}": [("–", name) for name in _truncate(diff.only_a)],
            f"Only in the second: {len(diff.only_b):,}": [("+", name) for name in _truncate(diff.only_b)],
            "Configuration": _changes(diff.config),
            "Preprocessing": _changes(diff.preprocessing),
        }
    )


def _changes(values: Mapping[str, tuple[object, object]]) -> Rows:
    return [(key, f"{format_value(a)} → {format_value(b)}") for key, (a, b) in values.items()]


def _difference(tensor: TensorDifference) -> str:
    if tensor.shape != tensor.other_shape:
        return f"{' × '.join(map(str, tensor.shape))} ≠ {' × '.join(map(str, tensor.other_shape))}"
    return "not finite" if tensor.max_difference is None else f"{tensor.max_difference:g}"


def print_adaptation(result: AdaptResult) -> None:
    """Print the changes of an adapted model."""
    config = result.bundle.config
    shape = f"{result.bundle.name}, images of {format_size(config.image_size)}, classes: {config.num_classes:,}"
    changes = result.changes or ("no change: the model has this shape",)
    dropped = [f"dropped: {shorten_list(result.dropped)}"] if result.dropped else []
    for line in (*changes, *dropped, f"Written: {result.path} ({shape})"):
        stdout_console().print(safe_text(line), soft_wrap=True)


def print_verification(result: VerificationResult) -> None:
    """Print the result of a verification."""
    is_compared = result.max_difference is not None
    rows = [
        ("format", f"{result.title} ({result.format})"),
        ("model", result.model),
        ("compared with" if is_compared else "not compared", result.against),
    ]
    if result.max_difference is not None:
        largest = f"{result.max_difference:.2g}" if math.isfinite(result.max_difference) else "not finite"
        rows += [
            ("largest difference", f"{largest} (tolerance {result.tolerance:.2g})"),
            ("verdict", "agrees" if result.agrees else "does not agree"),
        ]
    print_sections({result.source: rows})
