"""A model, images and maps go in; how fast the answer goes when the patches that a map points at are taken away."""

import torch

from vitkit.core.errors import InputError
from vitkit.core.shapes import Float, Int, Tensor
from vitkit.inspection.applies import needs_removable_patches
from vitkit.zoo.lookup import Model


@torch.no_grad()
def deletion_curve(
    model: Model,
    images: Float[Tensor, "B C H W"],
    maps: Float[Tensor, "B rows columns"],
    *,
    classes: Int[Tensor, "B"] | None = None,
    steps: int = 10,
) -> Float[Tensor, "B points"]:
    """The probability of a class after leaving out ever more patches, those first that the map rates highest.

    Patches are left out for good: the model does not get their tokens. The first point is the whole image, and each
    further one leaves out another `1 / steps` of it, down to the last such part. A map that points at what matters
    makes a curve that falls faster than that of random numbers; its mean is the usual score, the lower the better.

    >>> import vitkit
    >>> model = vitkit.create("Ti/16", image_size=64, classes=5).eval()
    >>> deletion_curve(model, torch.rand(2, 3, 64, 64), torch.rand(2, 4, 4), steps=4).shape
    torch.Size([2, 4])
    """
    vit = needs_removable_patches(model)
    patches = vit.config.patches
    if not 1 <= steps <= patches:
        raise InputError("patches cannot be left out in so many steps", expected=f"1 to {patches}", got=steps)
    whole = vit(images)
    chosen = whole.argmax(dim=1) if classes is None else classes
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    points = [whole.softmax(dim=1)]
    for step in range(1, steps):
        left = order[:, round(patches * step / steps) :].sort(dim=1).values
        tokens = vit.encode(vit.embed(images, visible=left)).tokens
        points.append(vit.head(vit.pool(tokens)).softmax(dim=1))
    return torch.stack([point.gather(1, chosen[:, None])[:, 0] for point in points], dim=1)
