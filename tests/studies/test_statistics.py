"""Statistics of the studies against SciPy."""

import numpy as np
import pytest

from vitkit.studies.statistics import equivalence_p_value, estimate, fit_power_law, t_probability, t_quantile

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 30])
def test_t_distribution_equals_scipy(freedom) -> None:
    for t in (-40.0, -3.0, -0.2, 0.0, 0.7, 2.5, 12.0):
        assert t_probability(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), rel=1e-9, abs=1e-14)
    for probability in (0.05, 0.5, 0.9, 0.975, 0.999):
        assert t_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_paired_interval_and_equivalence_equal_scipy(seeds) -> None:
    generator = np.random.default_rng(seeds)
    left, right = generator.normal(0.5, 0.1, seeds), generator.normal(0.45, 0.1, seeds)
    test = stats.ttest_rel(left, right)
    assert estimate((left - right).tolist()).interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    margin = 0.08
    below = stats.ttest_1samp(left - right, -margin, alternative="greater").pvalue
    above = stats.ttest_1samp(left - right, margin, alternative="less").pvalue
    assert equivalence_p_value((left - right).tolist(), margin=margin) == pytest.approx(max(below, above))


def test_power_law_fit_equals_scipy() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    compute = np.array([1.0, 3.0, 10.0, 30.0, 100.0])
    errors = 0.6 * compute**-0.25 + 0.2 + np.random.default_rng(0).normal(0, 0.003, 5)
    expected, _ = optimize.curve_fit(lambda x, a, b, c: a * x**-b + c, compute, errors, p0=(0.5, 0.3, 0.1))
    law = fit_power_law(compute.tolist(), errors.tolist())
    assert law is not None
    # The fit is in logarithms of the error above c, SciPy's in the error itself: equal up to the noise.
    assert (law(compute) - errors) ** 2 == pytest.approx(
        (expected[0] * compute ** -expected[1] + expected[2] - errors) ** 2, abs=1e-4
    )


def test_one_seed_has_no_interval() -> None:
    assert estimate([0.3]).interval is None
    assert equivalence_p_value([0.0], margin=1.0) == 1.0
