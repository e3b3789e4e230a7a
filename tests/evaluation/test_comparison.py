"""Comparison of models: paired intervals and tests against scipy, label placement, escaping."""

import csv
import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import balanced_accuracy_score

from vitkit.core.errors import InputError
from vitkit.evaluation.comparison import (
    ComparedModel,
    ComparisonResult,
    ModelScores,
    mcnemar_p_value,
    measure_speeds,
    model_family,
    paired_difference,
    scores_from_dict,
)
from vitkit.evaluation.evaluation import evaluate_logits
from vitkit.report.charts import standalone_svg
from vitkit.report.comparison import render_comparison, render_comparison_files, write_comparison
from vitkit.report.scatter import Point, label_box, place_labels, scatter, scatter_axes
from vitkit.zoo.registry import create, find_variant
from vitkit.zoo.variants import VARIANTS

HOSTILE = '<script>alert("x")</script>'


def two_models(images: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Return correlated correctness of two models on the same images."""
    rng = np.random.default_rng(0)
    hard = rng.random(images)
    return hard + 0.3 * rng.random(images) < 0.95, hard + 0.3 * rng.random(images) < 0.85


def compared_model(label: str, *, top1: float = 0.8, parameters: int = 1_000_000, **more: object) -> ComparedModel:
    scores = ModelScores(
        count=100, top1=top1, interval=(top1 - 0.05, top1 + 0.05), top5=0.95, mean_per_class=0.7, ece=0.1
    )
    return ComparedModel(
        label=label, model="Ti/16", family="ViT", parameters=parameters, gflops=1.0, scores=scores, **more
    )


# Differences


def test_paired_interval_equals_scipy() -> None:
    one, other = two_models()
    result = paired_difference(one, other, names=("one", "other"))
    reference = scipy.stats.bootstrap(
        (one.astype(float), other.astype(float)),
        lambda left, right, axis: (left - right).mean(axis=axis),
        paired=True,
        n_resamples=5000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    # Two bootstraps of their own random numbers: within two images of 400.
    assert result.interval == pytest.approx((reference.low, reference.high), abs=2 / 400)
    assert result.estimate == pytest.approx(one.mean() - other.mean(), abs=1e-12)


def test_paired_interval_is_narrower_than_unpaired() -> None:
    one, other = two_models()
    paired = paired_difference(one, other, names=("one", "other")).interval
    apart = 1.96 * np.sqrt(one.var() / 400 + other.var() / 400)
    assert paired[1] - paired[0] < 1.8 * apart


@pytest.mark.parametrize(("only", "only_other"), [(0, 0), (0, 1), (3, 9), (40, 40), (61, 90), (2400, 2600), (0, 3000)])
def test_mcnemar_equals_exact_binomial_test(only: int, only_other: int) -> None:
    expected = scipy.stats.binomtest(only, only + only_other, 0.5).pvalue if only + only_other else 1.0
    assert mcnemar_p_value(only, only_other) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("images", "only"), [(1, 1), (4, 4), (100, 5)])
def test_few_discordant_images_are_not_significant(images: int, only: int) -> None:
    """All resamples of few images may say the same, and chance alone does as much."""
    one = np.arange(images) < only
    result = paired_difference(one, np.zeros(images, dtype=np.bool_), names=("one", "other"))
    assert result.interval[0] > 0
    assert result.p_value > 0.05
    assert not result.is_significant
    assert "no significant difference" in result.describe()


def test_swapped_difference_changes_its_sign() -> None:
    one, other = two_models()
    there, back = (paired_difference(*pair, names=("a", "b")) for pair in ((one, other), (other, one)))
    assert there.estimate == -back.estimate > 0
    assert (there.only_model, there.only_baseline) == (back.only_baseline, back.only_model)
    assert "a is better than b by" in there.describe()
    assert "a is worse than b by" in back.describe()
    assert "−" not in back.describe()  # "worse by" says it already


def test_equal_predictions_are_not_significant() -> None:
    one, _ = two_models()
    result = paired_difference(one, one, names=("a", "b"))
    assert (result.estimate, result.interval, result.p_value) == (0.0, (0.0, 0.0), 1.0)
    assert "no significant difference" in result.describe()


def test_different_images_are_rejected() -> None:
    with pytest.raises(InputError, match="not evaluated on the same images"):
        paired_difference([True], [True, False], names=("a", "b"))


# ModelScores


def test_scores_equal_the_evaluation() -> None:
    logits, labels = torch.randn(60, 4), torch.arange(60) % 4
    evaluation = evaluate_logits(logits, labels, labels=("a", "b", "c", "d"))
    scores = scores_from_dict(evaluation.to_dict())
    expected = balanced_accuracy_score(labels.numpy(), logits.argmax(dim=1).numpy())
    assert scores.mean_per_class == pytest.approx(expected)
    assert (scores.top1, scores.interval, scores.count) == (evaluation.top1, evaluation.intervals["top1"], 60)
    assert scores_from_dict(json.loads(json.dumps(evaluation.to_dict()))) == scores


def test_invalid_result_is_rejected() -> None:
    with pytest.raises(InputError, match="not an evaluation result"):
        scores_from_dict({"top1": 0.5})


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_model_has_a_family(variant) -> None:
    expected = {"vit": "ViT", "axial": "ViT", "hybrid": "hybrid", "resnet": "ResNet"}
    assert model_family(find_variant(variant.name).config) == expected[variant.kind]


def test_speeds_are_measured_in_turns() -> None:
    """The models advance a fake clock: by one and two seconds per batch, and once by thirty."""
    shape = {"width": 16, "heads": 2, "depth": 1, "mlp_dim": 16}
    models = [create("Ti/16", image_size=16, num_classes=2, settings=shape) for _ in range(2)]
    order: list[int] = []
    clock = [0.0]

    def move(number: int) -> None:
        order.append(number)
        clock[0] += 30.0 if len(order) == 4 else number + 1.0

    for number, model in enumerate(models):
        model.register_forward_hook(lambda *_, number=number: move(number))
    assert measure_speeds(models, batch_size=4, rounds=3, clock=lambda: clock[0]) == [4.0, 2.0]
    assert order == [0, 1] * 4


# Drawings


def random_points(points: int) -> list[Point]:
    rng = np.random.default_rng(points)
    shares = rng.uniform(0.7, 0.9, points)
    return [
        Point(
            label=f"model-{number}",
            family=("ViT", "hybrid", "ResNet")[number % 3],
            x=float(10 ** rng.uniform(0, 3)),
            y=float(share),
            interval=(float(share) - 0.01, float(share) + 0.01),
        )
        for number, share in enumerate(shares)
    ]


@pytest.mark.parametrize("points", [1, 2, 6, 12, 16])
def test_labels_do_not_overlap(points: int) -> None:
    drawn = random_points(points)
    axes, _ = scatter_axes(drawn)
    centers = place_labels(drawn, axes)
    boxes = [label_box(at, len(point.label) * 7.4) for point, at in zip(drawn, centers, strict=True)]
    for (left, top, right, bottom), other in itertools.combinations(boxes, 2):
        assert not (left < other[2] and other[0] < right and top < other[3] and other[1] < bottom)
    for left, top, right, bottom in boxes:
        for point in drawn:
            assert not (left < axes.to_x(point.x) < right and top < axes.to_y(point.y) < bottom)


def test_scatter_escapes_names() -> None:
    point = Point(label=HOSTILE, family="ResNet", x=3.0, y=1.0, interval=(0.9, 1.1))
    drawing = scatter([point], title=HOSTILE, x_title="<b>")
    tree = ElementTree.fromstring(standalone_svg(drawing))
    assert not [each for each in tree.iter() if each.tag.endswith("script")]
    assert "<script" not in drawing


def test_point_without_cost_is_omitted() -> None:
    nothing = Point(label="a", family="ViT", x=0.0, y=0.5, interval=(0.4, 0.6))
    assert scatter([nothing], title="", x_title="") == ""


# The page and its tables


def test_page_escapes_names() -> None:
    one, other = two_models()
    result = ComparisonResult(
        models=(compared_model(HOSTILE, exaflops=0.1), compared_model("second", top1=0.9, exaflops=0.3, speed=12.0)),
        differences=(paired_difference(one, other, names=("second", HOSTILE)),),
        data="400 images of test",
        warnings=("mind <b>",),
    )
    page = render_comparison(result)
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert "mind &lt;b&gt;" in page
    assert "second is better than" in page
    assert {"exaflops.svg", "parameters.svg", "speed.svg", "differences.svg", "report.html"} == render_comparison_files(
        result
    ).keys()


def test_unmeasured_values_are_null_and_not_drawn(tmp_path: Path) -> None:
    result = ComparisonResult(models=(ComparedModel(label="a", model="b", family="ViT", parameters=3, gflops=0.1),))
    write_comparison(result, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "compare.json", "compare.csv"}
    rows = list(csv.DictReader((tmp_path / "compare.csv").read_text().splitlines()))
    assert rows[0]["top1"] == ""
    assert rows[0]["parameters"] == "3"
    [run] = json.loads(json.dumps(result.to_dict(), allow_nan=False))["models"]
    assert run["top1"] is None


def test_training_speed_is_drawn_without_measured_speed() -> None:
    result = ComparisonResult(models=(compared_model("a", training_speed=5.0),))
    assert "images per second in training" in render_comparison_files(result)["speed.svg"]
