"""A model goes in, what it answers to one drawn image comes out, by which a copy of it can be told to be good."""

from collections.abc import Sequence

import torch

from vitkit.core.shapes import Float, Tensor, pair
from vitkit.zoo.lookup import Model
from vitkit.zoo.variants import ModelConfig


def drawn_image(config: ModelConfig) -> Float[Tensor, "1 C H W"]:
    """The image: woven stripes with a disc, other in each channel, from −1 to 1; in integers, so the same everywhere.

    >>> from vitkit.zoo.lookup import configure
    >>> image = drawn_image(configure("Ti/16", image_size=32, channels=4))
    >>> image.shape, image.min() >= -1, image.max() <= 1
    (torch.Size([1, 4, 32, 32]), tensor(True), tensor(True))
    """
    height, width = pair(config.image_size)
    rows, columns = torch.arange(height)[:, None], torch.arange(width)[None, :]
    # Doubled, because the centre of an even number of pixels lies between two of them.
    from_centre = (2 * rows - height + 1) ** 2 + (2 * columns - width + 1) ** 2
    disc = from_centre < (min(height, width) // 2 + 1) ** 2
    planes = []
    for channel in range(config.channels):
        stripes = ((rows * (7 + 4 * channel)) ^ (columns * (5 + 2 * channel))) % 256
        planes.append(torch.where(disc, 255 - stripes // 2, stripes))
    return (torch.stack(planes)[None].to(torch.float32) - 127.5) / 127.5


def answers(model: Model) -> Float[Tensor, "1 Y"]:
    """What a model in evaluation answers to the drawn image: logits, or features where it has no classes."""
    return run(model, drawn_image(model.config))


@torch.no_grad()
def run(model: torch.nn.Module, image: Float[Tensor, "1 C H W"]) -> Float[Tensor, "1 Y"]:
    """The output of a module of anyone's, in float32 on the CPU."""
    output = model(image)
    assert isinstance(output, torch.Tensor)
    return output.detach().float()


def largest_difference(one: Tensor, other: Tensor | Sequence[float]) -> float:
    """The largest difference of two answers; infinite where they are not of one length, or not finite.

    >>> largest_difference(torch.tensor([1.0, 2.0]), [1.0, 2.5])
    0.5
    """
    left, right = one.double().flatten(), torch.as_tensor(other, dtype=torch.float64).flatten()
    if left.shape != right.shape:
        return float("inf")
    difference = float((left - right).abs().max()) if left.numel() else 0.0
    return difference if difference == difference else float("inf")  # noqa: PLR0124  NaN is not itself
