"""CPU time and peak memory of the work that grows with the numbers of images and classes.

python bench/many_images.py                    # all measurements; writes 100,000 files to the temporary directory
python bench/many_images.py --files 10000      # fewer files

Limits: 3.5 s for the split of a million images, and 3 s for opening the images of a second run.
"""

import argparse
import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import torch
from memory import MEGA, peak_rss, reset_peak
from PIL import Image

from vitkit.data.dataset import hold_out
from vitkit.data.layouts.base import ArraySource, number_names
from vitkit.evaluation.features import LabeledFeatures
from vitkit.evaluation.fewshot import predict_knn, sample_shots
from vitkit.inference.top_classes import top_classes
from vitkit.training.config import DataConfig, RunConfig
from vitkit.training.data import open_run_data
from vitkit.training.distributed import Ranks
from vitkit.training.run_dir import RunContext, RunDir

IMAGES, CLASSES = 1_000_000, 21_841
"""A million images of ImageNet-21k's classes."""
BATCH = 256
"""Images whose classes are named at once."""


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, [IMAGES], generator=generator)
    source = ArraySource(
        np.zeros((IMAGES, 1, 1), np.uint8),
        layout="random",
        classes=tuple(map(str, range(CLASSES))),
        labels=labels.numpy(),
        names=number_names("all", IMAGES),
    )
    measured: dict[str, object] = {"split": measure(lambda: hold_out(source))}
    measured["five shots"] = measure(lambda: sample_shots(labels, num_classes=CLASSES, shots=5, seed=0))
    measured["k-NN, 10,000 classes"] = measure(lambda: vote(10_000, generator))
    scores = torch.rand(BATCH, CLASSES, generator=generator)
    measured["top five of 1,024 images"] = measure(lambda: name_classes(scores, repeats=1024 // BATCH))
    with TemporaryDirectory() as folder:
        os.environ["VITKIT_CACHE"] = f"{folder}/cache"
        write_files(Path(folder) / "images", options.files)
        for run in ("first run", "second run"):
            measured[f"{run}, {options.files:,} files"] = measure(lambda name=run: open_images(Path(folder), name))
    print(json.dumps(measured, indent=2))


def measure(work: Callable[[], object]) -> dict[str, float]:
    """Return the CPU seconds of this process and the growth of its memory."""
    reset_peak()
    before, start = psutil.Process().memory_info().rss, time.process_time()
    work()
    seconds = time.process_time() - start
    return {"cpu_seconds": round(seconds, 2), "peak_megabytes": round((peak_rss() - before) / MEGA, 1)}


def vote(classes: int, generator: torch.Generator) -> None:
    """Classify 4,096 features by their nearest neighbors among two of each class."""
    sample = LabeledFeatures(
        features=torch.randn(2 * classes, 64, generator=generator), targets=torch.arange(2 * classes) % classes
    )
    predict_knn(sample, torch.randn(4_096, 64, generator=generator), num_classes=classes)


def name_classes(scores: torch.Tensor, *, repeats: int) -> None:
    """Find the five likeliest classes of each image of a batch, several times."""
    for _ in range(repeats):
        top_classes(scores, count=5)


def write_files(path: Path, count: int) -> None:
    """Write photo-like JPEGs of 64 pixels into 100 class folders; a hundred different ones are repeated."""
    rng = np.random.default_rng(0)
    for label in range(100):
        (path / f"{label:03}").mkdir(parents=True)
    coarse = rng.integers(0, 256, (100, 8, 8, 3), dtype=np.uint8)
    contents = []
    for pixels in coarse:
        file = io.BytesIO()
        Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        contents.append(file.getvalue())
    for number in range(count):
        (path / f"{number % 100:03}/{number}.jpg").write_bytes(contents[number // 100 % 100])


def open_images(folder: Path, run: str) -> None:
    """Open the images as a new run does: list, verify, split and fingerprint them."""
    run_dir = RunDir(folder / run)
    run_dir.path.mkdir()
    config = RunConfig(data=DataConfig(path=str(folder / "images")))
    open_run_data(RunContext(config=config, run_dir=run_dir, ranks=Ranks(device=torch.device("cpu")), workers=0))


if __name__ == "__main__":
    main()
