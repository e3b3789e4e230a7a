"""`vitkit eval`: a trained model and labelled images go in, how good it is comes out."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitkit.cli.checking import sound_images
from vitkit.cli.describing import counted
from vitkit.cli.engines import EngineChoice, asked, build_if_needed, engine_options, tell
from vitkit.cli.output import print_json, print_sections, safe_text, talk_console

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from vitkit.checkpoints.native import Artefact
    from vitkit.data.verify import BadFile
    from vitkit.engine.engine import Engine
    from vitkit.evaluate.judgement import Judgement
    from vitkit.evaluate.protocols import Judged, Prepared
    from vitkit.evaluate.real import RealAccuracy
    from vitkit.zoo.lookup import Model


@click.command("eval")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("data")
@click.option("--split", help="Which split to judge on; test, else val, else all images, where not given.")
@click.option("--kind", help="The kind of data set, where it is not found right by itself.")
@click.option(
    "--label-map",
    metavar="NAME|FILE",
    help="What the data's classes are to the model: imagenet, imagenet-v2, imagenet-a, imagenet-r, imagenet-sketch, "
    "objectnet, or a JSON or CSV file.",
)
@click.option("--real", metavar="FILE", help="Judge by ReaL's labels too: the published real.json.")
@click.option("--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Processes that read images.")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Images at a time.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or auto.")
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(
    run: Path,
    data: str,
    split: str | None,
    kind: str | None,
    label_map: str | None,
    real: str | None,
    workers: int,
    batch_size: int,
    device: str,
    as_json: bool,
) -> None:
    """Judge the model in the folder RUN on DATA: top-1, top-5, per class, calibration, confusion.

    On the data set that it learned from, it is judged by the images that were held out. A model of ImageNet's classes
    is judged on ImageNet-V2, -A, -R, -Sketch and ObjectNet by a label map, and on ImageNet by ReaL's labels too.
    It is judged as written. With --precision or --merge it is judged so as well, and the difference is said.

    \b
    vitkit eval runs/photos photos/
    vitkit eval runs/photos holidays/ --json
    vitkit eval runs/photos photos/ --precision int8
    vitkit eval ViT-B_16.npz imagenet --real real.json
    vitkit eval ViT-B_16.npz imagenet-a --label-map imagenet-a
    """
    from vitkit.checkpoints.foreign import load
    from vitkit.data.sources.detect import open_data
    from vitkit.engine.devices import choose_device
    from vitkit.evaluate.judging import choose_split, known_classes
    from vitkit.evaluate.protocols import Protocol, prepare
    from vitkit.train.folder import RunFolder
    from vitkit.train.images import as_divided_for

    artefact, place = load(run), choose_device(device)
    found = as_divided_for(RunFolder(run), open_data(data, kind=kind))
    name, source = choose_split(found, split)
    prepared = prepare(Protocol(label_map=label_map, real=real), source, labels=artefact.labels, place=data)
    if prepared.label_map is None:
        known_classes(artefact, source)  # before time is spent on looking at images
    talk = talk_console()
    if name == "train":
        talk.print("warning: these are images to learn from; the model may have seen them", style="yellow")
    talk.print(safe_text(f"{found.kind}: {len(source):,} images of split {name}"), soft_wrap=True)
    tell_map(prepared, talk)
    outcome = judge_images(
        artefact, prepared, asked(), place=data, workers=workers, batch_size=batch_size, device=place
    )
    if as_json:
        print_json(outcome.to_json(prepared, split=name))
        return
    print_judgement(outcome.judged.judgement, split=name)
    if outcome.judged.real is not None:
        print_real(outcome.judged.real)
    if outcome.cost is not None:
        print_cost(outcome.cost, outcome.judged.judgement)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The judgement of the model as written, beside which another engine's stands."""

    written: "Judgement"
    choice: EngineChoice
    engine: str

    def to_json(self, judgement: "Judgement") -> dict[str, object]:
        """Keys to add: what ran, what fp32 as written reached, and by how much this differs from it."""
        before = {
            "top1": self.written.top1,
            "top5": self.written.top5,
            "ece": self.written.ece,
            "nll": self.written.nll,
        }
        apart = {"top1": judgement.top1 - self.written.top1, "top5": judgement.top5 - self.written.top5}
        ran = {"precision": self.choice.precision, "merge": self.choice.merge, "engine": self.engine}
        return ran | {"fp32": before, "difference": apart}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is printed: how good the model is, by the chosen engine; what that costs; and which files are bad."""

    judged: "Judged"
    cost: Cost | None
    bad: "list[BadFile]"

    def to_json(self, prepared: "Prepared", *, split: str) -> dict[str, object]:
        """As the command prints it."""
        said: dict[str, object] = dict(self.judged.judgement.to_json())
        said |= {"split": split, "bad": [{"file": file.name, "reason": file.reason} for file in self.bad]}
        if prepared.label_map is not None:
            said |= {"label_map": prepared.label_map.to_json(), "images_left_out": prepared.left_out}
        if self.judged.real is not None:
            said |= {"real": self.judged.real.to_json()}
        return said if self.cost is None else said | self.cost.to_json(self.judged.judgement)


def judge_images(
    artefact: "Artefact",
    prepared: "Prepared",
    choice: EngineChoice,
    *,
    place: str,
    workers: int,
    batch_size: int,
    device: "torch.device",
) -> Outcome:
    """Judge the model as written, and by another engine too if one is asked for, on the images that can be read."""
    from rich.progress import Progress

    from vitkit.evaluate.protocols import judge_by

    engine = asked_engine(artefact.model(), choice, device=device) if choice.changes_answers else None
    ways = [None] if engine is None else [None, engine]
    talk, channels = talk_console(), artefact.preprocessing.channels
    with Progress(console=talk, transient=True, disable=not talk.is_terminal) as progress:
        sound, bad = sound_images(prepared.source, place=place, channels=channels, workers=workers, progress=progress)
        task = progress.add_task("judging", total=len(sound) * len(ways))
        found = [
            judge_by(
                artefact,
                replace(prepared, source=sound),
                workers=workers,
                batch_size=batch_size,
                device=device,
                engine=way,
                progress=lambda images: progress.advance(task, images),
            )
            for way in ways
        ]
    cost = None if engine is None else Cost(written=found[0].judgement, choice=choice, engine=engine.name)
    return Outcome(judged=found[-1], cost=cost, bad=bad)


def asked_engine(model: "Model", choice: EngineChoice, *, device: "torch.device") -> "Engine":
    """The engine that the model is judged by beside itself; why it is no faster one is said."""
    from vitkit.engine.choose import chosen

    build_if_needed(model, choice, device=device)
    engine, remark = chosen(model, precision=choice.precision, device=device, merge=choice.merge)
    tell(f"engine: {engine.name}" + (f"; {remark}" if remark else ""))
    return engine


def print_cost(cost: Cost, judgement: "Judgement") -> None:
    """Print the accuracy of the model as written, and what the chosen engine costs of it."""
    rows = [
        ("top-1", f"{cost.written.top1:.2%} ({100 * (judgement.top1 - cost.written.top1):+.2f} points by this engine)"),
        ("top-5", f"{cost.written.top5:.2%} ({100 * (judgement.top5 - cost.written.top5):+.2f} points)"),
    ]
    click.echo()
    print_sections({"The same images in fp32, as written": rows})


def tell_map(prepared: "Prepared", talk: "Console") -> None:
    """Say what the classes are taken for, and name those that the model has nothing for."""
    found = prepared.label_map
    if found is None:
        return
    classes = f"{len(found.known):,} of {len(found.classes):,} classes"
    logits = "their logits alone are read" if found.read == "mapped" else "all logits are read"
    talk.print(safe_text(f"label map {found.name}: {classes}; {logits}"), soft_wrap=True)
    for warning in found.warnings:
        talk.print(safe_text(f"warning: {warning}"), style="yellow", soft_wrap=True)
    if prepared.left_out:
        left = [name for name, means in zip(found.classes, found.means, strict=True) if not means]
        names = ", ".join(left[:5]) + (f" and {len(left) - 5:,} more" if len(left) > 5 else "")
        images = counted(prepared.left_out, "image")
        warning = f"warning: left out {images} of classes that mean nothing to the model: {names}"
        talk.print(safe_text(warning), style="yellow", soft_wrap=True)


def print_real(real: "RealAccuracy") -> None:
    """Print the ReaL accuracy."""
    low, high = real.interval
    skipped = f"{real.skipped:,} images without labels skipped"
    rows = [("top-1", f"{real.top1:.2%} (95 % interval {low:.1%}–{high:.1%})"), ("skipped", skipped)]
    click.echo()
    print_sections({f"By ReaL's labels, on {real.count:,} images": rows})


def print_judgement(judgement: "Judgement", *, split: str) -> None:
    """Print the numbers, and the classes that are told worst."""
    low, high = judgement.intervals["top1"]
    worst = sorted(
        (each for each in judgement.per_class if each.recall is not None), key=lambda each: each.recall or 0.0
    )
    print_sections(
        {
            f"On {judgement.count:,} images ({split})": [
                ("top-1", f"{judgement.top1:.2%} (95 % interval {low:.1%}–{high:.1%})"),
                ("top-5", f"{judgement.top5:.2%}"),
                ("calibration", f"{judgement.ece:.3f} expected calibration error"),
                ("log-likelihood", f"{-judgement.nll:.3f} nats an image"),
            ],
            "Classes found least often": [
                (
                    each.name,
                    f"{each.recall or 0.0:.1%} of {each.count} found, {each.precision or 0.0:.1%} of guesses right",
                )
                for each in worst[:5]
            ],
        }
    )
