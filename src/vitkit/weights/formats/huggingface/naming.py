"""Naming schemes and rules of transformers' files.

Files have the names of version 4, which `save_pretrained` still writes; version 5 uses others in memory. Both are read,
with or without the prefix of the base model (`vit.`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitkit.core.errors import WeightsError
from vitkit.model.config import BiTConfig, InterpolationOrigin, ViTConfig
from vitkit.weights.formats.base import FileMetadata
from vitkit.weights.rules import Rule, Shapes, layer_rules, rename
from vitkit.zoo.variants import ModelConfig


@dataclass(frozen=True, kw_only=True)
class BlockNames:
    """Names of a block's parts in one version of the library; `gated` are the layers of a SwiGLU."""

    layers: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    proj: str
    mlp: tuple[tuple[str, ...], str]
    gated: tuple[tuple[str, ...], str] = ((), "")


@dataclass(frozen=True)
class NamingScheme:
    """Names of the blocks, and the prefix of the base model."""

    prefix: str
    blocks: BlockNames

    @property
    def layers(self) -> str:
        """Prefix of all blocks."""
        return f"{self.prefix}{self.blocks.layers}."

    @property
    def embeddings(self) -> str:
        """Prefix of tokens, positions and patch projection."""
        return f"{self.prefix}embeddings."


_QKV_4 = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
_QKV_5 = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
VIT_BLOCKS = (
    BlockNames(
        layers="encoder.layer",
        norms=("layernorm_before", "layernorm_after"),
        qkv=_QKV_4,
        proj="attention.output.dense",
        mlp=(("intermediate.dense",), "output.dense"),
    ),
    BlockNames(
        layers="layers",
        norms=("layernorm_before", "layernorm_after"),
        qkv=_QKV_5,
        proj="attention.o_proj",
        mlp=(("mlp.fc1",), "mlp.fc2"),
    ),
)
"""Names of versions 4 and 5."""
_DINOV2_BLOCK = BlockNames(
    layers="encoder.layer",
    norms=("norm1", "norm2"),
    qkv=_QKV_4,
    proj="attention.output.dense",
    mlp=(("mlp.fc1",), "mlp.fc2"),
    gated=(("mlp.weights_in",), "mlp.weights_out"),
)
DINOV2_BLOCKS = (
    _DINOV2_BLOCK,
    replace(
        _DINOV2_BLOCK, qkv=_QKV_5, proj="attention.o_proj", gated=(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
    ),
)


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Facts about one of the library's model types. The first prefix and block names are those we write."""

    model_type: str
    models: tuple[str, str]  # classes without and with a classifier
    prefixes: tuple[str, ...] = ("vit.", "")
    schemes: tuple[BlockNames, ...] = VIT_BLOCKS
    heads: tuple[tuple[str, str], ...] = ()  # classifiers: our name and theirs
    norm_eps: float = 1e-12
    kernel: InterpolationOrigin = "huggingface"
    distilled: bool = False
    scaled: bool = False
    pooler: bool = False


VIT = ModelFamily(
    model_type="vit", models=("ViTModel", "ViTForImageClassification"), heads=(("head", "classifier"),), pooler=True
)
DEIT = ModelFamily(
    model_type="deit",
    models=("DeiTModel", "DeiTForImageClassificationWithTeacher"),
    prefixes=("deit.", ""),
    heads=(("head.label", "cls_classifier"), ("head.teacher", "distillation_classifier")),
    kernel="deit",
    distilled=True,
)
VIT_MAE = ModelFamily(model_type="vit_mae", models=("ViTMAEModel", ""), kernel="mae")
DINOV2 = ModelFamily(
    model_type="dinov2",
    models=("Dinov2Model", ""),
    prefixes=("dinov2.", "dinov2_with_registers.", ""),
    schemes=DINOV2_BLOCKS,
    norm_eps=1e-6,
    scaled=True,
)


# Detection


def detect_model_type(shapes: Shapes) -> str:
    """Detect the model type by its tensors; an encoder alone may be of a ViT or an MAE."""
    if any(name.endswith(".layer_scale1.lambda1") for name in shapes):
        return "dinov2"
    if any(name.endswith("embeddings.distillation_token") for name in shapes):
        return "deit"
    return "vit_mae" if "decoder.decoder_embed.weight" in shapes else "vit"


def matches(family: ModelFamily, shapes: Shapes, metadata: FileMetadata) -> bool:
    """Return whether a file belongs to this family, by its names and config.json."""
    naming = detect_naming(family, shapes)
    required = {f"{naming.embeddings}{part}" for part in ("cls_token", "position_embeddings")}
    if not required <= shapes.keys() or not count_blocks(naming, shapes):
        return False
    detected = detect_model_type(shapes)
    configured = metadata.config.get("model_type") or detected
    if configured == "vit_mae" and detected == "vit":
        detected = "vit_mae"
    return detected == family.model_type and configured in (detected, f"{detected}_with_registers")


def detect_naming(family: ModelFamily, shapes: Shapes) -> NamingScheme:
    """Return the naming scheme that most of a file's attention layers follow."""

    def count_matches(naming: NamingScheme) -> int:
        blocks = naming.blocks
        parts = tuple(f".{part}.weight" for part in (*blocks.qkv, blocks.proj))
        return sum(name.startswith(naming.layers) and name.endswith(parts) for name in shapes)

    return max(
        (NamingScheme(prefix, blocks) for prefix in family.prefixes for blocks in family.schemes), key=count_matches
    )


def count_blocks(naming: NamingScheme, shapes: Shapes) -> int:
    """Count the blocks; the numbers in names may be arbitrary."""
    pattern = re.compile(re.escape(naming.layers) + r"(\d+)\.")
    return len({match[1] for name in shapes if (match := pattern.match(name))})


# Rules


def make_rules(family: ModelFamily, config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
    """Make the rules of a model, with the names of a file or those of `save_pretrained`."""
    if isinstance(config, BiTConfig):
        raise WeightsError("the format is for Vision Transformers only", got="a ResNet")
    if shapes is None:
        naming = NamingScheme(family.prefixes[0] if config.num_classes else "", family.schemes[0])
    else:
        naming = detect_naming(family, shapes)
    prefix, embeddings = naming.prefix, naming.embeddings
    tokens = {"cls_token": "cls_token", "pos_embed": "position_embeddings"}
    tokens |= {"dist_token": "distillation_token"} if config.tokens.distillation else {}
    tokens |= {"reg_token": "register_tokens"} if config.tokens.registers else {}
    table = [rename(ours, f"{embeddings}{theirs}") for ours, theirs in tokens.items()]
    table += layer_rules("patch_embed.proj", f"{embeddings}patch_embeddings.projection")
    for layer in range(config.depth):
        table += _block(config, naming.blocks, f"blocks.{layer}.", f"{naming.layers}{layer}.")
    table += layer_rules("norm", f"{prefix}layernorm")
    if config.head.pre_logits:
        table += layer_rules("pre_logits.fc", f"{prefix}pooler.dense")
    for ours, theirs in family.heads if config.num_classes else ():
        table += layer_rules(ours, theirs)
    return table


def _block(config: ViTConfig, blocks: BlockNames, ours: str, theirs: str) -> Iterator[Rule]:
    first, second = blocks.gated if config.block.activation == "swiglu" else blocks.mlp
    yield from layer_rules(f"{ours}norm1", f"{theirs}{blocks.norms[0]}")
    qkv = [f"{theirs}{part}" for part in blocks.qkv]
    yield from layer_rules(f"{ours}attn.qkv", *qkv, bias=config.block.attention.qkv_bias)
    yield from layer_rules(f"{ours}attn.proj", f"{theirs}{blocks.proj}")
    yield from layer_rules(f"{ours}norm2", f"{theirs}{blocks.norms[1]}")
    yield from layer_rules(f"{ours}mlp.fc1", *[f"{theirs}{part}" for part in first])
    yield from layer_rules(f"{ours}mlp.fc2", f"{theirs}{second}")
    if config.block.layer_scale is not None:
        yield rename(f"{ours}ls1.gamma", f"{theirs}layer_scale1.lambda1")
        yield rename(f"{ours}ls2.gamma", f"{theirs}layer_scale2.lambda1")
