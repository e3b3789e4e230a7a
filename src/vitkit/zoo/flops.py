"""Floating-point operations of one forward pass, by part of the model.

As in the paper, a multiply-add counts as two operations, and only matrix products and convolutions are counted. Every
token is counted in every layer.
"""

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
    return _bit(config, padding=padding) if isinstance(config, BiTConfig) else _vit(config, padding=padding)


def count_dense_flops(rows: int, inputs: int, outputs: int) -> int:
    """Count the operations of a dense layer applied to `rows` rows."""
    return 2 * rows * inputs * outputs


def _vit(config: ViTConfig, *, padding: bool) -> FlopsByPart:
    width, tokens = config.width, config.prefix + config.patches
    backbone = config.backbone
    patch_height, patch_width = pair(config.patch_size)
    pixels = patch_height * patch_width * (backbone.width if backbone else config.channels)
    layers = config.depth * (2 if config.block.axial else 1)
    parts = {"backbone": _backbone(backbone, config, padding=padding)} if backbone else {}
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
    if config.block.axial:
        return config.depth * sum(2 * count_dense_flops(tokens, config.width, line) for line in config.grid)
    columns = 2 * tokens
    if config.positions.kind == "relative":
        columns += 2 * config.patches - 1 + (3 if config.prefix else 0)
    return config.depth * count_dense_flops(tokens, config.width, columns)


def _mlp(config: ViTConfig, tokens: int) -> int:
    matrices = 3 if config.block.activation == "swiglu" else 2
    return matrices * count_dense_flops(tokens, config.width, config.mlp_dim)


def _head(config: ViTConfig, tokens: int) -> int:
    width, pre_logits = config.width, config.head.pre_logits
    flops = count_dense_flops(1, config.num_features, config.num_classes)
    if pre_logits:
        flops += count_dense_flops(1, width, pre_logits)
    if config.pooling == "map":
        probe = 2 * count_dense_flops(1, width, width) + _mlp(config, 1)
        flops += probe + count_dense_flops(tokens, width, 2 * width) + 2 * count_dense_flops(1, width, tokens)
    return flops


def _bit(config: BiTConfig, *, padding: bool) -> FlopsByPart:
    root, size = _root(config, config.channels, pair(config.image_size), padding=padding)
    return {
        "root": root,
        "stages": _stages(config.units, config.root_width, size, padding=padding),
        "head": count_dense_flops(1, config.width, config.num_classes),
    }


def _backbone(backbone: BackboneConfig, config: ViTConfig, *, padding: bool) -> int:
    root, size = _root(backbone, config.channels, pair(config.image_size), padding=padding)
    return root + _stages(backbone.units, backbone.root_width, size, padding=padding)


def _root(
    config: BackboneConfig | BiTConfig, channels: int, size: tuple[int, int], *, padding: bool
) -> tuple[int, tuple[int, int]]:
    """Count the root's convolutions, and return the size of the feature map after it."""
    width = config.root_width
    if config.root == "small":
        return _convolution(size, channels, width, kernel=3, stride=1, padding=padding), size
    if config.root == "standard":
        flops = _convolution(size, channels, width, kernel=7, stride=2, padding=padding)
        return flops, _halved(_halved(size))
    flops = _convolution(size, channels, width // 4, kernel=3, stride=1, padding=padding)
    for inputs, units in zip((width // 4, width // 2), config.root_units, strict=True):
        outputs = 2 * inputs
        flops += _convolution(size, inputs, outputs, kernel=3, stride=2, padding=padding)
        size = _halved(size)
        flops += 2 * units * _convolution(size, outputs, outputs, kernel=3, stride=1, padding=padding)
    return flops, size


def _stages(units: tuple[int, ...], root_width: int, size: tuple[int, int], *, padding: bool) -> int:
    """Count bottleneck units: 1×1 at the input size, 3×3 that may halve it, 1×1; a projection where shapes change."""
    flops, inputs = 0, root_width
    for stage, count in enumerate(units):
        inner, outputs = root_width * 2**stage, root_width * 2**stage * EXPANSION
        for unit in range(count):
            stride = 2 if unit == 0 and stage > 0 else 1
            flops += count_dense_flops(size[0] * size[1], inputs, inner)
            flops += _convolution(size, inner, inner, kernel=3, stride=stride, padding=padding)
            size = _halved(size) if stride == 2 else size
            flops += count_dense_flops(size[0] * size[1], inner, outputs)
            if unit == 0:
                flops += count_dense_flops(size[0] * size[1], inputs, outputs)
            inputs = outputs
    return flops


def _convolution(size: tuple[int, int], inputs: int, outputs: int, *, kernel: int, stride: int, padding: bool) -> int:
    """Count a padded convolution, with or without the kernel taps that fall outside the image."""

    def products(side: int) -> int:
        results = -(-side // stride)
        if padding:
            return results * kernel
        # TensorFlow pads one side more, which shifts the taps; as many of them stay inside the image.
        reads = (result * stride - kernel // 2 + tap for result in range(results) for tap in range(kernel))
        return sum(0 <= read < side for read in reads)

    return 2 * products(size[0]) * products(size[1]) * inputs * outputs


def _halved(size: tuple[int, int]) -> tuple[int, int]:
    return -(-size[0] // 2), -(-size[1] // 2)
