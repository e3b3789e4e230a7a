"""What does an encoder that sees a quarter of the patches save? A model goes in, a table of times comes out.

python bench/masked.py                         about 3 minutes of two cores
python bench/masked.py --model S/16 --rounds 5

The full encoder and the masked autoencoder's run in turn on the same images and weights, embedding included. The share
of their times must be at most 0.35: a quarter of the tokens, and what does not shrink with them.
"""

import time
from collections.abc import Callable

import click
import torch
from timing import interleave, warm_up

from vitkit.core.shapes import Float, Int, Tensor
from vitkit.model.masked import AutoencoderConfig, MaskedAutoencoder
from vitkit.model.patches import random_patches
from vitkit.model.vit import ViT
from vitkit.zoo.lookup import create

MOST = 0.35


def contenders(
    model: MaskedAutoencoder, images: Float[Tensor, "B C H W"], visible: Int[Tensor, "B kept"], *, trains: bool
) -> dict[str, Callable[[], float]]:
    """One pass of the encoder over all patches, and one over the visible ones; each gives its seconds."""

    def timed(seen: Int[Tensor, "B kept"] | None) -> float:
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        with torch.set_grad_enabled(trains):
            tokens = model.encoded(model.encoder.embed(images, visible=seen))
            if trains:
                tokens.square().mean().backward()
        return time.perf_counter() - start

    return {"all patches": lambda: timed(None), "visible patches": lambda: timed(visible)}


@click.command()
@click.option("--model", "name", default="B/16", show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--rounds", default=10, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(name: str, batch: int, rounds: int, threads: int) -> None:
    """Time the encoder on all patches and on a quarter of them."""
    torch.set_num_threads(threads)
    vit = create(name, classes=0)
    assert isinstance(vit, ViT)
    config = AutoencoderConfig()
    model = MaskedAutoencoder(vit, config)
    images = torch.rand(batch, 3, *vit.patch_embed.image_size)
    patches = vit.config.patches
    visible = random_patches(batch, patches=patches, keep=int(patches * (1 - config.hidden)))
    print(f"{name}, {batch} images, {visible.shape[1]} of {patches} patches visible, {threads} threads\n")
    print("| pass | all patches, ms | visible, ms | share | bound |\n|---|---:|---:|---:|---:|", flush=True)
    for trains in (False, True):
        runs = contenders(model, images, visible, trains=trains)
        for run in runs.values():
            warm_up(run)
        seconds: dict[str, list[float]] = {contender: [] for contender in runs}
        interleave(runs, seconds, rounds=rounds)
        whole, part = (min(times) for times in seconds.values())
        verdict = "" if part / whole <= MOST else " **missed**"
        what = "forward and backward" if trains else "forward"
        print(f"| {what} | {1e3 * whole:.1f} | {1e3 * part:.1f} | {part / whole:.3f}{verdict} | {MOST} |", flush=True)


if __name__ == "__main__":
    main()
