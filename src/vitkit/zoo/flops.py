"""Floating-point operations of one forward pass, by part of the model.

As in the paper, a multiply-add counts as two operations, and only matrix products and convolutions are counted. Every
token is counted in every layer.
"""

from functools import partial

from vitkit.core.sizes import pair
from vitkit.model.config import EXPANSION, BackboneConfig, BiTConfig, ViTConfig
from vitkit.zoo.variants import ModelConfig

FlopsByPart = dict[str, int]


def count_forward_flops(config: ModelConfig, *, padding: bool = True) -> FlopsByPart:
    """Count the operations to classify one image, by part of the model.

    With `padding=False`, products of a convolution with zero padding are not counted.

    >>> from vitkit.zoo.variants import SIZES
    >>> round(sum(count_forward_flops(SIZES["B"]).values()) / 1e9, 1)
    35.1
    """
    if isinstance(config, ViTConfig):
        return _vit(config, padding=padding)
    root, stages = _resnet(config, config, padding=padding)
    return {"root": root, "stages": stages, "head": count_dense_flops(1, config.width, config.num_classes)}


def count_dense_flops(rows: int, inputs: int, outputs: int) -> int:
    """Count the operations of a dense layer applied to `rows` rows."""
    return 2 * rows * inputs * outputs


def _vit(config: ViTConfig, *, padding: bool) -> FlopsByPart:
    width, tokens, backbone = config.width, config.prefix + config.patches, config.backbone
    patch_height, patch_width = pair(config.patch_size)
    pixels = patch_height * patch_width * (backbone.width if backbone else config.channels)
    layers = config.depth * (2 if config.block.axial else 1)
    parts = {"backbone": sum(_resnet(backbone, config, padding=padding))} if backbone else {}
    return parts | {
        "patch embedding": count_dense_flops(config.patches, pixels, width),
        "qkv": layers * count_dense_flops(tokens, width, 3 * width),
        "attention": _attention(config, tokens),
        "attention out": layers * count_dense_flops(tokens, width, width),
        "mlp": layers * _mlp(config, tokens),
        "head": _head(config, tokens),
    }


def _attention(config: ViTConfig, tokens: int) -> int:
    # Queries times keys, weights times values, and queries times offsets if positions are relative.
    columns = 2 * (sum(config.grid) if config.block.axial else tokens)
    if config.positions.kind == "relative":
        columns += 2 * config.patches - 1 + (3 if config.prefix else 0)
    return config.depth * count_dense_flops(tokens, config.width, columns)


def _mlp(config: ViTConfig, tokens: int) -> int:
    matrices = 3 if config.block.activation == "swiglu" else 2
    return matrices * count_dense_flops(tokens, config.width, config.mlp_dim)


def _head(config: ViTConfig, tokens: int) -> int:
    width = config.width
    flops = count_dense_flops(1, config.num_features, config.num_classes)
    flops += count_dense_flops(1, width, config.head.pre_logits or 0)
    if config.pooling == "map":
        probe = 2 * count_dense_flops(1, width, width) + _mlp(config, 1)
        flops += probe + count_dense_flops(tokens, width, 2 * width) + 2 * count_dense_flops(1, width, tokens)
    return flops


def _resnet(resnet: BackboneConfig | BiTConfig, images: ModelConfig, *, padding: bool) -> tuple[int, int]:
    """Count the convolutions of a ResNet's root and of its stages, for images of a model."""
    width, channels, size = resnet.root_width, images.channels, pair(images.image_size)
    convolution = partial(_convolution, padding=padding)
    if resnet.root == "small":
        root = convolution(size, channels, width)
    elif resnet.root == "standard":
        root, size = convolution(size, channels, width, kernel=7, stride=2), _halve(_halve(size))
    else:
        root = convolution(size, channels, width // 4)
        for inputs, units in zip((width // 4, width // 2), resnet.root_units, strict=True):
            root += convolution(size, inputs, 2 * inputs, stride=2)
            size = _halve(size)
            root += 2 * units * convolution(size, 2 * inputs, 2 * inputs)
    stages, inputs = 0, width
    # Bottleneck units: 1×1 at the input size, 3×3 that may halve it, 1×1; a projection where shapes change.
    for stage, count in enumerate(resnet.units):
        inner, outputs = width * 2**stage, width * 2**stage * EXPANSION
        for unit in range(count):
            stride = 2 if unit == 0 and stage > 0 else 1
            stages += count_dense_flops(size[0] * size[1], inputs, inner)
            stages += convolution(size, inner, inner, stride=stride)
            size = _halve(size) if stride == 2 else size
            stages += count_dense_flops(size[0] * size[1], inner, outputs)
            stages += count_dense_flops(size[0] * size[1], inputs, outputs) if unit == 0 else 0
            inputs = outputs
    return root, stages


def _convolution(
    size: tuple[int, int], inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1, padding: bool
) -> int:
    """Count a padded convolution, with or without the kernel taps that fall outside the image."""

    def products(side: int) -> int:
        results = -(-side // stride)
        if padding:
            return results * kernel
        # TensorFlow pads one side more, which shifts the taps; as many of them stay inside the image.
        reads = (result * stride - kernel // 2 + tap for result in range(results) for tap in range(kernel))
        return sum(0 <= read < side for read in reads)

    return 2 * products(size[0]) * products(size[1]) * inputs * outputs


def _halve(size: tuple[int, int]) -> tuple[int, int]:
    return -(-size[0] // 2), -(-size[1] // 2)
