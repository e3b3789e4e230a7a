"""Fractals drawn in one process on one core, in images a second: sizes and colours go in, a table comes out.

python bench/fractals.py                    a quarter of a minute
python bench/fractals.py --seconds 0.2      a rough idea
"""

import statistics
import time
from itertools import product

import click
import numpy as np

from vitkit.data.fractals import FractalConfig, FractalSource, fractal_data

SIZES = (32, 64, 128, 224)
CLASSES = 100
ROUNDS = 5
"""Rates are medians of so many rounds: others may be at work on the machine."""


@click.command()
@click.option("--seconds", default=2.0, show_default=True, help="How long to draw for each row.")
def main(seconds: float) -> None:
    """Measure how fast fractals are drawn."""
    print("| size | colours | images/s per core | first image of a class, ms |")
    print("|---:|---|---:|---:|")
    for size, colour in product(SIZES, (False, True)):
        config = FractalConfig(classes=CLASSES, per_class=1000, size=size, colour=colour)
        source = fractal_data(config).splits["train"]
        assert isinstance(source, FractalSource)
        first = 1000 * time_first(source)
        rate = statistics.median(images_a_second(source, seconds=seconds / ROUNDS, seed=seed) for seed in range(ROUNDS))
        print(f"| {size} | {'colour' if colour else 'grey'} | {rate:,.0f} | {first:.1f} |", flush=True)


def time_first(source: FractalSource) -> float:
    """The mean CPU time of the first image of each class, which also finds the class's formula."""
    start = time.process_time()
    for label in range(CLASSES):
        source.content(label * source.count)
    return (time.process_time() - start) / CLASSES


def images_a_second(source: FractalSource, *, seconds: float, seed: int) -> float:
    """Images drawn in random order for a second of this process's CPU time."""
    indices = np.random.default_rng(seed).integers(len(source), size=100_000).tolist()
    start, drawn = time.process_time(), 0
    while (passed := time.process_time() - start) < seconds or not drawn:
        source.content(indices[drawn % len(indices)])
        drawn += 1
    return drawn / passed


if __name__ == "__main__":
    main()
