"""`vitkit export`: a trained model goes in, a file or folder that another library loads comes out, read back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from vitkit.cli.converting import changed, done_otherwise, read_back, write
from vitkit.cli.describing import OUR_TITLE, find_format, load
from vitkit.cli.machine import give_back_freed_memory
from vitkit.cli.output import print_json, print_sections, safe_text, talk_console
from vitkit.cli.weights import check_place, put

LOADERS = {
    "huggingface": 'transformers.AutoModelForImageClassification.from_pretrained("{out}")',
    "huggingface-deit": 'transformers.DeiTForImageClassificationWithTeacher.from_pretrained("{out}")',
    "timm": 'timm.create_model("local-dir:{out}", pretrained=True)',
}
"""The line that loads a classifier; what is of no library's folder is read by the code it belongs to, and by us."""
HEADLESS = 'transformers.AutoModel.from_pretrained("{out}")'
OWN = 'vitkit.load("{out}")'


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, what it cannot say, and how it is known to be right; in words."""

    format: str
    title: str
    model: str
    classes: int
    files: tuple[str, ...]
    loader: str
    proof: str
    changes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("settings", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--to", default="huggingface", show_default=True, help="The format: huggingface, timm, google, …")
@click.option("--force", is_flag=True, help="Write over what is at OUT.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(run: Path, out: Path, settings: tuple[str, ...], to: str, force: bool, as_json: bool) -> None:
    """Write the model in RUN for another library into OUT, with its labels and preprocessing where the format has them.

    RUN is the folder of a run, or weights of any format. For Hugging Face and timm, OUT is a new folder; for the
    others a new file. It is read back before the command ends. Settings change what the model computes, and with it its
    answers, where a format could not hold it otherwise.

    \b
    vitkit export runs/photos photos-hf --to huggingface
    vitkit export runs/photos photos.npz --to google
    vitkit export runs/photos photos.pth --to torchvision block.activation=gelu_erf
    """
    made = as_weights(run, out, to=to, settings=settings, force=force)
    if as_json:
        about = {"format": made.format, "out": str(out), "model": made.model, "classes": made.classes}
        parts = {"changes": made.changes, "lost": made.lost, "differs": made.differs}
        lists = {key: list(words) for key, words in parts.items()}
        print_json(about | {"files": list(made.files)} | lists | {"proof": made.proof, "load": made.loader})
        return
    rows = [
        ("to", made.title),
        ("model", made.model),
        ("files", ", ".join(made.files)),
        *(("changed", change) for change in made.changes),
        *(("lost", loss) for loss in made.lost),
        *(("differs", difference) for difference in made.differs),
        ("checked", made.proof),
    ]
    print_sections({f"Written: {out}": rows})
    click.echo(safe_text(made.loader))


def as_weights(run: Path, out: Path, *, to: str, settings: Sequence[str], force: bool) -> Exported:
    """Write a model as weights of some library; what proves it is that they come back number for number."""
    give_back_freed_memory()
    wanted = find_format(to)
    as_folder = wanted is None or wanted.writes == "safetensors"
    check_place(out, file=run, format_name=None, force=force, as_folder=as_folder)
    found, artefact = load(run, format=None)
    talk_console().print(safe_text(f"read {found.place}: {found.title}, {found.name}"), soft_wrap=True, style="dim")
    config, changes = changed(artefact, settings, place=run)
    artefact = replace(artefact, config=config)
    put(out, lambda place: write(wanted, place, artefact), as_folder=as_folder)
    again = read_back(wanted, out, artefact)
    return Exported(
        format=to,
        title=wanted.title if wanted else OUR_TITLE,
        model=artefact.name,
        classes=config.classes,
        files=tuple(sorted(path.name for path in out.iterdir()) if out.is_dir() else [out.name]),
        loader=loader(to, classes=config.classes).format(out=out),
        proof=f"read back: {again.tensors:,} tensors, number for number the same",
        changes=tuple(changes),
        lost=again.lost,
        differs=(*done_otherwise(wanted, artefact), *again.settings),
    )


def loader(to: str, *, classes: int) -> str:
    """The line of Python that loads what was written.

    >>> loader("huggingface-dinov2", classes=0), loader("google", classes=10)
    ('transformers.AutoModel.from_pretrained("{out}")', 'vitkit.load("{out}")')
    """
    if to.startswith("huggingface") and not classes:
        return HEADLESS
    return LOADERS.get(to, OWN)
