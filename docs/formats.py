"""Generator of formats.md, the table of models that each weight format supports.

Run it in the repository's root: .venv/bin/python docs/formats.py
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from vitkit.core.errors import ConfigError
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
from vitkit.weights.formats.base import Format
from vitkit.weights.formats.registry import FORMATS
from vitkit.zoo.variants import ModelConfig

PAGE = Path(__file__).with_suffix(".md")
COMMAND = ".venv/bin/python docs/formats.py"

# Small standard models of each origin

PAPER = ViTConfig(image_size=32, patch_size=8, width=128, depth=2, heads=2, mlp_dim=256, num_classes=5)
ERF = replace(PAPER, block=BlockConfig(activation="gelu_erf"))
SCALED = BlockConfig(activation="gelu_erf", layer_scale=0.1)
PLAIN: tuple[ViTConfig, ...] = (
    PAPER,
    ERF,
    replace(PAPER, num_classes=0),
    replace(ERF, num_classes=0),
    replace(ERF, tokens=TokenConfig(distillation=True)),
    replace(ERF, tokens=TokenConfig(class_token=True), pooling="mean", head=HeadConfig(norm="after_pooling")),
    replace(ERF, block=SCALED, positions=PositionConfig(covers="patches")),
    replace(ERF, block=SCALED, num_classes=0),
    replace(ERF, block=SCALED, pooling="class_mean"),
    replace(ERF, block=replace(SCALED, norm_eps=1e-5), num_classes=0, positions=PositionConfig(kind="rotary")),
)
"""Models of the paper, timm, both without classes, DeiT, MAE, DeiT III, DINOv2 without and with classes, and DINOv3."""

# Rows: changes of a standard model

Change = Callable[[ViTConfig], ModelConfig]


def changed(config: ViTConfig, **fields: Any) -> ViTConfig:
    return replace(config, **fields)


def with_(**fields: Any) -> Change:
    return partial(changed, **fields)


def with_block(**fields: Any) -> Change:
    return lambda config: replace(config, block=replace(config.block, **fields))


def with_tokens(**fields: Any) -> Change:
    return lambda config: replace(config, tokens=replace(config.tokens, **fields))


def with_positions(**fields: Any) -> Change:
    return lambda config: replace(config, positions=replace(config.positions, **fields))


def pooled(pooling: str, *, class_token: bool, norm: str = "before_pooling") -> Change:
    def change(config: ViTConfig) -> ViTConfig:
        tokens = replace(config.tokens, class_token=class_token)
        head = replace(config.head, norm=norm)
        return replace(config, pooling=pooling, tokens=tokens, head=head)

    return change


def hybrid(**backbone: Any) -> Change:
    return with_(backbone=BackboneConfig(**backbone), patch_size=2)


def resnet(**fields: Any) -> Change:
    return lambda config: BiTConfig(num_classes=5, image_size=64, **fields)


def simplify(num_classes: int) -> Change:
    """Reduce a model to a class token and one position table."""
    bare = {"tokens": TokenConfig(), "pooling": "class", "head": HeadConfig(), "positions": PositionConfig()}
    return lambda config: with_block(layer_scale=None)(replace(config, num_classes=num_classes, **bare))


KINDS: dict[str, Change] = {
    "a standard ViT with a classifier": simplify(5),
    "a standard ViT without a classifier": simplify(0),
    "exact GELU": with_block(activation="gelu_erf"),
    "tanh GELU": with_block(activation="gelu_tanh"),
    "SwiGLU": with_block(activation="swiglu"),
    "LayerNorm eps 1e-6": with_block(norm_eps=1e-6),
    "LayerNorm eps 1e-5": with_block(norm_eps=1e-5),
    "LayerNorm eps 1e-12": with_block(norm_eps=1e-12),
    "LayerScale": with_block(layer_scale=0.1),
    "no qkv biases": with_block(attention=AttentionConfig(qkv_bias=False)),
    "normalized queries and keys": with_block(attention=AttentionConfig(qk_norm=True)),
    "axial attention": lambda config: with_block(axial=True)(pooled("mean", class_token=False)(config)),
    "positions: learned": with_positions(kind="learned_1d"),
    "positions: sine-cosine": with_positions(kind="sincos_2d"),
    "positions: learned, patches only": with_positions(kind="learned_1d", covers="patches"),
    "positions: learned rows and columns": with_positions(kind="learned_2d"),
    "positions: at every layer": with_positions(kind="learned_1d", injection="every_layer"),
    "positions: relative": with_positions(kind="relative"),
    "positions: rotary": with_positions(kind="rotary"),
    "positions: rotary, base other than 100": with_positions(kind="rotary", rotary_base=10.0),
    "positions: none": with_positions(kind="none"),
    "pooling: class token": pooled("class", class_token=True),
    "pooling: class token before the norm": pooled("class", class_token=True, norm="after_pooling"),
    "pooling: mean, no class token": pooled("mean", class_token=False),
    "pooling: mean, with a class token": pooled("mean", class_token=True),
    "pooling: mean before the norm": pooled("mean", class_token=True, norm="after_pooling"),
    "pooling: attention": pooled("map", class_token=False),
    "pooling: attention, with a class token": pooled("map", class_token=True),
    "pooling: class token and mean": pooled("class_mean", class_token=True),
    "registers": with_tokens(registers=3),
    "a distillation token": with_tokens(distillation=True),
    "pre-logits and a classifier": with_(num_classes=5, head=HeadConfig(pre_logits=48)),
    "pre-logits without a classifier": with_(num_classes=0, head=HeadConfig(pre_logits=48)),
    "heads not of width 64": with_(heads=4),
    "a non-square grid": with_(image_size=(32, 48)),
    "non-square patches": with_(image_size=(32, 16), patch_size=(8, 4)),
    "one channel": with_(channels=1),
    "more than 1000 layers": with_(depth=1001),
    "a hybrid of the paper, Google's numerics": hybrid(units=()),
    "a hybrid of the paper, timm's numerics": hybrid(units=(), origin="timm"),
    "another hybrid, Google's numerics": hybrid(units=(1,), root_width=32),
    "another hybrid, timm's numerics": hybrid(units=(1,), root_width=32, origin="timm"),
    "a hybrid with 100 units": hybrid(units=(100,)),
    "a BiT ResNet of the paper, Google's numerics": resnet(),
    "a BiT ResNet of the paper, timm's numerics": resnet(origin="timm"),
    "another BiT ResNet, Google's numerics": resnet(units=(1, 1)),
    "another BiT ResNet, timm's numerics": resnet(units=(1, 1), origin="timm"),
    "a BiT ResNet with 100 units in a stage": resnet(units=(100,)),
}
LARGE = ("more than 1000 layers", "a hybrid with 100 units", "a BiT ResNet with 100 units in a stage")
"""Kinds that are too large to build in a test."""


def models_of(*kinds: str, plain: tuple[ViTConfig, ...] = PLAIN) -> list[ModelConfig]:
    """Apply changes to the standard models, in every order that gives a valid model."""
    return list(dict.fromkeys(_apply_changes(kinds, plain)))


def _apply_changes(kinds: tuple[str, ...], plain: tuple[ViTConfig, ...]) -> Iterator[ModelConfig]:
    for base in plain:
        for order in permutations(kinds):
            model: ModelConfig = base
            try:
                for kind in order:
                    if not isinstance(model, ViTConfig):
                        break
                    model = KINDS[kind](model)
                else:
                    yield model
            except ConfigError:
                continue


def find_supported(to: Format, *kinds: str) -> ModelConfig | None:
    """Return the first model of these kinds that a format supports, its own standard models first, or None."""
    return next(
        (model for model in _apply_changes(kinds, sort_standard_models(to)) if to.unsupported_reason(model) is None),
        None,
    )


@cache
def sort_standard_models(to: Format) -> tuple[ViTConfig, ...]:
    """Return the standard models, those that a format supports first."""
    return tuple(sorted(PLAIN, key=lambda plain: to.unsupported_reason(plain) is not None))


def find_reason(to: Format, kind: str) -> str | None:
    """Return why a format supports no model of a kind, or None if it supports one."""
    return (
        None if find_supported(to, kind) else to.unsupported_reason(models_of(kind, plain=sort_standard_models(to))[0])
    )


def find_unsupported_pairs(to: Format) -> dict[tuple[str, str], list[str]]:
    """Return pairs of supported kinds that a format does not support together, with the reasons."""
    supported = [kind for kind in KINDS if find_supported(to, kind)]
    unsupported = {}
    for pair in combinations(supported, 2):
        if find_supported(to, *pair) is None:
            plain = tuple(model for model in PLAIN if to.unsupported_reason(model) is None)
            reasons = [to.unsupported_reason(model) for model in models_of(*pair, plain=plain)]
            unsupported[pair] = [why for why in dict.fromkeys(reasons) if why]
    return {pair: reasons for pair, reasons in unsupported.items() if reasons}  # without reasons, no model is both


# Page

INTRODUCTION = f"""\
# Models that the weight formats support

A weight format was designed for the models of one code base. `vitkit weights convert` writes a model only if the
format can express everything the model computes, so that reading it back gives the same bits. Otherwise it reports the
first reason and writes nothing. `vitkit`, the format of run directories, supports every model.

**yes** means that the format supports models of that kind; a number refers to the reason why not.

This page is generated by `{COMMAND}`. Tests compare it with the code, write a model for each
**yes** except the largest, read it back without naming the format, and compare every number.
"""

TOGETHER = """\
## Unsupported combinations

Each of these is supported, but not both in one model.

| format | one | other | reasons |
|---|---|---|---|"""

DIFFERENCES = """\
## Settings that change

Tensors and outputs stay the same after a round trip. Some settings that files of other libraries do not store become
those of the format's origin:

- `positions.origin`, the interpolation of positions for another resolution, is that of the origin.
- A fixed sine-cosine table becomes a learned table with the same values.
- Training settings are lost: dropout, and the initial values of LayerScale and the head's bias.
- Files of `bit` and `dinov3` do not store the image size, and their models take any. They are read with 224 pixels,
  rounded down to whole patches.
"""


def make_page() -> str:
    """Return the content of formats.md."""
    reasons: dict[str, int] = {}
    rows = []
    for kind in KINDS:
        reasons_by_format = [find_reason(to, kind) for to in FORMATS.values()]
        cells = ["yes" if why is None else str(reasons.setdefault(why, len(reasons) + 1)) for why in reasons_by_format]
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    heads = " | ".join(f"`{name}`" for name in FORMATS)
    table = [f"| model | {heads} |", "|---" * (len(FORMATS) + 1) + "|", *rows]
    numbered = [f"{number}. {why}" for why, number in reasons.items()]
    pairs = [
        f"| `{to.name}` | {one} | {other} | {'; '.join(why)} |"
        for to in FORMATS.values()
        for (one, other), why in find_unsupported_pairs(to).items()
    ]
    parts = (INTRODUCTION, "\n".join(table), "## Reasons", "\n".join(numbered), "\n".join([TOGETHER, *pairs]))
    return "\n\n".join(part.rstrip("\n") for part in (*parts, DIFFERENCES)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
