"""`vitkit export`: write a model for a runtime or another library."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitkit.cli.console import print_result, print_sections, print_status
from vitkit.cli.options import json_option
from vitkit.core.config import parse_assignments
from vitkit.core.formatting import safe_text, shorten_list

if TYPE_CHECKING:
    from vitkit.exporters.exporter import ExportResult


@click.command("export")
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("settings", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option(
    "--to",
    default="huggingface",
    show_default=True,
    help="Program: onnx, torch, openvino. Weights: huggingface, timm, google, torchvision, …",
)
@click.option("--images", metavar="PATH", help="Images for the verification.  [default: built-in images]")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@json_option
def command(out: Path, settings: tuple[str, ...], force: bool, as_json: bool, **options: Any) -> None:
    """Export MODEL to OUT: a program for a runtime, or weights for another library.

    MODEL is a run directory, or weights of any format. OUT is a new directory with labels, preprocessing and an
    example.py that does not need vitkit; or, with the suffix .npz or .pth, a file with only the weights.

    The export is run and compared with the model before OUT gets its name. If the top-1 class of an image or a logit
    (by more than 1e-4) differs, nothing is written and the exit code is 1. Settings change what the model computes, for
    formats that cannot represent it otherwise.

    \b
    vitkit export runs/photos photos-onnx --to onnx --images photos/
    vitkit export runs/photos photos-hf --to huggingface
    vitkit export runs/photos photos-google --to google
    vitkit export runs/photos photos.pth --to torchvision block.activation=gelu_erf
    """
    import vitkit

    result = vitkit.export(out=out, settings=parse_assignments(settings), overwrite=force, **options)
    if result.already_existed:
        print_status(f"already complete: {out}")
    print_result(result, print_export, as_json=as_json)


def print_export(result: "ExportResult") -> None:
    """Print the files, the changes and the verification of an export."""
    rows = [
        ("to", result.title),
        ("model", result.model),
        ("files", ", ".join(result.files)),
        *(("changed", change) for change in result.changes),
        *([("dropped", shorten_list(result.dropped))] if result.dropped else []),
        *(("differs", difference) for difference in result.differs),
        ("verified", result.summary),
        *([("images", str(result.verification["images_from"]))] if "images_from" in result.verification else []),
    ]
    print_sections({f"{'Already complete' if result.already_existed else 'Exported'}: {result.path}": rows})
    click.echo(safe_text(result.load_command))
