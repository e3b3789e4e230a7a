"""Table of the paper's models: configuration, exact parameter count and aliases.

Parameter counts are for 1,000 classes at 224 pixels with a linear head. They are constants rather than computed, so
that a test detects a change of the model code that alters one.
"""

from dataclasses import dataclass, replace

from vitkit.model.config import BackboneConfig, BiTConfig, BlockConfig, ViTConfig

ModelConfig = ViTConfig | BiTConfig


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A named model of the paper."""

    name: str
    config: ModelConfig
    parameters: int
    aliases: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The name, then the aliases."""
        return self.name, *self.aliases

    @property
    def kind(self) -> str:
        """Architecture: vit, hybrid, axial or resnet."""
        if isinstance(self.config, BiTConfig):
            return "resnet"
        if self.config.backbone:
            return "hybrid"
        return "axial" if self.config.block.axial else "vit"


# Table 1 of the paper, and the two smaller sizes of the released code.
SIZES = {
    "Ti": ViTConfig(width=192, depth=12, heads=3, mlp_dim=768),
    "S": ViTConfig(width=384, depth=12, heads=6, mlp_dim=1536),
    "B": ViTConfig(width=768, depth=12, heads=12, mlp_dim=3072),
    "L": ViTConfig(width=1024, depth=24, heads=16, mlp_dim=4096),
    "H": ViTConfig(width=1280, depth=32, heads=16, mlp_dim=5120),
}
RESNETS = {"R50": (3, 4, 6, 3), "R101": (3, 4, 23, 3), "R152": (3, 8, 36, 3), "R200": (3, 24, 36, 3)}


def vit(size: str, patch_size: int, parameters: int, aliases: str = "") -> Variant:
    """Define a Vision Transformer with square patches."""
    config = replace(SIZES[size], patch_size=patch_size)
    return _variant(f"{size}/{patch_size}", config, parameters, f"ViT-{size}_{patch_size} {aliases}")


def hybrid(
    resnet: str,
    size: str,
    stride: int,
    units: tuple[int, ...],
    parameters: int,
    aliases: str = "",
    *,
    patch_size: int = 1,
) -> Variant:
    """Define a hybrid: patches of a ResNet's feature map. `stride` is the nominal one in the released code's names."""
    config = replace(SIZES[size], backbone=BackboneConfig(units=units), patch_size=patch_size)
    return _variant(f"{resnet}+{size}/{stride}", config, parameters, f"{resnet}+ViT-{size}_{stride} {aliases}")


def axial(size: str, patch_size: int, parameters: int) -> Variant:
    """Define a model with attention along rows, then columns, in each block, and mean pooling (appendix D.6)."""
    config = replace(SIZES[size], patch_size=patch_size, pooling="mean", block=BlockConfig(axial=True))
    return _variant(f"Axial-{size}/{patch_size}", config, parameters, f"Axial-ViT-{size}_{patch_size}")


def bit(resnet: str, width_factor: int, parameters: int, aliases: str = "") -> Variant:
    """Define a Big Transfer ResNet, the baseline of the paper."""
    name = f"{resnet}x{width_factor}"
    config = BiTConfig(units=RESNETS[resnet], width_factor=width_factor)
    return _variant(f"BiT-{name}", config, parameters, f"{name} BiT-M-{name} BiT-S-{name} {aliases}")


def _variant(name: str, config: ModelConfig, parameters: int, aliases: str) -> Variant:
    return Variant(name=name, config=config, parameters=parameters, aliases=tuple(aliases.split()))


_B16 = """vit_base_patch16_224 vit_base_patch16_384 vit_b_16
    google/vit-base-patch16-224 google/vit-base-patch16-224-in21k google/vit-base-patch16-384"""
_B32 = """vit_base_patch32_224 vit_base_patch32_384 vit_b_32
    google/vit-base-patch32-224-in21k google/vit-base-patch32-384"""
_L16 = """vit_large_patch16_224 vit_large_patch16_384 vit_l_16
    google/vit-large-patch16-224 google/vit-large-patch16-224-in21k google/vit-large-patch16-384"""
_L32 = """vit_large_patch32_224 vit_large_patch32_384 vit_l_32
    google/vit-large-patch32-224-in21k google/vit-large-patch32-384"""
_R50_B16 = "vit_base_r50_s16_224 vit_base_r50_s16_384 google/vit-hybrid-base-bit-384"
VARIANTS = (
    vit("Ti", 16, 5_717_416, "vit_tiny_patch16_224 vit_tiny_patch16_384"),
    vit("S", 16, 22_050_664, "vit_small_patch16_224 vit_small_patch16_384"),
    vit("S", 32, 22_878_952, "vit_small_patch32_224 vit_small_patch32_384"),
    vit("B", 8, 86_576_872, "vit_base_patch8_224"),
    vit("B", 16, 86_567_656, _B16),
    vit("B", 32, 88_224_232, _B32),
    vit("L", 16, 304_326_632, _L16),
    vit("L", 32, 306_535_400, _L32),
    vit("H", 14, 632_045_800, "vit_huge_patch14_224 vit_h_14 google/vit-huge-patch14-224-in21k"),
    hybrid("R", "Ti", 16, (), 6_337_704, "vit_tiny_r_s16_p8_224 vit_tiny_r_s16_p8_384", patch_size=8),
    hybrid("R26", "S", 32, (2, 2, 2, 2), 36_431_912, "vit_small_r26_s32_224 vit_small_r26_s32_384"),
    hybrid("R26", "B", 32, (2, 2, 2, 2), 101_383_976, "vit_base_r26_s32_224"),
    hybrid("R50", "B", 16, (3, 4, 9), 98_659_112, _R50_B16),
    hybrid("R50", "B", 32, (3, 4, 6, 3), 110_945_832),
    hybrid("R50", "L", 16, (3, 4, 9), 316_483_624),
    hybrid("R50", "L", 32, (3, 4, 6, 3), 328_994_856, "vit_large_r50_s32_224 vit_large_r50_s32_384"),
    axial("B", 16, 171_620_584),
    axial("B", 32, 173_277_160),
    bit("R50", 1, 25_549_352, "resnetv2_50x1_bit google/bit-50"),
    bit("R50", 2, 97_988_712),
    bit("R101", 1, 44_541_480, "resnetv2_101x1_bit"),
    bit("R152", 1, 60_185_128),
    bit("R152", 2, 236_335_208, "resnetv2_152x2_bit"),
    bit("R200", 3, 568_633_000),
)
