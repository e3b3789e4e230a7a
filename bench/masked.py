"""Time of an encoder that sees a quarter of the patches, relative to all of them.

python bench/masked.py                         about 3 minutes on two cores
python bench/masked.py --model S/16 --rounds 5

The full encoder and the masked autoencoder's are timed in turn on the same images and weights, embedding included. The
ratio of their times must be at most 0.35: a quarter of the tokens, and a part that does not depend on them.
"""

import time
from collections.abc import Callable

import click
import torch
from timing import interleave, warm_up

from vitkit.core.shapes import Float, Int, Tensor
from vitkit.model.patches import sample_patches
from vitkit.model.pretraining import MaskedAutoencoder
from vitkit.model.pretraining_config import MAEConfig
from vitkit.model.vit import ViT
from vitkit.zoo.registry import create

MAX_RATIO = 0.35


def candidates(
    model: MaskedAutoencoder, images: Float[Tensor, "B C H W"], visible: Int[Tensor, "B V"], *, trains: bool
) -> dict[str, Callable[[], float]]:
    """Return functions that time one pass over all patches and one over the visible ones, in seconds."""

    def measure(visible_only: Int[Tensor, "B V"] | None) -> float:
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        with torch.set_grad_enabled(trains):
            tokens = model.encode_normalized(model.encoder.embed(images, visible=visible_only))
            if trains:
                tokens.square().mean().backward()
        return time.perf_counter() - start

    return {"all patches": lambda: measure(None), "visible patches": lambda: measure(visible)}


@click.command()
@click.option("--model", "name", default="B/16", show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--rounds", default=10, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(name: str, batch: int, rounds: int, threads: int) -> None:
    """Time the encoder on all patches and on a quarter of them."""
    torch.set_num_threads(threads)
    vit = create(name, num_classes=0)
    assert isinstance(vit, ViT)
    config = MAEConfig()
    model = MaskedAutoencoder(vit, config)
    images = torch.rand(batch, 3, *vit.patch_embed.image_size)
    patches = vit.config.patches
    visible = sample_patches(batch, patches=patches, count=int(patches * (1 - config.mask_ratio)))
    print(f"{name}, {batch} images, {visible.shape[1]} of {patches} patches visible, {threads} threads\n")
    print("| pass | all patches, ms | visible, ms | ratio | bound |\n|---|---:|---:|---:|---:|", flush=True)
    for trains in (False, True):
        runs = candidates(model, images, visible, trains=trains)
        for run in runs.values():
            warm_up(run)
        seconds: dict[str, list[float]] = {candidate: [] for candidate in runs}
        interleave(runs, seconds, rounds=rounds)
        whole, part = (min(times) for times in seconds.values())
        verdict = "" if part / whole <= MAX_RATIO else " **missed**"
        what = "forward and backward" if trains else "forward"
        print(
            f"| {what} | {1e3 * whole:.1f} | {1e3 * part:.1f} | {part / whole:.3f}{verdict} | {MAX_RATIO} |", flush=True
        )


if __name__ == "__main__":
    main()
