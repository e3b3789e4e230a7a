"""A trainer and validation images go in; what judges the model whenever it is due comes out.

A labelled run is judged by how often it is right. One without labels is judged by its own loss, on tasks that are the
same at every evaluation, and draws what it makes of a few images.
"""

from collections.abc import Callable

import torch

from vitkit.data.loader import Batches, evaluation_batches
from vitkit.data.source import Source, Subset
from vitkit.evaluate.accuracy import in_step, tally
from vitkit.objectives.objective import EVALUATING, Chance, Reconstruction, Unlabelled
from vitkit.train.folder import RunFolder
from vitkit.train.loop import Evaluate
from vitkit.train.reconstructions import draw
from vitkit.train.update import Trainer, precision
from vitkit.train.watch import Watcher

SHOWN = 8
"""Images whose completion is drawn at every evaluation."""


def evaluation(trainer: Trainer, source: Source, *, folder: RunFolder, workers: int, watcher: Watcher) -> Evaluate:
    """What judges the model on the validation images, shared out among the ranks."""
    if isinstance(trainer.objective, Unlabelled):

        def show(shown: Reconstruction) -> None:
            try:
                draw(folder.reconstructions, shown)
            except OSError as error:  # a picture is no reason to end a run
                watcher.warn(f"{folder.reconstructions.name} could not be drawn: {error.strerror or error}")

        return by_own_loss(trainer, trainer.objective, source, workers=workers, show=show)
    return by_accuracy(trainer, source, workers=workers)


def by_accuracy(trainer: Trainer, source: Source, *, workers: int) -> Evaluate:
    """The loss of labels, and how often they are the first guess or among the first five."""
    config, ranks, state = trainer.config, trainer.ranks, trainer.state
    _, rounds = shares(trainer, len(source))

    def evaluate(stop: Callable[[], bool]) -> dict[str, float]:
        trainer.model.eval()
        with opened(trainer, source, workers=workers) as batches, state.averaged():
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


def by_own_loss(
    trainer: Trainer,
    objective: "Unlabelled[object]",
    source: Source,
    *,
    workers: int,
    show: Callable[[Reconstruction], None],
) -> Evaluate:
    """The objective's own loss and shares; an image has the same task at any batch size and on any rank.

    What the model makes of the first images is shown by the leader.
    """
    ranks = trainer.ranks

    def evaluate(stop: Callable[[], bool]) -> dict[str, float]:
        trainer.model.eval()
        with opened(trainer, source, workers=workers) as batches, trainer.state.averaged():
            loss, count, sums = own_loss(trainer, objective, batches, images=len(source), stop=stop)
            shown = reconstruct(trainer, objective, Subset(source, range(min(SHOWN, len(source)))))
        if ranks.leads:
            show(shown)
        loss, images, *totals = ranks.total([loss, count, *sums.values()])
        return {"val_loss": loss / images} | {
            f"val_{name}": total / images for name, total in zip(sums, totals, strict=True)
        }

    return evaluate


@torch.no_grad()
def own_loss(
    trainer: Trainer, objective: "Unlabelled[object]", batches: Batches, *, images: int, stop: Callable[[], bool]
) -> tuple[float, int, dict[str, float]]:
    """Sums over this rank's images: the loss, their number, and what else the objective counts.

    Ranks that share a model must call it together.
    """
    batch_size, rounds = shares(trainer, images)
    config, ranks = trainer.config, trainer.ranks
    loss, count, sums = 0.0, 0, dict[str, float]()
    together = in_step(batches, rounds=rounds, preprocessing=trainer.preprocessing, stop=stop)
    for number, (batch, counts) in enumerate(together):
        first = (number * ranks.ranks + ranks.rank) * batch_size
        pixels = batch.pixels.to(ranks.device)
        normalised = trainer.preprocessing.normalise(pixels)
        task = objective.set_task(normalised, pixels, chance=Chance(seed=config.seed, use=EVALUATING, first=first))
        with precision(config, ranks.device):
            outcome = objective(trainer.model, normalised, task)
        counted = len(pixels) if counts else 0
        loss += outcome.loss.item() * counted
        count += counted
        for name, value in outcome.sums.items():
            sums[name] = sums.get(name, 0.0) + (value.item() if counted else 0.0)
    return loss, count, sums


@torch.no_grad()
def reconstruct(trainer: Trainer, objective: "Unlabelled[object]", source: Source) -> Reconstruction:
    """What the model makes of the images of a source; every rank must ask."""
    device, fed = trainer.ranks.device, trainer.preprocessing
    with evaluation_batches(source, preprocessing=fed, batch_size=len(source)) as batches:
        pixels = next(batches).pixels.to(device)
    images = fed.normalise(pixels)
    task = objective.set_task(images, pixels, chance=Chance(seed=trainer.config.seed, use=EVALUATING))
    with precision(trainer.config, device):
        return objective.reconstruct(trainer.model, images, pixels, task)


def shares(trainer: Trainer, images: int) -> tuple[int, int]:
    """The images of a batch, and how many batches the busiest rank has."""
    schedule, ranks = trainer.config.schedule, trainer.ranks.ranks
    batch_size = max(1, schedule.batch_size // (ranks * schedule.accumulate))
    return batch_size, -(-images // (batch_size * ranks))


def opened(trainer: Trainer, source: Source, *, workers: int) -> Batches:
    """This rank's batches of the validation images."""
    batch_size, _ = shares(trainer, len(source))
    return evaluation_batches(
        source,
        preprocessing=trainer.preprocessing,
        batch_size=batch_size,
        rank=trainer.ranks.rank,
        ranks=trainer.ranks.ranks,
        workers=workers,
        device=trainer.ranks.device,
    )
