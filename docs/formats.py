"""Write formats.md, what each format of weights can hold and why it cannot hold the rest, by asking the code.

Run it in the repository's root: .venv/bin/python docs/formats.py
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from vitkit.checkpoints.foreign import FORMATS
from vitkit.checkpoints.formats.format import Format
from vitkit.core.errors import ConfigError
from vitkit.model.attention import AttentionConfig
from vitkit.model.config import TokenConfig, ViTConfig
from vitkit.model.encoder import BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BackboneConfig, BiTConfig
from vitkit.zoo.variants import ModelConfig

PAGE = Path(__file__).with_suffix(".md")
COMMAND = ".venv/bin/python docs/formats.py"

# The plain models of each origin, in small

PAPER = ViTConfig(image_size=32, patch_size=8, width=128, depth=2, heads=2, mlp_dim=256, classes=5)
ERF = replace(PAPER, block=BlockConfig(activation="gelu_erf"))
SCALED = BlockConfig(activation="gelu_erf", layer_scale=0.1)
PLAIN: tuple[ViTConfig, ...] = (
    PAPER,
    ERF,
    replace(PAPER, classes=0),
    replace(ERF, classes=0),
    replace(ERF, tokens=TokenConfig(distillation=True)),
    replace(ERF, tokens=TokenConfig(class_token=True), pooling="mean", head=HeadConfig(norm="after_pooling")),
    replace(ERF, block=SCALED, positions=PositionConfig(covers="patches")),
    replace(ERF, block=SCALED, classes=0),
    replace(ERF, block=replace(SCALED, norm_eps=1e-5), classes=0, positions=PositionConfig(kind="rotary")),
)
"""As the paper, timm, both without classes, DeiT, MAE, DeiT III, DINOv2 and DINOv3 have them."""

# The rows: what is changed in a plain model

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
    return lambda config: BiTConfig(classes=5, image_size=64, **fields)


def plainly(classes: int) -> Change:
    """Nothing but a class token and one table of positions."""
    bare = {"tokens": TokenConfig(), "pooling": "class", "head": HeadConfig(), "positions": PositionConfig()}
    return lambda config: with_block(layer_scale=None)(replace(config, classes=classes, **bare))


KINDS: dict[str, Change] = {
    "a plain ViT with a classifier": plainly(5),
    "a plain ViT without one": plainly(0),
    "GELU in its exact form": with_block(activation="gelu_erf"),
    "GELU in its tanh form": with_block(activation="gelu_tanh"),
    "SwiGLU, a gated MLP": with_block(activation="swiglu"),
    "norms of eps 1e-6": with_block(norm_eps=1e-6),
    "norms of eps 1e-5": with_block(norm_eps=1e-5),
    "norms of eps 1e-12": with_block(norm_eps=1e-12),
    "LayerScale": with_block(layer_scale=0.1),
    "no biases of queries, keys and values": with_block(attention=AttentionConfig(qkv_bias=False)),
    "norms of queries and keys": with_block(attention=AttentionConfig(qk_norm=True)),
    "axial attention": lambda config: with_block(axial=True)(pooled("mean", class_token=False)(config)),
    "positions: a learned table": with_positions(kind="learned_1d"),
    "positions: a fixed table, sine and cosine": with_positions(kind="sincos_2d"),
    "positions: a table of patches alone": with_positions(kind="learned_1d", covers="patches"),
    "positions: tables of rows and columns": with_positions(kind="learned_2d"),
    "positions: at every layer": with_positions(kind="learned_1d", injection="every_layer"),
    "positions: relative": with_positions(kind="relative"),
    "positions: rotary": with_positions(kind="rotary"),
    "positions: rotary, of another base than 100": with_positions(kind="rotary", rotary_base=10.0),
    "positions: none": with_positions(kind="none"),
    "pooling: the class token": pooled("class", class_token=True),
    "pooling: the class token, then the norm": pooled("class", class_token=True, norm="after_pooling"),
    "pooling: the mean, no class token": pooled("mean", class_token=False),
    "pooling: the mean, beside a class token": pooled("mean", class_token=True),
    "pooling: the mean, then the norm": pooled("mean", class_token=True, norm="after_pooling"),
    "pooling: by attention": pooled("map", class_token=False),
    "pooling: by attention, a class token too": pooled("map", class_token=True),
    "registers": with_tokens(registers=3),
    "a distillation token": with_tokens(distillation=True),
    "pre-logits under a classifier": with_(classes=5, head=HeadConfig(pre_logits=48)),
    "pre-logits alone": with_(classes=0, head=HeadConfig(pre_logits=48)),
    "heads that are not 64 wide": with_(heads=4),
    "a grid that is not square": with_(image_size=(32, 48)),
    "patches that are not square": with_(image_size=(32, 16), patch_size=(8, 4)),
    "images of one channel": with_(channels=1),
    "more than 1000 layers": with_(depth=1001),
    "a hybrid of the paper, as Google computes it": hybrid(units=()),
    "a hybrid of the paper, as timm computes it": hybrid(units=(), origin="timm"),
    "another hybrid, as Google computes it": hybrid(units=(1,), root_width=32),
    "another hybrid, as timm computes it": hybrid(units=(1,), root_width=32, origin="timm"),
    "a hybrid of 100 units": hybrid(units=(100,)),
    "a BiT ResNet of the paper, as Google computes it": resnet(),
    "a BiT ResNet of the paper, as timm computes it": resnet(origin="timm"),
    "another BiT ResNet, as Google computes it": resnet(units=(1, 1)),
    "another BiT ResNet, as timm computes it": resnet(units=(1, 1), origin="timm"),
    "a BiT ResNet of 100 units in a stage": resnet(units=(100,)),
}
LARGE = ("more than 1000 layers", "a hybrid of 100 units", "a BiT ResNet of 100 units in a stage")
"""Kinds of which a test would rather not make a model."""


def models_of(*kinds: str, plain: tuple[ViTConfig, ...] = PLAIN) -> list[ModelConfig]:
    """The plain models with these changes, one after the other in any order, where such a model can be."""
    return list(dict.fromkeys(_changed(kinds, plain)))


def _changed(kinds: tuple[str, ...], plain: tuple[ViTConfig, ...]) -> Iterator[ModelConfig]:
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


def held(to: Format, *kinds: str) -> ModelConfig | None:
    """The first model of these kinds that a format holds, beginning with its own plain models; or None."""
    return next((model for model in _changed(kinds, own(to)) if to.refuses(model) is None), None)


@cache
def own(to: Format) -> tuple[ViTConfig, ...]:
    """The plain models, those before the others that a format holds as they are."""
    return tuple(sorted(PLAIN, key=lambda plain: to.refuses(plain) is not None))


def reason(to: Format, kind: str) -> str | None:
    """Why a format holds no model of a kind, in the words of the error; None if it holds one."""
    return None if held(to, kind) else to.refuses(models_of(kind, plain=own(to))[0])


def not_together(to: Format) -> dict[tuple[str, str], list[str]]:
    """Of the kinds that a format holds, the pairs that it does not, with the reasons that it gives."""
    alone = [kind for kind in KINDS if held(to, kind)]
    refused = {}
    for pair in combinations(alone, 2):
        if held(to, *pair) is None:
            plain = tuple(model for model in PLAIN if to.refuses(model) is None)
            reasons = [to.refuses(model) for model in models_of(*pair, plain=plain)]
            refused[pair] = [why for why in dict.fromkeys(reasons) if why]
    return {pair: reasons for pair, reasons in refused.items() if reasons}  # where there are none, no model is both


# The page

INTRODUCTION = f"""\
# What the formats hold

A format of weights was made for the models of one code base. `vitkit weights convert` writes a model in a format only
if the format can say all of what the model computes, and what is written comes back to the bit. Otherwise it names the
first reason that it meets, and writes nothing. `vitkit` itself, the format of run folders, holds every model.

**yes** says that the format holds models of that kind; a number is the reason that it gives if it holds none.

This page is written by `{COMMAND}`, which asks the code. Tests compare the two. They also write a
model for each **yes** but those of 1000 layers, read it without being told the format, and compare every number.
"""

TOGETHER = """\
## Not together

Each of these a format holds, but not both in one model.

| format | one | other | reasons |
|---|---|---|---|"""

DIFFERENCES = """\
## What comes back in other words

The tensors come back to the bit, and the model computes the same. Some settings that foreign files do not have are
those of their origin after that:

- `positions.origin`, the kernel that resamples positions to another resolution, is the origin's own.
- A fixed table of sines and cosines comes back as a learned one with its numbers.
- Settings of training are gone: dropout, and where LayerScale and the head's bias start.
- A file of `bit` or `dinov3` does not tell the image size, and its models take any. It is read as 224 pixels, or as
  many of them as patches fill.
"""


def page() -> str:
    """All of formats.md."""
    reasons: dict[str, int] = {}
    rows = []
    for kind in KINDS:
        refused = [reason(to, kind) for to in FORMATS]
        cells = ["yes" if why is None else str(reasons.setdefault(why, len(reasons) + 1)) for why in refused]
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    heads = " | ".join(f"`{to.name}`" for to in FORMATS)
    table = [f"| model | {heads} |", "|---" * (len(FORMATS) + 1) + "|", *rows]
    listed = [f"{number}. {why}" for why, number in reasons.items()]
    pairs = [
        f"| `{to.name}` | {one} | {other} | {'; '.join(why)} |"
        for to in FORMATS
        for (one, other), why in not_together(to).items()
    ]
    parts = (INTRODUCTION, "\n".join(table), "## The reasons", "\n".join(listed), "\n".join([TOGETHER, *pairs]))
    return "\n\n".join(part.rstrip("\n") for part in (*parts, DIFFERENCES)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
