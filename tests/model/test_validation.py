"""Invalid configurations and images are rejected with one error and a hint."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_cases import images_for, random_vit, randomized, small

from vitkit.core.errors import ConfigError, InputError, VitkitError
from vitkit.model.config import (
    AttentionConfig,
    BackboneConfig,
    BiTConfig,
    BlockConfig,
    DropoutConfig,
    HeadConfig,
    PositionConfig,
    TokenConfig,
)
from vitkit.model.patches import check_images
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT


def refusal(kind: type[VitkitError], cause: Callable[[], object]) -> VitkitError:
    """Return the error that `cause` raises, which must have no cause."""
    with pytest.raises(VitkitError) as raised:
        cause()
    error = raised.value
    assert type(error) is kind
    assert error.__cause__ is None
    assert error.__context__ is None
    assert "\n" not in error.summary
    return error


# Configurations

IMPOSSIBLE: dict[str, tuple[dict[str, Any], str, str, object, str | None]] = {
    # changes: message, expected, got, hint
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
    "negative classes": ({"num_classes": -1}, "num_classes cannot be negative", "0 or more", -1, None),
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
        "a distillation token needs a class token and a linear head",
        "pooling = class and no head.pre_logits",
        "pooling = mean, head.pre_logits = None",
        None,
    ),
    "distillation under pre-logits": (
        {"tokens": TokenConfig(distillation=True), "head": HeadConfig(pre_logits=8)},
        "a distillation token needs a class token and a linear head",
        "pooling = class and no head.pre_logits",
        "pooling = class, head.pre_logits = 8",
        None,
    ),
    "axial blocks with a class token": (
        {"block": BlockConfig(axial=True)},
        "axial attention takes patches only",
        "pooling = mean or map, no class token or registers, and positions that are added",
        "pooling = class, 1 prefix tokens, learned_1d positions",
        None,
    ),
    "axial blocks with registers": (
        {"block": BlockConfig(axial=True), "pooling": "mean", "tokens": TokenConfig(registers=2)},
        "axial attention takes patches only",
        "pooling = mean or map, no class token or registers, and positions that are added",
        "pooling = mean, 2 prefix tokens, learned_1d positions",
        None,
    ),
    "axial blocks with relative positions": (
        {"block": BlockConfig(axial=True), "pooling": "mean", "positions": PositionConfig(kind="relative")},
        "axial attention takes patches only",
        "pooling = mean or map, no class token or registers, and positions that are added",
        "pooling = mean, 0 prefix tokens, relative positions",
        None,
    ),
    "patch dropout with relative positions": (
        {"dropout": DropoutConfig(patches=0.5), "positions": PositionConfig(kind="relative")},
        "patches can be removed only if all positions are added at the stem",
        "positions.injection = stem and no axial blocks",
        "relative positions, injection = every_layer, axial = False",
        None,
    ),
    "patch dropout with axial blocks": (
        {"dropout": DropoutConfig(patches=0.5), "block": BlockConfig(axial=True), "pooling": "mean"},
        "patches can be removed only if all positions are added at the stem",
        "positions.injection = stem and no axial blocks",
        "learned_1d positions, injection = stem, axial = True",
        None,
    ),
    "rotary heads that do not divide in quarters": (
        {"width": 12, "positions": PositionConfig(kind="rotary")},
        "the width of a head does not suit rotary positions",
        "a multiple of 4",
        6,
        None,
    ),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_invalid_configuration_is_rejected_with_a_hint(what: str) -> None:
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
        "attention.dropout is not a fraction (expected 0 ≤ fraction < 1, got 1.5)",
    ),
    "attention dropped by a negative share": (
        lambda: AttentionConfig(dropout=-0.1),
        "attention.dropout is not a fraction (expected 0 ≤ fraction < 1, got -0.1)",
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
def test_out_of_range_number_is_rejected(what: str) -> None:
    cause, message = UNUSABLE[what]
    assert refusal(ConfigError, cause).summary == message


# Images


@pytest.mark.parametrize(
    "shape", [(2, 3, 32, 32), (2, 3, 48, 32), (2, 1, 32, 48), (2, 4, 32, 48), (2, 32, 48, 3), (2, 3, 64, 96)]
)
def test_images_of_another_shape_are_rejected(shape: tuple[int, int, int, int]) -> None:
    model = random_vit(small())
    error = refusal(InputError, lambda: model(torch.zeros(shape)))
    sizes = f"images are {shape[2]}×{shape[3]}, the model takes 32×48"
    channels = f"images have {shape[1]} channel{'s' if shape[1] > 1 else ''}, the model takes 3"
    assert error.message == (sizes if shape[1] == 3 else channels)
    assert error.hint is not None


def test_resnet_rejects_other_channels_but_no_size() -> None:
    model = randomized(BiT(BiTConfig(units=(1,), num_classes=2)))
    error = refusal(InputError, lambda: model(torch.zeros(1, 1, 32, 32)))
    assert error.message == "images have 1 channel, the model takes 3"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_uint8_images_are_rejected_with_a_hint(dtype: torch.dtype) -> None:
    images = torch.zeros(2, 3, 32, 48, dtype=dtype)
    error = refusal(InputError, lambda: check_images(images, channels=3, image_size=(32, 48)))
    assert error.message == f"images are {str(dtype).removeprefix('torch.')}, the model takes normalized floats"
    assert error.hint == "model.preprocess.normalize(images), or model.preprocess(files)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_images_of_any_float_dtype_are_accepted(dtype: torch.dtype) -> None:
    check_images(torch.zeros(1, 3, 32, 48, dtype=dtype), channels=3, image_size=(32, 48))
    check_images(torch.zeros(1, 3, 5, 7, dtype=dtype), channels=3, image_size=None)


def test_empty_batch_is_accepted() -> None:
    model = random_vit(small())
    assert model(images_for(model.config, batch=0)).shape == (0, 5)


@pytest.mark.parametrize(
    "images", [torch.zeros(3, 32, 32), torch.zeros(1, 1, 3, 32, 32), torch.zeros(1, 3, 32, 32).byte()]
)
@pytest.mark.parametrize("name", ["ViT", "BiT"])
@pytest.mark.usefixtures("without_type_checks")
def test_model_rejects_bad_images_without_type_checks(name: str, images: torch.Tensor) -> None:
    """Under pytest the signatures are checked first; users have only the model's own check."""
    model, size = (ViT(small(image_size=32)), "32×32") if name == "ViT" else (BiT(BiTConfig(units=(1,))), "H×W")
    with pytest.raises(InputError) as raised:
        model(images)
    if images.is_floating_point():
        shape = "×".join(map(str, images.shape))
        assert raised.value.message == f"the model takes one tensor B×3×{size}, got {shape}"
    else:
        assert raised.value.message == "images are uint8, the model takes normalized floats"
