"""`vitkit weights`: describe, convert, compare, adapt and verify weights of any format."""

from pathlib import Path
from typing import Any

import click

import vitkit
from vitkit.cli.console import print_result, print_warnings
from vitkit.cli.options import SizeParameter, json_option
from vitkit.core.config import parse_assignments

DISAGREES = 1
NAMES = (
    "vitkit, google, big_vision, bit, timm, deit, mae, dinov2, dinov3, torchvision, huggingface, huggingface-deit, "
    "huggingface-mae, huggingface-dinov2"
)
"""Every format, for the help, which must not import the registry."""

file_argument = click.argument("file", type=click.Path(path_type=Path))
out_argument = click.argument("out", type=click.Path(path_type=Path))
format_option = click.option(
    "--format", "format_name", metavar="NAME", help=f"Format of FILE, if it is detected wrongly: {NAMES}."
)
force_option = click.option("--force", is_flag=True, help="Replace OUT if it exists.")


@click.group("weights")
def command() -> None:
    """Describe, compare, convert, adapt and verify weights of any format.

    FILE is a .npz, .safetensors, .pth or .bin file, or a directory with one, of Google, timm, Hugging Face, torchvision
    or Facebook; a run of vitkit; or a name on the hub, hub:owner/name. Nothing in a file is ever executed.
    """


@command.command("info", short_help="Show format, model, sizes and missing tensors.")
@file_argument
@format_option
@json_option
def info(file: Path, format_name: str | None, as_json: bool) -> None:
    """Show the format, model, sizes, missing and extra tensors, preprocessing and labels of FILE.

    \b
    vitkit weights info ViT-B_16.npz
    vitkit weights info runs/photos --json
    """
    from vitkit.cli.weights_text import print_info

    result = vitkit.describe_weights(file, format=format_name)
    print_result(result, print_info, as_json=as_json)
    if not as_json and (result.missing or result.extra):
        print_warnings(["not a complete model, or one that vitkit does not support; it cannot be loaded"])


@command.command("convert", short_help="Write a model in another format.")
@file_argument
@out_argument
@click.argument("settings", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--to", required=True, metavar="FORMAT", help=f"One of {NAMES}.")
@format_option
@force_option
@click.option("--allow-loss", is_flag=True, help="Leave out tensors that the format cannot hold.")
@json_option
def convert(
    file: Path, settings: tuple[str, ...], format_name: str | None, force: bool, as_json: bool, **options: Any
) -> None:
    """Write the model in FILE to OUT in another format, with exactly the same values.

    A format that cannot represent the model is an error, and so are tensors that would be lost. Settings override the
    configuration of a file that states it wrongly, and change the logits.

    \b
    vitkit weights convert ViT-B_16.npz b16 --to vitkit
    vitkit weights convert runs/photos for-timm --to timm
    vitkit weights convert b16 b16.pth --to torchvision block.activation=gelu_erf
    """
    from vitkit.cli.weights_text import print_conversion

    changes = parse_assignments(settings)
    result = vitkit.convert(file, settings=changes, format=format_name, overwrite=force, **options)
    print_result(result, print_conversion, as_json=as_json)


@command.command("diff", short_help="Compare two models of any format.")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--format-a", metavar="NAME", help="Format of A, if it is detected wrongly.")
@click.option("--format-b", metavar="NAME", help="Format of B, if it is detected wrongly.")
@json_option
def diff(a: Path, b: Path, format_a: str | None, format_b: str | None, as_json: bool) -> None:
    """Compare the models in A and B: tensors under vitkit's names, configuration, preprocessing and labels.

    \b
    vitkit weights diff ViT-B_16.npz vit_base_patch16_224.safetensors
    vitkit weights diff runs/photos runs/tuned --json
    """
    from vitkit.cli.weights_text import print_diff

    result = vitkit.diff_weights(a, b, format_a=format_a, format_b=format_b)
    print_result(result, print_diff, as_json=as_json)


@command.command("adapt", short_help="Change image size, patches, channels or classes.")
@file_argument
@out_argument
@click.option("--image-size", type=SizeParameter(), help="384, or 224x320; position embeddings are resampled.")
@click.option("--patch-size", type=SizeParameter(), help="8, or 8x16; the kernel is resized.")
@click.option("--channels", type=click.IntRange(min=1), help="1, 4, …; the logits of gray images do not change.")
@click.option("--num-classes", type=click.IntRange(min=0), help="Attach a new zero head; 0 for none.")
@click.option(
    "--labels",
    type=click.Path(path_type=Path),
    help="Class names: a file with one per line, a run, a dataset, or imagenet. Known classes keep their weights.",
)
@click.option("--pooling", type=click.Choice(["class", "mean"]), help="Input of the head: class token or mean.")
@format_option
@force_option
@json_option
def adapt(
    file: Path,
    out: Path,
    num_classes: int | None,
    labels: Path | None,
    format_name: str | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Adapt the model in FILE to other images, patches or classes, and write it to the directory OUT.

    \b
    vitkit weights adapt ViT-B_16.npz b16-384 --image-size 384
    vitkit weights adapt ViT-B_16.npz gray --channels 1 --num-classes 10
    vitkit weights adapt runs/photos more --labels new-photos/
    """
    from vitkit.cli.weights_text import print_adaptation

    if num_classes is not None and labels is not None:
        raise click.UsageError("--labels sets the number of classes; leave --num-classes out")
    result = vitkit.adapt(
        file, out, num_classes=num_classes, labels=labels, format=format_name, overwrite=force, **options
    )
    print_result(result, print_adaptation, as_json=as_json)


@command.command("verify", short_help="Compare logits with those of the model's origin.")
@file_argument
@format_option
@json_option
def verify(file: Path, format_name: str | None, as_json: bool) -> None:
    """Compare the logits of the model in FILE with stored logits, or with those of the library it came from.

    The exit code is 1 if they do not agree, or if there is nothing to compare with.

    \b
    vitkit weights verify b16
    vitkit weights verify vit_base_patch16_224.safetensors --json
    """
    from vitkit.cli.weights_text import print_verification

    result = vitkit.verify(file, format=format_name)
    print_result(result, print_verification, as_json=as_json)
    if not result.agrees:
        click.get_current_context().exit(DISAGREES)
