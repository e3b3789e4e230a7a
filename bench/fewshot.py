"""How long does the few-shot head take beside scipy's own solve? Features go in, a table of times comes out.

python bench/fewshot.py                        100,000 features of 768 numbers, 100 classes; about a minute of two cores
python bench/fewshot.py --images 10000 --rounds 9

Both standardise the same features, append nothing they need not, and solve for the same l2 in float64; ours keeps the
eigenvectors, with which any other l2 costs one more product. The heads must agree, and the share of the times must be
at most 2.
"""

import statistics
import time

import click
import numpy as np
import scipy.linalg
import torch

from vitkit.evaluate.least_squares import BIAS, EPS, L2, signs, solve

MOST = 2.0


def by_scipy(features: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias by the normal equations, bias column and all, as one would write it with scipy."""
    mean = features.mean(axis=0, dtype=np.float64)
    deviation = features.std(axis=0, dtype=np.float64) + EPS
    standard = np.empty((len(features), features.shape[1] + 1))
    np.subtract(features, mean, out=standard[:, :-1])
    standard[:, :-1] /= deviation
    standard[:, -1] = BIAS
    gram = standard.T @ standard
    gram[np.diag_indices_from(gram)] += L2
    weight = scipy.linalg.solve(gram, standard.T @ wanted, assume_a="pos", overwrite_a=True)
    scaled = weight[:-1] / deviation[:, None]
    return scaled, BIAS * weight[-1] - mean @ scaled


@click.command(help=__doc__)
@click.option("--images", default=100_000, show_default=True)
@click.option("--width", default=768, show_default=True)
@click.option("--classes", default=100, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(images: int, width: int, classes: int, rounds: int) -> None:
    """Measure in turn, and print."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, [images], generator=generator)
    features = torch.randn(images, width, generator=generator)
    features += 0.5 * torch.randn(classes, width, generator=generator)[labels]
    plain, wanted = features.numpy(), signs(labels, classes=classes).numpy()
    ours, theirs = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        head = solve(features, labels, classes=classes).head()
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        weight, bias = by_scipy(plain, wanted)
        theirs.append(time.perf_counter() - start)
    apart = max(np.abs(head.weight.T.numpy() - weight).max(), np.abs(head.bias.numpy() - bias).max())
    ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    click.echo(f"{images:,} features of {width}, {classes} classes, {rounds} rounds in turn, float64")
    click.echo(f"vitkit  {statistics.median(ours):6.2f} s (median), every l2")
    click.echo(f"scipy   {statistics.median(theirs):6.2f} s (median), one l2")
    click.echo(f"ratio   {ratio:6.2f}, at most {MOST} allowed; the heads differ by {apart:.1e}")
    if ratio > MOST or apart > 1e-8:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
