"""The variant table: each model of the paper with its configuration, exact parameter count and other names.

Counts are for 1000 classes at 224 pixels, with a plain linear head. They are written down rather than computed, so
that a change to the model code that moves one is seen.
"""

from dataclasses import dataclass, replace

from vitkit.model.config import ViTConfig
from vitkit.model.encoder import BlockConfig
from vitkit.model.resnet import BackboneConfig, BiTConfig

ModelConfig = ViTConfig | BiTConfig


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table."""

    name: str
    config: ModelConfig
    parameters: int
    aliases: tuple[str, ...]

    @property
    def kind(self) -> str:
        """What family the model is of: vit, hybrid, axial or resnet."""
        if isinstance(self.config, BiTConfig):
            return "resnet"
        if self.config.backbone:
            return "hybrid"
        return "axial" if self.config.block.axial else "vit"


# Table 1, and the two smaller sizes of the released code: width, depth, heads, mlp_dim.
SIZES = {
    "Ti": ViTConfig(width=192, depth=12, heads=3, mlp_dim=768),
    "S": ViTConfig(width=384, depth=12, heads=6, mlp_dim=1536),
    "B": ViTConfig(width=768, depth=12, heads=12, mlp_dim=3072),
    "L": ViTConfig(width=1024, depth=24, heads=16, mlp_dim=4096),
    "H": ViTConfig(width=1280, depth=32, heads=16, mlp_dim=5120),
}
RESNETS = {"R50": (3, 4, 6, 3), "R101": (3, 4, 23, 3), "R152": (3, 8, 36, 3), "R200": (3, 24, 36, 3)}


def vit(size: str, patch_size: int, *, parameters: int, aliases: str = "") -> Variant:
    """A Vision Transformer: images cut into square patches."""
    config = replace(SIZES[size], patch_size=patch_size)
    return _variant(f"{size}/{patch_size}", config, parameters, f"ViT-{size}_{patch_size} {aliases}")


def hybrid(
    resnet: str,
    size: str,
    stride: int,
    *,
    units: tuple[int, ...],
    patch_size: int = 1,
    parameters: int,
    aliases: str = "",
) -> Variant:
    """A ResNet whose feature map is cut into patches; the name gives the released code's nominal stride."""
    config = replace(SIZES[size], backbone=BackboneConfig(units=units), patch_size=patch_size)
    return _variant(f"{resnet}+{size}/{stride}", config, parameters, f"{resnet}+ViT-{size}_{stride} {aliases}")


def axial(size: str, patch_size: int, *, parameters: int) -> Variant:
    """Rows, then columns, in each block, averaged over patches (D.6)."""
    config = replace(SIZES[size], patch_size=patch_size, pooling="mean", block=BlockConfig(axial=True))
    return _variant(f"Axial-{size}/{patch_size}", config, parameters, f"Axial-ViT-{size}_{patch_size}")


def bit(resnet: str, width_factor: int, *, parameters: int, aliases: str = "") -> Variant:
    """A Big Transfer ResNet, the baseline."""
    name = f"{resnet}x{width_factor}"
    config = BiTConfig(units=RESNETS[resnet], width_factor=width_factor)
    return _variant(f"BiT-{name}", config, parameters, f"{name} BiT-M-{name} BiT-S-{name} {aliases}")


def _variant(name: str, config: ModelConfig, parameters: int, aliases: str) -> Variant:
    return Variant(name=name, config=config, parameters=parameters, aliases=tuple(aliases.split()))


VARIANTS = (
    vit("Ti", 16, parameters=5_717_416, aliases="vit_tiny_patch16_224 vit_tiny_patch16_384"),
    vit("S", 16, parameters=22_050_664, aliases="vit_small_patch16_224 vit_small_patch16_384"),
    vit("S", 32, parameters=22_878_952, aliases="vit_small_patch32_224 vit_small_patch32_384"),
    vit("B", 8, parameters=86_576_872, aliases="vit_base_patch8_224"),
    vit(
        "B",
        16,
        parameters=86_567_656,
        aliases="vit_base_patch16_224 vit_base_patch16_384 vit_b_16 google/vit-base-patch16-224 "
        "google/vit-base-patch16-224-in21k google/vit-base-patch16-384",
    ),
    vit(
        "B",
        32,
        parameters=88_224_232,
        aliases="vit_base_patch32_224 vit_base_patch32_384 vit_b_32 google/vit-base-patch32-224-in21k "
        "google/vit-base-patch32-384",
    ),
    vit(
        "L",
        16,
        parameters=304_326_632,
        aliases="vit_large_patch16_224 vit_large_patch16_384 vit_l_16 google/vit-large-patch16-224 "
        "google/vit-large-patch16-224-in21k google/vit-large-patch16-384",
    ),
    vit(
        "L",
        32,
        parameters=306_535_400,
        aliases="vit_large_patch32_224 vit_large_patch32_384 vit_l_32 google/vit-large-patch32-224-in21k "
        "google/vit-large-patch32-384",
    ),
    vit(
        "H",
        14,
        parameters=632_045_800,
        aliases="vit_huge_patch14_224 vit_h_14 google/vit-huge-patch14-224-in21k",
    ),
    hybrid(
        "R",
        "Ti",
        16,
        units=(),
        patch_size=8,
        parameters=6_337_704,
        aliases="vit_tiny_r_s16_p8_224 vit_tiny_r_s16_p8_384",
    ),
    hybrid(
        "R26",
        "S",
        32,
        units=(2, 2, 2, 2),
        parameters=36_431_912,
        aliases="vit_small_r26_s32_224 vit_small_r26_s32_384",
    ),
    hybrid("R26", "B", 32, units=(2, 2, 2, 2), parameters=101_383_976, aliases="vit_base_r26_s32_224"),
    hybrid(
        "R50",
        "B",
        16,
        units=(3, 4, 9),
        parameters=98_659_112,
        aliases="vit_base_r50_s16_224 vit_base_r50_s16_384 google/vit-hybrid-base-bit-384",
    ),
    hybrid("R50", "B", 32, units=(3, 4, 6, 3), parameters=110_945_832),
    hybrid("R50", "L", 16, units=(3, 4, 9), parameters=316_483_624),
    hybrid(
        "R50",
        "L",
        32,
        units=(3, 4, 6, 3),
        parameters=328_994_856,
        aliases="vit_large_r50_s32_224 vit_large_r50_s32_384",
    ),
    axial("B", 16, parameters=171_620_584),
    axial("B", 32, parameters=173_277_160),
    bit("R50", 1, parameters=25_549_352, aliases="resnetv2_50x1_bit google/bit-50"),
    bit("R50", 2, parameters=97_988_712),
    bit("R101", 1, parameters=44_541_480, aliases="resnetv2_101x1_bit"),
    bit("R152", 1, parameters=60_185_128),
    bit("R152", 2, parameters=236_335_208, aliases="resnetv2_152x2_bit"),
    bit("R200", 3, parameters=568_633_000),
)
