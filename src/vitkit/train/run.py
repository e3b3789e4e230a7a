"""A configuration and a folder go in; a trained, judged and explained model comes out. Read this first.

    claim the folder → find the images → make the model → resume → train → keep the model → judge it → report

Run it again after an interruption and it goes on; run it again after it finished and it changes nothing.
"""

import errno
import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from vitkit.checkpoints.adapt import with_channels
from vitkit.checkpoints.foreign import load, load_as_stored
from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import ConfigError, TrainingError
from vitkit.core.shapes import pair
from vitkit.core.stopping import Stop, Stopped
from vitkit.data.augment import check_augment
from vitkit.data.loader import Batches, Position, Share, training_batches
from vitkit.data.source import Source
from vitkit.objectives.distillation import Teacher
from vitkit.train.config import RunConfig
from vitkit.train.evaluation import evaluation
from vitkit.train.folder import RunFolder
from vitkit.train.images import find_images
from vitkit.train.logs import Logs
from vitkit.train.loop import Loop, Rhythm
from vitkit.train.make import (
    around,
    choose_model,
    choose_preprocessing,
    finished_weights,
    make_model,
    make_objective,
    make_trainer,
    worker_count,
)
from vitkit.train.parallel import Ranks, joined, on_leader
from vitkit.train.report import conclude
from vitkit.train.resume import best_so_far, resume, was_evaluated
from vitkit.train.state import Checkpoints
from vitkit.train.update import Trainer
from vitkit.train.watch import Watcher
from vitkit.zoo.lookup import create, find
from vitkit.zoo.variants import ModelConfig

EVALUATIONS = 20
"""At most so many evaluations in a run that does not say how often."""


@dataclass(frozen=True)
class Result:
    """How a run ended: its summary if it is finished, None if it was stopped and saved."""

    folder: RunFolder
    summary: dict[str, object] | None
    was_finished: bool = False


def run(config: RunConfig, out: Path | str, *, watcher: Watcher | None = None, stop: Stop | None = None) -> Result:
    """Carry out a run, or go on with it, or find it done."""
    folder, watcher = RunFolder(Path(out)), watcher or Watcher()
    stop = Stop() if stop is None else stop  # one that nobody asked yet is false, and is the one to look at
    with naming_the_disk(folder), joined(config.parallel) as ranks, ExitStack() as closing:
        watcher = watcher if ranks.leads else Watcher()
        closing.enter_context(claimed(folder, config, ranks=ranks))
        if (summary := folder.result()) is not None:
            return Result(folder, summary, was_finished=True)

        workers = worker_count(config, ranks)
        pretrained = starting_point(config, watcher=watcher) if config.model.weights else None
        teacher = find_teacher(config, ranks=ranks, watcher=watcher)
        check(config, pretrained=pretrained, teacher=teacher, ranks=ranks)
        try:
            images = find_images(config, folder=folder, ranks=ranks, workers=workers, watcher=watcher, stop=stop)
        except Stopped:
            return Result(folder, None)
        when = rhythm(config, images=len(images.train))

        labels = images.classes if config.objective.labelled else ()
        teacher = teacher.of_classes(labels) if teacher else None
        model_config = choose_model(config, classes=len(labels), pretrained=pretrained)
        prepared = choose_preprocessing(config, model_config, pretrained)
        name, size = name_of(config, model_config, pretrained), pair(model_config.image_size)
        model = make_model(config, model_config, pretrained=pretrained, ranks=ranks, watcher=watcher)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        watcher.say(f"{name}: {parameters:,} parameters, images of {size[0]}×{size[1]} pixels, {when.steps:,} steps")
        trainer = make_trainer(
            config, model, preprocessing=prepared, classes=len(labels), steps=when.steps, ranks=ranks, teacher=teacher
        )
        checkpoints = Checkpoints(folder.checkpoints, last=config.keep.last)
        resume(trainer.state, checkpoints, folder, ranks=ranks, watcher=watcher)

        step = trainer.state.progress.step
        loop = Loop(
            trainer=trainer,
            batches=closing.enter_context(stream(trainer, images.train, workers=workers)),
            rhythm=when,
            checkpoints=checkpoints,
            stop=stop,
            watcher=watcher,
            logs=closing.enter_context(Logs.open(folder, config.keep, step=step)) if ranks.leads else None,
            evaluate=evaluation(trainer, images.val, folder=folder, workers=workers, watcher=watcher)
            if images.val
            else None,
            best=best_so_far(folder),
        )
        pending = bool(images.val) and when.due(when.evaluate, step) and not was_evaluated(folder, step)
        if not loop.run(evaluation_is_missing=bool(ranks.agree(int(pending)))):
            return Result(folder, None)

        finished, rest = finished_weights(trainer, model)
        artefact = Artefact(name=name, config=model_config, state=finished, preprocessing=prepared, labels=labels)
        summary = on_leader(
            ranks,
            lambda alive: conclude(
                config,
                artefact,
                images,
                rest=rest,
                folder=folder,
                ranks=ranks,
                workers=workers,
                watcher=watcher,
                alive=alive,
            ),
        )
        return Result(folder, {} if summary is None else summary)  # only the leader has it


@contextmanager
def naming_the_disk(folder: RunFolder) -> Iterator[None]:
    """Say of a file that cannot be written or read which it is, and what helps."""
    try:
        yield
    except BrokenPipeError:
        raise  # nobody listens any more: not the disk's fault
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise TrainingError(
            f"{error.filename or folder.path}: {error.strerror or error}",
            hint=f"{'make room' if full else 'mend the disk'} and run the same command again, or name another --out",
        ) from error


@contextmanager
def claimed(folder: RunFolder, config: RunConfig, *, ranks: Ranks) -> Iterator[None]:
    """Make the folder this run's own; a run that fails before it has kept anything leaves the place as it was.

    Whoever mends the mistake can then use the same folder, which would otherwise hold "a run with another" setting.
    """
    new_places = [place for place in (folder.path, *folder.path.parents) if not place.exists()]
    is_new, is_ours = not folder.config.exists(), False
    try:
        on_leader(ranks, lambda _: folder.claim(config))
        is_ours = True
        yield
    except Exception:
        if ranks.leads and is_new:
            if is_ours and not has_kept_something(folder):
                give_back(folder)
            for place in new_places:
                with suppress(OSError):  # it is not empty: somebody else uses it
                    place.rmdir()
        raise


def has_kept_something(folder: RunFolder) -> bool:
    """Whether there is something to go on from, or to read."""
    logged = folder.metrics.exists() and folder.metrics.stat().st_size > 0
    return logged or bool(Checkpoints(folder.checkpoints).steps())


def give_back(folder: RunFolder) -> None:
    """Remove what a run writes before its first checkpoint; what says whose folder it is last."""
    for inner in (folder.checkpoints, folder.path / "tensorboard"):
        shutil.rmtree(inner, ignore_errors=True)
    for file in (folder.bad_files, folder.data, folder.metrics, folder.speed, folder.config):
        file.unlink(missing_ok=True)


def starting_point(config: RunConfig, *, watcher: Watcher) -> Artefact:
    """The trained model to begin from, for images of the channels that this run has."""
    weights = config.model.weights or ""
    # Positions that are resampled anyway are resampled once, from those that were learned.
    pretrained = load(weights) if config.model.image_size is None else load_as_stored(weights)
    return for_channels(pretrained, config.data.channels, watcher=watcher)


def for_channels(pretrained: Artefact, channels: int, *, watcher: Watcher) -> Artefact:
    """A trained model for images of so many channels; what was changed for it is said."""
    if pretrained.config.channels == channels:
        return pretrained
    fitted, changes = with_channels(pretrained, channels)
    for change in changes:
        watcher.say(change)
    return fitted


def find_teacher(config: RunConfig, *, ranks: Ranks, watcher: Watcher) -> Teacher | None:
    """The teacher of a distilled run, whole on every rank, for images of the channels that this run has."""
    if config.objective.name != "distillation":
        return None
    if (place := config.objective.distillation.teacher) is None:
        raise ConfigError(
            "a distilled run needs a teacher",
            hint="set objective.distillation.teacher to a finished run, or to weights that vitkit weights info knows",
        )
    found = for_channels(load(place), config.data.channels, watcher=watcher)
    watcher.say(f"teacher: {found.name}, {sum(tensor.numel() for tensor in found.state.values()):,} parameters")
    model = found.model().float().to(ranks.device)
    return Teacher(model=model, preprocessing=found.preprocessing, labels=found.labels)


def check(config: RunConfig, *, pretrained: Artefact | None, teacher: Teacher | None, ranks: Ranks) -> None:
    """Find mistakes in the settings at once, not after hours of looking at images."""
    channels, schedule = config.data.channels, config.schedule
    check_augment(config.augment, channels=channels)
    if pretrained is None and config.model.shrink < 1:
        raise ConfigError(
            "model.shrink keeps a share of trained weights, and there are none",
            expected="model.weights, or model.shrink=1",
            got=config.model.shrink,
        )
    Share(batch_size=schedule.batch_size, ranks=ranks.ranks, accumulate=schedule.accumulate)
    classes = 0 if not config.objective.labelled else pretrained.config.classes if pretrained else 2
    model = choose_model(config, classes=classes, pretrained=pretrained)
    prepared = choose_preprocessing(config, model, pretrained)
    if config.objective.name != "supervised":
        with torch.device("meta"):
            make_objective(
                config, around(create(model, device="meta"), config), preprocessing=prepared, teacher=teacher
            )


def name_of(config: RunConfig, model: ModelConfig, pretrained: Artefact | None) -> str:
    """What to call the model: its name, or that of the weights, which say so themselves where it was changed."""
    if pretrained:
        return pretrained.name
    variant = find(config.model.name or "")
    fitted = {"image_size", "classes", "channels"}
    is_plain = all(getattr(variant.config, key) == value for key, value in vars(model).items() if key not in fitted)
    return variant.name if is_plain else f"{variant.name} (changed)"


def rhythm(config: RunConfig, *, images: int) -> Rhythm:
    """How many steps there are, and when what is due.

    >>> rhythm(RunConfig(), images=1280).steps
    100
    """
    schedule, keep = config.schedule, config.keep
    an_epoch = images / schedule.batch_size
    steps = schedule.steps or max(1, math.ceil(an_epoch * (schedule.epochs or 0)))
    evaluate = keep.evaluate_every or max(1, math.ceil(an_epoch), math.ceil(steps / EVALUATIONS))
    return Rhythm(
        steps=steps,
        steps_an_epoch=an_epoch,
        log=keep.log_every,
        evaluate=evaluate,
        save=keep.save_every or evaluate,
        save_seconds=60 * keep.save_minutes,
    )


def stream(trainer: Trainer, source: Source, *, workers: int) -> Batches:
    """This rank's batches from where the run stands."""
    schedule, ranks = trainer.config.schedule, trainer.ranks
    seen = trainer.state.progress.step * schedule.batch_size
    return training_batches(
        source,
        start=Position(trainer.config.seed, 0, 0).after(seen, size=len(source)),
        share=Share(batch_size=schedule.batch_size, rank=ranks.rank, ranks=ranks.ranks, accumulate=schedule.accumulate),
        preprocessing=trainer.preprocessing,
        augment=trainer.config.augment,
        workers=workers,
        device=ranks.device,
    )
