"""Time of the few-shot ridge regression next to scipy's solver.

python bench/fewshot.py                        100,000 features of 768 numbers, 100 classes; about a minute of two cores
python bench/fewshot.py --images 10000 --rounds 9

Both standardize the same features and solve for the same l2 in float64; ours keeps the eigenvectors, with which any
other l2 costs one more product. The heads must agree, and the ratio of the times must be at most 2.
"""

import statistics
import time

import click
import numpy as np
import scipy.linalg
import torch
from torch.nn import functional

from vitkit.evaluation.fewshot import BIAS, EPS, L2, solve_ridge

MAX_RATIO = 2.0


def solve_with_scipy(features: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Solve the normal equations, including the bias column."""
    mean = features.mean(axis=0, dtype=np.float64)
    deviation = features.std(axis=0, dtype=np.float64) + EPS
    standard = np.empty((len(features), features.shape[1] + 1))
    np.subtract(features, mean, out=standard[:, :-1])
    standard[:, :-1] /= deviation
    standard[:, -1] = BIAS
    gram = standard.T @ standard
    gram[np.diag_indices_from(gram)] += L2
    weight = scipy.linalg.solve(gram, standard.T @ targets, assume_a="pos", overwrite_a=True)
    scaled = weight[:-1] / deviation[:, None]
    return scaled, BIAS * weight[-1] - mean @ scaled


@click.command()
@click.option("--images", default=100_000, show_default=True)
@click.option("--width", default=768, show_default=True)
@click.option("--num-classes", default=100, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(images: int, width: int, num_classes: int, rounds: int) -> None:
    """Measure both in turn and print a table."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, num_classes, [images], generator=generator)
    features = torch.randn(images, width, generator=generator)
    features += 0.5 * torch.randn(num_classes, width, generator=generator)[labels]
    plain, targets = features.numpy(), functional.one_hot(labels, num_classes).double().numpy() * 2 - 1
    ours, theirs = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        head = solve_ridge(features, labels, num_classes=num_classes).head()
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        weight, bias = solve_with_scipy(plain, targets)
        theirs.append(time.perf_counter() - start)
    difference = max(np.abs(head.weight.T.numpy() - weight).max(), np.abs(head.bias.numpy() - bias).max())
    ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    click.echo(f"{images:,} features of {width}, {num_classes} classes, {rounds} rounds in turn, float64")
    click.echo(f"vitkit  {statistics.median(ours):6.2f} s (median), every l2")
    click.echo(f"scipy   {statistics.median(theirs):6.2f} s (median), one l2")
    click.echo(f"ratio   {ratio:6.2f}, at most {MAX_RATIO} allowed; the heads differ by {difference:.1e}")
    if ratio > MAX_RATIO or difference > 1e-8:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
