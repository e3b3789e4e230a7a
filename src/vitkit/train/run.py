"""A configuration and a folder go in; a trained, judged and explained model comes out. Read this first.

    claim the folder → find the images → make the model → resume → train → keep the model → judge it → report

Run it again after an interruption and it goes on; run it again after it finished and it changes nothing.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from vitkit.checkpoints import native
from vitkit.checkpoints.native import Artefact
from vitkit.core.stopping import Stop, Stopped
from vitkit.data.augment import check_augment
from vitkit.data.loader import Batches, Position, Share, evaluation_batches, training_batches
from vitkit.data.source import Source
from vitkit.evaluate.accuracy import tally
from vitkit.train.config import RunConfig
from vitkit.train.folder import RunFolder
from vitkit.train.images import find_images
from vitkit.train.logs import Logs
from vitkit.train.loop import Evaluate, Loop, Rhythm
from vitkit.train.make import (
    choose_model,
    choose_preprocessing,
    finished_weights,
    make_model,
    make_trainer,
    worker_count,
)
from vitkit.train.parallel import joined, on_leader
from vitkit.train.report import conclude
from vitkit.train.resume import best_so_far, resume, was_evaluated
from vitkit.train.state import Checkpoints
from vitkit.train.update import Trainer
from vitkit.train.watch import Watcher

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
    folder, watcher, stop = RunFolder(Path(out)), watcher or Watcher(), stop or Stop()
    with joined(config.parallel) as ranks, ExitStack() as closing:
        watcher = watcher if ranks.leads else Watcher()
        on_leader(ranks, lambda _: folder.claim(config))
        if (summary := folder.result()) is not None:
            return Result(folder, summary, was_finished=True)

        workers = worker_count(config, ranks)
        check_augment(config.augment, channels=config.data.channels)
        pretrained = native.load(config.model.weights) if config.model.weights else None
        try:
            images = find_images(config.data, folder=folder, ranks=ranks, workers=workers, watcher=watcher, stop=stop)
        except Stopped:
            return Result(folder, None)
        when = rhythm(config, images=len(images.train))

        model_config = choose_model(config, classes=len(images.classes), pretrained=pretrained)
        prepared = choose_preprocessing(config, model_config, pretrained)
        model = make_model(config, model_config, pretrained=pretrained, ranks=ranks, watcher=watcher)
        trainer = make_trainer(
            config, model, preprocessing=prepared, classes=len(images.classes), steps=when.steps, ranks=ranks
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
            evaluate=evaluation(trainer, images.val, watcher=watcher, workers=workers) if images.val else None,
            best=best_so_far(folder),
        )
        pending = bool(images.val) and when.due(when.evaluate, step) and not was_evaluated(folder, step)
        if not loop.run(evaluation_is_missing=bool(ranks.agree(int(pending)))):
            return Result(folder, None)

        artefact = Artefact(
            name=config.model.name or (pretrained.name if pretrained else ""),
            config=model_config,
            state=finished_weights(trainer, model),
            preprocessing=prepared,
            labels=images.classes,
        )
        summary = on_leader(
            ranks,
            lambda alive: conclude(
                config, artefact, images, folder=folder, ranks=ranks, workers=workers, watcher=watcher, alive=alive
            ),
        )
        return Result(folder, summary)


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
        pin_memory=ranks.device.type == "cuda",
    )


def evaluation(trainer: Trainer, source: Source, *, watcher: Watcher, workers: int) -> Evaluate:
    """What judges the model on the validation images, shared out among the ranks."""
    config, ranks, state = trainer.config, trainer.ranks, trainer.state
    batch_size = max(1, config.schedule.batch_size // (ranks.ranks * config.schedule.accumulate))
    rounds = -(-len(source) // (batch_size * ranks.ranks))

    def evaluate(stop: Callable[[], bool]) -> dict[str, float]:
        batches = evaluation_batches(
            source,
            preprocessing=trainer.preprocessing,
            batch_size=batch_size,
            rank=ranks.rank,
            ranks=ranks.ranks,
            workers=workers,
        )
        trainer.model.eval()
        with batches, state.averaged():
            sums = tally(
                trainer.model,
                batches,
                preprocessing=trainer.preprocessing,
                device=ranks.device,
                rounds=rounds,
                autocast=torch.bfloat16 if config.parallel.precision == "bf16" else None,
                stop=stop,
            )
        loss, first, five, count = ranks.total([sums.loss, sums.first, sums.five, sums.count])
        return {"val_loss": loss / count, "val_top1": first / count, "val_top5": five / count}

    return evaluate
