"""What a model made of images of which it saw a part goes in; one picture of it comes out, a column an image.

Above is the image, in the middle the same with the patches that were asked for in grey, below the model's answer.
"""

import io
from pathlib import Path

import torch
from PIL import Image

from vitkit.core.files import write_bytes
from vitkit.core.shapes import Float, Tensor
from vitkit.objectives.objective import Reconstruction

SIDE = 112
"""Pixels of an image's longer side in the picture, or a little more: small images are enlarged by whole factors."""
GAP = 4


def draw(path: Path, shown: Reconstruction) -> None:
    """Write the picture as a PNG, whole or not at all; the same reconstruction gives the same file."""
    content = io.BytesIO()
    picture(shown).save(content, format="PNG")
    write_bytes(path, content.getvalue())


def picture(shown: Reconstruction) -> Image.Image:
    """Three rows of images, on a ground that shows through between them.

    >>> grey = torch.full((2, 1, 8, 8), 100.0)
    >>> picture(Reconstruction(grey, torch.zeros(2, 8, 8, dtype=torch.bool), grey)).size
    (228, 344)
    """
    rows = (shown.images, shown.seen, shown.predicted)
    height, width = shown.images.shape[2:]
    factor = max(1, -(-SIDE // max(height, width)))
    tall, wide = height * factor, width * factor
    canvas = Image.new("RGBA", (len(shown.images) * (wide + GAP) - GAP, len(rows) * (tall + GAP) - GAP), (0, 0, 0, 0))
    for down, row in enumerate(rows):
        for across, image in enumerate(in_colour(row)):
            tile = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).resize(
                (wide, tall), Image.Resampling.NEAREST
            )
            canvas.paste(tile, (across * (wide + GAP), down * (tall + GAP)))
    return canvas


def in_colour(images: Float[Tensor, "B C H W"]) -> Tensor:
    """Pixels as bytes of three channels: grey ones repeated, and of more than three the first."""
    three = images if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    return three[:, :3].round().clamp(0, 255).to(torch.uint8).cpu()
