"""Names and shapes of a Big Transfer file go in, the ResNet in it and the rules of its tensors come out."""

from collections.abc import Iterator

from vitkit.checkpoints.formats.format import About, Format
from vitkit.checkpoints.formats.google import CONVOLUTION, group_norm
from vitkit.checkpoints.formats.google_shapes import image_size_told, units_of
from vitkit.checkpoints.formats.sizes import impossible, shape_of
from vitkit.checkpoints.mapping import Rule, Shapes, rearranged, same
from vitkit.core.errors import ConfigError, WeightsError
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.variants import ModelConfig

ROOT = "resnet/root_block/standardized_conv2d/kernel"
HEAD = "resnet/head/conv2d"
ONE_PIXEL = rearranged("1 1 inputs outputs", "outputs inputs")


def describe(shapes: Shapes, about: About) -> BiTConfig:
    """The model in a file. It takes images of any size: the one set is 224, unless `config.json` says another."""
    root = shape_of(shapes, ROOT, axes=4)
    factor, rest = divmod(root[3], 64)
    if rest or not factor:
        raise WeightsError(f"{ROOT} is of no BiT", expected="a multiple of 64 outputs", got=root[3])
    classes = 0
    if f"{HEAD}/kernel" in shapes:
        classes = shape_of(shapes, f"{HEAD}/kernel", axes=4)[3]
    try:
        return BiTConfig(
            units=units_of(shapes, pattern="resnet/block([0-9])/unit([0-9]{2})/"),
            width_factor=factor,
            channels=root[2],
            image_size=image_size_told(about) or 224,
            classes=classes,
        )
    except ConfigError as error:
        raise impossible(error) from error


def unit_rules(ours: str, theirs: str, *, first: bool, shapes: Shapes | None) -> Iterator[Rule]:
    """The rules of one unit: its three convolutions are called a, b and c, each after its norm."""
    for number, letter in enumerate("abc", start=1):
        yield from norm(f"{ours}.norm{number}", f"{theirs}/{letter}/group_norm", shapes)
        kernel = f"{theirs}/{letter}/standardized_conv2d/kernel"
        yield Rule((f"{ours}.conv{number}.weight",), (kernel,), CONVOLUTION)
    if first:  # of its stage: it changes the width, so its shortcut is a projection
        kernel = f"{theirs}/a/proj/standardized_conv2d/kernel"
        yield Rule((f"{ours}.downsample.conv.weight",), (kernel,), CONVOLUTION)


def norm(ours: str, theirs: str, shapes: Shapes | None) -> Iterator[Rule]:
    """A GroupNorm in BiT's words."""
    return group_norm(ours, theirs, leaves=("gamma", "beta"), shapes=shapes, flat=True)


def rules(config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
    """All rules of a model, in the order of the data's way; stages and units are counted from 1 in files."""
    if not isinstance(config, BiTConfig):
        raise WeightsError("the format holds BiT's ResNets only", got="a Vision Transformer")
    units = [(stage, unit) for stage, count in enumerate(config.units) for unit in range(count)]
    found = [Rule(("stem.conv.weight",), (ROOT,), CONVOLUTION)]
    for stage, unit in units:
        theirs = f"resnet/block{stage + 1}/unit{unit + 1:02d}"
        found += unit_rules(f"stages.{stage}.blocks.{unit}", theirs, first=unit == 0, shapes=shapes)
    found += norm("norm", "resnet/group_norm", shapes)
    if config.classes:
        found += [Rule(("head.weight",), (f"{HEAD}/kernel",), ONE_PIXEL), same("head.bias", f"{HEAD}/bias")]
    return found


def refuses(config: ModelConfig) -> str | None:
    """Why the format cannot hold a model."""
    if not isinstance(config, BiTConfig):
        return "a Vision Transformer"
    if len(config.units) > 9 or max(config.units) > 99:
        return "more than 9 stages, or 99 units in one"
    return None if config.origin == "google" else f"a ResNet of {config.origin}'s numbers"


BIT = Format(
    name="bit",
    title="Google's Big Transfer",
    origin="bit",
    writes="npz",
    recognises=lambda shapes, about: ROOT in shapes,
    describe=describe,
    rules=rules,
    refuses=refuses,
)
