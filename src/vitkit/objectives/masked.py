"""Images without labels go in, the loss of telling what corrupted patches were comes out (appendix B.1.2).

    pixels → patches → half of them corrupted → what each was: its mean colour, 16 colours, or all its pixels

The loss counts corrupted patches only, those that were left as they are among them. Every image has the same number of
them, so that the mean over images is the mean over patches however the images are shared out.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Bool, Float, Int, Size, Tensor, pair
from vitkit.model.config import ViTConfig
from vitkit.model.masked import DOWNSIZED, LEVELS, MaskedConfig
from vitkit.model.patches import patchify, select_patches, unpatchify
from vitkit.objectives.objective import Chance, Outcome, Reconstruction

LEVEL = 256 // LEVELS


class Corruption(NamedTuple):
    """Which patches are corrupted, and how: the patch whose embedding each has, and whether it has the mask instead."""

    sources: Int[Tensor, "B N"]
    masked: Bool[Tensor, "B N"]
    places: Int[Tensor, "B asked"]


class MaskedTask(NamedTuple):
    """What is hidden, and what it was: classes (B, asked, questions), or pixels (B, asked, P)."""

    corruption: Corruption
    answers: Tensor


class MaskedPrediction:
    """Cross-entropy of colour classes, or the squared error of pixels from 0 to 1, at the corrupted patches.

    >>> from vitkit.model.masked import MaskedPatches
    >>> from vitkit.model.vit import ViT
    >>> config = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=16, classes=0)
    >>> objective, model = MaskedPrediction(MaskedConfig(), config), MaskedPatches(ViT(config), MaskedConfig())
    >>> pixels = torch.randint(0, 256, (2, 3, 8, 8))
    >>> task = objective.set_task(pixels / 255, pixels, chance=Chance(seed=0, use=0))
    >>> objective(model, pixels / 255, task).loss.shape
    torch.Size([])
    """

    def __init__(self, config: MaskedConfig, model: ViTConfig) -> None:
        self.config, self.patch_size, self.grid = config, pair(model.patch_size), model.grid
        if round(config.corrupted * model.patches) < 1:
            raise ConfigError(
                "no patch would be corrupted",
                expected=f"objective.masked.corrupted of {1 / model.patches:.2f} or more, or smaller patches",
                got=config.corrupted,
            )

    def set_task(self, images: Float[Tensor, "B C H W"], pixels: Tensor, *, chance: Chance) -> MaskedTask:
        """Corrupt patches, and say what they were."""
        patches = self.grid[0] * self.grid[1]
        noise = chance.uniform(len(pixels), numbers=3 * patches).unflatten(1, (3, patches))
        corruption = Corruption(*(each.to(images.device) for each in corrupt(noise, config=self.config)))
        asked = select_patches(patchify(pixels.float(), patch_size=self.patch_size), corruption.places)
        if self.config.target == "pixels":
            return MaskedTask(corruption, asked / 255)
        cells = 1 if self.config.target == "mean_colour" else DOWNSIZED
        return MaskedTask(corruption, colour_classes(asked, patch_size=self.patch_size, cells=cells))

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: MaskedTask) -> Outcome:
        """The mean loss of the corrupted patches, and the share of them whose classes are right, summed over images."""
        said = model(images, *targets.corruption).float()
        if self.config.target == "pixels":
            return Outcome(functional.mse_loss(said[:, :, 0], targets.answers), {})
        loss = functional.cross_entropy(said.flatten(0, 2), targets.answers.flatten())
        right = (said.argmax(dim=3) == targets.answers).float().mean(dim=(1, 2))
        return Outcome(loss, {"right": right.sum()})

    def reconstruct(
        self, model: nn.Module, images: Float[Tensor, "B C H W"], pixels: Tensor, targets: MaskedTask
    ) -> Reconstruction:
        """The images with every corrupted patch as the model says it was: in colours of 3 bits, or in pixels."""
        said, places = model(images, *targets.corruption).float(), targets.corruption.places
        pixels = pixels.float()
        if self.config.target == "pixels":
            guessed = said[:, :, 0].clamp(0, 1) * 255
        else:
            guessed = coloured(said.argmax(dim=3), channels=pixels.shape[1], patch_size=self.patch_size)
        return painted(pixels, guessed, places, patch_size=self.patch_size, grid=self.grid)


def corrupt(noise: Float[Tensor, "B 3 N"], *, config: MaskedConfig) -> Corruption:
    """Choose patches and what becomes of them, from three numbers for each patch.

    The first orders the patches, and so many of the lowest are corrupted; the second says how; the third names another
    patch of the same image. All images have as many corrupted patches; how many are masked is left to chance.

    >>> corrupt(torch.rand(1, 3, 4), config=MaskedConfig()).places.shape
    torch.Size([1, 2])
    """
    chosen, how, which = noise.unbind(dim=1)
    patches = noise.shape[2]
    places = chosen.argsort(dim=1)[:, : round(config.corrupted * patches)].sort(dim=1).values
    corrupted = torch.zeros_like(chosen, dtype=torch.bool).scatter(1, places, True)
    own = torch.arange(patches, device=noise.device).expand(len(noise), -1)
    other = (own + 1 + (which * (patches - 1)).long()) % patches if patches > 1 else own
    is_other = corrupted & (how >= config.mask) & (how < config.mask + config.other)
    return Corruption(torch.where(is_other, other, own), corrupted & (how < config.mask), places)


def colour_classes(
    patches: Float[Tensor, "B asked P"], *, patch_size: Size, cells: int = 1
) -> Int[Tensor, "B asked questions"]:
    """The class of the mean colour of each cell of patches of pixels, 0…255: 3 bits a channel, the first the highest.

    A patch has cells × cells cells; where they do not divide it they overlap by a pixel.

    >>> colour_classes(torch.tensor([[[255.0, 0.0, 32.0]]]), patch_size=1).item()  # 7 · 64 + 0 · 8 + 1
    449
    """
    height, width = pair(patch_size)
    split = rearrange(patches, "B asked (C p q) -> (B asked) C p q", p=height, q=width)
    # Whole numbers are summed exactly, so that their mean is below a level's edge exactly where it should be.
    means = functional.adaptive_avg_pool2d(split, cells)
    levels = (means / LEVEL).floor().clamp(0, LEVELS - 1).long().flatten(2)
    weights = LEVELS ** torch.arange(levels.shape[1] - 1, -1, -1, device=levels.device)
    return (levels * weights[:, None]).sum(dim=1).unflatten(0, patches.shape[:2])


def coloured(
    classes: Int[Tensor, "B asked questions"], *, channels: int, patch_size: Size
) -> Float[Tensor, "B asked P"]:
    """Patches of pixels in the middle of the colours that the classes stand for.

    >>> coloured(torch.tensor([[[449]]]), channels=3, patch_size=1).tolist()
    [[[240.0, 16.0, 48.0]]]
    """
    side = round(classes.shape[2] ** 0.5)
    levels = torch.stack([classes // LEVELS**power % LEVELS for power in range(channels - 1, -1, -1)], dim=2)
    cells = rearrange(levels, "B asked C (p q) -> (B asked) C p q", p=side).float() * LEVEL + LEVEL / 2
    patches = functional.interpolate(cells, size=pair(patch_size), mode="nearest")
    return patches.flatten(1).unflatten(0, classes.shape[:2])


def painted(
    pixels: Float[Tensor, "B C H W"],
    guessed: Float[Tensor, "B asked P"],
    places: Int[Tensor, "B asked"],
    *,
    patch_size: tuple[int, int],
    grid: tuple[int, int],
) -> Reconstruction:
    """Images beside themselves with the guessed patches put in at their places."""
    patches = patchify(pixels, patch_size=patch_size)
    asked = places[:, :, None].expand(-1, -1, patches.shape[2])
    put = unpatchify(patches.scatter(1, asked, guessed), patch_size=patch_size, grid=grid)
    where = torch.zeros_like(patches).scatter(1, asked, 1.0)
    hidden = unpatchify(where, patch_size=patch_size, grid=grid)[:, 0] > 0
    return Reconstruction(pixels, hidden, put)
