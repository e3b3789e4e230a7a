"""Format of Google's Big Transfer ResNets."""

from collections.abc import Iterator

from vitkit.core.errors import WeightsError
from vitkit.model.config import BiTConfig
from vitkit.weights.formats.base import FileMetadata, Format, get_shape, invalid_model_errors
from vitkit.weights.formats.google import CONVOLUTION, count_units, get_image_size, group_norm
from vitkit.weights.rules import Rule, Shapes, rearrange_axes, rename
from vitkit.zoo.variants import ModelConfig

ROOT = "resnet/root_block/standardized_conv2d/kernel"
HEAD = "resnet/head/conv2d"
ONE_PIXEL = rearrange_axes("1 1 inputs outputs", "outputs inputs")


@invalid_model_errors()
def infer_config(shapes: Shapes, metadata: FileMetadata) -> BiTConfig:
    """Infer the model in a file. It takes images of any size: that of `config.json`, or 224."""
    root = get_shape(shapes, ROOT, axes=4)
    factor, rest = divmod(root[3], 64)
    if rest or not factor:
        raise WeightsError(f"{ROOT} does not fit a BiT", expected="a multiple of 64 outputs", got=root[3])
    return BiTConfig(
        units=count_units(shapes, pattern="resnet/block([0-9])/unit([0-9]{2})/"),
        width_factor=factor,
        channels=root[2],
        image_size=get_image_size(metadata) or 224,
        num_classes=get_shape(shapes, f"{HEAD}/kernel", axes=4)[3] if f"{HEAD}/kernel" in shapes else 0,
    )


def make_rules(config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
    """Make the rules of a model. Files number stages and units from 1."""
    if not isinstance(config, BiTConfig):
        raise WeightsError("the format is for BiT ResNets only", got="a Vision Transformer")
    rules = [Rule(("stem.conv.weight",), (ROOT,), CONVOLUTION)]
    for stage, count in enumerate(config.units):
        for unit in range(count):
            rules += _unit_rules(f"stages.{stage}.blocks.{unit}", f"resnet/block{stage + 1}/unit{unit + 1:02d}", shapes)
    rules += _norm_rules("norm", "resnet/group_norm", shapes)
    if config.num_classes:
        rules += [Rule(("head.weight",), (f"{HEAD}/kernel",), ONE_PIXEL), rename("head.bias", f"{HEAD}/bias")]
    return rules


def _unit_rules(ours: str, theirs: str, shapes: Shapes | None) -> Iterator[Rule]:
    """Make the rules of a unit with convolutions a, b and c, each after its norm."""
    for number, letter in enumerate("abc", start=1):
        yield from _norm_rules(f"{ours}.norm{number}", f"{theirs}/{letter}/group_norm", shapes)
        kernel = f"{theirs}/{letter}/standardized_conv2d/kernel"
        yield Rule((f"{ours}.conv{number}.weight",), (kernel,), CONVOLUTION)
    if ours.endswith(".0"):  # the first unit of a stage changes the width, so its shortcut is a projection
        kernel = f"{theirs}/a/proj/standardized_conv2d/kernel"
        yield Rule((f"{ours}.downsample.conv.weight",), (kernel,), CONVOLUTION)


def _norm_rules(ours: str, theirs: str, shapes: Shapes | None) -> Iterator[Rule]:
    return group_norm(ours, (f"{theirs}/gamma", f"{theirs}/beta"), shapes=shapes, flat=True)


def unsupported_reason(config: ModelConfig) -> str | None:
    """Return why the format cannot hold a model, or None."""
    if not isinstance(config, BiTConfig):
        return "a Vision Transformer"
    if len(config.units) > 9 or max(config.units) > 99:
        return "more than 9 stages, or 99 units in one"
    if config.root != "standard":
        return "a small root"
    return None if config.origin == "google" else f"a ResNet with {config.origin}'s numerics"


BIT = Format(
    name="bit",
    title="Google's Big Transfer",
    file_type="npz",
    library="timm",
    matches=lambda shapes, metadata: ROOT in shapes,
    infer_config=infer_config,
    rules=make_rules,
    unsupported_reason=unsupported_reason,
)
