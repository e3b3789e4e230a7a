"""Masked patch prediction (appendix B.1.2).

Half of the patches are corrupted, and the model predicts what each was: its mean color, 16 mean colors, or all of its
pixels. Every image has the same number of corrupted patches, so the mean over images is the mean over patches however
the images are divided among ranks.
"""

import math
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Bool, Float, Int, Tensor
from vitkit.core.sizes import Size, pair
from vitkit.data.preprocessing import Preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.patches import patchify, select_patches, unpatchify
from vitkit.model.pretraining import MaskedPatches, get_encoder
from vitkit.model.pretraining_config import COLOR_LEVELS, DOWNSIZED_SIDE, MaskedConfig
from vitkit.objectives.base import LossOutput, Objective, PerImageRNG, PretrainingBuilder, Reconstruction, require_vit
from vitkit.objectives.teacher import Teacher
from vitkit.zoo.flops import count_dense_flops
from vitkit.zoo.registry import Model
from vitkit.zoo.variants import ModelConfig

LEVEL = 256 // COLOR_LEVELS


class Corruption(NamedTuple):
    """Indices of the corrupted patches; for every patch the one whose embedding it gets, and whether it is masked."""

    sources: Int[Tensor, "B N"]
    masked: Bool[Tensor, "B N"]
    indices: Int[Tensor, "B M"]


class MaskedTargets(NamedTuple):
    """Corrupted patches and what to predict for them: color classes (B, M, cells), or pixels (B, M, P)."""

    corruption: Corruption
    values: Tensor


class MaskedPatchObjective:
    """Cross-entropy of color classes, or squared error of pixels in [0, 1], at the corrupted patches."""

    def __init__(self, config: MaskedConfig, model: ViTConfig) -> None:
        self.config, self.patch_size, self.grid = config, pair(model.patch_size), model.grid
        if round(config.corrupt_ratio * model.patches) < 1:
            raise ConfigError(
                "no patch would be corrupted",
                expected=f"objective.masked.corrupt_ratio of {1 / model.patches:.2f} or more, or smaller patches",
                got=config.corrupt_ratio,
            )

    def make_targets(self, images: Float[Tensor, "B C H W"], pixels: Tensor, *, rng: PerImageRNG) -> MaskedTargets:
        """Choose the corrupted patches at random and return what they were."""
        patches = self.grid[0] * self.grid[1]
        noise = rng.uniform(len(pixels), numbers=3 * patches).unflatten(1, (3, patches))
        corruption = Corruption(*(each.to(images.device) for each in draw_corruption(noise, config=self.config)))
        patch_pixels = select_patches(patchify(pixels.float(), patch_size=self.patch_size), corruption.indices)
        if self.config.target == "pixels":
            return MaskedTargets(corruption, patch_pixels / 255)
        cells = 1 if self.config.target == "mean_color" else DOWNSIZED_SIDE
        return MaskedTargets(corruption, color_classes(patch_pixels, patch_size=self.patch_size, cells=cells))

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: MaskedTargets) -> LossOutput:
        """Return the mean loss of the corrupted patches, and each image's fraction of correct classes, summed."""
        predicted = model(images, *targets.corruption).float()
        if self.config.target == "pixels":
            return LossOutput(functional.mse_loss(predicted[:, :, 0], targets.values), {})
        loss = functional.cross_entropy(predicted.flatten(0, 2), targets.values.flatten())
        correct = (predicted.argmax(dim=3) == targets.values).float().mean(dim=(1, 2))
        return LossOutput(loss, {"patch_accuracy": correct.sum()})

    def reconstruct(
        self, model: nn.Module, images: Float[Tensor, "B C H W"], pixels: Tensor, targets: MaskedTargets
    ) -> Reconstruction:
        """Return the images with the model's prediction of every corrupted patch, in colors of 3 bits or in pixels."""
        predicted, pixels = model(images, *targets.corruption).float(), pixels.float()
        if self.config.target == "pixels":
            values = predicted[:, :, 0].clamp(0, 1) * 255
        else:
            values = classes_to_pixels(predicted.argmax(dim=3), channels=pixels.shape[1], patch_size=self.patch_size)
        indices = targets.corruption.indices
        return paste_patches(pixels, values, indices, patch_size=self.patch_size, grid=self.grid)


class MaskedPatchBuilder(PretrainingBuilder):
    """Builder of masked patch prediction, which wraps the encoder with a mask token and a prediction head."""

    def wrap(self, model: Model, *, generator: torch.Generator | None = None) -> nn.Module:
        return MaskedPatches(require_vit(model), self.config.masked, generator=generator)

    def build(self, model: nn.Module, *, preprocessing: Preprocessing, teacher: Teacher | None) -> Objective[Any]:
        return MaskedPatchObjective(self.config.masked, require_vit(get_encoder(model)).config)

    def pretraining_config(self) -> MaskedConfig:
        return self.config.masked

    def forward_flops(self, model: ModelConfig) -> int:
        """Return the FLOPs of a forward pass with the prediction head."""
        if not isinstance(model, ViTConfig):
            return super().forward_flops(model)
        corrupted = round(self.config.masked.corrupt_ratio * model.patches)
        outputs = math.prod(self.config.masked.output_shape(model))
        return super().forward_flops(model) + count_dense_flops(corrupted, model.width, outputs)


def draw_corruption(noise: Float[Tensor, "B 3 N"], *, config: MaskedConfig) -> Corruption:
    """Choose the corrupted patches and their corruption, from three random numbers for each patch.

    Patches with the lowest first numbers are corrupted; the second number decides whether by the mask token, another
    patch or not at all; the third selects the other patch of the same image. The number of corrupted patches is fixed,
    the number of masked ones is random.
    """
    order, action, offset = noise.unbind(dim=1)
    patches = noise.shape[2]
    indices = order.argsort(dim=1)[:, : round(config.corrupt_ratio * patches)].sort(dim=1).values
    corrupted = torch.zeros_like(order, dtype=torch.bool).scatter(1, indices, True)
    own = torch.arange(patches, device=noise.device).expand(len(noise), -1)
    other = (own + 1 + (offset * (patches - 1)).long()) % patches if patches > 1 else own
    is_other = (
        corrupted & (action >= config.mask_token_ratio) & (action < config.mask_token_ratio + config.other_patch_ratio)
    )
    return Corruption(torch.where(is_other, other, own), corrupted & (action < config.mask_token_ratio), indices)


def color_classes(patches: Float[Tensor, "B M P"], *, patch_size: Size, cells: int = 1) -> Int[Tensor, "B M cells"]:
    """Return the class of the mean color of each cell of a patch: 3 bits per channel, the first channel highest.

    A patch has cells × cells cells, which overlap by a pixel if they do not divide it.

    >>> color_classes(torch.tensor([[[255.0, 0.0, 32.0]]]), patch_size=1).item()  # 7 · 64 + 0 · 8 + 1
    449
    """
    height, width = pair(patch_size)
    split = rearrange(patches, "B M (C p q) -> (B M) C p q", p=height, q=width)
    # Integers are summed exactly, so the mean is on the right side of a level's edge.
    means = functional.adaptive_avg_pool2d(split, cells)
    levels = (means / LEVEL).floor().clamp(0, COLOR_LEVELS - 1).long().flatten(2)
    weights = COLOR_LEVELS ** torch.arange(levels.shape[1] - 1, -1, -1, device=levels.device)
    return (levels * weights[:, None]).sum(dim=1).unflatten(0, patches.shape[:2])


def classes_to_pixels(classes: Int[Tensor, "B M cells"], *, channels: int, patch_size: Size) -> Float[Tensor, "B M P"]:
    """Return patches of the colors in the middle of the classes.

    >>> classes_to_pixels(torch.tensor([[[449]]]), channels=3, patch_size=1).tolist()
    [[[240.0, 16.0, 48.0]]]
    """
    side = round(classes.shape[2] ** 0.5)
    levels = torch.stack(
        [classes // COLOR_LEVELS**power % COLOR_LEVELS for power in range(channels - 1, -1, -1)], dim=2
    )
    cells = rearrange(levels, "B M C (p q) -> (B M) C p q", p=side).float() * LEVEL + LEVEL / 2
    patches = functional.interpolate(cells, size=pair(patch_size), mode="nearest")
    return patches.flatten(1).unflatten(0, classes.shape[:2])


def paste_patches(
    pixels: Float[Tensor, "B C H W"],
    values: Float[Tensor, "B M P"],
    indices: Int[Tensor, "B M"],
    *,
    patch_size: tuple[int, int],
    grid: tuple[int, int],
) -> Reconstruction:
    """Return the images with some patches replaced by predicted values."""
    patches = patchify(pixels, patch_size=patch_size)
    index = indices[:, :, None].expand(-1, -1, patches.shape[2])
    predicted = unpatchify(patches.scatter(1, index, values), patch_size=patch_size, grid=grid)
    mask = torch.zeros_like(patches).scatter(1, index, 1.0)
    return Reconstruction(pixels, unpatchify(mask, patch_size=patch_size, grid=grid)[:, 0] > 0, predicted)
