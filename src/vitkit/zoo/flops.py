"""A configuration goes in, the floating-point operations of one forward pass come out, part by part.

An operation is one multiplication or one addition, so a multiply-add counts twice, and only matrix products and
convolutions are counted: the paper's way. Every token is counted in every layer.
"""

from vitkit.core.shapes import pair
from vitkit.model.config import ViTConfig
from vitkit.model.resnet import EXPANSION, BackboneConfig, BiTConfig
from vitkit.zoo.variants import ModelConfig

Parts = dict[str, int]


def forward_flops(config: ModelConfig, *, padding: bool = True) -> Parts:
    """Operations to classify one image, by part of the model; their sum is the model's cost.

    Without `padding`, a convolution's products with the zeros around the image are left out.

    >>> from vitkit.zoo.variants import SIZES
    >>> round(sum(forward_flops(SIZES["B"]).values()) / 1e9, 1)
    35.1
    """
    return _bit(config, padding=padding) if isinstance(config, BiTConfig) else _vit(config, padding=padding)


def dense(rows: int, inputs: int, outputs: int) -> int:
    """A dense layer over rows.

    >>> dense(197, 768, 768)
    232390656
    """
    return 2 * rows * inputs * outputs


def _vit(config: ViTConfig, *, padding: bool) -> Parts:
    width, tokens = config.width, config.prefix + config.patches
    backbone = config.backbone
    patch_height, patch_width = pair(config.patch_size)
    pixels = patch_height * patch_width * (backbone.width if backbone else config.channels)
    layers = config.depth * (2 if config.block.axial else 1)
    parts = {"backbone": _backbone(backbone, config, padding=padding)} if backbone else {}
    return parts | {
        "patch embedding": dense(config.patches, pixels, width),
        "qkv": layers * dense(tokens, width, 3 * width),
        "attention": _attention(config, tokens),
        "attention out": layers * dense(tokens, width, width),
        "mlp": layers * _mlp(config, tokens),
        "head": _head(config, tokens),
    }


def _attention(config: ViTConfig, tokens: int) -> int:
    """Queries times keys and weights times values; and queries times offsets, if positions are relative."""
    if config.block.axial:
        return config.depth * sum(2 * dense(tokens, config.width, line) for line in config.grid)
    seen = 2 * tokens
    if config.positions.kind == "relative":
        seen += 2 * config.patches - 1 + (3 if config.prefix else 0)
    return config.depth * dense(tokens, config.width, seen)


def _mlp(config: ViTConfig, tokens: int) -> int:
    matrices = 3 if config.block.activation == "swiglu" else 2
    return matrices * dense(tokens, config.width, config.mlp_dim)


def _head(config: ViTConfig, tokens: int) -> int:
    width, pre_logits = config.width, config.head.pre_logits
    flops = dense(1, config.features, config.classes)
    if pre_logits:
        flops += dense(1, width, pre_logits)
    if config.pooling == "map":
        probe = 2 * dense(1, width, width) + _mlp(config, 1)
        flops += probe + dense(tokens, width, 2 * width) + 2 * dense(1, width, tokens)
    return flops


def _bit(config: BiTConfig, *, padding: bool) -> Parts:
    root, size = _root(config.channels, config.root_width, pair(config.image_size), padding=padding)
    return {
        "root": root,
        "stages": _stages(config.units, config.root_width, size, padding=padding),
        "head": dense(1, config.width, config.classes),
    }


def _backbone(backbone: BackboneConfig, config: ViTConfig, *, padding: bool) -> int:
    root, size = _root(config.channels, backbone.root_width, pair(config.image_size), padding=padding)
    return root + _stages(backbone.units, backbone.root_width, size, padding=padding)


def _root(channels: int, width: int, image_size: tuple[int, int], *, padding: bool) -> tuple[int, tuple[int, int]]:
    """The 7×7 convolution, and the size that its stride and the pooling's leave."""
    flops = _convolution(image_size, channels, width, kernel=7, stride=2, padding=padding)
    return flops, _halved(_halved(image_size))


def _stages(units: tuple[int, ...], root_width: int, size: tuple[int, int], *, padding: bool) -> int:
    """Bottleneck units: 1×1 at the incoming size, 3×3 that may halve it, 1×1; and a shortcut where shapes change."""
    flops, inputs = 0, root_width
    for stage, count in enumerate(units):
        inner, outputs = root_width * 2**stage, root_width * 2**stage * EXPANSION
        for unit in range(count):
            stride = 2 if unit == 0 and stage > 0 else 1
            flops += dense(size[0] * size[1], inputs, inner)
            flops += _convolution(size, inner, inner, kernel=3, stride=stride, padding=padding)
            size = _halved(size) if stride == 2 else size
            flops += dense(size[0] * size[1], inner, outputs)
            if unit == 0:
                flops += dense(size[0] * size[1], inputs, outputs)
            inputs = outputs
    return flops


def _convolution(size: tuple[int, int], inputs: int, outputs: int, *, kernel: int, stride: int, padding: bool) -> int:
    """A padded convolution: each output reads the kernel's height times its width, or what of it is in the image."""

    def products(side: int) -> int:
        results = -(-side // stride)
        if padding:
            return results * kernel
        # Padding of one side more or less shifts the reads; as many of them stay inside.
        reads = (result * stride - kernel // 2 + tap for result in range(results) for tap in range(kernel))
        return sum(0 <= read < side for read in reads)

    return 2 * products(size[0]) * products(size[1]) * inputs * outputs


def _halved(size: tuple[int, int]) -> tuple[int, int]:
    return -(-size[0] // 2), -(-size[1] // 2)
