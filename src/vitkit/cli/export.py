"""`vitkit export`: a trained model goes in, a program or weights for other libraries come out, with their proof."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.converting import changed, done_otherwise, read_back, write
from vitkit.cli.describing import OUR_TITLE, OURS, find_format, load
from vitkit.cli.machine import give_back_freed_memory
from vitkit.cli.output import print_json, print_sections, safe_text, talk_console
from vitkit.cli.weights import check_place

if TYPE_CHECKING:
    from vitkit.checkpoints.formats.format import Format
    from vitkit.checkpoints.native import Artefact
    from vitkit.export.exporting import Wish
    from vitkit.export.images import ProofImages

PROGRAMS = ("onnx", "torch", "openvino")
"""What needs no vitkit and no model's code to run."""
LOADERS = {
    "huggingface": 'transformers.AutoModelForImageClassification.from_pretrained("{out}")',
    "huggingface-deit": 'transformers.DeiTForImageClassificationWithTeacher.from_pretrained("{out}")',
    "timm": 'timm.create_model("local-dir:{out}", pretrained=True)',
}
"""The line that loads a classifier; what is of no library's folder is read by the code it belongs to, and by us."""
OWN_ENDINGS = {"npz": (".npz",), "torch": (".pth", ".pt", ".bin", ".ckpt")}
"""What a file of weights may be called, by what it is; timm's and Hugging Face's are folders."""
HEADLESS = 'transformers.AutoModel.from_pretrained("{out}")'
OWN = 'vitkit.load("{out}")'


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, what it cannot say, and how it is known to be right; in words, and the proof in numbers."""

    format: str
    title: str
    model: str
    classes: int
    files: tuple[str, ...]
    loader: str
    checked: str
    proof: Mapping[str, object]
    changes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    already: bool = False
    """Whether it was there before, and nothing was done."""


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("settings", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option(
    "--to",
    default="huggingface",
    show_default=True,
    help="Programs: onnx, torch, openvino. Weights: huggingface, timm, google, torchvision, …",
)
@click.option("--images", metavar="PLACE", help="Images to prove it on; else some that come with vitkit.")
@click.option("--force", is_flag=True, help="Write over what is at OUT.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    run: Path, out: Path, settings: tuple[str, ...], to: str, images: str | None, force: bool, as_json: bool
) -> None:
    """Write the model in RUN for elsewhere into OUT: a program that runs by itself, or weights of another library.

    RUN is the folder of a run, or weights of any format. OUT is a new folder, with labels, preprocessing and, for all
    but weights that no library here loads, an example.py that needs no vitkit; or a new file of weights alone, where it
    is named .npz or .pth.

    Before OUT gets its name, what was written is run by what it is for, on images, beside the model itself. Where the
    first class is not the same for all of them, or logits differ by more than 1e-4, nothing is left, and the exit code
    is 1. Settings change what the model computes, and with it its answers, where a format could not hold it otherwise.

    \b
    vitkit export runs/photos photos-onnx --to onnx --images photos/
    vitkit export runs/photos photos-hf --to huggingface
    vitkit export runs/photos photos-google --to google
    vitkit export runs/photos photos.pth --to torchvision block.activation=gelu_erf
    """
    check_name(to)
    give_back_freed_memory()
    asked = Asked(run=run, out=out, to=to, settings=settings, images=images, force=force)
    made = as_program(asked) if to in PROGRAMS else as_weights(asked)
    if made.already:
        say(f"done already: {out}")
    if as_json:
        about = {"format": made.format, "out": str(out), "model": made.model, "classes": made.classes}
        parts = {"changes": made.changes, "lost": made.lost, "differs": made.differs}
        lists = {key: list(words) for key, words in parts.items()}
        ends = {"checked": made.checked, "proof": made.proof, "load": made.loader, "already": made.already}
        print_json(about | {"files": list(made.files)} | lists | ends)
        return
    rows = [
        ("to", made.title),
        ("model", made.model),
        ("files", ", ".join(made.files)),
        *(("changed", change) for change in made.changes),
        *(("lost", loss) for loss in made.lost),
        *(("differs", difference) for difference in made.differs),
        ("checked", made.checked),
        *([("images", str(made.proof["images_from"]))] if "images_from" in made.proof else []),
    ]
    print_sections({f"{'Done already' if made.already else 'Written'}: {out}": rows})
    click.echo(safe_text(made.loader))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user typed."""

    run: Path
    out: Path
    to: str
    settings: Sequence[str] = ()
    images: str | None = None
    force: bool = False

    def artefact(self) -> "tuple[Artefact, list[str]]":
        """The model with the user's settings, and in words what they change."""
        found, artefact = load(self.run, format=None)
        say(f"read {found.place}: {found.title}, {found.name}")
        config, changes = changed(artefact, self.settings, place=self.run)
        return replace(artefact, config=config), changes

    def wish(self, artefact: "Artefact") -> "Wish":
        """What is to be met by what is at OUT, or to be written down with it."""
        from vitkit.export.exporting import Wish, fingerprint

        return Wish(to=self.to, fingerprint=fingerprint(artefact), images=self.images)

    @contextmanager
    def proof_images(self, artefact: "Artefact") -> "Iterator[ProofImages | None]":
        """The images that were named, with a bar while they are run."""
        if self.images is None:
            yield None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from vitkit.export.images import ProofImages
        from vitkit.predict.places import images_at

        source, talk = images_at([self.images]), talk_console()
        columns = (TextColumn("proving"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as progress:
            task = progress.add_task("")

            def watch(done: int) -> None:
                progress.update(task, completed=done)

            how = artefact.preprocessing
            images = ProofImages(source, preprocessing=how, described=self.images, watch=watch)
            progress.update(task, total=len(images))
            yield images

    def check_place(self, *, as_folder: bool) -> None:
        """Refuse what cannot be read or written, before time is spent."""
        from vitkit.core.errors import WeightsError

        if as_folder and self.out.is_symlink() and not self.out.exists():
            raise WeightsError(f"{self.out}: a link to what is not there", hint="choose another place for OUT")
        check_place(self.out, file=self.run, format_name=None, force=self.force, as_folder=as_folder)

    @property
    def is_there(self) -> bool:
        """Whether something is at OUT that an earlier command may have written."""
        return not self.force and (self.out.is_file() or (self.out.is_dir() and any(self.out.iterdir())))


# Programs


def as_program(asked: Asked) -> Exported:
    """Write a model as a program for a runtime, or find it there; what proves it is that the runtime runs it."""
    from vitkit.export.exporting import export
    from vitkit.export.runtime import check_installed
    from vitkit.export.runtimes import RUNTIMES

    runtime = RUNTIMES[asked.to]
    check_installed(runtime.title, needs=runtime.needs, extra=runtime.extra)
    if not asked.is_there:
        asked.check_place(as_folder=True)
    artefact, changes = asked.artefact()
    wish = asked.wish(artefact)
    proof = wish.is_met(asked.out) if asked.is_there else None
    already = proof is not None
    if proof is None:
        asked.check_place(as_folder=True)
        with asked.proof_images(artefact) as images:
            proof = export(artefact, asked.out, runtime=runtime, wish=wish, images=images, say=say)
    return Exported(
        format=asked.to,
        title=runtime.title,
        model=artefact.name,
        classes=artefact.config.classes,
        files=files_at(asked.out),
        loader=runtime.loader.format(out=asked.out),
        checked=str(proof["words"]),
        proof=proof,
        changes=tuple(changes),
        already=already,
    )


# Weights


def as_weights(asked: Asked) -> Exported:
    """Write a model as weights of some library, or find them there.

    What proves them is that they come back number for number, and that those who read them answer the same.
    """
    wanted = find_format(asked.to)
    as_folder = is_folder(asked, wanted)
    if not asked.is_there:
        asked.check_place(as_folder=as_folder)
    artefact, changes = asked.artefact()
    made = Exported(
        format=asked.to,
        title=wanted.title if wanted else OUR_TITLE,
        model=artefact.name,
        classes=artefact.config.classes,
        files=(),
        loader=loader(asked.to, classes=artefact.config.classes).format(out=asked.out),
        checked="",
        proof={},
        changes=tuple(changes),
    )
    if asked.is_there and (found := there_already(asked, artefact, made)):
        return found
    asked.check_place(as_folder=as_folder)
    return write_weights(asked, wanted, artefact, made)


def write_weights(asked: Asked, wanted: "Format | None", artefact: "Artefact", made: Exported) -> Exported:
    """Write and prove them aside, and give them their name."""
    from vitkit.checkpoints.native import write_json
    from vitkit.core.files import sha256
    from vitkit.export.placing import PROOF, proof_beside, put_file, put_folder, write_sums
    from vitkit.export.weights import FILES, add_words, proved_weights

    as_folder, found = is_folder(asked, wanted), list[Exported]()

    def fill(place: Path, images: "ProofImages | None") -> None:
        if as_folder and wanted is not None:
            place.mkdir(exist_ok=True)
            write(wanted, place / FILES.get(wanted.writes, ""), artefact)
            add_words(place, artefact)
        else:
            write(wanted, place, artefact)
        again = read_back(wanted, place, artefact)
        say("reading it back, and asking the library that it is for, where that is installed")
        proof = proved_weights(asked.to, place, artefact, title=made.title, images=images)
        numbers = f"{again.tensors:,} tensors, number for number the same"
        differs = (*done_otherwise(wanted, artefact), *again.settings)
        proof = {**proof, "tensors": again.tensors}
        checked = f"read back: {numbers}; {proof['words']}"
        found.append(replace(made, checked=checked, proof=proof, lost=again.lost, differs=differs))
        asked_for = asked.wish(artefact).to_json()
        said = {"checked": checked, "lost": list(again.lost), "differs": list(differs), "asked": asked_for}
        if as_folder:
            write_json(place / PROOF, {**proof, **said})
            write_sums(place)
        else:
            write_json(proof_beside(place), {**proof, **said, "sha256": sha256(place)})

    with asked.proof_images(artefact) as images:
        (put_folder if as_folder else put_file)(asked.out, lambda place: fill(place, images))
    return replace(found[0], files=files_at(asked.out))


def is_folder(asked: Asked, wanted: "Format | None") -> bool:
    """Whether OUT becomes a folder: some formats are one, and of others it is where OUT is not named like a file."""
    return wanted is None or asked.out.suffix not in OWN_ENDINGS.get(wanted.writes, ())


def there_already(asked: Asked, artefact: "Artefact", made: Exported) -> Exported | None:
    """What is at OUT, if by its proof it is what would be written."""
    proof = asked.wish(artefact).is_met(asked.out)
    if proof is None:
        return None
    lost, differs = (
        tuple(map(str, value)) if isinstance(value := proof.get(key), list) else () for key in ("lost", "differs")
    )
    checked = str(proof.get("checked"))
    return replace(
        made, checked=checked, proof=proof, lost=lost, differs=differs, files=files_at(asked.out), already=True
    )


# Words


def check_name(to: str) -> None:
    """Refuse a format that does not exist, with the nearest that does."""
    from vitkit.checkpoints.foreign import FORMATS
    from vitkit.core.errors import UnknownNameError, did_you_mean

    names = [*PROGRAMS, OURS, *(known.name for known in FORMATS)]
    if to not in names:
        hint = did_you_mean(to, names) or f"known formats: {', '.join(names)}"
        raise UnknownNameError(f"nothing can be exported to {to}", hint=hint)


def files_at(out: Path) -> tuple[str, ...]:
    """The names of what is there."""
    from vitkit.export.placing import proof_beside

    if out.is_dir():
        return tuple(sorted(path.name for path in out.iterdir()))
    return (out.name, *([proof_beside(out).name] if proof_beside(out).is_file() else []))


def say(text: str) -> None:
    """Tell what is being done."""
    talk_console().print(safe_text(text), soft_wrap=True, style="dim")


def loader(to: str, *, classes: int) -> str:
    """The line of Python that loads what was written.

    >>> loader("huggingface-dinov2", classes=0), loader("google", classes=10)
    ('transformers.AutoModel.from_pretrained("{out}")', 'vitkit.load("{out}")')
    """
    if to.startswith("huggingface") and not classes:
        return HEADLESS
    return LOADERS.get(to, OWN)
