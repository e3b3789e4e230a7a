"""Speed of generating fractals: a table of images per second on one core, by size and color.

python bench/fractals.py                    about 15 seconds
python bench/fractals.py --seconds 0.2      a rough estimate
"""

import statistics
import time
from itertools import product

import click
import numpy as np

from vitkit.data.config import FractalConfig
from vitkit.data.fractals import FractalSource, make_fractals

SIZES = (32, 64, 128, 224)
CLASSES = 100
ROUNDS = 5
"""Rounds per rate; the median is reported, because other programs may run."""


@click.command()
@click.option("--seconds", default=2.0, show_default=True, help="How long to draw for each row.")
def main(seconds: float) -> None:
    """Measure the speed of generating fractals."""
    print("| size | colors | images/s per core | first image of a class, ms |")
    print("|---:|---|---:|---:|")
    for size, color in product(SIZES, (False, True)):
        config = FractalConfig(num_classes=CLASSES, per_class=1000, size=size, color=color)
        source = make_fractals(config).splits["train"]
        assert isinstance(source, FractalSource)
        first = 1000 * time_first(source)
        rates = [images_per_second(source, seconds=seconds / ROUNDS, seed=seed) for seed in range(ROUNDS)]
        rate = statistics.median(rates)
        print(f"| {size} | {'color' if color else 'gray'} | {rate:,.0f} | {first:.1f} |", flush=True)


def time_first(source: FractalSource) -> float:
    """Return the mean CPU time of the first image of each class, which also finds the class's formula."""
    start = time.process_time()
    for label in range(CLASSES):
        source.read(label * source.count)
    return (time.process_time() - start) / CLASSES


def images_per_second(source: FractalSource, *, seconds: float, seed: int) -> float:
    """Return images per CPU second, in random order."""
    indices = np.random.default_rng(seed).integers(len(source), size=100_000).tolist()
    start, count = time.process_time(), 0
    while (elapsed := time.process_time() - start) < seconds or not count:
        source.read(indices[count % len(indices)])
        count += 1
    return count / elapsed


if __name__ == "__main__":
    main()
