"""The names in a file of transformers go in, the rules that turn them into ours come out, in either of two dialects.

Files have the names of the library's version 4, which `save_pretrained` still writes; version 5 has others in memory.
Both are read, with the prefix of the base model (`vit.`) or without.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vitkit.checkpoints.formats.format import About
from vitkit.checkpoints.mapping import SAME, Rule, Shapes, joined, same
from vitkit.core.errors import WeightsError
from vitkit.model.config import ViTConfig
from vitkit.model.resample import Origin
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.variants import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What one version of the library calls the parts of a block; `gated` are the two layers of a SwiGLU."""

    layers: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    proj: str
    mlp: tuple[tuple[str, ...], str]
    gated: tuple[tuple[str, ...], str] = ((), "")


@dataclass(frozen=True)
class Spelling:
    """A dialect, and the prefix in front of the base model's names."""

    prefix: str
    dialect: Dialect

    @property
    def layers(self) -> str:
        """What the names of all blocks begin with."""
        return f"{self.prefix}{self.dialect.layers}."

    @property
    def embeddings(self) -> str:
        """What the names of tokens, positions and patches begin with."""
        return f"{self.prefix}embeddings."


@dataclass(frozen=True, kw_only=True)
class Family:
    """What sets one of the library's model types apart; its first prefix and first dialect are what we write."""

    model_type: str
    models: tuple[str, str]  # the classes of a model without a classifier, and with one
    prefixes: tuple[str, ...]
    dialects: tuple[Dialect, ...]
    heads: tuple[tuple[str, str], ...] = ()  # classifiers: ours and theirs
    norm_eps: float = 1e-12
    kernel: Origin = "huggingface"
    distilled: bool = False
    scaled: bool = False
    pooler: bool = False


_PLAIN = {
    "version 4": Dialect(
        layers="encoder.layer",
        norms=("layernorm_before", "layernorm_after"),
        qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        proj="attention.output.dense",
        mlp=(("intermediate.dense",), "output.dense"),
    ),
    "version 5": Dialect(
        layers="layers",
        norms=("layernorm_before", "layernorm_after"),
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        proj="attention.o_proj",
        mlp=(("mlp.fc1",), "mlp.fc2"),
    ),
}
_DINO = {
    "version 4": Dialect(
        layers="encoder.layer",
        norms=("norm1", "norm2"),
        qkv=_PLAIN["version 4"].qkv,
        proj=_PLAIN["version 4"].proj,
        mlp=(("mlp.fc1",), "mlp.fc2"),
        gated=(("mlp.weights_in",), "mlp.weights_out"),
    ),
    "version 5": Dialect(
        layers="encoder.layer",
        norms=("norm1", "norm2"),
        qkv=_PLAIN["version 5"].qkv,
        proj=_PLAIN["version 5"].proj,
        mlp=(("mlp.fc1",), "mlp.fc2"),
        gated=(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    ),
}

VIT = Family(
    model_type="vit",
    models=("ViTModel", "ViTForImageClassification"),
    prefixes=("vit.", ""),
    dialects=tuple(_PLAIN.values()),
    heads=(("head", "classifier"),),
    pooler=True,
)
DEIT = Family(
    model_type="deit",
    models=("DeiTModel", "DeiTForImageClassificationWithTeacher"),
    prefixes=("deit.", ""),
    dialects=tuple(_PLAIN.values()),
    heads=(("head.label", "cls_classifier"), ("head.teacher", "distillation_classifier")),
    kernel="deit",
    distilled=True,
)
VIT_MAE = Family(
    model_type="vit_mae",
    models=("ViTMAEModel", ""),
    prefixes=("vit.", ""),
    dialects=tuple(_PLAIN.values()),
    kernel="mae",
)
DINOV2 = Family(
    model_type="dinov2",
    models=("Dinov2Model", ""),
    prefixes=("dinov2.", "dinov2_with_registers.", ""),
    dialects=tuple(_DINO.values()),
    norm_eps=1e-6,
    scaled=True,
)


# Whose file it is


def kind(shapes: Shapes) -> str:
    """The model type that tensors speak of; an encoder alone does not tell whether it was a ViT's or an MAE's."""
    if any(name.endswith(".layer_scale1.lambda1") for name in shapes):
        return "dinov2"
    if any(name.endswith("embeddings.distillation_token") for name in shapes):
        return "deit"
    return "vit_mae" if "decoder.decoder_embed.weight" in shapes else "vit"


def recognises(family: Family, shapes: Shapes, about: About) -> bool:
    """Whether the file is of this family: by its names, and by config.json where that says something else."""
    spelling = spoken(family, shapes)
    embedded = {f"{spelling.embeddings}{part}" for part in ("cls_token", "position_embeddings")}
    if not embedded <= shapes.keys() or not depth_of(spelling, shapes):
        return False
    found = kind(shapes)
    told = about.config.get("model_type") or found
    if told == "vit_mae" and found == "vit":
        found = "vit_mae"
    return found == family.model_type and told in (found, f"{found}_with_registers")


def spoken(family: Family, shapes: Shapes) -> Spelling:
    """The spelling in which most of a file's attention layers are written."""

    def matches(spelling: Spelling) -> int:
        dialect = spelling.dialect
        parts = tuple(f".{part}.weight" for part in (*dialect.qkv, dialect.proj))
        return sum(name.startswith(spelling.layers) and name.endswith(parts) for name in shapes)

    return max((Spelling(prefix, dialect) for prefix in family.prefixes for dialect in family.dialects), key=matches)


def depth_of(spelling: Spelling, shapes: Shapes) -> int:
    """How many blocks the file has; counted, as a number in a name may be anything."""
    pattern = re.compile(re.escape(spelling.layers) + r"(\d+)\.")
    return len({found[1] for name in shapes if (found := pattern.match(name))})


# The rules


def rules(family: Family, config: ModelConfig, shapes: Shapes | None) -> list[Rule]:
    """The table of a model, in the spelling of a file, or in the one that `save_pretrained` gives it."""
    if isinstance(config, BiTConfig):
        raise WeightsError("there are no rules for a ResNet here", expected="a ViT", got="a BiT")
    if shapes is None:
        spelling = Spelling(family.prefixes[0] if config.classes else "", family.dialects[0])
    else:
        spelling = spoken(family, shapes)
    prefix, embeddings = spelling.prefix, spelling.embeddings
    tokens = {"cls_token": "cls_token", "pos_embed": "position_embeddings"}
    tokens |= {"dist_token": "distillation_token"} if config.tokens.distillation else {}
    tokens |= {"reg_token": "register_tokens"} if config.tokens.registers else {}
    table = [same(ours, f"{embeddings}{theirs}") for ours, theirs in tokens.items()]
    table += _dense("patch_embed.proj", f"{embeddings}patch_embeddings.projection")
    for layer in range(config.depth):
        table += _block(config, spelling.dialect, f"blocks.{layer}.", f"{spelling.layers}{layer}.")
    table += _dense("norm", f"{prefix}layernorm")
    if config.head.pre_logits:
        table += _dense("pre_logits.fc", f"{prefix}pooler.dense")
    for ours, theirs in family.heads if config.classes else ():
        table += _dense(ours, theirs)
    return table


def _block(config: ViTConfig, dialect: Dialect, ours: str, theirs: str) -> Iterator[Rule]:
    first, second = dialect.gated if config.block.activation == "swiglu" else dialect.mlp
    yield from _dense(f"{ours}norm1", f"{theirs}{dialect.norms[0]}")
    qkv = [f"{theirs}{part}" for part in dialect.qkv]
    yield from _dense(f"{ours}attn.qkv", *qkv, bias=config.block.attention.qkv_bias)
    yield from _dense(f"{ours}attn.proj", f"{theirs}{dialect.proj}")
    yield from _dense(f"{ours}norm2", f"{theirs}{dialect.norms[1]}")
    yield from _dense(f"{ours}mlp.fc1", *[f"{theirs}{part}" for part in first])
    yield from _dense(f"{ours}mlp.fc2", f"{theirs}{second}")
    if config.block.layer_scale is not None:
        yield same(f"{ours}ls1.gamma", f"{theirs}layer_scale1.lambda1")
        yield same(f"{ours}ls2.gamma", f"{theirs}layer_scale2.lambda1")


def _dense(ours: str, *theirs: str, bias: bool = True) -> Iterator[Rule]:
    """Weight and bias of a layer of ours, which is one of theirs or several, outputs after outputs."""
    layout = SAME if len(theirs) == 1 else joined(SAME, len(theirs))
    for part in ("weight", "bias") if bias else ("weight",):
        yield Rule((f"{ours}.{part}",), tuple(f"{name}.{part}" for name in theirs), layout)
