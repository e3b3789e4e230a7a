"""CPU time before the first step of a run: verification and fingerprints of its images, at first and in a second run.

python bench/verification.py                        # 100,000 images of 64 pixels: at most 3 CPU s in the second run
"""

import argparse
import json
import os
import resource
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image

from vitkit.training.config import DataConfig, RunConfig
from vitkit.training.data import open_run_data
from vitkit.training.distributed import Ranks
from vitkit.training.run_dir import RunContext, RunDir

SIDE, CLASSES = 64, 100


def main() -> None:
    """Print the CPU seconds of the first and of the second run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        os.environ["VITKIT_CACHE"] = f"{folder}/cache"
        write_images(Path(folder, "images"), options.images)
        seconds = {
            name: measure(Path(folder, "images"), Path(folder, name), workers=options.workers)
            for name in ("first", "second")
        }
    print(json.dumps({"images": options.images, "cpu_seconds": seconds}, indent=2))


def write_images(path: Path, count: int) -> None:
    """Write noisy JPEGs, divided among the directories of classes."""
    rng = np.random.default_rng(0)
    for label in range(CLASSES):
        (path / f"{label:03}").mkdir(parents=True)
    for index in range(count):
        pixels = rng.integers(0, 256, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        image.save(path / f"{index % CLASSES:03}" / f"{index}.jpg")


def measure(images: Path, out: Path, *, workers: int) -> float:
    """Return the CPU seconds of opening the data of a new run, with those of worker processes."""
    out.mkdir()
    config = RunConfig(data=DataConfig(path=str(images)))
    ranks = Ranks(device=torch.device("cpu"))
    before = cpu_seconds()
    open_run_data(RunContext(config=config, run_dir=RunDir(out), ranks=ranks, workers=workers))
    return round(cpu_seconds() - before, 2)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its worker processes that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


if __name__ == "__main__":
    main()
