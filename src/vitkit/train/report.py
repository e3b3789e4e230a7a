"""A finished run goes in; its model on disk, a judgement of it, a page to look at and a summary come out."""

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from PIL import Image

from vitkit.checkpoints import native
from vitkit.checkpoints.native import Artefact, write_json
from vitkit.checkpoints.pretraining import Around, Settings, save_pretraining
from vitkit.core import runlog
from vitkit.core.config import to_toml
from vitkit.core.files import write_text
from vitkit.core.runlog import Record
from vitkit.core.shapes import Tensor
from vitkit.data.decode import decode
from vitkit.data.source import Source
from vitkit.evaluate.judgement import Judgement
from vitkit.evaluate.judging import judge_artefact
from vitkit.evaluate.page import ComparisonRow, DataDescription, Panel, RunReport, ShownMistake, render, thumbnail
from vitkit.evaluate.plots import Series
from vitkit.train.config import ObjectiveConfig, RunConfig
from vitkit.train.folder import RunFolder
from vitkit.train.images import Images
from vitkit.train.ledger import Ledger, keep_ledger, operations
from vitkit.train.parallel import Ranks
from vitkit.train.watch import Watcher, on_the_clock

MISTAKES = 24
"""Pictures of wrong answers on the page."""


def conclude(
    config: RunConfig,
    artefact: Artefact,
    images: Images,
    *,
    rest: Mapping[str, Tensor],
    folder: RunFolder,
    ranks: Ranks,
    workers: int,
    watcher: Watcher,
    alive: Callable[[], None],
) -> dict[str, object]:
    """Keep the model, judge it, and write the page and the summary; the summary last, since it says "finished".

    `rest` is what was around the model where it learned without labels; there are then no answers to judge.
    """
    native.save(folder.path, artefact)
    if not config.objective.labelled:
        save_pretraining(folder.path, Around(settings=pretraining_settings(config.objective), state=dict(rest)))
    judged: tuple[str, Source, Judgement] | None = None
    if config.objective.labelled and images.judged_by is not None:
        name, source = images.judged_by
        judged = (name, source, judged_on(artefact, source, ranks=ranks, workers=workers, watcher=watcher, alive=alive))
    metrics = runlog.read(folder.metrics)
    ledger = keep_ledger(
        artefact.config,
        parameters=sum(tensor.numel() for tensor in artefact.state.values()),
        images_seen=max((int(str(record["step"])) for record in metrics), default=0) * config.schedule.batch_size,
        flops_an_image=operations(config.objective, artefact.config),
        speed=runlog.read(folder.speed),
        device=ranks.device,
        ranks=ranks.ranks,
    )
    for other in config.keep.compare_with:
        if RunFolder(Path(other)).result() is None:
            watcher.warn(f"{other} has no result to compare with: it is not a finished run")
    write_text(folder.report, page(config, artefact, images, folder=folder, judged=judged, ledger=ledger))
    summary: dict[str, object] = {
        "model": artefact.name,
        "objective": config.objective.name,
        "classes": len(artefact.labels),
        "images": {"train": len(images.train)} | ({judged[0]: len(judged[1])} if judged else {}),
        "bad_files": images.bad,
        "judged_on": judged[0] if judged else None,
        "result": judged[2].to_json() if judged else None,
        "validation": last_evaluation(metrics),
        "ledger": ledger.to_json(),
    }
    write_json(folder.summary, summary)
    return summary


def judged_on(
    artefact: Artefact,
    source: Source,
    *,
    ranks: Ranks,
    workers: int,
    watcher: Watcher,
    alive: Callable[[], None],
) -> Judgement:
    """The finished model's judgement on a split."""
    watcher.work("judging the model", len(source))

    def progress(images: int) -> None:
        watcher.advance(images)
        alive()

    return judge_artefact(artefact, source, workers=workers, device=ranks.device, progress=progress)


def page(
    config: RunConfig,
    artefact: Artefact,
    images: Images,
    *,
    folder: RunFolder,
    judged: tuple[str, Source, Judgement] | None,
    ledger: Ledger,
) -> str:
    """The run's page."""
    parts = {"train": images.train, "val": images.val, "test": images.test}
    return render(
        RunReport(
            title=folder.path.resolve().name,
            model=artefact.name,
            parameters=ledger.parameters,
            data=DataDescription(
                kind=images.kind,
                place=Path(images.place).name or images.place,
                classes=images.classes,
                counts={name: len(source) for name, source in parts.items() if source is not None},
            ),
            config=to_toml(config),
            curves=curves(runlog.read(folder.metrics), labelled=config.objective.labelled),
            judgements={judged[0]: judged[2]} if judged else {},
            unjudged=unjudged(config, images, last_evaluation(runlog.read(folder.metrics))),
            reconstructions=folder.reconstructions.read_bytes() if folder.reconstructions.exists() else None,
            mistakes=mistakes(judged[1], judged[2], channels=config.data.channels) if judged else (),
            comparison=comparison(config, folder, judged[2] if judged else None),
            ledger=ledger_rows(ledger),
            speed=(
                Panel(
                    title="Images per second", series=series(runlog.read(folder.speed), {"all": "images_per_second"})
                ),
            ),
            environment=environment(),
            bad_files=images.bad,
            next_steps=next_steps(folder, labelled=config.objective.labelled),
        )
    )


def last_evaluation(metrics: list[Record]) -> dict[str, object] | None:
    """The numbers of the last evaluation, by their names in the log."""
    last = next((record for record in reversed(metrics) if "val_loss" in record), None)
    return None if last is None else {key: value for key, value in last.items() if key.startswith("val_")}


def unjudged(config: RunConfig, images: Images, validation: Mapping[str, object] | None) -> str:
    """Why there is no judgement, where there is none."""
    if config.objective.labelled:
        return "There were no images to validate or test on: accuracy was not measured."
    learned = "The model learned without labels, and answers with features: fine-tune it to teach it classes."
    if validation is None or images.val is None:
        return learned
    return f"{learned} Its loss on {len(images.val):,} validation images is {float(str(validation['val_loss'])):.3f}."


def pretraining_settings(objective: ObjectiveConfig) -> Settings:
    """The section of the objective that says what was around the model."""
    return objective.masked if objective.name == "masked" else objective.autoencoder


def comparison(config: RunConfig, folder: RunFolder, judgement: Judgement | None) -> tuple[ComparisonRow, ...]:
    """This run beside those that it is to be compared with."""
    if not config.keep.compare_with or judgement is None:
        return ()
    rows = []
    for other in map(Path, config.keep.compare_with):
        result = (RunFolder(other).result() or {}).get("result")
        if isinstance(result, Mapping):
            low, high = result["intervals"]["top1"]
            rows.append(ComparisonRow(label=other.resolve().name, top1=result["top1"], interval=(low, high)))
    here = folder.path.resolve().name
    return (*rows, ComparisonRow(label=f"{here} (this run)", top1=judgement.top1, interval=judgement.intervals["top1"]))


def series(records: list[Record], lines: Mapping[str, str]) -> tuple[Series, ...]:
    """Lines of a chart by their names, from the keys of a log; a key that is nowhere gives none."""
    found = []
    for name, key in lines.items():
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            steps, values = zip(*points, strict=True)
            found.append(Series(name=name, steps=steps, values=values))
    return tuple(found)


def curves(metrics: list[Record], *, labelled: bool = True) -> tuple[Panel, ...]:
    """The charts of a run; without labels there is a share of right answers only where patches have classes."""
    title, key = ("Accuracy", "top1") if labelled else ("Patches named rightly", "right")
    right = series(metrics, {"train": key, "val": f"val_{key}"})
    return (
        Panel(title="Loss", series=series(metrics, {"train": "loss", "val": "val_loss"}), smooth=True),
        *([Panel(title=title, series=right, percent=True, smooth=True)] if labelled or right else []),
        Panel(title="Learning rate", series=series(metrics, {"rate": "lr"})),
        Panel(title="Gradient norm", series=series(metrics, {"norm": "gradient_norm"}), scale="log", smooth=True),
    )


def mistakes(source: Source, judgement: Judgement, *, channels: int) -> tuple[ShownMistake, ...]:
    """The wrong answers that the model was surest of, with their pictures."""
    shown = []
    for mistake in judgement.most_confident_mistakes(MISTAKES):
        picture = decode(source.content(mistake.index), channels=channels)
        shown.append(
            ShownMistake(
                picture=thumbnail(picture) if isinstance(picture, Image.Image) else None,
                file=source.name(mistake.index),
                label=judgement.classes[mistake.label],
                predicted=judgement.classes[mistake.predicted],
                probability=mistake.probability,
                label_probability=mistake.label_probability,
            )
        )
    return tuple(shown)


def ledger_rows(ledger: Ledger) -> tuple[tuple[str, str], ...]:
    """The ledger in words."""
    rows = [
        ("Operations to learn from one image", f"{ledger.flops_an_image / 1e9:.3g} GFLOPs"),
        ("Images seen", f"{ledger.images_seen:,}"),
        ("Operations of the whole run", f"{ledger.exaflops:.3g} exaFLOPs"),
    ]
    if ledger.seconds and ledger.images_per_second and ledger.flops_a_second and ledger.utilisation is not None:
        rows += [
            ("Time in its steps", on_the_clock(ledger.seconds)),
            ("Images a second", f"{ledger.images_per_second:,.0f}"),
            ("Operations a second", f"{ledger.flops_a_second / 1e9:,.0f} GFLOP/s"),
            ("Utilisation", f"{ledger.utilisation:.0%} of the peak"),
            ("Peak, float32 matrix products", f"{ledger.peak_flops_a_second / 1e9:,.0f} GFLOP/s measured"),
        ]
    if ledger.waiting is not None:
        rows.append(("Time spent waiting for images", f"{ledger.waiting:.1%}"))
    rows.append(("Machine", f"{ledger.ranks} × {ledger.device}, {ledger.threads} threads each"))
    return tuple(rows)


def environment() -> tuple[tuple[str, str], ...]:
    """What the run ran on."""
    return (
        ("vitkit", version("vitkit")),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("System", f"{platform.system()} {platform.machine()}"),
    )


def next_steps(folder: RunFolder, *, labelled: bool) -> tuple[tuple[str, str], ...]:
    """What to do with the model."""
    run = folder.path.name
    if not labelled:
        return (
            ("Teach it classes", f"vitkit finetune {run} LABELLED-FOLDER --out NEW"),
            ("See what its features are worth", f"vitkit fewshot {run} LABELLED-FOLDER"),
        )
    return (
        ("Judge it on other images", f"vitkit eval {run} OTHER-FOLDER"),
        ("Teach it other classes", f"vitkit finetune {run} OTHER-FOLDER --out NEW"),
    )
