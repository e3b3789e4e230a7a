"""Hidden patches, and what a model that was trained on them makes of them."""

import pytest
import torch

from vitkit.data.preprocessing import Preprocessing
from vitkit.inspection import reconstruction
from vitkit.model.config import ViTConfig
from vitkit.model.pretraining import MaskedAutoencoder, MaskedPatches
from vitkit.model.pretraining_config import MAEConfig, MaskedConfig
from vitkit.model.vit import ViT

SMALL = ViTConfig(image_size=32, patch_size=8, width=16, depth=1, heads=2, mlp_dim=32, num_classes=0)
FED = Preprocessing(image_size=32, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
LIGHT = MAEConfig(width=16, depth=1, heads=2)


def pixels() -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def of_patches(hidden: torch.Tensor) -> torch.Tensor:
    """Whether each patch is hidden; all of its pixels are, or none."""
    tiles = hidden.unflatten(1, (4, 8)).unflatten(3, (4, 8)).float().mean(dim=(2, 4))
    assert set(tiles.unique().tolist()) <= {0.0, 1.0}
    return tiles.bool()


@torch.no_grad()
def test_constant_prediction_fills_masked_patches() -> None:
    model = MaskedPatches(ViT(SMALL), MaskedConfig()).eval()
    model.mask_head.weight.zero_()
    model.mask_head.bias.zero_()[449] = 1.0  # red 7, green 0, blue 1 of 0 to 7
    found = reconstruction(model, FED.normalize(pixels()), preprocessing=FED)
    assert (of_patches(found.hidden).sum(dim=(1, 2)) == 8).all()
    painted = found.predicted.permute(0, 2, 3, 1)[found.hidden]
    assert torch.equal(painted, torch.tensor([240.0, 16.0, 48.0]).expand_as(painted))
    # Up to rounding in float32 of numbers up to 255.
    seen = ~found.hidden[:, None].expand_as(found.images)
    torch.testing.assert_close(found.predicted[seen], pixels().float()[seen], atol=1e-3, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("normalize", [True, False])
def test_zero_autoencoder_predicts_the_mean(normalize: bool) -> None:
    config = MAEConfig(width=16, depth=1, heads=2, normalize=normalize)
    model = MaskedAutoencoder(ViT(SMALL), config).eval()
    model.decoder_pred.weight.zero_()
    model.decoder_pred.bias.zero_()
    found = reconstruction(model, FED.normalize(pixels()), preprocessing=FED)
    assert (of_patches(found.hidden).sum(dim=(1, 2)) == 12).all()
    painted = found.predicted.permute(0, 2, 3, 1)[found.hidden]
    if normalize:  # the mean of each patch, over all its numbers: one brightness in the model's units
        units = (painted / 255 - torch.tensor(FED.mean)) / torch.tensor(FED.std)
        torch.testing.assert_close(units, units[:, :1].expand_as(units), atol=1e-4, rtol=0)
    else:  # zero in the model's units is the mean of the data
        torch.testing.assert_close(painted, torch.tensor(FED.mean).expand_as(painted) * 255, atol=1e-3, rtol=0)


def test_seed_chooses_masked_patches() -> None:
    model = MaskedAutoencoder(ViT(SMALL), LIGHT).eval()
    images = FED.normalize(pixels())
    first, again, other = (reconstruction(model, images, preprocessing=FED, seed=seed).hidden for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
