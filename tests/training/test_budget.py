"""Planning of a time budget: parts of the time, trials, choice and advice, from measured seconds and scores."""

from pathlib import Path

import pytest

from vitkit.training.budget import (
    Selection,
    TimeBudget,
    TrialRecord,
    advise,
    best_record,
    count_trials,
    held_out_fraction,
    plan_probes,
    plan_steps,
    plan_trials,
)
from vitkit.training.config import RunConfig


def record(name: str, top1: float, loss: float, steps: int = 5) -> TrialRecord:
    return TrialRecord(name=name, top1=top1, loss=loss, seconds=1.0, steps=steps)


def test_budget_counts_earlier_calls():
    times = iter([130.0, 150.0])
    budget = TimeBudget(seconds=120.0, clock=lambda: next(times), started=100.0, spent=20.0)
    assert (budget.elapsed(), budget.remaining()) == (50.0, 50.0)


@pytest.mark.parametrize("images", [2, 10, 100, 1000, 100_000])
def test_held_out_fraction_is_between_a_tenth_and_a_third(images):
    assert 0.1 <= held_out_fraction(images) <= 0.3


def test_probes_use_the_same_images_at_every_size():
    sizes, images = plan_probes((64, 96, 128), seconds_per_image=0.01, images=4000, seconds=45, num_classes=10)
    assert sizes == (64, 96, 128)
    assert images == int(45 / (0.01 * (1 + 2.25 + 4)))


def test_trials_vary_only_settings_that_are_not_given():
    config = RunConfig().override({"lr": 1e-2})
    names = [trial.name for trial in plan_trials(config, fixed=["schedule.lr"], is_pretrained=True, with_scratch=True)]
    assert names == ["all-lr-0.01", "scratch", "lora-lr-0.01", "head-lr-0.01"]
    trials = plan_trials(
        RunConfig().override({"trainable": "head"}),
        fixed=["optimizer.trainable"],
        is_pretrained=True,
        with_scratch=False,
    )
    assert {trial.name.partition("-")[0] for trial in trials} == {"head"}


def test_all_parts_fit_into_the_budget():
    for minutes in (0.5, 3, 10, 60):
        seconds = 60 * minutes
        count, each = count_trials(0.35 * seconds)
        assert count * each <= 0.35 * seconds + 0.1 * count


def test_steps_are_at_least_one():
    assert plan_steps(-5.0, seconds_per_step=1.0, images=10, batch_size=8, max_epochs=40) == 1


def test_loss_decides_between_accuracies_that_chance_explains():
    near, clear = record("near", 0.79, 0.40), record("clear", 0.50, 0.30)
    assert best_record([record("top", 0.80, 0.60), near, clear], images=50) is near
    assert best_record([record("top", 0.80, 0.60), near, clear], images=50_000).name == "top"


def test_advice_names_the_weakest_class_and_better_weights():
    selection = Selection(
        records=(), best=record("probe", 0.7, 0.5), path=Path("probe"), minutes=3.0, advice="use other weights"
    )
    counts, recalls = {"ants": 12, "bees": 90}, {"ants": 0.4, "bees": 0.9}
    lines = advise(selection, counts=counts, recalls=recalls, top1=0.8, final_top1=0.75)
    assert lines == [
        "more photos of ants: 40% of them are recognized, from 12 photos",
        "use other weights",
        "more minutes: the final run improved on the trials (--minutes 9)",
    ]
    assert (
        advise(selection, counts=counts, recalls=recalls, top1=0.8, final_top1=0.65) == lines[:-1]
    )  # the probe is kept
    assert advise(selection, counts={}, recalls={"ants": 1.0}, top1=1.0, final_top1=1.0) == []
