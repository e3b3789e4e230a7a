"""Our models against timm's: names, logits, gradients and sizes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from oracle.comparison import assert_close, assert_same_gradients, compute_gradients, random_images, randomize
from oracle.foreign_names import timm_bit, timm_distilled, timm_root_alone, timm_without_class_positions
from oracles import import_timm
from torch import Tensor, nn

from vitkit.core.sizes import pair
from vitkit.model.config import (
    AttentionConfig,
    BackboneConfig,
    BiTConfig,
    BlockConfig,
    HeadConfig,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.model.resnet import BIT_CONVENTIONS, HYBRID_CONVENTIONS, BiT
from vitkit.model.vit import ViT
from vitkit.zoo.registry import create, find_variant
from vitkit.zoo.variants import VARIANTS, Variant

Rename = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])

ERF = BlockConfig(activation="gelu_erf")
SMALL = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, heads=4, mlp_dim=128, num_classes=10, block=ERF)


def timm_vit(config: ViTConfig, **changes: Any) -> nn.Module:
    """Build timm's model for a configuration; `changes` are timm's arguments."""
    import_timm()
    from timm.layers import LayerNorm  # noqa: PLC0415
    from timm.models.deit import VisionTransformerDistilled  # noqa: PLC0415
    from timm.models.vision_transformer import VisionTransformer  # noqa: PLC0415

    block = config.block
    made = VisionTransformerDistilled if config.tokens.distillation else VisionTransformer
    arguments = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "num_classes": config.num_classes,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.mlp_dim / config.width,
        "global_pool": {"class": "token", "mean": "avg", "map": "map"}[config.pooling],
        "class_token": config.class_tokens > 0,
        "fc_norm": config.head.norm == "after_pooling",
        "qkv_bias": block.attention.qkv_bias,
        "qk_norm": block.attention.qk_norm,
        "init_values": block.layer_scale,
        "reg_tokens": config.tokens.registers,
        "no_embed_class": config.positions.covers == "patches",
        "norm_layer": partial(LayerNorm, eps=block.norm_eps),
        "act_layer": partial(nn.GELU, approximate="tanh" if block.activation == "gelu_tanh" else "none"),
    }
    return made(**(arguments | changes))


def swiglu() -> dict[str, Any]:
    """Return timm's arguments for a SwiGLU of `mlp_dim`, whose hidden width includes the gate."""
    import_timm()
    from timm.layers import SwiGLUPacked  # noqa: PLC0415

    return {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 2 * SMALL.mlp_dim / SMALL.width}


def assert_same_models(ours: nn.Module, theirs: nn.Module, images: Tensor, *, rename: Rename = dict) -> None:
    """Load all our random weights into timm's model and compare outputs and gradients."""
    theirs.load_state_dict(rename(ours.state_dict()), strict=True)
    assert_same_gradients(compute_gradients(ours, images), compute_gradients(theirs, images), rename=rename)


CASES = [
    pytest.param(SMALL, dict, id="class token"),
    pytest.param(replace(SMALL, block=replace(ERF, activation="gelu_tanh")), dict, id="tanh GELU"),
    pytest.param(replace(SMALL, block=replace(ERF, norm_eps=1e-2)), dict, id="large eps"),
    pytest.param(replace(SMALL, image_size=48, patch_size=16, depth=3), dict, id="large patches"),
    pytest.param(replace(SMALL, image_size=(32, 48), patch_size=(8, 16)), dict, id="wide images, tall grid"),
    pytest.param(replace(SMALL, image_size=(48, 32)), dict, id="tall images"),
    pytest.param(replace(SMALL, channels=1), dict, id="1 channel"),
    pytest.param(replace(SMALL, channels=5), dict, id="5 channels"),
    pytest.param(replace(SMALL, pooling="mean"), dict, id="mean pooling"),
    pytest.param(
        replace(SMALL, pooling="mean", head=HeadConfig(norm="after_pooling")), dict, id="mean pooling, norm after"
    ),
    pytest.param(
        replace(SMALL, pooling="mean", head=HeadConfig(norm="after_pooling"), tokens=TokenConfig(class_token=True)),
        dict,
        id="mean pooling beside a class token",
    ),
    pytest.param(replace(SMALL, head=HeadConfig(norm="after_pooling")), dict, id="class token, norm after"),
    pytest.param(replace(SMALL, pooling="map"), dict, id="attention pooling"),
    pytest.param(
        replace(SMALL, pooling="map", block=BlockConfig(norm_eps=1e-2)), dict, id="attention pooling, tanh, large eps"
    ),
    pytest.param(replace(SMALL, block=replace(ERF, layer_scale=1e-5)), dict, id="LayerScale"),
    pytest.param(
        replace(SMALL, block=replace(ERF, norm_eps=1e-2, attention=AttentionConfig(qk_norm=True))),
        dict,
        id="normalized queries and keys",
    ),
    pytest.param(replace(SMALL, block=replace(ERF, attention=AttentionConfig(qkv_bias=False))), dict, id="no qkv bias"),
    pytest.param(replace(SMALL, positions=PositionConfig(covers="patches")), dict, id="positions of patches only"),
    pytest.param(
        replace(SMALL, positions=PositionConfig(covers="patches"), tokens=TokenConfig(registers=4)),
        dict,
        id="registers",
    ),
    pytest.param(
        replace(
            SMALL,
            pooling="mean",
            positions=PositionConfig(covers="patches"),
            tokens=TokenConfig(registers=4),
        ),
        dict,
        id="registers without a class token",
    ),
    pytest.param(replace(SMALL, tokens=TokenConfig(distillation=True)), timm_distilled, id="distilled"),
]


@dtypes
@pytest.mark.parametrize(("config", "rename"), CASES)
def test_vit_names_logits_and_gradients_equal_timm(config: ViTConfig, rename: Rename, dtype: torch.dtype) -> None:
    ours, theirs = ViT(config), timm_vit(config)
    randomize(ours)
    images = random_images(3, config.channels, *pair(config.image_size))
    assert_same_models(ours.to(dtype), theirs.to(dtype), images, rename=rename)


@dtypes
def test_swiglu_equals_timm(dtype: torch.dtype) -> None:
    ours = ViT(replace(SMALL, block=BlockConfig(activation="swiglu", layer_scale=1e-5)))
    theirs = timm_vit(ours.config, **swiglu())
    randomize(ours)
    assert_same_models(ours.to(dtype), theirs.to(dtype), random_images(3, 3, 32, 32))


@dtypes
def test_attention_pooling_reads_the_class_token(dtype: torch.dtype) -> None:
    """timm excludes prefix tokens by default; the released code includes them."""
    ours = ViT(replace(SMALL, pooling="map", tokens=TokenConfig(class_token=True)))
    theirs = timm_vit(ours.config, pool_include_prefix=True)
    randomize(ours)
    assert_same_models(ours.to(dtype), theirs.to(dtype), random_images(3, 3, 32, 32))


@dtypes
def test_registers_follow_the_class_token(dtype: torch.dtype) -> None:
    """In DINOv2 the class token has a position and registers have none; timm adds that position to the token."""
    ours = ViT(replace(SMALL, tokens=TokenConfig(registers=4)))
    theirs = timm_vit(ours.config, no_embed_class=True)
    randomize(ours)
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    theirs.load_state_dict(timm_without_class_positions(ours.state_dict()), strict=True)
    images = random_images(3, 3, 32, 32)
    actual, expected = compute_gradients(ours, images), compute_gradients(theirs, images)
    assert_close(actual.output, expected.output)
    assert_close(actual.gradients["reg_token"], expected.gradients["reg_token"])
    assert_close(actual.gradients["pos_embed"][:, 1:], expected.gradients["pos_embed"])
    assert_close(actual.gradients["pos_embed"][:, :1], expected.gradients["cls_token"])


# Hybrids and BiT, in float64 alone: relu and max pooling have kinks, and float32 puts a few activations on the other
# side of them, where the gradient is another one. Names are timm's as they are, where there are stages.


def timm_hybrid(config: ViTConfig) -> nn.Module:
    import_timm()
    from timm.layers import GroupNormAct, HybridEmbed, StdConv2dSame  # noqa: PLC0415
    from timm.models.resnetv2 import ResNetV2, create_resnetv2_stem  # noqa: PLC0415

    assert config.backbone is not None
    units, root_width = config.backbone.units, config.backbone.root_width
    layers = {
        "conv_layer": partial(StdConv2dSame, eps=1e-8),
        "norm_layer": partial(GroupNormAct, num_groups=32, eps=1e-6),
        "stem_type": "same",
        "preact": False,
    }
    if units:
        channels = tuple(4 * root_width * 2**stage for stage in range(len(units)))
        sizes = {"in_chans": config.channels, "channels": channels, "stem_chs": root_width}
        backbone = ResNetV2(units, num_classes=0, global_pool="", **sizes, **layers)
    else:
        backbone = create_resnetv2_stem(config.channels, root_width, **layers)
    return timm_vit(config, embed_layer=partial(HybridEmbed, backbone))


@pytest.mark.parametrize(
    ("units", "root_width", "patch_size", "image_size", "rename"),
    [
        pytest.param((2, 1), 32, 1, (32, 48), dict, id="two stages"),
        pytest.param((1, 1, 1, 1), 32, 1, (64, 32), dict, id="four stages"),
        pytest.param((1, 2), 32, 2, (48, 32), dict, id="2x2 patches"),
        pytest.param((), 64, 4, (32, 48), timm_root_alone, id="root alone"),
    ],
)
def test_hybrid_logits_and_gradients_equal_timm(
    units: tuple[int, ...], root_width: int, patch_size: int, image_size: tuple[int, int], rename: Rename
) -> None:
    backbone = BackboneConfig(units=units, root_width=root_width)
    ours = ViT(replace(SMALL, image_size=image_size, patch_size=patch_size, backbone=backbone))
    randomize(ours)
    theirs = timm_hybrid(ours.config)
    assert_same_models(ours.double(), theirs.double(), random_images(2, 3, *image_size), rename=rename)


@pytest.mark.parametrize("image_size", [(32, 48), (49, 34)], ids=["even", "odd"])
def test_bit_logits_and_gradients_equal_timm(image_size: tuple[int, int]) -> None:
    import_timm()
    from timm.layers import GroupNormAct, StdConv2d  # noqa: PLC0415
    from timm.models.resnetv2 import ResNetV2  # noqa: PLC0415

    ours = BiT(BiTConfig(units=(2, 1, 1), num_classes=10))
    theirs = ResNetV2(
        (2, 1, 1),
        num_classes=10,
        stem_type="fixed",
        conv_layer=partial(StdConv2d, eps=1e-10),  # the released code's, where timm's own BiT has 1e-8
        norm_layer=partial(GroupNormAct, num_groups=32, eps=1e-5),
    )
    randomize(ours)
    assert_same_models(ours.double(), theirs.double(), random_images(2, 3, *image_size), rename=timm_bit)


# Whose numbers a ResNet computes with, in float64, where nothing but an eps can be left. With kernels as small as
# trained ones the eps show: that of the norm, and that of the standardization.


def resnets(origin: Any) -> tuple[nn.Module, nn.Module, Rename]:
    """Build a BiT of ours and timm's with the same units."""
    import_timm()
    from timm.layers import GroupNormAct, StdConv2d  # noqa: PLC0415
    from timm.models.resnetv2 import ResNetV2  # noqa: PLC0415

    ours = BiT(BiTConfig(units=(2, 1, 1), num_classes=10, origin=origin))
    layers = {"conv_layer": partial(StdConv2d, eps=1e-8), "norm_layer": partial(GroupNormAct, num_groups=32)}
    return ours, ResNetV2((2, 1, 1), num_classes=10, stem_type="fixed", **layers), timm_bit


def root_alone(origin: Any) -> tuple[nn.Module, nn.Module, Rename]:
    """Build the root of a hybrid of ours and timm's."""
    timm = import_timm()
    backbone = BackboneConfig(units=(), origin=origin)
    ours = ViT(replace(SMALL, image_size=64, backbone=backbone))
    sizes = {"img_size": 64, "embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0, "num_classes": 10}
    return ours, timm.create_model("vit_tiny_r_s16_p8_224", **sizes), timm_root_alone


@pytest.mark.parametrize("made", [resnets, root_alone], ids=["BiT", "hybrid"])
def test_resnet_with_timm_numerics_equals_timm(made: Any) -> None:
    differences = {}
    for origin in ("timm", "google"):
        ours, theirs, rename = made(origin)
        randomize(ours, kernels=0.02)
        ours, theirs = ours.double().eval(), theirs.double().eval()
        theirs.load_state_dict(rename(ours.state_dict()), strict=True)
        images = random_images(1, 3, 64, 64)
        with torch.no_grad():
            expected = theirs(images)
            differences[origin] = float((ours(images) - expected).abs().max() / expected.abs().max())
    assert differences["timm"] < 1e-12
    assert 1e-6 < differences["google"] < 1e-3


def test_timm_resnet_numerics() -> None:
    """Check timm's own models, so that a change in timm is noticed."""
    timm = import_timm()
    with torch.device("meta"):
        bit = timm.create_model("resnetv2_50x1_bit")
        hybrid = timm.create_model("vit_small_r26_s32_224").patch_embed.backbone
    for resnet, known in ((bit, BIT_CONVENTIONS["timm"]), (hybrid, HYBRID_CONVENTIONS["timm"])):
        convolutions = {
            module.eps for module in resnet.modules() if isinstance(module, nn.Conv2d) and hasattr(module, "eps")
        }
        norms = {module.eps for module in resnet.modules() if isinstance(module, nn.GroupNorm)}
        assert (convolutions, norms) == ({known.variance_eps}, {known.norm_eps})


# The zoo's own sizes


@pytest.mark.parametrize(
    ("name", "timm_name", "image_size", "depth", "rename"),
    [
        pytest.param("Ti/16", "vit_tiny_patch16_224", 224, 12, dict, id="Ti/16"),
        pytest.param("S/16", "vit_small_patch16_224", 224, 12, dict, id="S/16"),
        pytest.param("R+Ti/16", "vit_tiny_r_s16_p8_224", 224, 12, timm_root_alone, id="R+Ti/16"),
        pytest.param("R26+S/32", "vit_small_r26_s32_224", 96, 2, dict, id="R26+S/32, 2 layers"),
        pytest.param("R50+B/16", "vit_base_r50_s16_224", 64, 1, dict, id="R50+B/16, 1 layer"),
    ],
)
def test_zoo_model_logits_equal_timm(name: str, timm_name: str, image_size: int, depth: int, rename: Rename) -> None:
    timm = import_timm()
    settings = {"depth": depth, "block.activation": "gelu_erf"}
    ours = create(name, image_size=image_size, settings=settings, device="meta").to_empty(device="cpu")
    with torch.device("meta"):
        theirs = timm.create_model(timm_name, num_classes=1000, img_size=image_size, depth=depth)
    randomize(ours)
    theirs.load_state_dict(rename(ours.state_dict()), strict=True, assign=True)
    images = random_images(1, 3, image_size, image_size).float()
    with torch.no_grad():
        assert_close(ours.eval()(images), theirs.eval()(images))


def test_zoo_bit_logits_equal_timm() -> None:
    timm = import_timm()
    ours = create("BiT-R50x1", device="meta").to_empty(device="cpu")
    with torch.device("meta"):
        theirs = timm.create_model("resnetv2_50x1_bit", num_classes=1000)
    randomize(ours)
    theirs.load_state_dict(timm_bit(ours.state_dict()), strict=True, assign=True)
    images = random_images(1, 3, 64, 32).float()
    with torch.no_grad():
        assert_close(ours.eval()(images), theirs.eval()(images))


TIMM_ALIASES = [
    [alias for alias in variant.aliases if re.match(r"vit_[a-z]{4,5}_|resnetv2_", alias)] for variant in VARIANTS
]
ALIASES = ["vit_base_patch16_384", *(aliases[0] for aliases in TIMM_ALIASES if aliases)]
"""One alias per model, and one with another image size, which only changes the number of positions."""


@pytest.mark.parametrize("alias", ALIASES)
def test_timm_alias_has_the_same_parameter_count(alias: str) -> None:
    timm = import_timm()
    ours = create(find_variant(alias).config, device="meta")
    with torch.device("meta"):
        theirs = timm.create_model(alias, num_classes=1000)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.kind == "resnet"], ids=lambda variant: variant.name)
def test_baseline_parameter_count_equals_timm(variant: Variant) -> None:
    import_timm()
    from timm.layers import StdConv2d  # noqa: PLC0415
    from timm.models.resnetv2 import ResNetV2  # noqa: PLC0415

    config = variant.config
    with torch.device("meta"):
        theirs = ResNetV2(
            layers=config.units, width_factor=config.width_factor, stem_type="fixed", conv_layer=StdConv2d
        )
    assert sum(parameter.numel() for parameter in theirs.parameters()) == variant.parameters
