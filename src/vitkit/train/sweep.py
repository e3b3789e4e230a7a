"""A fine-tuning run and learning rates go in; the best rate, and the model it gives on all images, come out (Table 4).

The rates are tried on the training images without the held-out ones, the one that does best on the held-out is chosen,
and the run is repeated with it on everything. Every trial is a run of its own, so a sweep goes on where it stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitkit.checkpoints.native import write_json
from vitkit.core.errors import ConfigError
from vitkit.core.stopping import Stop
from vitkit.train.config import RunConfig
from vitkit.train.parallel import joined, on_leader
from vitkit.train.resume import best_so_far, logged
from vitkit.train.run import Result, run
from vitkit.train.watch import Watcher

TRIALS = "sweep"
"""The folder of the trials, inside that of the final run."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One rate and how well it did on the held-out images at the end of its run."""

    lr: float
    val_top1: float
    val_loss: float


@dataclass(frozen=True)
class Sweep:
    """All trials, the best of them, and the final run; None where the sweep was asked to stop."""

    trials: tuple[Trial, ...]
    final: Result | None


def sweep(
    config: RunConfig,
    rates: Sequence[float],
    out: Path | str,
    *,
    watcher: Watcher | None = None,
    stop: Stop | None = None,
) -> Sweep:
    """Try the rates, choose, and run on everything; the final run's folder is `out`, the trials are inside it."""
    if not config.data.val_share:
        raise ConfigError("a sweep chooses by held-out images, and data.val_share is 0", hint="set data.val_share=0.1")
    if not config.objective.labelled:
        raise ConfigError(
            "a sweep chooses by how often a model is right, and this one learns without labels",
            expected="objective.name=supervised or distillation",
            got=config.objective.name,
            hint="leave out the sweep, and set schedule.lr",
        )
    out = Path(out)
    trials: list[Trial] = []
    with joined(config.parallel) as ranks:
        watcher = watcher if watcher and ranks.leads else Watcher()
        for rate in rates:
            watcher.say(f"trying lr {rate:g}")
            result = run(with_rate(config, rate), out / TRIALS / f"lr-{rate:g}", watcher=watcher, stop=stop)
            if result.summary is None:
                return Sweep(tuple(trials), None)
            trials.append(trial(rate, result))
        chosen = max(trials, key=lambda each: (each.val_top1, -each.val_loss))
        watcher.say(f"lr {chosen.lr:g} did best on the held-out images: {chosen.val_top1:.2%}; now on all images")
        final = replace(with_rate(config, chosen.lr), data=replace(config.data, train_on="all"))
        result = run(final, out, watcher=watcher, stop=stop)
        if result.summary is not None:  # whoever asks for the file next, on any rank, finds it
            said = {"chosen": chosen.lr, "trials": [vars(each) for each in trials]}
            on_leader(ranks, lambda _: write_json(out / "sweep.json", said))
    return Sweep(tuple(trials), result)


def with_rate(config: RunConfig, rate: float) -> RunConfig:
    """The run with another learning rate."""
    return replace(config, schedule=replace(config.schedule, lr=rate))


def trial(rate: float, result: Result) -> Trial:
    """What the last evaluation of a finished run said."""
    last = next((record for record in reversed(logged(result.folder)) if "val_top1" in record), None)
    if last is None or best_so_far(result.folder) is None:
        raise ConfigError("the trial was never judged: too few images to hold any out")
    return Trial(lr=rate, val_top1=float(str(last["val_top1"])), val_loss=float(str(last["val_loss"])))
