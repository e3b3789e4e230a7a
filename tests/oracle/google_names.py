"""Conversion of Google's names and layouts to ours, independent of the package's formats."""

import re
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Weights = Mapping[str, NDArray[np.float32]]

VIT = {
    "embedding": "patch_embed.proj",
    "cls": "cls_token",
    "Transformer/posembed_input/pos_embedding": "pos_embed",
    r"Transformer/encoderblock_(\d+)/LayerNorm_0": r"blocks.\1.norm1",
    r"Transformer/encoderblock_(\d+)/MultiHeadDotProductAttention_1/out": r"blocks.\1.attn.proj",
    r"Transformer/encoderblock_(\d+)/LayerNorm_2": r"blocks.\1.norm2",
    r"Transformer/encoderblock_(\d+)/MlpBlock_3/Dense_0": r"blocks.\1.mlp.fc1",
    r"Transformer/encoderblock_(\d+)/MlpBlock_3/Dense_1": r"blocks.\1.mlp.fc2",
    "Transformer/encoder_norm": "norm",
    "pre_logits": "pre_logits.fc",
    "head": "head",
}
HYBRID = VIT | {
    "conv_root": "patch_embed.backbone.stem.conv",
    "gn_root": "patch_embed.backbone.stem.norm",
    r"block(\d+)/unit(\d+)/conv(\d)": r"patch_embed.backbone.stages.\1.blocks.\2.conv\3",
    r"block(\d+)/unit(\d+)/gn(\d)": r"patch_embed.backbone.stages.\1.blocks.\2.norm\3",
    r"block(\d+)/unit(\d+)/conv_proj": r"patch_embed.backbone.stages.\1.blocks.\2.downsample.conv",
    r"block(\d+)/unit(\d+)/gn_proj": r"patch_embed.backbone.stages.\1.blocks.\2.downsample.norm",
}
BIT = {
    "resnet/root_block/standardized_conv2d": "stem.conv",
    **{
        f"resnet/block(\\d+)/unit(\\d+)/{letter}/{theirs}": f"stages.\\1.blocks.\\2.{ours}{number}"
        for number, letter in enumerate("abc", start=1)
        for theirs, ours in (("standardized_conv2d", "conv"), ("group_norm", "norm"))
    },
    r"resnet/block(\d+)/unit(\d+)/a/proj/standardized_conv2d": r"stages.\1.blocks.\2.downsample.conv",
    "resnet/group_norm": "norm",
    "resnet/head/conv2d": "head",
}
LEAVES = {"kernel": ".weight", "bias": ".bias", "scale": ".weight", "gamma": ".weight", "beta": ".bias"}


def our_name(name: str, table: Mapping[str, str]) -> str:
    layer, _, leaf = name.rpartition("/")
    path, ending = (layer, LEAVES[leaf]) if leaf in LEAVES else (name, "")
    (ours,) = (match.expand(ours) for theirs, ours in table.items() if (match := re.fullmatch(theirs, path)))
    # Google counts ResNet stages and units from 1.
    counted = re.sub(r"stages\.(\d+)\.blocks\.(\d+)", lambda m: f"stages.{int(m[1]) - 1}.blocks.{int(m[2]) - 1}", ours)
    return counted + ending


def our_layout(name: str, tensor: NDArray[np.float32]) -> NDArray[np.float32]:
    """Convert a layout: our kernels have outputs first, Google's last; heads and norms are flattened."""
    if name.endswith("attn.proj.weight"):
        return tensor.reshape(-1, tensor.shape[-1]).T  # (heads, per head, width)
    if name == "head.weight" and tensor.ndim == 4:
        return tensor[0, 0].T  # BiT's head is a 1×1 convolution
    if name.endswith(".weight") and tensor.ndim == 2:
        return tensor.T
    if "norm" in name:
        return tensor.reshape(-1)  # (1, 1, 1, C) in older files
    return tensor.transpose(3, 2, 0, 1) if name.endswith(".weight") and tensor.ndim == 4 else tensor


def fused(weights: Weights) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the joined weights and biases of q, k and v of each layer."""
    attention = "Transformer/encoderblock_{}/MultiHeadDotProductAttention_1/{}/{}"
    layer = 0
    while attention.format(layer, "query", "kernel") in weights:
        kernels, biases = (
            [weights[attention.format(layer, part, leaf)] for part in ("query", "key", "value")]
            for leaf in ("kernel", "bias")
        )
        yield f"blocks.{layer}.attn.qkv.weight", np.concatenate([k.reshape(k.shape[0], -1).T for k in kernels])
        yield f"blocks.{layer}.attn.qkv.bias", np.concatenate([bias.reshape(-1) for bias in biases])
        layer += 1


def our_state_dict(weights: Weights, table: Mapping[str, str]) -> dict[str, Tensor]:
    ours = dict(fused(weights))
    for name, tensor in weights.items():
        if not re.search("/(query|key|value)/", name):
            renamed = our_name(name, table)
            ours[renamed] = our_layout(renamed, tensor)
    return {name: torch.from_numpy(np.ascontiguousarray(tensor)) for name, tensor in ours.items()}
