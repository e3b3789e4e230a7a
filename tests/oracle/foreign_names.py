"""Conversion of our tensors to the names of other libraries, independent of the package's formats."""

import re
from collections.abc import Mapping
from importlib import metadata

import torch
from packaging.version import Version
from torch import Tensor

Tensors = Mapping[str, Tensor]
Table = Mapping[str, str]


def renamed(tensors: Tensors, table: Table) -> dict[str, Tensor]:
    """Rename each tensor by the row that matches it; other names stay."""

    def rename(name: str) -> str:
        found = [match.expand(theirs) for ours, theirs in table.items() if (match := re.fullmatch(ours, name))]
        assert len(found) <= 1, f"{name} has several names: {found}"
        return found[0] if found else name

    return {rename(name): tensor for name, tensor in tensors.items()}


def split(tensors: Tensors, fused: str, parts: tuple[str, ...]) -> dict[str, Tensor]:
    """Split layers called `fused` along their outputs."""
    parts_by_name: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if f".{fused}." in name:
            for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
                parts_by_name[name.replace(f".{fused}.", f".{part}.")] = piece
        else:
            parts_by_name[name] = tensor
    return parts_by_name


# timm: ours, but for the two heads of a distilled model, the bare stem under R+Ti/16 and BiT's convolution as a head

TIMM_DISTILLED = {r"head\.label\.(.+)": r"head.\1", r"head\.teacher\.(.+)": r"head_dist.\1"}
TIMM_ROOT_ALONE = {r"patch_embed\.backbone\.stem\.(.+)": r"patch_embed.backbone.\1"}


def timm_distilled(ours: Tensors) -> dict[str, Tensor]:
    return renamed(ours, TIMM_DISTILLED)


def timm_root_alone(ours: Tensors) -> dict[str, Tensor]:
    return renamed(ours, TIMM_ROOT_ALONE)


def timm_bit(ours: Tensors) -> dict[str, Tensor]:
    theirs = renamed(ours, {r"head\.(.+)": r"head.fc.\1"})
    return theirs | {"head.fc.weight": theirs["head.fc.weight"][:, :, None, None]}


def timm_without_class_positions(ours: Tensors) -> dict[str, Tensor]:
    """Add the class token's position to the token, as timm stores DINOv2 with registers."""
    first, rest = ours["pos_embed"].tensor_split([1], dim=1)
    return {**ours, "cls_token": ours["cls_token"] + first, "pos_embed": rest}


# transformers, as version 5.19 names things in memory

HUGGINGFACE_VIT = {
    r"cls_token": r"vit.embeddings.cls_token",
    r"pos_embed": r"vit.embeddings.position_embeddings",
    r"patch_embed\.proj\.(.+)": r"vit.embeddings.patch_embeddings.projection.\1",
    r"blocks\.(\d+)\.norm1\.(.+)": r"vit.layers.\1.layernorm_before.\2",
    r"blocks\.(\d+)\.attn\.proj\.(.+)": r"vit.layers.\1.attention.o_proj.\2",
    r"blocks\.(\d+)\.attn\.([qkv]_proj)\.(.+)": r"vit.layers.\1.attention.\2.\3",
    r"blocks\.(\d+)\.norm2\.(.+)": r"vit.layers.\1.layernorm_after.\2",
    r"blocks\.(\d+)\.mlp\.(.+)": r"vit.layers.\1.mlp.\2",
    r"norm\.(.+)": r"vit.layernorm.\1",
    r"pre_logits\.fc\.(.+)": r"vit.pooler.dense.\1",
    r"head\.(weight|bias)": r"classifier.\1",
}
HUGGINGFACE_DEIT = {ours: theirs.replace("vit.", "deit.") for ours, theirs in HUGGINGFACE_VIT.items()} | {
    r"dist_token": r"deit.embeddings.distillation_token",
    r"head\.label\.(.+)": r"cls_classifier.\1",
    r"head\.teacher\.(.+)": r"distillation_classifier.\1",
}
HUGGINGFACE_DINO = {
    r"cls_token": r"embeddings.cls_token",
    r"reg_token": r"embeddings.register_tokens",
    r"blocks\.(\d+)\.(norm\d)\.(.+)": r"LAYERS.\1.\2.\3",
    r"blocks\.(\d+)\.attn\.proj\.(.+)": r"LAYERS.\1.attention.o_proj.\2",
    r"blocks\.(\d+)\.attn\.([qkv]_proj)\.(.+)": r"LAYERS.\1.attention.\2.\3",
    r"blocks\.(\d+)\.ls(\d)\.gamma": r"LAYERS.\1.layer_scale\2.lambda1",
    r"blocks\.(\d+)\.mlp\.((?:gate|up|down)_proj\..+)": r"LAYERS.\1.mlp.\2",
}
HUGGINGFACE_DINOV2 = {ours: theirs.replace("LAYERS", "encoder.layer") for ours, theirs in HUGGINGFACE_DINO.items()} | {
    r"pos_embed": r"embeddings.position_embeddings",
    r"patch_embed\.proj\.(.+)": r"embeddings.patch_embeddings.projection.\1",
    r"blocks\.(\d+)\.mlp\.(fc\d\..+)": r"encoder.layer.\1.mlp.\2",
    r"norm\.(.+)": r"layernorm.\1",
}
HUGGINGFACE_DINOV3 = {ours: theirs.replace("LAYERS", "model.layer") for ours, theirs in HUGGINGFACE_DINO.items()} | {
    r"patch_embed\.proj\.(.+)": r"embeddings.patch_embeddings.\1",
    r"blocks\.(\d+)\.mlp\.fc1\.(.+)": r"model.layer.\1.mlp.up_proj.\2",
    r"blocks\.(\d+)\.mlp\.fc2\.(.+)": r"model.layer.\1.mlp.down_proj.\2",
}
HUGGINGFACE_BIT = {
    r"stem\.conv\.(.+)": r"bit.embedder.convolution.\1",
    r"stages\.(\d+)\.blocks\.(.+)": r"bit.encoder.stages.\1.layers.\2",
    r"norm\.(.+)": r"bit.norm.\1",
    r"head\.(.+)": r"classifier.1.\1",
}
QKV = ("q_proj", "k_proj", "v_proj")
OLDER_HUGGINGFACE = (
    (r"^(vit|deit)\.layers\.(\d+)\.mlp\.fc1\.", r"\1.layers.\2.intermediate.dense."),
    (r"^(vit|deit)\.layers\.(\d+)\.mlp\.fc2\.", r"\1.layers.\2.output.dense."),
    (r"^(vit|deit)\.layers\.", r"\1.encoder.layer."),
    (r"^model\.layer\.", "layer."),
    (r"(encoder\.layer\.\d+\.attention)\.q_proj\.", r"\1.attention.query."),
    (r"(encoder\.layer\.\d+\.attention)\.k_proj\.", r"\1.attention.key."),
    (r"(encoder\.layer\.\d+\.attention)\.v_proj\.", r"\1.attention.value."),
    (r"(encoder\.layer\.\d+\.attention)\.o_proj\.", r"\1.output.dense."),
    (r"(encoder\.layer\.\d+\.mlp)\.down_proj\.", r"\1.weights_out."),
)
"""The names of version 5.0; its DINOv2 has the gate and the value of a gated MLP in one layer."""


def as_installed(theirs: Tensors) -> dict[str, Tensor]:
    """Change names to those of the installed version."""
    if Version(metadata.version("transformers")) >= Version("5.19"):
        return dict(theirs)
    older: dict[str, Tensor] = {}
    for newest, tensor in theirs.items():
        name = newest
        for pattern, replacement in OLDER_HUGGINGFACE:
            name = re.sub(pattern, replacement, name)
        older[name] = tensor
    for name in [name for name in older if re.search(r"encoder\.layer\.\d+\.mlp\.gate_proj\.", name)]:
        parts = older.pop(name), older.pop(name.replace("gate_proj", "up_proj"))
        older[name.replace("gate_proj", "weights_in")] = torch.cat(parts)
    return older


def huggingface_vit(ours: Tensors) -> dict[str, Tensor]:
    return as_installed(renamed(split(ours, "qkv", QKV), HUGGINGFACE_VIT))


def huggingface_vit_with_pooler(ours: Tensors) -> dict[str, Tensor]:
    """Rename for `ViTModel`, without the classifier."""
    theirs = {name.removeprefix("vit."): tensor for name, tensor in huggingface_vit(ours).items()}
    return {name: tensor for name, tensor in theirs.items() if not name.startswith("classifier.")}


def huggingface_deit(ours: Tensors) -> dict[str, Tensor]:
    return as_installed(renamed(split(ours, "qkv", QKV), HUGGINGFACE_DEIT))


def huggingface_dinov2(ours: Tensors) -> dict[str, Tensor]:
    return as_installed(renamed(split(ours, "qkv", QKV), HUGGINGFACE_DINOV2))


def huggingface_dinov2_gated(ours: Tensors) -> dict[str, Tensor]:
    return huggingface_dinov2(_gated(ours))


def huggingface_dinov3(ours: Tensors) -> dict[str, Tensor]:
    return _without_key_bias(as_installed(renamed(split(ours, "qkv", QKV), HUGGINGFACE_DINOV3)))


def huggingface_dinov3_gated(ours: Tensors) -> dict[str, Tensor]:
    return huggingface_dinov3(_gated(ours))


def huggingface_bit(ours: Tensors) -> dict[str, Tensor]:
    return renamed(ours, HUGGINGFACE_BIT)


def _gated(ours: Tensors) -> dict[str, Tensor]:
    apart = split(ours, "fc1", ("gate_proj", "up_proj"))
    return {name.replace(".fc2.", ".down_proj."): tensor for name, tensor in apart.items()}


def _without_key_bias(theirs: Tensors) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in theirs.items() if not name.endswith("k_proj.bias")}


# torchvision

TORCHVISION = {
    r"cls_token": r"class_token",
    r"pos_embed": r"encoder.pos_embedding",
    r"patch_embed\.proj\.(.+)": r"conv_proj.\1",
    r"blocks\.(\d+)\.norm(\d)\.(.+)": r"encoder.layers.encoder_layer_\1.ln_\2.\3",
    r"blocks\.(\d+)\.attn\.qkv\.(.+)": r"encoder.layers.encoder_layer_\1.self_attention.in_proj_\2",
    r"blocks\.(\d+)\.attn\.proj\.(.+)": r"encoder.layers.encoder_layer_\1.self_attention.out_proj.\2",
    r"blocks\.(\d+)\.mlp\.fc1\.(.+)": r"encoder.layers.encoder_layer_\1.mlp.0.\2",
    r"blocks\.(\d+)\.mlp\.fc2\.(.+)": r"encoder.layers.encoder_layer_\1.mlp.3.\2",
    r"norm\.(.+)": r"encoder.ln.\1",
    r"pre_logits\.fc\.(.+)": r"heads.pre_logits.\1",
    r"head\.(.+)": r"heads.head.\1",
}


def torchvision(ours: Tensors) -> dict[str, Tensor]:
    return renamed(ours, TORCHVISION)


def load(model: torch.nn.Module, tensors: Tensors, *, unused: tuple[str, ...] = ()) -> None:
    """Load a complete state dict; `unused` are tensors that a forward pass does not read."""
    found = model.load_state_dict(dict(tensors), strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= set(unused)
