"""The tensors of torchvision's VisionTransformer go in, our model comes out, and back.

Its first weights call the layers of the MLP linear_1 and linear_2; later ones number them. Both are read, the later
names are written. A file does not say how many heads there are: they are 64 wide (80 in H/14), unless `About.config`
says `num_heads`, in the words of torchvision's constructor.
"""

import re

from vitkit.checkpoints.formats.format import About, Format
from vitkit.checkpoints.formats.sizes import (
    first_reason,
    impossible,
    not_plain,
    shape_of,
    size_of,
    square_side,
    tells_heads,
    usual_heads,
)
from vitkit.checkpoints.mapping import Rule, Shapes, same
from vitkit.core.errors import ConfigError, WeightsError
from vitkit.core.shapes import pair
from vitkit.model.config import ViTConfig
from vitkit.model.encoder import BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.variants import ModelConfig

BLOCK = "encoder.layers.encoder_layer_"
NUMBERED, LEGACY = ("mlp.0", "mlp.3"), ("mlp.linear_1", "mlp.linear_2")
NORM_EPS = 1e-6


def recognises(shapes: Shapes, about: About) -> bool:
    """Whether the names are torchvision's; a stem of several convolutions is none of ours."""
    wanted = {"class_token", "conv_proj.weight", "encoder.pos_embedding", f"{BLOCK}0.self_attention.in_proj_weight"}
    return wanted <= shapes.keys()


def mlp_names(shapes: Shapes | None) -> tuple[str, str]:
    """What the two layers of the MLP are called in a file, or by us.

    >>> mlp_names({"encoder.layers.encoder_layer_0.mlp.linear_1.weight": (128, 64)})
    ('mlp.linear_1', 'mlp.linear_2')
    """
    legacy = any(name.startswith(BLOCK) and ".mlp.linear_" in name for name in shapes or ())
    return LEGACY if legacy else NUMBERED


def describe(shapes: Shapes, about: About) -> ViTConfig:
    """The model in a file, for square images."""
    try:
        return _described(shapes, about)
    except ConfigError as error:
        raise impossible(error) from error


def _described(shapes: Shapes, about: About) -> ViTConfig:
    width, channels, height, across = shape_of(shapes, "conv_proj.weight", axes=4)
    side = square_side(shape_of(shapes, "encoder.pos_embedding", axes=3)[1] - 1)
    first = mlp_names(shapes)[0]
    hidden = "heads.pre_logits.weight"
    return ViTConfig(
        image_size=size_of(side * height, side * across),
        patch_size=size_of(height, across),
        channels=channels,
        width=width,
        depth=len({found[1] for name in shapes if (found := re.match(rf"{re.escape(BLOCK)}(\d+)\.", name))}),
        heads=_told_heads(about) or usual_heads(width),
        mlp_dim=shape_of(shapes, f"{BLOCK}0.{first}.weight", axes=2)[0],
        classes=shape_of(shapes, "heads.head.weight", axes=2)[0] if "heads.head.weight" in shapes else 0,
        positions=PositionConfig(origin="torchvision"),
        block=BlockConfig(activation="gelu_erf", norm_eps=NORM_EPS),
        head=HeadConfig(pre_logits=shape_of(shapes, hidden, axes=2)[0] if hidden in shapes else None),
    )


def _told_heads(about: About) -> int:
    heads = about.config.get("num_heads", 0)
    if type(heads) is not int:
        raise WeightsError("num_heads is not a number of heads", expected="a whole number", got=heads)
    return heads


def rules(config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
    """The table of a model, with a file's names for the MLP, or the later ones."""
    if isinstance(config, BiTConfig):
        raise WeightsError("there are no rules for a ResNet here", expected="a ViT", got="a BiT")
    table = [same("cls_token", "class_token"), same("pos_embed", "encoder.pos_embedding")]
    layers = {"patch_embed.proj.": "conv_proj."}
    for layer in range(config.depth):
        layers |= _block(f"blocks.{layer}.", f"{BLOCK}{layer}.", mlp_names(shapes))
    layers["norm."] = "encoder.ln."
    if config.head.pre_logits:
        layers["pre_logits.fc."] = "heads.pre_logits."
    if config.classes:
        layers["head."] = "heads.head."
    return table + [same(f"{o}{part}", f"{t}{part}") for o, t in layers.items() for part in ("weight", "bias")]


def _block(ours: str, theirs: str, mlp: tuple[str, str]) -> dict[str, str]:
    return {
        f"{ours}norm1.": f"{theirs}ln_1.",
        f"{ours}attn.qkv.": f"{theirs}self_attention.in_proj_",
        f"{ours}attn.proj.": f"{theirs}self_attention.out_proj.",
        f"{ours}norm2.": f"{theirs}ln_2.",
        f"{ours}mlp.fc1.": f"{theirs}{mlp[0]}.",
        f"{ours}mlp.fc2.": f"{theirs}{mlp[1]}.",
    }


def refuses(config: ModelConfig) -> str | None:
    """Why torchvision's class cannot be this model, or None."""
    if isinstance(config, BiTConfig):
        return "a ResNet"
    sides = (pair(config.image_size), pair(config.patch_size))
    block = config.block
    return not_plain(config) or first_reason(
        (
            (config.tokens.distillation, "a distillation token"),
            (config.tokens.registers > 0, "registers"),
            (block.layer_scale is not None, "layer scale"),
            (block.activation == "swiglu", "a gated MLP"),
            (block.activation == "gelu_tanh", "the tanh form of GELU"),
            (block.norm_eps != NORM_EPS, f"a norm with an eps of {block.norm_eps:g}"),
            (not block.attention.qkv_bias, "attention without biases"),
            (config.channels != 3, "images of other than 3 channels"),
            (any(height != width for height, width in sides), "images or patches that are not square"),
            (not tells_heads(config), "a head count that its width does not tell"),
        )
    )


TORCHVISION = Format(
    name="torchvision",
    title="torchvision",
    origin="torchvision",
    writes="torch",
    recognises=recognises,
    describe=describe,
    rules=rules,
    refuses=refuses,
)
