"""Training speed from JPEG files, compared with training from memory and with decoding alone.

GOMP_SPINCOUNT=1000 python bench/from_files.py FOLDER        about five minutes, prints JSON
GOMP_SPINCOUNT=1000 python bench/from_files.py FOLDER --steps 4 --rounds 1

bench/training.py starts this script. `vitkit train` sets the same variable, because spinning threads take cores from
the decoders, and also makes malloc keep freed memory.

Each round opens the loader anew. Timing starts and ends with a full prefetch queue, so that every image that is counted
was also decoded within the measured time.
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

from vitkit.core.environment import retain_freed_memory
from vitkit.data.dataset import ImageSource
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.loader import BatchLoader, ImageBatch
from vitkit.training.build import build_model, build_trainer, resolve_model_config, resolve_preprocessing
from vitkit.training.callbacks import Callback
from vitkit.training.config import ModelChoice, RunConfig, ScheduleConfig
from vitkit.training.distributed import Ranks
from vitkit.training.run import open_training_batches
from vitkit.training.trainer import Trainer

MODEL, BATCH, CLASSES = "Ti/16", 32, 10
WORKERS = (1, 2)
WARM_UP = 3
DECODE_BATCHES = 20
"""Batches per measurement of decoding alone."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Images per second, medians over rounds: computing alone, and by workers decoding alone and both."""

    model: str
    batch: int
    files: int
    compute: float
    decode: dict[str, float]
    both: dict[str, float]
    waiting: dict[str, float]
    """Fraction of the time that training waits for images, by workers."""

    @property
    def limit(self) -> float:
        """Return the rate of cores that decode and compute in turn: the times add up.

        >>> of = {"1": 300.0}
        >>> Rates(model="", batch=1, files=1, compute=100.0, decode=of, both=of, waiting=of).limit
        75.0
        """
        return 1 / (1 / self.compute + 1 / max(self.decode.values()))


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--steps", default=16, show_default=True, help="Training steps of each candidate in a round.")
@click.option("--rounds", default=3, show_default=True)
def main(folder: Path, steps: int, rounds: int) -> None:
    """Measure training from the JPEG files in a folder."""
    retain_freed_memory()
    with copy_into_classes(folder) as path:
        print(json.dumps(asdict(measure(path, steps=steps, rounds=rounds))))


@contextmanager
def copy_into_classes(folder: Path) -> Iterator[Path]:
    """Link the files into a directory of classes; the class does not affect the time."""
    files = sorted(folder.rglob("*.jpg"))
    with tempfile.TemporaryDirectory() as path:
        for number, file in enumerate(files):
            target = Path(path) / f"class-{number % CLASSES}" / f"{number}.jpg"
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
        yield Path(path)


def measure(path: Path, *, steps: int, rounds: int) -> Rates:
    """Measure all rates in rounds of computing, decoding, and both."""
    source = open_dataset(path).splits["all"]
    trainer = make_trainer()
    batch = next(open_batches(trainer, source, workers=0))
    for _ in range(2):
        trainer.step(cast("Any", repeat(batch)))
    compute: list[float] = []
    decode: dict[str, list[float]] = {str(workers): [] for workers in WORKERS}
    both: dict[str, list[float]] = {str(workers): [] for workers in WORKERS}
    waiting: dict[str, list[float]] = {str(workers): [] for workers in WORKERS}
    for _ in range(rounds):
        compute.append(measure_compute(trainer, batch, steps=steps))
        for workers in WORKERS:
            decode[str(workers)].append(measure_decode(trainer, source, workers=workers))
            rate, wait_seconds = measure_training(trainer, source, workers=workers, steps=steps)
            both[str(workers)].append(rate)
            waiting[str(workers)].append(wait_seconds)
    middle = [{name: median(rates) for name, rates in results.items()} for results in (decode, both, waiting)]
    return Rates(
        model=MODEL,
        batch=BATCH,
        files=len(source),
        compute=median(compute),
        decode=middle[0],
        both=middle[1],
        waiting=middle[2],
    )


def make_trainer() -> Trainer:
    """Build the trainer as the command line does."""
    config = RunConfig(
        model=ModelChoice(name=MODEL, settings=("block.activation=gelu_erf",)),
        schedule=ScheduleConfig(batch_size=BATCH, epochs=None, steps=10**6, lr=1e-4, decay="constant"),
    )
    ranks = Ranks(device=torch.device("cpu"))
    model_config = resolve_model_config(config, num_classes=CLASSES, pretrained=None)
    model = build_model(config, model_config, pretrained=None, ranks=ranks, callback=Callback())
    prepared = resolve_preprocessing(config, model_config, None)
    return build_trainer(config, model, preprocessing=prepared, num_classes=CLASSES, total_steps=10**6, ranks=ranks)


def open_batches(trainer: Trainer, source: ImageSource, *, workers: int) -> BatchLoader:
    """Open the stream of batches of a run."""
    return open_training_batches(trainer, source, workers=workers)


def measure_compute(trainer: Trainer, batch: ImageBatch, *, steps: int) -> float:
    """Return images per second from memory."""
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step(cast("Any", repeat(batch)))
    return steps * BATCH / (time.perf_counter() - start)


def measure_decode(trainer: Trainer, source: ImageSource, *, workers: int) -> float:
    """Return images per second of decoding alone, from full queue to full queue as in training."""
    with open_batches(trainer, source, workers=workers) as batches:
        next(batches)
        wait_until_idle()
        start = time.perf_counter()
        for _ in range(DECODE_BATCHES):
            next(batches)
        wait_until_idle()
        return DECODE_BATCHES * BATCH / (time.perf_counter() - start)


def measure_training(trainer: Trainer, source: ImageSource, *, workers: int, steps: int) -> tuple[float, float]:
    """Return images per second of decoding and training, and the fraction of time spent waiting.

    The first steps are not counted: after workers were forked, each page that the model writes to is copied once.
    """
    with open_batches(trainer, source, workers=workers) as batches:
        for _ in range(WARM_UP):
            trainer.step(batches)
        wait_until_idle()
        start, waited_before = time.perf_counter(), batches.wait_seconds
        for _ in range(steps):
            trainer.step(batches)
        fraction = (batches.wait_seconds - waited_before) / (time.perf_counter() - start)
        wait_until_idle()
        return steps * BATCH / (time.perf_counter() - start), fraction


def wait_until_idle(*, max_seconds: float = 60.0, pause: float = 0.05) -> None:
    """Wait until the worker processes are idle because their queue is full."""
    end = time.monotonic() + max_seconds
    before = -1.0
    while (now := busy_seconds()) > before and time.monotonic() < end:
        before = now
        time.sleep(pause)


def busy_seconds() -> float:
    """Return the CPU seconds of the worker processes so far; the kernel counts in hundredths."""
    total = 0.0
    for child in psutil.Process().children():
        times = child.cpu_times()
        total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
