"""Comparing models: paired intervals and tests against scipy, names that do not collide, pages without traps."""

import csv
import io
import itertools
import json
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import balanced_accuracy_score

from vitkit.core.errors import InputError
from vitkit.evaluate.comparison import (
    Contender,
    Scores,
    family_of,
    mcnemar,
    measured_speeds,
    paired_difference,
    scores_in,
    scores_of,
)
from vitkit.evaluate.comparison_page import CSV_COLUMNS, Comparison, csv_rows, files, render
from vitkit.evaluate.judgement import judge
from vitkit.evaluate.scatter import Axes, Point, _box, decades, placed, scatter, share_ticks, whole
from vitkit.evaluate.tables import as_csv
from vitkit.zoo.lookup import create, find
from vitkit.zoo.variants import VARIANTS

HOSTILE = '<script>alert("x")</script>'


def two_models(images: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Right answers that go together, as those of two models on the same images do."""
    rng = np.random.default_rng(0)
    hard = rng.random(images)
    return hard + 0.3 * rng.random(images) < 0.95, hard + 0.3 * rng.random(images) < 0.85


def contender(label: str, *, top1: float = 0.8, parameters: int = 1_000_000, **more: object) -> Contender:
    scores = Scores(count=100, top1=top1, interval=(top1 - 0.05, top1 + 0.05), top5=0.95, mean_per_class=0.7, ece=0.1)
    return Contender(label=label, model="Ti/16", family="ViT", parameters=parameters, gflops=1.0, scores=scores, **more)


# Differences


def test_the_paired_interval_is_scipys() -> None:
    one, other = two_models()
    found = paired_difference(one, other, names=("one", "other"))
    reference = scipy.stats.bootstrap(
        (one.astype(float), other.astype(float)),
        lambda left, right, axis: (left - right).mean(axis=axis),
        paired=True,
        n_resamples=5000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    # Two bootstraps of their own random numbers: within two images of 400.
    assert found.interval == pytest.approx((reference.low, reference.high), abs=2 / 400)
    assert found.difference == pytest.approx(one.mean() - other.mean(), abs=1e-12)


def test_the_paired_interval_is_narrower_than_two_apart() -> None:
    one, other = two_models()
    paired = paired_difference(one, other, names=("one", "other")).interval
    apart = 1.96 * np.sqrt(one.var() / 400 + other.var() / 400)
    assert paired[1] - paired[0] < 1.8 * apart


@pytest.mark.parametrize(("only", "only_other"), [(0, 0), (0, 1), (3, 9), (40, 40), (61, 90), (2400, 2600), (0, 3000)])
def test_mcnemar_is_the_exact_binomial_test(only: int, only_other: int) -> None:
    wanted = scipy.stats.binomtest(only, only + only_other, 0.5).pvalue if only + only_other else 1.0
    assert mcnemar(only, only_other) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("images", "only"), [(1, 1), (4, 4), (100, 5)])
def test_a_few_images_do_not_make_a_difference_sure(images: int, only: int) -> None:
    """All resamples of few images may say the same, and chance alone does as much."""
    one = np.arange(images) < only
    found = paired_difference(one, np.zeros(images, dtype=np.bool_), names=("one", "other"))
    assert found.interval[0] > 0
    assert found.p_value > 0.05
    assert not found.is_sure
    assert "cannot be told apart" in found.in_words()


def test_turned_round_a_difference_changes_its_sign() -> None:
    one, other = two_models()
    there, back = (paired_difference(*pair, names=("a", "b")) for pair in ((one, other), (other, one)))
    assert there.difference == -back.difference > 0
    assert (there.only, there.only_other) == (back.only_other, back.only)
    assert "a is better than b by" in there.in_words()
    assert "a is worse than b by" in back.in_words()
    assert "−" not in back.in_words()  # "worse by" says it already


def test_the_same_answers_cannot_be_told_apart() -> None:
    one, _ = two_models()
    found = paired_difference(one, one, names=("a", "b"))
    assert (found.difference, found.interval, found.p_value) == (0.0, (0.0, 0.0), 1.0)
    assert "cannot be told apart" in found.in_words()


def test_other_images_are_refused() -> None:
    with pytest.raises(InputError, match="not judged on the same images"):
        paired_difference([True], [True, False], names=("a", "b"))


# Scores


def test_scores_are_the_judgements() -> None:
    logits, labels = torch.randn(60, 4), torch.arange(60) % 4
    judgement = judge(logits, labels, classes=("a", "b", "c", "d"))
    scores = scores_of(judgement)
    wanted = balanced_accuracy_score(labels.numpy(), logits.argmax(dim=1).numpy())
    assert scores.mean_per_class == pytest.approx(wanted)
    assert (scores.top1, scores.interval, scores.count) == (judgement.top1, judgement.intervals["top1"], 60)
    assert scores_in(json.loads(json.dumps(judgement.to_json()))) == scores


def test_what_is_no_result_is_refused() -> None:
    with pytest.raises(InputError, match="no result of a run"):
        scores_in({"top1": 0.5})


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_model_is_of_a_family(variant) -> None:
    wanted = {"vit": "ViT", "axial": "ViT", "hybrid": "hybrid", "resnet": "ResNet"}
    assert family_of(find(variant.name).config) == wanted[variant.kind]


def test_speeds_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that models move themselves: the one takes a second a batch, the other two, and once thirty."""
    shape = ["width=16", "heads=2", "depth=1", "mlp_dim=16"]
    models = [create("Ti/16", image_size=16, classes=2, settings=shape) for _ in range(2)]
    order: list[int] = []
    clock = [0.0]

    def move(number: int) -> None:
        order.append(number)
        clock[0] += 30.0 if len(order) == 4 else number + 1.0

    for number, model in enumerate(models):
        model.register_forward_hook(lambda *_, number=number: move(number))
    monkeypatch.setattr("vitkit.evaluate.comparison.time.perf_counter", lambda: clock[0])
    assert measured_speeds(models, batch_size=4, rounds=3) == [4.0, 2.0]
    assert order == [0, 1] * 4


# Drawings


def crowd(points: int) -> list[Point]:
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
def test_names_cover_neither_each_other_nor_marks(points: int) -> None:
    drawn = crowd(points)
    ticks = share_ticks(drawn)
    axes = Axes(x=decades(drawn), y=(ticks[0], ticks[-1]))
    boxes = [_box(*place, len(point.label) * 7.4) for point, place in zip(drawn, placed(drawn, axes), strict=True)]
    for (left, top, right, bottom), other in itertools.combinations(boxes, 2):
        assert not (left < other[2] and other[0] < right and top < other[3] and other[1] < bottom)
    for left, top, right, bottom in boxes:
        for point in drawn:
            assert not (left < axes.across(point.x) < right and top < axes.down(point.y) < bottom)


def test_a_drawing_is_well_formed_and_names_are_inert() -> None:
    point = Point(label=HOSTILE, family="ResNet", x=3.0, y=1.0, interval=(0.9, 1.1))
    drawing = scatter([point], title=HOSTILE, cost="<b>")
    tree = ElementTree.fromstring(whole(drawing))
    assert not [each for each in tree.iter() if each.tag.endswith("script")]
    assert "<script" not in drawing


def test_a_point_without_a_cost_is_left_out() -> None:
    nothing = Point(label="a", family="ViT", x=0.0, y=0.5, interval=(0.4, 0.6))
    assert scatter([nothing], title="", cost="") == ""


# The page and its tables


def test_the_page_says_all_and_lets_nothing_run() -> None:
    one, other = two_models()
    found = Comparison(
        contenders=(contender(HOSTILE, exaflops=0.1), contender("second", top1=0.9, exaflops=0.3, speed=12.0)),
        differences=(paired_difference(one, other, names=("second", HOSTILE)),),
        data="400 images of test",
        warnings=("beware <b>",),
    )
    page = render(found)
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert "beware &lt;b&gt;" in page
    assert "second is better than" in page
    assert {"exaflops.svg", "parameters.svg", "speed.svg", "differences.svg", "report.html"} == files(found).keys()


def test_what_nobody_measured_is_not_drawn_and_is_null() -> None:
    found = Comparison(contenders=(Contender(label="a", model="b", family="ViT", parameters=3, gflops=0.1),))
    assert files(found).keys() == {"report.html"}
    rows = list(csv.DictReader(io.StringIO(as_csv(csv_rows(found), CSV_COLUMNS).decode())))
    assert rows[0]["top1"] == ""
    assert rows[0]["parameters"] == "3"
    [run] = json.loads(json.dumps(found.to_json(), allow_nan=False))["runs"]
    assert run["top1"] is None


def test_training_speed_is_drawn_where_no_speed_was_measured() -> None:
    found = Comparison(contenders=(contender("a", training_speed=5.0),))
    assert "images a second in training" in files(found)["speed.svg"]
