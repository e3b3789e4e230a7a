"""A model that was trained to fill in patches, and images, go in; what it makes of hidden patches comes out."""

import torch

from vitkit.core.shapes import Float, Tensor
from vitkit.data.transforms import Preprocessing
from vitkit.model.masked import MaskedAutoencoder, MaskedPatches
from vitkit.objectives.autoencoder import FillingIn
from vitkit.objectives.masked import MaskedPrediction
from vitkit.objectives.objective import EVALUATING, Chance, Reconstruction


@torch.no_grad()
def reconstruction(
    model: MaskedPatches | MaskedAutoencoder,
    images: Float[Tensor, "B C H W"],
    *,
    preprocessing: Preprocessing,
    seed: int = 0,
) -> Reconstruction:
    """The images, what was hidden of them, and how the model completes them, as pixels from 0 to 255.

    Patches are hidden as in training, the share and the way; `seed` says which. `preprocessing` is what the images went
    through, so that colours can be told from numbers.

    >>> from vitkit.model.config import ViTConfig
    >>> from vitkit.model.masked import MaskedConfig
    >>> from vitkit.model.vit import ViT
    >>> vit = ViT(ViTConfig(image_size=32, patch_size=8, width=16, depth=1, heads=2, mlp_dim=32, classes=0))
    >>> how, model = Preprocessing(image_size=32), MaskedPatches(vit, MaskedConfig())
    >>> found = reconstruction(model, torch.rand(2, 3, 32, 32), preprocessing=how)
    >>> found.predicted.shape, float(found.hidden.float().mean())
    (torch.Size([2, 3, 32, 32]), 0.5)
    """
    chance, pixels = Chance(seed=seed, use=EVALUATING), preprocessing.pixels_of(images)
    config = model.encoder.config
    if isinstance(model, MaskedAutoencoder):
        filling = FillingIn(model.settings, config, fed=preprocessing)
        return filling.reconstruct(model, images, pixels, filling.set_task(images, pixels, chance=chance))
    predicting = MaskedPrediction(model.settings, config)
    return predicting.reconstruct(model, images, pixels, predicting.set_task(images, pixels, chance=chance))
