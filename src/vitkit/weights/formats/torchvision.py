"""Format of torchvision's VisionTransformer.

Early weights name the MLP layers linear_1 and linear_2, later ones number them. Both are read; the later names are
written. A file does not store the number of heads: that of torchvision's own models follows from their width; others
need `num_heads` in a config.json, or the format's name, which stands for heads of width 64.
"""

from vitkit.core.errors import WeightsError
from vitkit.core.sizes import pair
from vitkit.model.config import BiTConfig, BlockConfig, HeadConfig, PositionConfig, ViTConfig
from vitkit.weights.formats import base
from vitkit.weights.formats.base import NONSTANDARD_PARTS, FileMetadata, Format, count_outputs, get_shape, simplify_size
from vitkit.weights.rules import Rule, Shapes, rename
from vitkit.zoo.variants import ModelConfig

BLOCK = "encoder.layers.encoder_layer_"
REQUIRED_NAMES = {"class_token", "conv_proj.weight", "encoder.pos_embedding", f"{BLOCK}0.self_attention.in_proj_weight"}
NUMBERED, LEGACY = ("mlp.0", "mlp.3"), ("mlp.linear_1", "mlp.linear_2")
NORM_EPS = 1e-6
HEADS = {768: 12, 1024: 16, 1280: 16}
"""Number of heads of torchvision's models by width."""
UNSUPPORTED_PARTS = (
    *NONSTANDARD_PARTS,
    *("a distillation token", "registers", "LayerScale", "SwiGLU", "tanh GELU", "no qkv biases"),
)


def find_mlp_names(shapes: Shapes | None) -> tuple[str, str]:
    """Return the names of the MLP layers in a file, or the later ones."""
    legacy = any(name.startswith(BLOCK) and ".mlp.linear_" in name for name in shapes or ())
    return LEGACY if legacy else NUMBERED


@base.invalid_model_errors()
def infer_config(shapes: Shapes, metadata: FileMetadata) -> ViTConfig:
    """Infer the model in a file, for square images."""
    width, channels, height, across = get_shape(shapes, "conv_proj.weight", axes=4)
    side = base.square_side(get_shape(shapes, "encoder.pos_embedding", axes=3)[1] - 1)
    heads = metadata.config.get("num_heads", 0)
    declared = metadata.is_declared
    if type(heads) is not int:
        raise WeightsError("config.json: num_heads is not a number of heads", expected="an integer", got=heads)
    return ViTConfig(
        image_size=simplify_size(side * height, side * across),
        patch_size=simplify_size(height, across),
        channels=channels,
        width=width,
        depth=base.count_blocks(shapes, BLOCK),
        heads=heads or HEADS.get(width) or base.default_heads(width, format="torchvision", is_declared=declared),
        mlp_dim=get_shape(shapes, f"{BLOCK}0.{find_mlp_names(shapes)[0]}.weight", axes=2)[0],
        num_classes=count_outputs(shapes, "heads.head.weight") or 0,
        positions=PositionConfig(origin="torchvision"),
        block=BlockConfig(activation="gelu_erf", norm_eps=NORM_EPS),
        head=HeadConfig(pre_logits=count_outputs(shapes, "heads.pre_logits.weight")),
    )


def make_rules(config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
    """Make the rules of a model, with the MLP names of a file or the later ones."""
    config, mlp = base.require_vit(config), find_mlp_names(shapes)
    layers = {"patch_embed.proj.": "conv_proj."}
    for layer in range(config.depth):
        ours, theirs = f"blocks.{layer}.", f"{BLOCK}{layer}."
        layers |= {
            f"{ours}norm1.": f"{theirs}ln_1.",
            f"{ours}attn.qkv.": f"{theirs}self_attention.in_proj_",
            f"{ours}attn.proj.": f"{theirs}self_attention.out_proj.",
            f"{ours}norm2.": f"{theirs}ln_2.",
            f"{ours}mlp.fc1.": f"{theirs}{mlp[0]}.",
            f"{ours}mlp.fc2.": f"{theirs}{mlp[1]}.",
        }
    layers["norm."] = "encoder.ln."
    if config.head.pre_logits:
        layers["pre_logits.fc."] = "heads.pre_logits."
    if config.num_classes:
        layers["head."] = "heads.head."
    return [
        rename("cls_token", "class_token"),
        rename("pos_embed", "encoder.pos_embedding"),
        *(rename(ours + part, theirs + part) for ours, theirs in layers.items() for part in ("weight", "bias")),
    ]


def unsupported_reason(config: ModelConfig) -> str | None:
    """Return why torchvision cannot hold a model, or None."""
    if isinstance(config, BiTConfig):
        return "a ResNet"
    sides, eps = (pair(config.image_size), pair(config.patch_size)), config.block.norm_eps
    reasons = {
        f"a norm with an eps of {eps:g}": eps != NORM_EPS,
        "images of other than 3 channels": config.channels != 3,
        "images or patches that are not square": any(height != width for height, width in sides),
        "a number of heads that does not follow from the width": base.find_default_heads(config.width) != config.heads,
    }
    return base.find_reason(config, UNSUPPORTED_PARTS, reasons)


TORCHVISION = Format(
    name="torchvision",
    title="torchvision",
    file_type="torch",
    library="torchvision",
    # A stem of several convolutions has other names.
    matches=lambda shapes, metadata: shapes.keys() >= REQUIRED_NAMES,
    infer_config=infer_config,
    rules=make_rules,
    unsupported_reason=unsupported_reason,
)
