"""Training from JPEG files: a folder goes in; how fast the model learns from it, beside memory and decoding, comes out.

GOMP_SPINCOUNT=1000 python bench/from_files.py FOLDER        about five minutes, prints JSON
GOMP_SPINCOUNT=1000 python bench/from_files.py FOLDER --steps 4 --rounds 1

bench/training.py starts it. The variable is what `vitkit train` sets: threads that wait awake keep cores from decoders.
Memory is kept as `vitkit train` keeps it.

The stream of batches is opened anew in each round, and its clock starts when as much is prefetched as ever will be. It
stops when that is so again, so nothing is taken from a store that somebody else's time has filled.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any, cast

import click
import psutil
import torch

from vitkit.cli.machine import keep_freed_memory
from vitkit.data.loader import Batch, Batches
from vitkit.data.source import Source
from vitkit.data.sources.detect import open_data
from vitkit.train.config import ModelChoice, RunConfig, ScheduleConfig
from vitkit.train.make import choose_model, choose_preprocessing, make_model, make_trainer
from vitkit.train.parallel import Ranks
from vitkit.train.run import stream
from vitkit.train.update import Trainer
from vitkit.train.watch import Watcher

MODEL, BATCH, CLASSES = "Ti/16", 32, 10
WORKERS = (1, 2)
WARM_UP = 3
DECODED = 20
"""Batches by which decoding alone is measured."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Images a second, medians of the rounds: of computing alone, and by workers of decoding alone and of both."""

    model: str
    batch: int
    files: int
    compute: float
    decode: dict[str, float]
    both: dict[str, float]
    waiting: dict[str, float]
    """The share of its time that the model waited for images."""

    @property
    def limit(self) -> float:
        """The rate that cores which do both, in turn, can reach: the times of the two add up.

        >>> of = {"1": 300.0}
        >>> Rates(model="", batch=1, files=1, compute=100.0, decode=of, both=of, waiting=of).limit
        75.0
        """
        return 1 / (1 / self.compute + 1 / max(self.decode.values()))


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--steps", default=16, show_default=True, help="Training steps of each contender in a round.")
@click.option("--rounds", default=3, show_default=True)
def main(folder: Path, steps: int, rounds: int) -> None:
    """Measure training from the JPEG files in a folder."""
    keep_freed_memory()
    with labelled(folder) as place:
        print(json.dumps(asdict(measure(place, steps=steps, rounds=rounds))))


@contextmanager
def labelled(folder: Path) -> Iterator[Path]:
    """The folder's files in a folder of classes; what class a file is in does not matter to the time it takes."""
    files = sorted(folder.rglob("*.jpg"))
    with tempfile.TemporaryDirectory() as place:
        for number, file in enumerate(files):
            target = Path(place) / f"class-{number % CLASSES}" / f"{number}.jpg"
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
        yield Path(place)


def measure(place: Path, *, steps: int, rounds: int) -> Rates:
    """All rates, in rounds of computing alone, decoding alone, and both."""
    source = open_data(place).splits["all"]
    trainer = make()
    batch = next(decoded(trainer, source, workers=0))
    for _ in range(2):
        trainer.update(cast("Any", repeat(batch)))
    compute: list[float] = []
    decode: dict[str, list[float]] = {str(workers): [] for workers in WORKERS}
    both: dict[str, list[float]] = {str(workers): [] for workers in WORKERS}
    waiting: dict[str, list[float]] = {str(workers): [] for workers in WORKERS}
    for _ in range(rounds):
        compute.append(computing(trainer, batch, steps=steps))
        for workers in WORKERS:
            decode[str(workers)].append(decoding(trainer, source, workers=workers))
            rate, waited = training(trainer, source, workers=workers, steps=steps)
            both[str(workers)].append(rate)
            waiting[str(workers)].append(waited)
    middle = [{name: median(rates) for name, rates in found.items()} for found in (decode, both, waiting)]
    return Rates(
        model=MODEL,
        batch=BATCH,
        files=len(source),
        compute=median(compute),
        decode=middle[0],
        both=middle[1],
        waiting=middle[2],
    )


def make() -> Trainer:
    """What a run of the command line would call."""
    config = RunConfig(
        model=ModelChoice(name=MODEL, settings=("block.activation=gelu_erf",)),
        schedule=ScheduleConfig(batch_size=BATCH, epochs=None, steps=10**6, lr=1e-4, decay="constant"),
    )
    ranks = Ranks(device=torch.device("cpu"))
    model_config = choose_model(config, classes=CLASSES, pretrained=None)
    model = make_model(config, model_config, pretrained=None, ranks=ranks, watcher=Watcher())
    prepared = choose_preprocessing(config, model_config, None)
    return make_trainer(config, model, preprocessing=prepared, classes=CLASSES, steps=10**6, ranks=ranks)


def decoded(trainer: Trainer, source: Source, *, workers: int) -> Batches:
    """The stream of batches that a run would open now."""
    return stream(trainer, source, workers=workers)


def computing(trainer: Trainer, batch: Batch, *, steps: int) -> float:
    """Images a second where they are in memory already."""
    start = time.perf_counter()
    for _ in range(steps):
        trainer.update(cast("Any", repeat(batch)))
    return steps * BATCH / (time.perf_counter() - start)


def decoding(trainer: Trainer, source: Source, *, workers: int) -> float:
    """Images a second where nobody learns from them; from full store to full store, as in training."""
    with decoded(trainer, source, workers=workers) as batches:
        next(batches)
        settle()
        start = time.perf_counter()
        for _ in range(DECODED):
            next(batches)
        settle()
        return DECODED * BATCH / (time.perf_counter() - start)


def training(trainer: Trainer, source: Source, *, workers: int, steps: int) -> tuple[float, float]:
    """Images a second of decoding and learning, and the share of time that the model waited.

    The first steps are not counted: after workers were forked, each page that the model writes to is copied once.
    """
    with decoded(trainer, source, workers=workers) as batches:
        for _ in range(WARM_UP):
            trainer.update(batches)
        settle()
        start, waited_before = time.perf_counter(), batches.waited
        for _ in range(steps):
            trainer.update(batches)
        share = (batches.waited - waited_before) / (time.perf_counter() - start)
        settle()
        return steps * BATCH / (time.perf_counter() - start), share


def settle(*, patience: float = 60.0, pause: float = 0.05) -> None:
    """Wait until the worker processes have nothing left to do: their store is full."""
    end = time.monotonic() + patience
    before = -1.0
    while (now := busy_seconds()) > before and time.monotonic() < end:
        before = now
        time.sleep(pause)


def busy_seconds() -> float:
    """Seconds that the worker processes have computed so far; the kernel counts in hundredths."""
    total = 0.0
    for child in psutil.Process().children():
        times = child.cpu_times()
        total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
