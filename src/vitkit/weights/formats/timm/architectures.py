"""timm's architectures that vitkit computes, with what their tensors do not determine.

Any other name is refused: a model with the same tensor names and shapes may compute something else, such as a norm
after the residual, another number of heads or rotary positions. `tests/weights/test_timm_architectures.py` compares
every architecture of the installed timm.
"""

import re
from typing import NamedTuple

from vitkit.model.config import Activation


class Architecture(NamedTuple):
    """Pooling (timm's name), activation and number of heads of an architecture.

    `pools_prefix` is timm's `pool_include_prefix`.
    """

    pooling: str
    activation: Activation
    heads: int
    pools_prefix: bool = False


_NAMES: dict[tuple[str, Activation, int], str] = {
    ("token", "gelu_erf", 2): "test_vit",
    ("token", "gelu_erf", 3): """
        deit_tiny_distilled_patch16_224 deit_tiny_patch16_224 vit_tiny_patch16_224 vit_tiny_patch16_384
        vit_tiny_r_s16_p8_224 vit_tiny_r_s16_p8_384
    """,
    ("token", "gelu_erf", 6): """
        deit3_small_patch16_224 deit3_small_patch16_384 deit_small_distilled_patch16_224 deit_small_patch16_224
        flexivit_small vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2 vit_small_patch16_224
        vit_small_patch16_36x1_224 vit_small_patch16_384 vit_small_patch32_224 vit_small_patch32_384
        vit_small_patch8_224 vit_small_r26_s32_224 vit_small_r26_s32_384
    """,
    ("token", "gelu_erf", 8): "deit3_medium_patch16_224",
    ("token", "gelu_erf", 12): """
        deit3_base_patch16_224 deit3_base_patch16_384 deit_base_distilled_patch16_224
        deit_base_distilled_patch16_384 deit_base_patch16_224 deit_base_patch16_384 flexivit_base
        vit_base_patch14_dinov2 vit_base_patch14_reg1_tipsv2 vit_base_patch14_reg4_dinov2 vit_base_patch16_224
        vit_base_patch16_224_miil vit_base_patch16_384 vit_base_patch32_224 vit_base_patch32_384
        vit_base_patch8_224 vit_base_r26_s32_224 vit_base_r50_s16_224 vit_base_r50_s16_384
    """,
    ("token", "gelu_erf", 14): "vit_base_patch16_plus_240 vit_base_patch32_plus_256",
    ("token", "gelu_erf", 16): """
        deit3_huge_patch14_224 deit3_large_patch16_224 deit3_large_patch16_384 eva_giant_patch14_clip_224
        flexivit_large vit_giant_patch14_224 vit_gigantic_patch14_224 vit_huge_patch14_224 vit_large_patch14_224
        vit_large_patch14_dinov2 vit_large_patch14_reg1_tipsv2 vit_large_patch14_reg4_dinov2
        vit_large_patch16_224 vit_large_patch16_384 vit_large_patch32_224 vit_large_patch32_384
        vit_large_r50_s32_224 vit_large_r50_s32_384 vit_so400m_patch14_reg1_tipsv2
    """,
    ("token", "swiglu", 24): "vit_giant_patch14_dinov2 vit_giant_patch14_reg1_tipsv2 vit_giant_patch14_reg4_dinov2",
    ("avg", "gelu_erf", 2): "test_vit2",
    ("avg", "gelu_erf", 3): "vit_tiny_patch16_dinov3_qkvb",
    ("avg", "gelu_erf", 4): "vit_wee_patch16_reg1_gap_256",
    ("avg", "gelu_erf", 5): "vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256",
    ("avg", "gelu_erf", 6): "vit_small_patch16_dinov3 vit_small_patch16_dinov3_qkvb",
    ("avg", "gelu_erf", 8): """
        vit_medium_patch16_gap_240 vit_medium_patch16_gap_256 vit_medium_patch16_gap_384
        vit_medium_patch16_reg1_gap_256 vit_medium_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_256
        vit_mediumd_patch16_reg4_gap_384
    """,
    ("avg", "gelu_erf", 10): """
        vit_betwixt_patch16_gap_256 vit_betwixt_patch16_reg1_gap_256 vit_betwixt_patch16_reg4_gap_256
        vit_betwixt_patch16_reg4_gap_384
    """,
    ("avg", "gelu_erf", 12): """
        vit_base_patch16_dinov3 vit_base_patch16_dinov3_qkvb vit_base_patch16_reg4_gap_256
        vit_base_patch16_siglip_gap_224 vit_base_patch16_siglip_gap_256 vit_base_patch16_siglip_gap_384
        vit_base_patch16_siglip_gap_512
    """,
    ("avg", "gelu_erf", 13): """
        vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384 vit_so150m2_patch16_reg1_gap_448
    """,
    ("avg", "gelu_erf", 14): "vit_so150m_patch16_reg4_gap_256 vit_so150m_patch16_reg4_gap_384",
    ("avg", "gelu_erf", 16): """
        eva_giant_patch14_224 eva_giant_patch14_336 eva_giant_patch14_560 eva_large_patch14_196
        eva_large_patch14_336 vit_base_patch16_gap_224 vit_giant_patch16_gap_224 vit_huge_patch14_gap_224
        vit_huge_patch16_gap_448 vit_large_patch16_dinov3 vit_large_patch16_dinov3_qkvb
        vit_large_patch16_siglip_gap_256 vit_large_patch16_siglip_gap_384 vit_so400m_patch14_siglip_gap_224
        vit_so400m_patch14_siglip_gap_378 vit_so400m_patch14_siglip_gap_384 vit_so400m_patch14_siglip_gap_448
        vit_so400m_patch14_siglip_gap_896
    """,
    ("avg", "gelu_tanh", 12): "vit_base_patch32_siglip_gap_256",
    ("avg", "gelu_tanh", 16): """
        vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384 vit_large_patch16_siglip_gap_512
        vit_so400m_patch16_siglip_gap_256 vit_so400m_patch16_siglip_gap_384 vit_so400m_patch16_siglip_gap_512
    """,
    ("avg", "swiglu", 6): "vit_small_plus_patch16_dinov3 vit_small_plus_patch16_dinov3_qkvb",
    ("avg", "swiglu", 20): "vit_huge_plus_patch16_dinov3 vit_huge_plus_patch16_dinov3_qkvb",
    ("avg", "swiglu", 32): "vit_7b_patch16_dinov3",
    ("map", "gelu_erf", 3): "test_vit3",
    ("map", "gelu_erf", 12): """
        vit_base_patch16_siglip_224 vit_base_patch16_siglip_256 vit_base_patch16_siglip_384
        vit_base_patch16_siglip_512
    """,
    ("map", "gelu_erf", 16): """
        vit_large_patch16_siglip_256 vit_large_patch16_siglip_384 vit_so400m_patch14_siglip_224
        vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384
    """,
    ("map", "gelu_tanh", 12): "vit_base_patch32_siglip_256",
    ("map", "gelu_tanh", 16): """
        vit_giantopt_patch16_siglip_256 vit_giantopt_patch16_siglip_384 vit_large_patch16_siglip_512
        vit_so400m_patch16_siglip_256 vit_so400m_patch16_siglip_384 vit_so400m_patch16_siglip_512
    """,
}
ARCHITECTURES: dict[str, Architecture] = {
    name: Architecture(*facts, pools_prefix=name == "test_vit3")
    for facts, names in _NAMES.items()
    for name in names.split()
}
"""Known Vision Transformers by name."""
RESNETS = r"resnetv2_(50x[13]|101x[13]|152x[24])_bit"
"""Known BiT ResNets."""
LEGACY_SUFFIXES = r"(_in21k|_sam|_dino)$"
"""Suffixes by which timm named weights of the same architecture before 0.8."""


def find_architecture(name: str) -> Architecture | None:
    """Return what is known about an architecture, or None.

    >>> find_architecture("vit_base_patch16_gap_224").heads
    16
    """
    return ARCHITECTURES.get(re.sub(LEGACY_SUFFIXES, "", name))


def find_name_in_file(name: str) -> str | None:
    """Return the known architecture that a file is named after, or None.

    >>> find_name_in_file("vit_base_patch16_224.augreg_in21k.safetensors")
    'vit_base_patch16_224'
    """
    start = re.split(r"[.-]", name, maxsplit=1)[0]
    return start if find_architecture(start) else None
