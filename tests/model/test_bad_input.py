"""What cannot be, refused with one error that says what was expected, what came, and what to do."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_cases import images_for, random_vit, randomised, small

from vitkit.core.errors import ConfigError, InputError, VitkitError
from vitkit.model.attention import AttentionConfig
from vitkit.model.config import DropoutConfig, TokenConfig
from vitkit.model.encoder import BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.inputs import check_images
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BackboneConfig, BiT, BiTConfig


def refusal(kind: type[VitkitError], cause: Callable[[], object]) -> VitkitError:
    """The one error that `cause` raises, with no other behind it."""
    with pytest.raises(VitkitError) as raised:
        cause()
    error = raised.value
    assert type(error) is kind
    assert error.__cause__ is None
    assert error.__context__ is None
    assert "\n" not in str(error)
    return error


# Configurations

IMPOSSIBLE: dict[str, tuple[dict[str, Any], str, str, object, str | None]] = {
    # what is asked for: message, expected, got, hint
    "a patch that does not divide the image": (
        {"image_size": 225, "patch_size": 16},
        "the patch does not divide the image",
        "multiples of 16×16",
        "225×225",
        "use an image size of 224×224, or another patch size",
    ),
    "a patch that does not divide the width of the image": (
        {"image_size": (32, 50), "patch_size": 8},
        "the patch does not divide the image",
        "multiples of 8×8",
        "32×50",
        "use an image size of 32×48, or another patch size",
    ),
    "a hybrid whose stride does not divide the image": (
        {"image_size": 40, "patch_size": 1, "backbone": BackboneConfig(units=(1, 1, 1))},
        "the patch does not divide the image",
        "multiples of 16×16",
        "40×40",
        "use an image size of 32×32, or another patch size",
    ),
    "a negative image": (
        {"image_size": -32},
        "image and patch sizes must be positive",
        "1 pixel or more",
        "an image of -32×-32 in patches of 8×8",
        None,
    ),
    "a patch of nothing": (
        {"patch_size": 0},
        "image and patch sizes must be positive",
        "1 pixel or more",
        "an image of 32×48 in patches of 0×0",
        None,
    ),
    "heads that do not divide the width": (
        {"width": 768, "heads": 10},
        "the heads do not divide the width",
        "heads that divide 768",
        10,
        "the paper's heads are 64 wide: try heads=12",
    ),
    "no width": ({"width": 0}, "width must be positive", "more than 0", 0, None),
    "negative depth": ({"depth": -2}, "depth must be positive", "more than 0", -2, None),
    "no heads": ({"heads": 0}, "heads must be positive", "more than 0", 0, None),
    "no hidden layer": ({"mlp_dim": 0}, "mlp_dim must be positive", "more than 0", 0, None),
    "no channels": ({"channels": 0}, "channels must be positive", "more than 0", 0, None),
    "negative classes": ({"classes": -1}, "classes cannot be negative", "0 or more", -1, None),
    "negative registers": (
        {"tokens": TokenConfig(registers=-1)},
        "tokens.registers cannot be negative",
        "0 or more",
        -1,
        None,
    ),
    "class pooling without a class token": (
        {"tokens": TokenConfig(class_token=False)},
        "class pooling reads the class token",
        "tokens.class_token = true",
        "false",
        "use pooling=mean or pooling=map for a model without one",
    ),
    "distillation without class pooling": (
        {"pooling": "mean", "tokens": TokenConfig(distillation=True)},
        "the distillation token stands beside the class token, under a plain linear head",
        "pooling = class and no head.pre_logits",
        "pooling = mean, head.pre_logits = None",
        None,
    ),
    "distillation under pre-logits": (
        {"tokens": TokenConfig(distillation=True), "head": HeadConfig(pre_logits=8)},
        "the distillation token stands beside the class token, under a plain linear head",
        "pooling = class and no head.pre_logits",
        "pooling = class, head.pre_logits = 8",
        None,
    ),
    "axial blocks with a class token": (
        {"block": BlockConfig(axial=True)},
        "axial attention runs over the patch grid alone",
        "pooling = mean or map, no class token or registers, and positions that are added",
        "pooling = class, 1 in front of the patches, learned_1d positions",
        None,
    ),
    "axial blocks with registers": (
        {"block": BlockConfig(axial=True), "pooling": "mean", "tokens": TokenConfig(registers=2)},
        "axial attention runs over the patch grid alone",
        "pooling = mean or map, no class token or registers, and positions that are added",
        "pooling = mean, 2 in front of the patches, learned_1d positions",
        None,
    ),
    "axial blocks with relative positions": (
        {"block": BlockConfig(axial=True), "pooling": "mean", "positions": PositionConfig(kind="relative")},
        "axial attention runs over the patch grid alone",
        "pooling = mean or map, no class token or registers, and positions that are added",
        "pooling = mean, 0 in front of the patches, relative positions",
        None,
    ),
    "patch dropout with relative positions": (
        {"dropout": DropoutConfig(patches=0.5), "positions": PositionConfig(kind="relative")},
        "patches can be left out only where all positions are added at the stem",
        "positions.injection = stem and no axial blocks",
        "relative positions, injection = every_layer, axial = False",
        None,
    ),
    "patch dropout with axial blocks": (
        {"dropout": DropoutConfig(patches=0.5), "block": BlockConfig(axial=True), "pooling": "mean"},
        "patches can be left out only where all positions are added at the stem",
        "positions.injection = stem and no axial blocks",
        "learned_1d positions, injection = stem, axial = True",
        None,
    ),
    "rotary heads that do not divide in quarters": (
        {"width": 12, "positions": PositionConfig(kind="rotary")},
        "rotary positions turn quarters of a head",
        "a multiple of 4",
        6,
        None,
    ),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_impossible_configuration_is_refused_with_what_to_do(what: str) -> None:
    changes, message, expected, got, hint = IMPOSSIBLE[what]
    error = refusal(ConfigError, lambda: small(**changes))
    assert (error.message, error.expected, error.got, error.hint) == (message, expected, got, hint)


UNUSABLE: dict[str, tuple[Callable[[], object], str]] = {
    "pre-logits of negative width": (
        lambda: HeadConfig(pre_logits=-4),
        "head.pre_logits must be positive (expected more than 0, got -4)",
    ),
    "more attention dropped than there is": (
        lambda: AttentionConfig(dropout=1.5),
        "attention.dropout is not a share (expected 0 ≤ share < 1, got 1.5)",
    ),
    "attention dropped by a negative share": (
        lambda: AttentionConfig(dropout=-0.1),
        "attention.dropout is not a share (expected 0 ≤ share < 1, got -0.1)",
    ),
    "rotary periods of a zero base": (
        lambda: PositionConfig(kind="rotary", rotary_base=0.0),
        "positions.rotary_base must be positive (expected more than 0, got 0.0)",
    ),
    "a negative epsilon": (
        lambda: BlockConfig(norm_eps=-1.0),
        "block.norm_eps must be positive (expected more than 0, got -1.0)",
    ),
    "an epsilon that is no number": (
        lambda: BlockConfig(norm_eps=float("nan")),
        "block.norm_eps must be positive (expected more than 0, got nan)",
    ),
    "a width that halves do not fill": (
        lambda: small(width=15, heads=3, positions=PositionConfig(kind="learned_2d")),
        "the width does not suit learned_2d positions (expected a multiple of 2, got 15)",
    ),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_a_number_that_no_model_can_use_is_refused_in_the_configuration(what: str) -> None:
    cause, message = UNUSABLE[what]
    assert str(refusal(ConfigError, cause)) == message


# Images


@pytest.mark.parametrize(
    "shape", [(2, 3, 32, 32), (2, 3, 48, 32), (2, 1, 32, 48), (2, 4, 32, 48), (2, 32, 48, 3), (2, 3, 64, 96)]
)
def test_images_of_another_shape_are_refused(shape: tuple[int, int, int, int]) -> None:
    model = random_vit(small())
    error = refusal(InputError, lambda: model(torch.zeros(shape)))
    assert error.message == "the images do not fit the model"
    assert error.expected == "batch × 3 × 32 × 48"
    assert error.got == " × ".join(map(str, shape))
    assert error.hint == "resize or convert the images, or create the model with their image_size and channels"


def test_a_resnet_refuses_other_channels_and_no_size() -> None:
    model = randomised(BiT(BiTConfig(units=(1,), classes=2)))
    error = refusal(InputError, lambda: model(torch.zeros(1, 1, 32, 32)))
    assert (error.expected, error.got) == ("batch × 3 × any × any", "1 × 1 × 32 × 32")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_images_still_in_bytes_are_refused_with_the_way_to_normalise_them(dtype: torch.dtype) -> None:
    images = torch.zeros(2, 3, 32, 48, dtype=dtype)
    error = refusal(InputError, lambda: check_images(images, channels=3, image_size=(32, 48)))
    assert error.message == "images must be normalised floating-point numbers"
    assert error.expected == "float32 or the like"
    assert error.got == str(dtype).removeprefix("torch.")
    assert error.hint == "for the released weights: (images.float() - 127.5) / 127.5"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_images_of_any_floating_format_pass(dtype: torch.dtype) -> None:
    check_images(torch.zeros(1, 3, 32, 48, dtype=dtype), channels=3, image_size=(32, 48))
    check_images(torch.zeros(1, 3, 5, 7, dtype=dtype), channels=3, image_size=None)


def test_an_empty_batch_passes() -> None:
    model = random_vit(small())
    assert model(images_for(model.config, batch=0)).shape == (0, 5)


UNCHECKED = """
import torch
import vitkit
from vitkit.core.errors import VitkitError

models = [vitkit.create("Ti/16", image_size=32, classes=2, settings=["depth=1"]),
          vitkit.create("BiT-R50x1", classes=2, settings=["units=[1]"])]
for model in models:
    for images in (torch.zeros(3, 32, 32), torch.zeros(1, 1, 3, 32, 32), torch.zeros(1, 3, 32, 32).byte()):
        try:
            model(images)
        except VitkitError as error:
            print(type(error).__name__, "|", error)
"""


def test_images_are_refused_alike_where_shapes_are_not_type_checked() -> None:
    """Under pytest the signatures are checked first; a user has only the model's own check."""
    done = subprocess.run([sys.executable, "-c", UNCHECKED], capture_output=True, text=True, check=True)
    shapes = ["3 × 32 × 32", "1 × 1 × 3 × 32 × 32"]
    floating = "images must be normalised floating-point numbers (expected float32 or the like, got uint8)"
    assert done.stdout.splitlines() == [
        f"InputError | {message}"
        for size in ("32 × 32", "any × any")
        for message in (
            *(f"the images do not fit the model (expected batch × 3 × {size}, got {shape})" for shape in shapes),
            floating,
        )
    ]
