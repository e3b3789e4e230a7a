"""Masked autoencoder objective (MAE, He et al., 2021).

Three quarters of the patches are hidden, the encoder sees only the others, and the loss is the mean squared error of
the pixels of hidden patches, each normalized to mean 0 and variance 1.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.core.sizes import Size, pair
from vitkit.data.preprocessing import Preprocessing
from vitkit.model.config import HeadConfig, PositionConfig, TokenConfig, ViTConfig
from vitkit.model.patches import patchify, select_patches
from vitkit.model.pretraining import MaskedAutoencoder, get_encoder
from vitkit.model.pretraining_config import MAEConfig
from vitkit.objectives.base import LossOutput, Objective, PerImageRNG, PretrainingBuilder, Reconstruction, require_vit
from vitkit.objectives.masked_patches import paste_patches
from vitkit.objectives.teacher import Teacher
from vitkit.zoo.flops import count_dense_flops, count_forward_flops
from vitkit.zoo.registry import Model
from vitkit.zoo.variants import ModelConfig

EPSILON = 1e-6
"""Added to a patch's variance, as in the released code: a patch of one color has variance 0."""


class MAETargets(NamedTuple):
    """Indices of visible and of hidden patches, and the values to predict for the hidden ones."""

    visible: Int[Tensor, "B V"]
    hidden: Int[Tensor, "B M"]
    values: Float[Tensor, "B M P"]


class MAEObjective:
    """Mean squared error of hidden patches of the normalized images."""

    def __init__(self, config: MAEConfig, model: ViTConfig, *, preprocessing: Preprocessing) -> None:
        self.config, self.preprocessing = config, preprocessing
        self.patch_size, self.grid = pair(model.patch_size), model.grid
        self.visible = count_visible(config, model)
        if not 1 <= self.visible < model.patches:
            raise ConfigError(
                "objective.mae.mask_ratio leaves no patch to see, or none to predict",
                expected=f"1 to {model.patches - 1} of {model.patches} patches visible",
                got=config.mask_ratio,
                hint="use smaller patches",
            )

    def make_targets(self, images: Float[Tensor, "B C H W"], pixels: Tensor, *, rng: PerImageRNG) -> MAETargets:
        """Choose the hidden patches at random and return their values."""
        return self.targets_from_noise(images, rng.uniform(len(images), numbers=self.grid[0] * self.grid[1]))

    def targets_from_noise(self, images: Float[Tensor, "B C H W"], noise: Float[Tensor, "B N"]) -> MAETargets:
        """Make the patches with the lowest noise visible, and return the values of the others."""
        order = noise.argsort(dim=1).to(images.device)
        visible, hidden = (part.sort(dim=1).values for part in (order[:, : self.visible], order[:, self.visible :]))
        values = self.select_values(images, hidden)
        if self.config.normalize:
            mean, deviation = moments(values)
            values = (values - mean) / deviation
        return MAETargets(visible, hidden, values)

    def select_values(self, images: Float[Tensor, "B C H W"], indices: Int[Tensor, "B M"]) -> Float[Tensor, "B M P"]:
        """Return the values of the patches at `indices`, in the order of MAE's decoder."""
        patches = patchify(images, patch_size=self.patch_size)
        return to_mae_order(select_patches(patches, indices), patch_size=self.patch_size)

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: MAETargets) -> LossOutput:
        """Return the mean squared error of the hidden patches."""
        predicted = model(images, targets.visible, targets.hidden).float()
        return LossOutput(functional.mse_loss(predicted, targets.values), {})

    def reconstruct(
        self, model: nn.Module, images: Float[Tensor, "B C H W"], pixels: Tensor, targets: MAETargets
    ) -> Reconstruction:
        """Return the images with the model's prediction of every hidden patch.

        If targets are normalized, mean and variance are taken from the hidden patch itself: the picture shows whether
        the model knows the content of the patch, not its brightness.
        """
        predicted = model(images, targets.visible, targets.hidden).float()
        if self.config.normalize:
            mean, deviation = moments(self.select_values(images, targets.hidden))
            predicted = predicted * deviation + mean
        height, width = self.patch_size
        values = rearrange(predicted, "B M (p q C) -> B M C (p q)", p=height, q=width)
        shift, scale = (
            torch.tensor(each, device=values.device) * 255 for each in (self.preprocessing.mean, self.preprocessing.std)
        )
        values = (values * scale[:, None] + shift[:, None]).clamp(0, 255).flatten(2)
        return paste_patches(pixels.float(), values, targets.hidden, patch_size=self.patch_size, grid=self.grid)


class MAEBuilder(PretrainingBuilder):
    """Builder of the MAE objective, which wraps the encoder with a decoder."""

    def wrap(self, model: Model, *, generator: torch.Generator | None = None) -> nn.Module:
        return MaskedAutoencoder(require_vit(model), self.config.mae, generator=generator)

    def build(self, model: nn.Module, *, preprocessing: Preprocessing, teacher: Teacher | None) -> Objective[Any]:
        return MAEObjective(self.config.mae, require_vit(get_encoder(model)).config, preprocessing=preprocessing)

    def pretraining_config(self) -> MAEConfig:
        return self.config.mae

    def forward_flops(self, model: ModelConfig) -> int:
        """Return the FLOPs of a forward pass: the encoder sees some patches, the decoder all of them."""
        if not isinstance(model, ViTConfig):
            return super().forward_flops(model)
        config, visible = self.config.mae, count_visible(self.config.mae, model)
        hidden, (height, width) = model.patches - visible, pair(model.patch_size)
        pixels = model.channels * height * width
        encoder = replace(model, image_size=(height, width * visible))  # any grid of as many patches
        decoder = replace(model, width=config.width, depth=config.depth, heads=config.heads, mlp_dim=4 * config.width)
        positions, tokens = PositionConfig(kind="none"), TokenConfig(registers=model.prefix)
        decoder = replace(decoder, positions=positions, tokens=tokens, pooling="mean", head=HeadConfig())
        embedding = count_dense_flops(model.prefix + visible, model.width, config.width)
        return (
            sum(count_forward_flops(encoder).values())
            + count_dense_flops(hidden, pixels, model.width)
            + sum((count_forward_flops(decoder) | {"patch embedding": embedding}).values())
            + count_dense_flops(hidden, config.width, pixels)
        )


def count_visible(config: MAEConfig, model: ViTConfig) -> int:
    """Return the number of visible patches, rounded down as in the released code."""
    return int(model.patches * (1 - config.mask_ratio))


def to_mae_order(patches: Float[Tensor, "B N P"], *, patch_size: Size) -> Float[Tensor, "B N P"]:
    """Reorder patches from (channel, row, column) to (row, column, channel), the order of MAE's decoder.

    >>> to_mae_order(torch.arange(4.0)[None, None], patch_size=(1, 2)).flatten().tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    height, width = pair(patch_size)
    return rearrange(patches, "B N (C p q) -> B N (p q C)", p=height, q=width)


def moments(patches: Float[Tensor, "B N P"]) -> tuple[Float[Tensor, "B N 1"], Float[Tensor, "B N 1"]]:
    """Return the mean and standard deviation of each patch, as in the released code."""
    mean, variance = patches.mean(dim=2, keepdim=True), patches.var(dim=2, keepdim=True)
    return mean, (variance + EPSILON).sqrt()
