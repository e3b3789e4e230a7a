"""Statistics of the studies against SciPy."""

import numpy as np
import pytest

from vitkit.studies.statistics import equivalence_p_value, estimate, fit_power_law, t_probability, t_quantile

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 30, 333])
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


def test_power_law_fit_and_intervals_equal_scipy() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    compute = np.repeat([1.0, 3.0, 10.0, 30.0], 3)
    errors = 0.6 * compute**-0.25 + 0.2 + np.random.default_rng(0).normal(0, 0.003, 12)
    expected, covariance = optimize.curve_fit(
        lambda x, a, b, c: a * x**-b + c, compute, errors, p0=(0.5, 0.3, 0.1), xtol=1e-14, ftol=1e-14
    )
    law = fit_power_law(compute.tolist(), errors.tolist())
    assert law is not None
    assert (law.a, law.b, law.c) == pytest.approx(expected, rel=1e-5)
    half = stats.t.ppf(0.975, 12 - 3) * np.sqrt(np.diag(covariance))
    intervals = law.intervals()
    assert intervals is not None
    assert [high - low for low, high in intervals.values()] == pytest.approx(2 * half, rel=1e-4)
    # The band at C = 1 is the interval of a + c.
    variance = covariance[0, 0] + covariance[2, 2] + 2 * covariance[0, 2]
    band = law.band(np.array([1.0]))
    assert band is not None
    assert band[0] == pytest.approx(stats.t.ppf(0.975, 9) * variance**0.5, rel=1e-4)


def test_power_law_fit_keeps_c_above_zero() -> None:
    law = fit_power_law([1.0, 10.0, 100.0, 1000.0], [0.5, 0.45, 0.35, 0.2])
    assert law is not None
    assert law.c == 0.0
    assert law.freedom == 2
    assert fit_power_law([1.0, 10.0], [0.5, 0.4]) is None


def test_one_seed_has_no_interval() -> None:
    assert estimate([0.3]).interval is None
    assert equivalence_p_value([0.0], margin=1.0) == 1.0
