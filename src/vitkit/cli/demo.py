"""`vitkit demo`: nothing goes in; a first tour of the paper's model, on an image drawn on the spot, comes out."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

from vitkit.cli.output import format_bytes, print_json, print_sections, result_console

if TYPE_CHECKING:
    import torch

    import vitkit.model.vit

Result = TypeVar("Result")


@click.command("demo")
@click.option("--model", default="Ti/16", show_default=True, help="A Vision Transformer by name; see vitkit models.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(model: str, as_json: bool) -> None:
    """Create a model, run an image through it step by step, and show what it costs."""
    import torch

    from vitkit.core.errors import InputError
    from vitkit.core.shapes import pair
    from vitkit.model.vit import ViT
    from vitkit.zoo.cost import cost
    from vitkit.zoo.lookup import create

    created, milliseconds = timed(lambda: create(model, generator=torch.Generator().manual_seed(0)))
    if not isinstance(created, ViT) or created.config.backbone:
        raise InputError(f"the tour shows a plain Vision Transformer; {model} is none", hint="try --model B/16")
    image = drawn_image(pair(created.config.image_size))
    steps = [("create", "parameters", milliseconds), *walk(created.eval(), image)]
    ledger = cost(created.config)
    figures: dict[str, object] = {
        "model": model,
        "parameters": ledger.parameters,
        "forward_gflops": ledger.forward_flops / 1e9,
        "activation_bytes_per_image": ledger.activation_bytes,
        "steps": [
            {"step": step, "shape": shape, "milliseconds": milliseconds} for step, shape, milliseconds in steps[1:]
        ],
    }
    if as_json:
        print_json(figures)
        return
    print_picture(image, created.config.grid)
    print_sections(
        {
            f"1. Create {model}": [
                ("parameters", f"{ledger.parameters:,}, set in {steps[0][2]:.0f} ms"),
                ("from Python", f'vitkit.create("{model}")'),
            ],
            "2. Run the image through it": [
                (step, f"{shape:36} {milliseconds:7.1f} ms") for step, shape, milliseconds in steps[1:]
            ],
            "3. What it costs": [
                ("forward", f"{ledger.forward_flops / 1e9:.2f} GFLOPs an image"),
                (
                    "pre-training",
                    f"{ledger.exaflops(images=303_000_000, epochs=7):.1f} exaFLOPs for 7 epochs of JFT-300M",
                ),
                ("training", f"{format_bytes(ledger.activation_bytes)} of activations an image"),
            ],
            "Next": [
                ("vitkit models", "every model of the paper, with its exact size"),
                ("vitkit cost", f"{model} --image-size 384: what higher resolution costs"),
                ("vitkit doctor", "what this machine is best at"),
            ],
        }
    )


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What the work gives, and how many milliseconds it took.

    >>> timed(lambda: 3)[0]
    3
    """
    start = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - start) * 1000


def drawn_image(size: tuple[int, int]) -> "torch.Tensor":
    """A sun over hills, in red, green and blue from 0 to 1."""
    import torch

    y, x = torch.meshgrid(*(torch.linspace(0, 1, side) for side in size), indexing="ij")
    sky = torch.stack([0.35 + 0.5 * y, 0.55 + 0.25 * y, 0.95 - 0.25 * y])
    sun = ((x - 0.68) ** 2 + (y - 0.3) ** 2 < 0.012)[None]
    far = (y > 0.62 + 0.07 * torch.sin(7 * x))[None]
    near = (y > 0.78 + 0.06 * torch.cos(5 * x + 1))[None]
    image = sky
    for shape, colour in ((sun, (1.0, 0.85, 0.3)), (far, (0.3, 0.5, 0.42)), (near, (0.14, 0.32, 0.2))):
        image = torch.where(shape, torch.tensor(colour)[:, None, None], image)
    return image


def walk(model: "vitkit.model.vit.ViT", image: "torch.Tensor") -> list[tuple[str, str, float]]:
    """The four steps of the model, each with what comes out of it and its milliseconds."""
    import torch

    with torch.inference_mode():
        images = image[None] * 2 - 1
        model(images)  # the first pass pays for starting threads
        tokens, embedding = timed(lambda: model.embed(images))
        encoded, encoding = timed(lambda: model.encode(tokens))
        features, pooling = timed(lambda: model.pool(encoded.tokens))
        logits, classifying = timed(lambda: model.head(features))
    rows, columns = model.config.grid
    classes = logits.shape[-1]
    return [
        ("embed", f"{rows}×{columns} patches → {tokens.shape[1]} tokens of {tokens.shape[2]}", embedding),
        ("encode", f"{len(model.blocks)} blocks of {model.config.heads} heads", encoding),
        ("pool", f"{features.shape[-1]} features", pooling),
        ("head", f"{classes} classes", classifying),
    ]


def print_picture(image: "torch.Tensor", grid: tuple[int, int]) -> None:
    """Print the image as its patches: two characters of mean colour for each, which make a square."""
    from rich.text import Text
    from torch.nn import functional

    console = result_console()
    if console.color_system:
        rows = (functional.adaptive_avg_pool2d(image, grid) * 255).round().int().permute(1, 2, 0).tolist()
        for row in rows:
            cells = [("  ", f"on rgb({red},{green},{blue})") for red, green, blue in row]
            console.print(Text.assemble("  ", *cells))
    console.print(Text(f"\n  An image is worth {grid[0]}×{grid[1]} words.\n", style="bold"))
