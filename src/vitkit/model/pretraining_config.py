"""Configurations of masked, autoencoding and distilled pre-training. This module imports no torch."""

from dataclasses import dataclass, replace
from typing import Literal

from vitkit.core.errors import ConfigError, check_fraction, check_positive
from vitkit.core.sizes import pair
from vitkit.model.config import BiTConfig, ViTConfig

MaskedTarget = Literal["mean_color", "downsized", "pixels"]
COLOR_LEVELS = 8
"""Targets of masked patch prediction have 3 bits per channel (appendix B.1.2)."""
DOWNSIZED_SIDE = 4
"""Rows and columns of a patch in the target `downsized`."""


@dataclass(frozen=True, kw_only=True)
class MaskedConfig:
    """Masked patch prediction (appendix B.1.2).

    Args:
        target: Mean color of the patch at 3 bits per channel, the same for each cell of the patch downsized to
            4 × 4, or all of its pixels.
        corrupt_ratio: Fraction of patches that are corrupted and predicted.
        mask_token_ratio: Fraction of these that become the learned [mask] embedding.
        other_patch_ratio: Fraction of these that become the embedding of another patch of the image. The rest of them
            is unchanged.
    """

    target: MaskedTarget = "mean_color"
    corrupt_ratio: float = 0.5
    mask_token_ratio: float = 0.8
    other_patch_ratio: float = 0.1

    def __post_init__(self) -> None:
        for name in ("corrupt_ratio", "mask_token_ratio", "other_patch_ratio"):
            check_fraction(f"objective.masked.{name}", getattr(self, name), allow_one=True)
        check_positive("objective.masked.corrupt_ratio", self.corrupt_ratio)
        if self.mask_token_ratio + self.other_patch_ratio > 1.0 + 1e-9:
            message = "mask_token_ratio and other_patch_ratio are fractions of the same patches"
            total = self.mask_token_ratio + self.other_patch_ratio
            raise ConfigError(message, expected="a sum of at most 1", got=total)

    def output_shape(self, model: ViTConfig) -> tuple[int, int]:
        """Return the number of predictions per patch and the number of outputs of each (classes, or pixel values).

        >>> MaskedConfig().output_shape(ViTConfig()), MaskedConfig(target="pixels").output_shape(ViTConfig())
        ((1, 512), (1, 768))
        >>> MaskedConfig(target="downsized").output_shape(ViTConfig(channels=1))
        (16, 8)
        """
        height, width = pair(model.patch_size)
        if self.target == "pixels":
            return 1, height * width * model.channels
        if model.channels > 3:
            message = "color targets need images of at most three channels"
            got = f"{self.target}, and {model.channels} channels"
            raise ConfigError(message, expected="objective.masked.target=pixels", got=got)
        if self.target == "downsized" and min(height, width) < DOWNSIZED_SIDE:
            expected, got = f"{DOWNSIZED_SIDE}×{DOWNSIZED_SIDE} pixels or more", f"{height}×{width}"
            hint = "use objective.masked.target=mean_color or pixels"
            raise ConfigError("the patch is too small to be downsized", expected=expected, got=got, hint=hint)
        return DOWNSIZED_SIDE**2 if self.target == "downsized" else 1, COLOR_LEVELS**model.channels


@dataclass(frozen=True, kw_only=True)
class MAEConfig:
    """Masked autoencoder (MAE, He et al. 2021): masking ratio and decoder, with MAE's defaults.

    With `normalize` the target of each masked patch has mean 0 and variance 1.
    """

    mask_ratio: float = 0.75
    width: int = 512
    depth: int = 8
    heads: int = 16
    normalize: bool = True

    def __post_init__(self) -> None:
        check_fraction("objective.mae.mask_ratio", self.mask_ratio, allow_zero=False)
        for name in ("width", "depth", "heads"):
            check_positive(f"objective.mae.{name}", getattr(self, name))
        if self.width % 4 or self.width % self.heads:
            message = "objective.mae.width does not suit its heads and sine-cosine positions"
            raise ConfigError(message, expected=f"a multiple of 4 and of {self.heads}", got=self.width)


def make_student_config(config: ViTConfig | BiTConfig, *, token: bool) -> ViTConfig | BiTConfig:
    """Return the configuration of a student, with a distillation token if `token` is set (DeiT)."""
    if isinstance(config, ViTConfig):
        if config.tokens.distillation and not token:
            message = "the student has a distillation token and a head for it"
            raise ConfigError(message, expected="objective.distillation.token=true", got="false")
        return replace(config, tokens=replace(config.tokens, distillation=token))
    if token:
        message = "a distillation token needs a Vision Transformer"
        hint = "set objective.distillation.token=false: both losses then act on the one head"
        raise ConfigError(message, expected="a ViT", got="a ResNet", hint=hint)
    return config
