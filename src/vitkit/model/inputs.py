"""Images go in, and come through only if the model can take them as they are: nothing is cropped or guessed."""

from vitkit.core.errors import InputError
from vitkit.core.shapes import Tensor


def check_images(images: Tensor, *, channels: int, image_size: tuple[int, int] | None) -> None:
    """Refuse images of another layout, number of channels or size (any size, if None), and images still in bytes.

    >>> import torch
    >>> check_images(torch.zeros(2, 3, 32, 24), channels=3, image_size=(32, 32))
    Traceback (most recent call last):
    vitkit.core.errors.InputError: the images do not fit the model (expected batch × 3 × 32 × 32, got 2 × 3 × 32 × 24)
    """
    sizes = ("any", "any") if image_size is None else image_size
    fits = images.ndim == 4 and images.shape[1] == channels
    if not fits or (image_size is not None and images.shape[2:] != image_size):
        raise InputError(
            "the images do not fit the model",
            expected=" × ".join(map(str, ("batch", channels, *sizes))),
            got=" × ".join(map(str, images.shape)),
            hint="resize or convert the images, or create the model with their image_size and channels",
        )
    if not images.is_floating_point():
        raise InputError(
            "images must be normalised floating-point numbers",
            expected="float32 or the like",
            got=str(images.dtype).removeprefix("torch."),
            hint="for the released weights: (images.float() - 127.5) / 127.5",
        )
