"""Small models for tests: configurations of every kind, zoo models cut down to size, and a slow reference of attention.

Images are 32×48 where a case is free to choose, so that rows and columns differ and confusing them shows.
"""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.core.shapes import pair
from vitkit.model.attention import AttentionConfig
from vitkit.model.config import TokenConfig, ViTConfig
from vitkit.model.encoder import BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BackboneConfig, BiTConfig
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import Model, create
from vitkit.zoo.variants import VARIANTS, ModelConfig

IMAGE_SIZE = (32, 48)

ALLOWED = {
    "none": {"stem"},
    "learned_1d": {"stem", "every_layer", "shared"},
    "learned_2d": {"stem", "every_layer", "shared"},
    "sincos_2d": {"stem", "shared"},
    "relative": {"every_layer", "shared"},
    "rotary": {"shared"},
}
"""Where each kind of positions may enter: the paper's appendix D.4, written down a second time."""
PLACED = [(kind, injection) for kind, places in ALLOWED.items() for injection in sorted(places)]
MISPLACED = [
    (kind, injection)
    for kind, places in ALLOWED.items()
    for injection in ("every_layer", "shared", "stem")
    if injection not in places
]
EMBEDDING_INJECTIONS = [(kind, place) for kind, place in PLACED if kind in ("learned_1d", "learned_2d", "sincos_2d")]


def small(**changes: Any) -> ViTConfig:
    """A Vision Transformer of 2 layers over 4×6 patches; any field may be changed."""
    fields: dict[str, Any] = {
        "image_size": IMAGE_SIZE,
        "patch_size": 8,
        "width": 16,
        "depth": 2,
        "heads": 2,
        "mlp_dim": 24,
        "classes": 5,
    }
    return ViTConfig(**fields | changes)


def placed(kind: str, injection: str | None = None, **changes: Any) -> ViTConfig:
    """A small model with these positions."""
    return small(positions=PositionConfig(kind=kind, injection=injection), **changes)


def attending(**changes: Any) -> BlockConfig:
    """Blocks whose attention is changed."""
    return BlockConfig(attention=AttentionConfig(**changes))


CASES: dict[str, ViTConfig] = {
    **{f"{kind}-{injection}": placed(kind, injection) for kind, injection in PLACED},
    **{f"{kind}-mean": placed(kind, pooling="mean") for kind in ALLOWED},
    "map": small(pooling="map"),
    "map-swiglu": small(pooling="map", block=BlockConfig(activation="swiglu")),
    "map-relative": placed("relative", pooling="map"),
    "mean-with-class-token": small(pooling="mean", tokens=TokenConfig(class_token=True)),
    "map-with-class-token": small(pooling="map", tokens=TokenConfig(class_token=True)),
    "registers": small(tokens=TokenConfig(registers=3)),
    "registers-mean": small(pooling="mean", tokens=TokenConfig(registers=2)),
    "registers-rotary": placed("rotary", tokens=TokenConfig(registers=2)),
    "registers-relative": placed("relative", tokens=TokenConfig(registers=2)),
    "registers-every-layer": placed("learned_1d", "every_layer", tokens=TokenConfig(registers=2)),
    "distilled": small(tokens=TokenConfig(distillation=True)),
    "distilled-registers": small(tokens=TokenConfig(distillation=True, registers=1)),
    "distilled-2d-every-layer": placed("learned_2d", "every_layer", tokens=TokenConfig(distillation=True)),
    "distilled-after-pooling": small(tokens=TokenConfig(distillation=True), head=HeadConfig(norm="after_pooling")),
    "positions-of-patches-only": small(positions=PositionConfig(covers="patches")),
    "positions-of-patches-only-2d": small(positions=PositionConfig(kind="learned_2d", covers="patches")),
    "sincos-mae": small(positions=PositionConfig(kind="sincos_2d", sincos="mae")),
    "qk-norm": small(block=attending(qk_norm=True)),
    "qk-norm-rotary": placed("rotary", block=attending(qk_norm=True)),
    "qk-norm-relative": placed("relative", block=attending(qk_norm=True)),
    "no-qkv-bias": small(block=attending(qkv_bias=False)),
    "layer-scale": small(block=BlockConfig(layer_scale=0.1)),
    "swiglu": small(block=BlockConfig(activation="swiglu")),
    "erf": small(block=BlockConfig(activation="gelu_erf", norm_eps=1e-5)),
    "axial": small(pooling="mean", block=BlockConfig(axial=True)),
    "axial-map": small(pooling="map", block=BlockConfig(axial=True, layer_scale=0.1)),
    "axial-2d-every-layer": placed("learned_2d", "every_layer", pooling="mean", block=BlockConfig(axial=True)),
    "axial-without-positions": placed("none", pooling="mean", block=BlockConfig(axial=True)),
    "pre-logits": small(head=HeadConfig(pre_logits=12, bias=-10.0)),
    "pre-logits-mean": small(pooling="mean", head=HeadConfig(pre_logits=12)),
    "norm-after-class-pooling": small(head=HeadConfig(norm="after_pooling")),
    "norm-after-mean-pooling": small(pooling="mean", head=HeadConfig(norm="after_pooling")),
    "norm-after-map-pooling": small(pooling="map", head=HeadConfig(norm="after_pooling")),
    "headless": small(classes=0),
    "headless-distilled": small(classes=0, tokens=TokenConfig(distillation=True)),
    "grey": small(channels=1, patch_size=(4, 16)),
    "one-layer-one-head": small(depth=1, heads=1),
    "hybrid": small(patch_size=1, image_size=(32, 64), backbone=BackboneConfig(units=(1, 2), root_width=32)),
    "hybrid-of-the-root": small(patch_size=(2, 4), image_size=32, backbone=BackboneConfig(units=(), root_width=32)),
}
"""One small configuration for each thing a Vision Transformer can be, by name."""


def shrunk(config: ModelConfig) -> ModelConfig:
    """The same structure, two layers deep and narrow; every ResNet stage has one unit; the last map is 2×2 or more.

    A map of one cell under a norm of 32 groups of one channel would be normalised away, and no gradient would pass.
    """
    if isinstance(config, BiTConfig):
        return replace(config, units=(1,) * len(config.units), width_factor=1, image_size=64, classes=5)
    height, width = pair(config.patch_size)
    backbone = config.backbone
    if backbone is not None:
        backbone = replace(backbone, units=(1,) * len(backbone.units), root_width=32)
    stride = backbone.stride if backbone else 1
    return replace(
        config,
        backbone=backbone,
        image_size=(2 * stride * height, 3 * stride * width),
        width=16,
        depth=2,
        heads=2,
        mlp_dim=24,
        classes=5,
        head=replace(config.head, pre_logits=12 if config.head.pre_logits else None),
    )


def shrunk_zoo() -> dict[str, ModelConfig]:
    """Every zoo model cut down to size; those that become the same are one, named after all of them."""
    names: dict[ModelConfig, list[str]] = {}
    for variant in VARIANTS:
        names.setdefault(shrunk(variant.config), []).append(variant.name)
    return {" ".join(same): config for config, same in names.items()}


@cache
def without_numbers(config: ModelConfig) -> Model:
    """The model of this configuration on the meta device, the same for everyone who asks."""
    return create(config, device="meta")


@cache
def _fresh(config: ModelConfig) -> Model:
    return create(config, generator=torch.Generator().manual_seed(16))


def fresh(config: ModelConfig) -> Model:
    """A model as it starts, from a known seed. Under pytest building is slow (all is type-checked): it is done once."""
    return deepcopy(_fresh(config))


def images_for(config: ModelConfig, *, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random images that a model of this configuration takes."""
    return torch.randn(batch, config.channels, *pair(config.image_size), dtype=dtype)


@torch.no_grad()
def randomised(model: nn.Module, *, deviation: float = 0.3) -> nn.Module:
    """The model in evaluation mode with every learned parameter moved, so that none is zero or one any more."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=deviation)
    return model.eval()


def random_vit(config: ViTConfig, *, dtype: torch.dtype = torch.float32) -> ViT:
    """A model of this configuration with random parameters everywhere, ready to run."""
    model = randomised(fresh(config)).to(dtype)
    assert isinstance(model, ViT)
    return model


def slow_attention(
    tokens: Tensor, *, qkv: nn.Linear, proj: nn.Linear, heads: int, bias: Tensor | None = None
) -> Tensor:
    """Appendix A with loops: for each image and head softmax(q kᵀ / √K + bias) v, side by side, then projected."""
    queries, keys, values = qkv(tokens).chunk(3, dim=-1)
    share = tokens.shape[-1] // heads
    images = []
    for image in range(tokens.shape[0]):
        columns = []
        for head in range(heads):
            part = slice(head * share, (head + 1) * share)
            logits = queries[image, :, part] @ keys[image, :, part].T / share**0.5
            if bias is not None:
                logits = logits + bias[image, head]
            columns.append(logits.softmax(dim=-1) @ values[image, :, part])
        images.append(torch.cat(columns, dim=-1))
    return proj(torch.stack(images))
