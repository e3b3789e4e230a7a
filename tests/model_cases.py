"""Small models for tests: configurations of every kind, reduced zoo models, and a reference of attention.

Images are 32×48 where possible, so that confusing rows and columns fails a test.
"""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
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
from vitkit.model.vit import ViT
from vitkit.zoo.registry import Model, create
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
"""Injections of each kind of positions, written down a second time."""
VALID_INJECTIONS = [(kind, injection) for kind, places in ALLOWED.items() for injection in sorted(places)]
INVALID_INJECTIONS = [
    (kind, injection)
    for kind, places in ALLOWED.items()
    for injection in ("every_layer", "shared", "stem")
    if injection not in places
]
EMBEDDING_INJECTIONS = [
    (kind, place) for kind, place in VALID_INJECTIONS if kind in ("learned_1d", "learned_2d", "sincos_2d")
]


def small(**changes: Any) -> ViTConfig:
    """Return a configuration of 2 layers over 4×6 patches; any field may be changed."""
    fields: dict[str, Any] = {
        "image_size": IMAGE_SIZE,
        "patch_size": 8,
        "width": 16,
        "depth": 2,
        "heads": 2,
        "mlp_dim": 24,
        "num_classes": 5,
    }
    return ViTConfig(**fields | changes)


def with_positions(kind: str, injection: str | None = None, **changes: Any) -> ViTConfig:
    """Return a small configuration with these positions."""
    return small(positions=PositionConfig(kind=kind, injection=injection), **changes)


def block_with_attention(**changes: Any) -> BlockConfig:
    """Return a block configuration with this attention."""
    return BlockConfig(attention=AttentionConfig(**changes))


CASES: dict[str, ViTConfig] = {
    **{f"{kind}-{injection}": with_positions(kind, injection) for kind, injection in VALID_INJECTIONS},
    **{f"{kind}-mean": with_positions(kind, pooling="mean") for kind in ALLOWED},
    "small-root": small(patch_size=4, backbone=BackboneConfig(units=(1,), root_width=32, root="small")),
    "stacked-root": small(
        patch_size=1, backbone=BackboneConfig(units=(), root_width=64, root="stack", root_units=(1, 2))
    ),
    "map": small(pooling="map"),
    "map-swiglu": small(pooling="map", block=BlockConfig(activation="swiglu")),
    "map-relative": with_positions("relative", pooling="map"),
    "mean-with-class-token": small(pooling="mean", tokens=TokenConfig(class_token=True)),
    "map-with-class-token": small(pooling="map", tokens=TokenConfig(class_token=True)),
    "class-mean": small(pooling="class_mean", tokens=TokenConfig(registers=2)),
    "class-mean-after": small(pooling="class_mean", head=HeadConfig(norm="after_pooling")),
    "registers": small(tokens=TokenConfig(registers=3)),
    "registers-mean": small(pooling="mean", tokens=TokenConfig(registers=2)),
    "registers-rotary": with_positions("rotary", tokens=TokenConfig(registers=2)),
    "registers-relative": with_positions("relative", tokens=TokenConfig(registers=2)),
    "registers-every-layer": with_positions("learned_1d", "every_layer", tokens=TokenConfig(registers=2)),
    "distilled": small(tokens=TokenConfig(distillation=True)),
    "distilled-registers": small(tokens=TokenConfig(distillation=True, registers=1)),
    "distilled-2d-every-layer": with_positions("learned_2d", "every_layer", tokens=TokenConfig(distillation=True)),
    "distilled-after-pooling": small(tokens=TokenConfig(distillation=True), head=HeadConfig(norm="after_pooling")),
    "positions-of-patches-only": small(positions=PositionConfig(covers="patches")),
    "positions-of-patches-only-2d": small(positions=PositionConfig(kind="learned_2d", covers="patches")),
    "sincos-mae": small(positions=PositionConfig(kind="sincos_2d", sincos="mae")),
    "qk-norm": small(block=block_with_attention(qk_norm=True)),
    "qk-norm-rotary": with_positions("rotary", block=block_with_attention(qk_norm=True)),
    "qk-norm-relative": with_positions("relative", block=block_with_attention(qk_norm=True)),
    "no-qkv-bias": small(block=block_with_attention(qkv_bias=False)),
    "layer-scale": small(block=BlockConfig(layer_scale=0.1)),
    "swiglu": small(block=BlockConfig(activation="swiglu")),
    "erf": small(block=BlockConfig(activation="gelu_erf", norm_eps=1e-5)),
    "axial": small(pooling="mean", block=BlockConfig(axial=True)),
    "axial-map": small(pooling="map", block=BlockConfig(axial=True, layer_scale=0.1)),
    "axial-2d-every-layer": with_positions("learned_2d", "every_layer", pooling="mean", block=BlockConfig(axial=True)),
    "axial-without-positions": with_positions("none", pooling="mean", block=BlockConfig(axial=True)),
    "pre-logits": small(head=HeadConfig(pre_logits=12, bias=-10.0)),
    "pre-logits-mean": small(pooling="mean", head=HeadConfig(pre_logits=12)),
    "norm-after-class-pooling": small(head=HeadConfig(norm="after_pooling")),
    "norm-after-mean-pooling": small(pooling="mean", head=HeadConfig(norm="after_pooling")),
    "norm-after-map-pooling": small(pooling="map", head=HeadConfig(norm="after_pooling")),
    "headless": small(num_classes=0),
    "headless-distilled": small(num_classes=0, tokens=TokenConfig(distillation=True)),
    "gray": small(channels=1, patch_size=(4, 16)),
    "one-layer-one-head": small(depth=1, heads=1),
    "hybrid": small(patch_size=1, image_size=(32, 64), backbone=BackboneConfig(units=(1, 2), root_width=32)),
    "hybrid-of-the-root": small(patch_size=(2, 4), image_size=32, backbone=BackboneConfig(units=(), root_width=32)),
}
"""One small configuration for each variation of a Vision Transformer."""


def reduce_size(config: ModelConfig) -> ModelConfig:
    """Return the same structure with two narrow layers and one unit per ResNet stage.

    The last feature map has at least 2×2 cells: a norm of one channel per group turns a single cell into 0.
    """
    if isinstance(config, BiTConfig):
        return replace(config, units=(1,) * len(config.units), width_factor=1, image_size=64, num_classes=5)
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
        num_classes=5,
        head=replace(config.head, pre_logits=12 if config.head.pre_logits else None),
    )


def reduced_zoo() -> dict[str, ModelConfig]:
    """Return every zoo model in reduced size; models that become equal are one case, named after all of them."""
    names: dict[ModelConfig, list[str]] = {}
    for variant in VARIANTS:
        names.setdefault(reduce_size(variant.config), []).append(variant.name)
    return {" ".join(same): config for config, same in names.items()}


@cache
def meta_model(config: ModelConfig) -> Model:
    """Return the model on the meta device, cached."""
    return create(config, device="meta")


@cache
def _fresh(config: ModelConfig) -> Model:
    return create(config, generator=torch.Generator().manual_seed(16))


def fresh(config: ModelConfig) -> Model:
    """Return a new model with a fixed seed. Building is slow under run-time type checks, so it is cached."""
    return deepcopy(_fresh(config))


def images_for(config: ModelConfig, *, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random images of the model's size."""
    return torch.randn(batch, config.channels, *pair(config.image_size), dtype=dtype)


@torch.no_grad()
def randomized(model: nn.Module, *, deviation: float = 0.3) -> nn.Module:
    """Add noise to every learned parameter, so that none is zero or one, and set evaluation mode."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=deviation)
    return model.eval()


def random_vit(config: ViTConfig, *, dtype: torch.dtype = torch.float32) -> ViT:
    """Return a model with random parameters in evaluation mode."""
    model = randomized(fresh(config)).to(dtype)
    assert isinstance(model, ViT)
    return model


def reference_attention(
    tokens: Tensor, *, qkv: nn.Linear, proj: nn.Linear, heads: int, bias: Tensor | None = None
) -> Tensor:
    """Compute appendix A with loops: softmax(q kᵀ / √K + bias) v for each image and head, then the projection."""
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
