"""Images without labels go in, the loss of filling in hidden patches comes out (MAE, He et al., 2021).

Three quarters of the patches are hidden, the encoder sees only the others, and the error is squared, over the pixels of
hidden patches only, each patch with mean 0 and variance 1.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Float, Int, Size, Tensor, pair
from vitkit.data.transforms import Preprocessing
from vitkit.model.config import ViTConfig
from vitkit.model.masked import AutoencoderConfig
from vitkit.model.patches import patchify, select_patches
from vitkit.objectives.masked import painted
from vitkit.objectives.objective import Chance, Outcome, Reconstruction

EPSILON = 1e-6
"""Added to a patch's variance, as in the released code: a patch of one colour has none."""


class FillingTask(NamedTuple):
    """The patches that are seen, those that are asked for, and the latter's pixels."""

    visible: Int[Tensor, "B kept"]
    places: Int[Tensor, "B asked"]
    answers: Float[Tensor, "B asked P"]


class FillingIn:
    """The mean squared error of hidden patches, of images as the model takes them.

    >>> from vitkit.model.masked import MaskedAutoencoder
    >>> from vitkit.model.vit import ViT
    >>> vit = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=16, classes=0)
    >>> config, fed = AutoencoderConfig(width=8, depth=1, heads=2), Preprocessing(image_size=8)
    >>> pixels = torch.randint(0, 256, (2, 3, 8, 8)).byte()
    >>> images, objective = fed.normalise(pixels), FillingIn(config, vit, fed=fed)
    >>> task = objective.set_task(images, pixels, chance=Chance(seed=0, use=0))
    >>> objective(MaskedAutoencoder(ViT(vit), config), images, task).loss.shape
    torch.Size([])
    """

    def __init__(self, config: AutoencoderConfig, model: ViTConfig, *, fed: Preprocessing) -> None:
        self.config, self.fed = config, fed
        self.patch_size, self.grid = pair(model.patch_size), model.grid
        self.visible = int(model.patches * (1 - config.hidden))  # rounded down, as in the released code
        if not 1 <= self.visible < model.patches:
            raise ConfigError(
                "either nothing would be hidden or nothing seen",
                expected=f"objective.autoencoder.hidden to leave 1 to {model.patches - 1} of {model.patches} patches",
                got=config.hidden,
                hint="use smaller patches",
            )

    def set_task(self, images: Float[Tensor, "B C H W"], pixels: Tensor, *, chance: Chance) -> FillingTask:
        """Hide patches, and say what they were."""
        return self.task(images, chance.uniform(len(images), numbers=self.grid[0] * self.grid[1]))

    def task(self, images: Float[Tensor, "B C H W"], noise: Float[Tensor, "B N"]) -> FillingTask:
        """Show the patches with the lowest noise, and ask for the others."""
        order = noise.argsort(dim=1).to(images.device)
        visible, places = (part.sort(dim=1).values for part in (order[:, : self.visible], order[:, self.visible :]))
        patches = in_mae_order(patchify(images, patch_size=self.patch_size), patch_size=self.patch_size)
        answers = select_patches(patches, places)
        return FillingTask(visible, places, normalised(answers) if self.config.normalise else answers)

    def __call__(self, model: nn.Module, images: Float[Tensor, "B C H W"], targets: FillingTask) -> Outcome:
        """The mean squared error over hidden patches; there is no share of right ones to show."""
        said = model(images, targets.visible, targets.places).float()
        return Outcome(functional.mse_loss(said, targets.answers), {})

    def reconstruct(
        self, model: nn.Module, images: Float[Tensor, "B C H W"], pixels: Tensor, targets: FillingTask
    ) -> Reconstruction:
        """The images with every hidden patch as the model fills it in.

        Where patches are asked for with mean 0 and variance 1, the picture borrows both from the patch itself: what it
        shows is whether the model knows what is in the patch, not how bright it is.
        """
        said = model(images, targets.visible, targets.places).float()
        if self.config.normalise:
            patches = in_mae_order(patchify(images, patch_size=self.patch_size), patch_size=self.patch_size)
            mean, deviation = moments(select_patches(patches, targets.places))
            said = said * deviation + mean
        height, width = self.patch_size
        guessed = rearrange(said, "B asked (p q C) -> B asked C (p q)", p=height, q=width)
        shift, scale = (torch.tensor(each, device=said.device) * 255 for each in (self.fed.mean, self.fed.deviation))
        guessed = (guessed * scale[:, None] + shift[:, None]).clamp(0, 255).flatten(2)
        return painted(pixels.float(), guessed, targets.places, patch_size=self.patch_size, grid=self.grid)


def in_mae_order(patches: Float[Tensor, "B N P"], *, patch_size: Size) -> Float[Tensor, "B N P"]:
    """Patches of channel, row, column in the order of MAE's decoder: row, column, channel.

    >>> in_mae_order(torch.arange(4.0)[None, None], patch_size=(1, 2)).flatten().tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    height, width = pair(patch_size)
    return rearrange(patches, "B N (C p q) -> B N (p q C)", p=height, q=width)


def moments(patches: Float[Tensor, "B N P"]) -> tuple[Float[Tensor, "B N 1"], Float[Tensor, "B N 1"]]:
    """The mean of each patch and its deviation, as the released code has them.

    >>> moments(torch.tensor([[[0.0, 2.0]]]))[0].item()
    1.0
    """
    mean, variance = patches.mean(dim=2, keepdim=True), patches.var(dim=2, keepdim=True)
    return mean, (variance + EPSILON).sqrt()


def normalised(patches: Float[Tensor, "B N P"]) -> Float[Tensor, "B N P"]:
    """Patches with mean 0 and variance 1.

    >>> normalised(torch.tensor([[[0.0, 2.0]]]))
    tensor([[[-0.7071,  0.7071]]])
    """
    mean, deviation = moments(patches)
    return (patches - mean) / deviation
