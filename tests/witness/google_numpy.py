"""Independent NumPy forward pass of the released models, for comparison with the paper by eye.

Plain NumPy in float64; images as (batch, height, width, channels), already normalized. Google's released
tensor names and layouts are read as they are, so nothing stands between the files and the arithmetic.

- `vit_logits`: ViT with class token or mean-pooled, with or without `pre_logits`, on patches or on a ResNet's
  feature map (hybrid). The tensors decide which: `cls`, `pre_logits/kernel`, `conv_root/kernel`.
- `bit_logits`: the BiT ResNet v2 of the BiT-M files.

"Section", "appendix" and "eq." are those of "An Image is Worth 16x16 Words"; "released code" marks what only
the code of google-research/vision_transformer or google-research/big_transfer decides.
"""

from collections.abc import Iterator, Mapping
from math import ceil, prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, NDArray[np.floating]]

LAYER_NORM_EPS = 1e-6  # released code, flax's default
HYBRID_GROUP_NORM_EPS = 1e-6  # released code, flax's default
HYBRID_STANDARDIZATION_EPS = 1e-5  # released code, added to the standard deviation
BIT_GROUP_NORM_EPS = 1e-5  # released code
BIT_STANDARDIZATION_EPS = 1e-10  # released code, added to the variance
GROUPS = 32


def in_float64(weights: Weights) -> dict[str, Array]:
    return {name: np.asarray(tensor, dtype=np.float64) for name, tensor in weights.items()}


def scope(weights: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Return the tensors below a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


# Activations, norms and dense layers


def relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def gelu(x: Array) -> Array:
    """Compute GELU in the tanh form (released code)."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def softmax(logits: Array) -> Array:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def dense(x: Array, layer: Mapping[str, Array]) -> Array:
    return x @ layer["kernel"] + layer["bias"]


def layer_norm(x: Array, layer: Mapping[str, Array]) -> Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = x.var(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + LAYER_NORM_EPS) * layer["scale"] + layer["bias"]


def group_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    """Normalize over height, width and the channels of a group; scale and bias are (C) or (1, 1, 1, C)."""
    batch, height, width, channels = x.shape
    grouped = x.reshape(batch, height, width, GROUPS, channels // GROUPS)
    mean = grouped.mean(axis=(1, 2, 4), keepdims=True)
    variance = grouped.var(axis=(1, 2, 4), keepdims=True)
    normalized = (grouped - mean) / np.sqrt(variance + eps)
    return normalized.reshape(x.shape) * scale + bias


# Convolution and pooling, kernels as (height, width, input channels, output channels)


def pad(x: Array, rows: tuple[int, int], columns: tuple[int, int], value: float = 0.0) -> Array:
    return np.pad(x, ((0, 0), rows, columns, (0, 0)), constant_values=value)


def same_padding(length: int, size: int, stride: int) -> tuple[int, int]:
    """Return the padding before and after for ceil(length / stride) outputs; the larger one is after."""
    total = max((ceil(length / stride) - 1) * stride + size - length, 0)
    return total // 2, total - total // 2


def pad_same(x: Array, size: int, stride: int, value: float = 0.0) -> Array:
    return pad(x, same_padding(x.shape[1], size, stride), same_padding(x.shape[2], size, stride), value)


def windows(x: Array, size: int, stride: int) -> Array:
    """Return all windows of size × size: (batch, rows, columns, channels, size, size)."""
    return sliding_window_view(x, (size, size), axis=(1, 2))[:, ::stride, ::stride]


def convolution(x: Array, kernel: Array, stride: int) -> Array:
    return np.einsum("nrscij,ijco->nrso", windows(x, kernel.shape[0], stride), kernel, optimize=True)


def max_pool(x: Array, size: int, stride: int) -> Array:
    return windows(x, size, stride).max(axis=(-2, -1))


def units_and_strides(w: Mapping[str, Array], unit_name: str) -> Iterator[tuple[dict[str, Array], int]]:
    """Yield the units of `block1`, `block2`, … in order; stride 2 in the first unit of every stage except the first."""
    stage = 1
    while block := scope(w, f"block{stage}/"):
        number = 1
        while unit := scope(block, unit_name.format(number)):
            yield unit, 2 if stage > 1 and number == 1 else 1
            number += 1
        stage += 1


# The hybrid's ResNet (section 3.1, "Hybrid Architecture"): post-activation, SAME padding (released code)


def hybrid_convolution(x: Array, w: Mapping[str, Array], name: str, stride: int = 1) -> Array:
    """Apply weight standardization (w − mean)/(std + eps) over H, W, Cin; SAME convolution; GroupNorm."""
    kernel = w[f"conv{name}/kernel"]
    mean, std = kernel.mean(axis=(0, 1, 2)), kernel.std(axis=(0, 1, 2))
    standardized = (kernel - mean) / (std + HYBRID_STANDARDIZATION_EPS)
    y = convolution(pad_same(x, kernel.shape[0], stride), standardized, stride)
    return group_norm(y, w[f"gn{name}/scale"], w[f"gn{name}/bias"], HYBRID_GROUP_NORM_EPS)


def hybrid_unit(x: Array, unit: Mapping[str, Array], stride: int) -> Array:
    residual = x
    if "conv_proj/kernel" in unit:  # stored where the shape changes
        residual = hybrid_convolution(x, unit, "_proj", stride)
    y = relu(hybrid_convolution(x, unit, "1"))
    y = relu(hybrid_convolution(y, unit, "2", stride))
    y = hybrid_convolution(y, unit, "3")
    return relu(residual + y)


def hybrid_feature_map(x: Array, w: Mapping[str, Array]) -> Array:
    x = relu(hybrid_convolution(x, w, "_root", 2))
    x = max_pool(pad_same(x, 3, 2, -np.inf), 3, 2)
    for unit, stride in units_and_strides(w, "unit{}/"):
        x = hybrid_unit(x, unit, stride)
    return x


# The Vision Transformer (section 3.1)


def patch_embeddings(x: Array, layer: Mapping[str, Array]) -> Array:
    """Compute x_p E of eq. (1): patches row by row, top to bottom, flattened and projected."""
    patch, _, channels, width = layer["kernel"].shape
    rows, columns = x.shape[1] // patch, x.shape[2] // patch
    x = x[:, : rows * patch, : columns * patch]
    grid = x.reshape(len(x), rows, patch, columns, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    x_p = grid.reshape(len(x), rows * columns, patch * patch * channels)
    return x_p @ layer["kernel"].reshape(patch * patch * channels, width) + layer["bias"]


def multi_head_self_attention(z: Array, layer: Mapping[str, Array]) -> Array:
    """Compute MSA of appendix A, eq. (5–8); kernels (D, H, d) for q, k, v and (H, d, D) for out."""

    def heads(name: str) -> Array:
        per_head = np.einsum("nld,dhk->nhlk", z, layer[f"{name}/kernel"])
        return per_head + layer[f"{name}/bias"][:, None, :]

    q, k, v = heads("query"), heads("key"), heads("value")
    attention = softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1]))
    return np.einsum("nhlk,hkd->nld", attention @ v, layer["out/kernel"]) + layer["out/bias"]


def mlp(z: Array, layer: Mapping[str, Array]) -> Array:
    return dense(gelu(dense(z, scope(layer, "Dense_0/"))), scope(layer, "Dense_1/"))


def encoder_block(z: Array, block: Mapping[str, Array]) -> Array:
    attended = multi_head_self_attention(
        layer_norm(z, scope(block, "LayerNorm_0/")), scope(block, "MultiHeadDotProductAttention_1/")
    )
    z = attended + z  # eq. (2)
    return mlp(layer_norm(z, scope(block, "LayerNorm_2/")), scope(block, "MlpBlock_3/")) + z  # eq. (3)


def vit_logits(weights: Weights, images: ArrayLike) -> Array:
    """Compute logits (batch, classes) of a ViT or hybrid with the parts its file has."""
    w = in_float64(weights)
    x = np.asarray(images, dtype=np.float64)
    if "conv_root/kernel" in w:
        x = hybrid_feature_map(x, w)
    z = patch_embeddings(x, scope(w, "embedding/"))
    if "cls" in w:
        x_class = np.broadcast_to(w["cls"], (len(z), 1, z.shape[-1]))
        z = np.concatenate([x_class, z], axis=1)
    z = z + w["Transformer/posembed_input/pos_embedding"]  # eq. (1)
    layer = 0
    while block := scope(w, f"Transformer/encoderblock_{layer}/"):
        z = encoder_block(z, block)
        layer += 1
    normalized = layer_norm(z, scope(w, "Transformer/encoder_norm/"))
    y = normalized[:, 0] if "cls" in w else normalized.mean(axis=1)  # eq. (4), or mean pooling (appendix D.3)
    if "pre_logits/kernel" in w:  # the pre-training head's hidden layer (section 3.1)
        y = np.tanh(dense(y, scope(w, "pre_logits/")))
    return dense(y, scope(w, "head/"))


# The BiT ResNet v2 (section 4.1, the baseline): pre-activation, explicit padding (released code)


def bit_convolution(x: Array, kernel: Array, stride: int) -> Array:
    """Apply weight standardization (w − mean)/sqrt(var + eps) over H, W, Cin; convolution padded by 3, 1 or 0."""
    mean, variance = kernel.mean(axis=(0, 1, 2)), kernel.var(axis=(0, 1, 2))
    standardized = (kernel - mean) / np.sqrt(variance + BIT_STANDARDIZATION_EPS)
    border = (kernel.shape[0] - 1) // 2  # 3 for 7×7, 1 for 3×3, 0 for 1×1
    return convolution(pad(x, (border, border), (border, border)), standardized, stride)


def bit_activation(x: Array, layer: Mapping[str, Array]) -> Array:
    return relu(group_norm(x, layer["group_norm/gamma"], layer["group_norm/beta"], BIT_GROUP_NORM_EPS))


def bit_unit(x: Array, unit: Mapping[str, Array], stride: int) -> Array:
    a, b, c = scope(unit, "a/"), scope(unit, "b/"), scope(unit, "c/")
    activated = bit_activation(x, a)
    shortcut = x
    if "proj/standardized_conv2d/kernel" in a:  # stored where the shape changes; reads the activated tensor
        shortcut = bit_convolution(activated, a["proj/standardized_conv2d/kernel"], stride)
    y = bit_convolution(activated, a["standardized_conv2d/kernel"], 1)
    y = bit_convolution(bit_activation(y, b), b["standardized_conv2d/kernel"], stride)
    y = bit_convolution(bit_activation(y, c), c["standardized_conv2d/kernel"], 1)
    return y + shortcut


def bit_logits(weights: Weights, images: ArrayLike) -> Array:
    """Compute logits (batch, classes) of a BiT ResNet v2."""
    w = scope(in_float64(weights), "resnet/")
    x = bit_convolution(np.asarray(images, dtype=np.float64), w["root_block/standardized_conv2d/kernel"], 2)
    x = max_pool(pad(x, (1, 1), (1, 1), 0.0), 3, 2)  # the border is zero, not −inf: it can win
    for unit, stride in units_and_strides(w, "unit{:02d}/"):
        x = bit_unit(x, unit, stride)
    features = bit_activation(x, w).mean(axis=(1, 2), keepdims=True)  # global mean
    logits = convolution(features, w["head/conv2d/kernel"], 1) + w["head/conv2d/bias"]
    return logits[:, 0, 0]


# Random weights in the same layouts: nothing zero, no trivial norms, activations and logits of order 1


class Draws:
    """Named random float32 tensors from one generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.weights: dict[str, NDArray[np.float32]] = {}

    def normal(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        self.weights[name] = self.rng.normal(mean, std, shape).astype(np.float32)

    def dense(self, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        self.normal(f"{name}/kernel", inputs + outputs, prod(inputs) ** -0.5)
        self.normal(f"{name}/bias", outputs, 0.3)

    def norm(self, name: str, shape: tuple[int, ...], scale: str = "scale", bias: str = "bias") -> None:
        self.normal(f"{name}/{scale}", shape, 0.3, mean=1.0)
        self.normal(f"{name}/{bias}", shape, 0.3)

    def standardized(self, name: str, window: int, inputs: int, outputs: int) -> None:
        """Draw a kernel with a nonzero mean; output channels range from weak (where the eps shows) to strong."""
        std = 10.0 ** self.rng.uniform(-5.0, 0.0, outputs)
        kernel = self.rng.normal(0.5, 1.0, (window, window, inputs, outputs)) * std
        self.weights[f"{name}/kernel"] = kernel.astype(np.float32)


def random_vit_weights(
    rng: np.random.Generator,
    *,
    image_size: tuple[int, int] = (32, 32),
    channels: int = 3,
    patch: int = 8,
    width: int = 24,
    depth: int = 2,
    heads: int = 3,
    mlp_dim: int = 40,
    num_classes: int = 7,
    pre_logits: int | None = None,
    class_token: bool = True,
) -> dict[str, NDArray[np.float32]]:
    """Draw a ViT for images of (height, width); `pre_logits` is the width of that layer or None."""
    draws = Draws(rng)
    draws.dense("embedding", (patch, patch, channels), (width,))
    if class_token:
        draws.normal("cls", (1, 1, width), 1.0)
    tokens = (image_size[0] // patch) * (image_size[1] // patch) + class_token
    draws.normal("Transformer/posembed_input/pos_embedding", (1, tokens, width), 0.5)
    for layer in range(depth):
        block = f"Transformer/encoderblock_{layer}"
        draws.norm(f"{block}/LayerNorm_0", (width,))
        for name in ("query", "key", "value"):
            draws.dense(f"{block}/MultiHeadDotProductAttention_1/{name}", (width,), (heads, width // heads))
        draws.dense(f"{block}/MultiHeadDotProductAttention_1/out", (heads, width // heads), (width,))
        draws.norm(f"{block}/LayerNorm_2", (width,))
        draws.dense(f"{block}/MlpBlock_3/Dense_0", (width,), (mlp_dim,))
        draws.dense(f"{block}/MlpBlock_3/Dense_1", (mlp_dim,), (width,))
    draws.norm("Transformer/encoder_norm", (width,))
    if pre_logits is not None:
        draws.dense("pre_logits", (width,), (pre_logits,))
    draws.dense("head", (pre_logits or width,), (num_classes,))
    return draws.weights


def random_hybrid_weights(
    rng: np.random.Generator,
    *,
    image_size: tuple[int, int] = (32, 32),
    blocks: tuple[int, ...] = (2, 1),
    root_width: int = 32,
    flat_norms: bool = True,
    patch: int = 1,
    **vit: Any,
) -> dict[str, NDArray[np.float32]]:
    """Draw a hybrid with `blocks` units per stage; `vit` as in `random_vit_weights`.

    GroupNorm tensors are (C), or (1, 1, 1, C) as in older files where `flat_norms` is false.
    """
    draws = Draws(rng)

    def convolution_and_norm(prefix: str, suffix: str, window: int, inputs: int, outputs: int) -> None:
        draws.standardized(f"{prefix}conv{suffix}", window, inputs, outputs)
        draws.norm(f"{prefix}gn{suffix}", (outputs,) if flat_norms else (1, 1, 1, outputs))

    convolution_and_norm("", "_root", 7, 3, root_width)
    channels, stride = root_width, 4
    for stage, units in enumerate(blocks, start=1):
        bottleneck = root_width * 2 ** (stage - 1)
        stride = 4 * 2 ** (stage - 1)
        for number in range(1, units + 1):
            unit = f"block{stage}/unit{number}/"
            if number == 1:
                convolution_and_norm(unit, "_proj", 1, channels, 4 * bottleneck)
            convolution_and_norm(unit, "1", 1, channels, bottleneck)
            convolution_and_norm(unit, "2", 3, bottleneck, bottleneck)
            convolution_and_norm(unit, "3", 1, bottleneck, 4 * bottleneck)
            channels = 4 * bottleneck
    feature_map = (ceil(image_size[0] / stride), ceil(image_size[1] / stride))
    return draws.weights | random_vit_weights(rng, image_size=feature_map, channels=channels, patch=patch, **vit)


def random_bit_weights(
    rng: np.random.Generator,
    *,
    blocks: tuple[int, ...] = (1, 1, 1, 1),
    width_factor: float = 0.5,
    num_classes: int = 7,
) -> dict[str, NDArray[np.float32]]:
    """Draw a BiT ResNet v2 with `blocks` units per stage; the root has 64 × `width_factor` channels."""
    draws = Draws(rng)
    channels = root_width = int(64 * width_factor)
    draws.standardized("resnet/root_block/standardized_conv2d", 7, 3, root_width)
    for stage, units in enumerate(blocks, start=1):
        bottleneck = root_width * 2 ** (stage - 1)
        for number in range(1, units + 1):
            unit = f"resnet/block{stage}/unit{number:02d}"
            if number == 1:
                draws.standardized(f"{unit}/a/proj/standardized_conv2d", 1, channels, 4 * bottleneck)
            for name, window, inputs, outputs in (
                ("a", 1, channels, bottleneck),
                ("b", 3, bottleneck, bottleneck),
                ("c", 1, bottleneck, 4 * bottleneck),
            ):
                draws.norm(f"{unit}/{name}/group_norm", (inputs,), "gamma", "beta")
                draws.standardized(f"{unit}/{name}/standardized_conv2d", window, inputs, outputs)
            channels = 4 * bottleneck
    draws.norm("resnet/group_norm", (channels,), "gamma", "beta")
    draws.dense("resnet/head/conv2d", (1, 1, channels), (num_classes,))
    return draws.weights
