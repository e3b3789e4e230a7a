"""`vitkit weights`: weights of any origin go in; what they are, or the same in another format or shape, comes out."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click

from vitkit.cli.comparing import comparison_as_json, comparison_in_words
from vitkit.cli.converting import changed, check_out, done_otherwise, read_back, write
from vitkit.cli.cost import Size, SizeParameter
from vitkit.cli.describing import (
    OUR_TITLE,
    OURS,
    describe,
    explaining,
    find_format,
    load,
    place_of,
)
from vitkit.cli.machine import give_back_freed_memory
from vitkit.cli.output import print_json, print_sections, result_console, safe_text, talk_console

DISAGREES = 1
NAMES = (
    "vitkit, google, big_vision, bit, timm, deit, mae, dinov2, dinov3, torchvision, huggingface, huggingface-deit, "
    "huggingface-mae, huggingface-dinov2"
)
"""Every format, in the help, which must not import the table of them."""
FILE_ENDINGS = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt")

file_argument = click.argument("file", type=click.Path(path_type=Path))
out_argument = click.argument("out", type=click.Path(path_type=Path))
format_option = click.option(
    "--format", "format_name", metavar="NAME", help=f"The format of FILE, should it be found wrong: {NAMES}."
)
force_option = click.option("--force", is_flag=True, help="Write over what is at OUT.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.group("weights")
def command() -> None:
    """Look at weights of any origin, compare them, convert them, and adapt them to your images.

    FILE is a .npz, .safetensors, .pth or .bin file, or a folder with one: Google's, timm's, Hugging Face's,
    torchvision's, Facebook's, or the folder of a run; or a name on the hub, hub:owner/name. Nothing in it is ever run.
    """


# info


@command.command("info", short_help="What is in a file: format, model, sizes, what is missing.")
@file_argument
@format_option
@json_option
def info(file: Path, format_name: str | None, as_json: bool) -> None:
    """Say what is in FILE: format, model, sizes, what is missing or left over, preprocessing, labels.

    \b
    vitkit weights info ViT-B_16.npz
    vitkit weights info runs/photos --json
    """
    found = describe(file, format=format_name)
    if as_json:
        print_json(found.to_json())
        return
    print_sections(found.sections())
    if found.missing or found.extra:
        remark = "warning: not a whole model, or of a kind that vitkit does not know; it cannot be loaded"
        talk_console().print(remark, style="yellow", soft_wrap=True)


# convert


@command.command("convert", short_help="The same model in another format.")
@file_argument
@out_argument
@click.argument("settings", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--to", "to_name", required=True, metavar="FORMAT", help=f"One of {NAMES}.")
@format_option
@force_option
@json_option
def convert(
    file: Path,
    out: Path,
    settings: tuple[str, ...],
    to_name: str,
    format_name: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the model in FILE to OUT in another format, number for number the same.

    A format that cannot say what the model computes is refused. Settings change what the model computes, and with it
    its answers: they are for those who know that the file says it wrong.

    \b
    vitkit weights convert ViT-B_16.npz b16 --to vitkit
    vitkit weights convert runs/photos for-timm --to timm
    vitkit weights convert b16 b16.pth --to torchvision block.activation=gelu_erf
    """
    give_back_freed_memory()
    to = find_format(to_name)
    as_folder = to is None or to.writes == "safetensors"
    check_place(out, file=file, format_name=format_name, force=force, as_folder=as_folder)
    found, artefact = load(file, format=format_name)
    talk(f"read {found.place}: {found.title}, {found.name}")
    config, changes = changed(artefact, settings, place=file)
    artefact = replace(artefact, config=config)
    put(out, lambda place: write(to, place, artefact), as_folder=as_folder)
    again = read_back(to, out, artefact)
    lost, differs = list(again.lost), [*done_otherwise(to, artefact), *again.settings]
    if as_json:
        origin = {"file": str(file), "from": found.format, "out": str(out), "to": to_name, "model": found.name}
        left = {"changes": changes, "lost": lost, "differs": differs, "notes": [*found.notes]}
        print_json(origin | {"tensors": len(artefact.state)} | left)
        return
    rows = [
        ("from", f"{found.place}, {found.title}"),
        ("to", to.title if to else OUR_TITLE),
        ("model", f"{found.name}, {len(artefact.state):,} tensors"),
        *(("note", note) for note in found.notes),
        *(("changed", change) for change in changes),
        *(("lost", loss) for loss in lost),
        *(("differs", difference) for difference in differs),
    ]
    print_sections({f"Written: {out}": rows})


# diff


@command.command("diff", short_help="In what two models differ, whatever their formats.")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--format-a", metavar="NAME", help="The format of A, should it be found wrong.")
@click.option("--format-b", metavar="NAME", help="The format of B, should it be found wrong.")
@json_option
def diff(a: Path, b: Path, format_a: str | None, format_b: str | None, as_json: bool) -> None:
    """Compare the models in A and B, whatever their formats: every tensor under vitkit's name, and the rest.

    \b
    vitkit weights diff ViT-B_16.npz vit_base_patch16_224.safetensors
    vitkit weights diff runs/photos runs/tuned --json
    """
    from vitkit.checkpoints.compare import compare

    pairs = ((a, format_a), (b, format_b))
    for path, name in pairs:  # before time is spent on the other
        find_format(name)
        place_of(path, format=name)
    (first, one), (second, other) = (load(path, format=name) for path, name in pairs)
    for each in (first, second):
        talk(f"read {each.place}: {each.title}, {each.name}")
    found = compare(one, other)
    if as_json:
        sources = {key: {"file": each.place, "format": each.format} for key, each in (("a", first), ("b", second))}
        print_json(comparison_as_json(found) | sources)
        return
    print_sections(comparison_in_words(found, titles=(first.title, second.title)))


# adapt


@command.command("adapt", short_help="The model for other images, patches, channels or classes.")
@file_argument
@out_argument
@click.option("--image-size", type=SizeParameter(), help="384, or 224x320; positions are resampled.")
@click.option("--patch-size", type=SizeParameter(), help="8, or 8x16; the kernel is resized.")
@click.option("--channels", type=click.IntRange(min=1), help="1, 4, …; grey pictures keep their answers.")
@click.option("--classes", type=click.IntRange(min=0), help="A new head, zero, of so many classes; 0 for none.")
@click.option(
    "--labels",
    type=click.Path(path_type=Path),
    help="Names of classes: a file with a line each, a run, or a folder of images. Known ones keep their weights.",
)
@click.option("--pooling", type=click.Choice(["class", "mean"]), help="What the head reads: the token, or the mean.")
@format_option
@force_option
@json_option
def adapt(  # noqa: PLR0913, PLR0917  each is an option that users type
    file: Path,
    out: Path,
    image_size: Size | None,
    patch_size: Size | None,
    channels: int | None,
    classes: int | None,
    labels: Path | None,
    pooling: Literal["class", "mean"] | None,
    format_name: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Change the model in FILE to other images, patches or classes; OUT is a folder that vitkit loads and fine-tunes.

    \b
    vitkit weights adapt ViT-B_16.npz b16-384 --image-size 384
    vitkit weights adapt ViT-B_16.npz grey --channels 1 --classes 10
    vitkit weights adapt runs/photos more --labels new-photos/
    """
    from vitkit.checkpoints import native
    from vitkit.cli.reshaping import Wish, read_labels, reshape
    from vitkit.core.shapes import sides

    if classes is not None and labels is not None:
        raise click.UsageError("--labels says how many classes there are; leave --classes out")
    wish = Wish(
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        classes=classes,
        labels=None if labels is None else read_labels(labels),
        pooling=pooling,
    )
    check_place(out, file=file, format_name=format_name, force=force, as_folder=True)
    found, artefact = load(file, format=format_name)
    talk(f"read {found.place}: {found.title}, {found.name}")
    made = reshape(artefact, wish)
    put(out, lambda place: native.save(place, made.artefact), as_folder=True)
    config = made.artefact.config
    if as_json:
        sizes = {"image_size": config.image_size, "classes": config.classes, "channels": config.channels}
        origin = {"file": str(file), "from": found.format, "out": str(out), "model": made.artefact.name}
        print_json(origin | sizes | {"changes": list(made.changes), "identical": not made.changes})
        return
    console = result_console()
    for change in made.changes or ("nothing to change: it has this shape already",):
        console.print(safe_text(change), soft_wrap=True)
    shape = f"{made.artefact.name}, images of {sides(config.image_size)}, classes: {config.classes:,}"
    console.print(safe_text(f"Written: {out} ({shape})"), soft_wrap=True)


# verify


@command.command("verify", short_help="Whether a model answers as it did where it comes from.")
@file_argument
@format_option
@json_option
def verify(file: Path, format_name: str | None, as_json: bool) -> None:
    """Run the model in FILE on a drawn image, and compare with its stored logits or with the library it came from.

    Exit code 1 where they do not agree, or where there is nothing to compare with.

    \b
    vitkit weights verify b16
    vitkit weights verify vit_base_patch16_224.safetensors --json
    """
    from vitkit.checkpoints.foreign import FORMATS
    from vitkit.checkpoints.verify import verify as run

    find_format(format_name)
    place = place_of(file, format=format_name)
    with explaining(place, format=format_name):
        found = run(place, format=format_name)
    titles = {known.name: known.title for known in FORMATS} | {OURS: OUR_TITLE}
    difference = found.max_difference if found.max_difference is None or math.isfinite(found.max_difference) else None
    compared = found.max_difference is not None
    if as_json:
        origin = {"file": str(file), "format": found.format, "model": found.model}
        verdict = {"max_difference": difference, "against": found.against, "tolerance": found.tolerance}
        print_json(origin | verdict | {"agrees": found.agrees})
    else:
        rows = [
            ("format", f"{titles[found.format]} ({found.format})"),
            ("model", found.model),
            ("compared with" if compared else "not compared", found.against),
        ]
        if compared:
            largest = "not a finite number" if difference is None else f"{difference:.2g}"
            rows += [
                ("largest difference", f"{largest}, where {found.tolerance:.2g} is allowed"),
                ("verdict", "agrees" if found.agrees else "does not agree"),
            ]
        print_sections({str(file): rows})
    if not found.agrees:
        click.get_current_context().exit(DISAGREES)


# Places


def check_place(out: Path, *, file: Path, format_name: str | None, force: bool, as_folder: bool) -> None:
    """Refuse what cannot be read or written before time is spent, and a folder under the name of a file."""
    from vitkit.core.errors import WeightsError

    find_format(format_name)
    check_out(out, file=place_of(file, format=format_name), force=force, as_folder=as_folder)
    if as_folder and out.suffix in FILE_ENDINGS:
        raise WeightsError(
            f"{out}: this would be a folder, with configuration and preprocessing beside the weights",
            hint=f"name it {out.with_suffix('')}",
        )


def put(out: Path, fill: Callable[[Path], None], *, as_folder: bool) -> None:
    """Let a model be written at OUT, whole or not at all; what was there is written over file by file."""
    from vitkit.core.files import commit_folder

    if as_folder and not (out.exists() or out.is_symlink()):
        commit_folder(out, fill)
    else:
        fill(out)


# Words


def talk(text: str) -> None:
    """Say something that is no result."""
    talk_console().print(safe_text(text), soft_wrap=True, style="dim")
