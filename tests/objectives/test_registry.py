"""Registry of objectives: a new one is a module and an entry."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from vitkit.core.errors import ConfigError
from vitkit.core.shapes import Tensor
from vitkit.data.preprocessing import Preprocessing
from vitkit.objectives.base import LossOutput, Objective, ObjectiveBuilder
from vitkit.objectives.config import OBJECTIVES, ObjectiveEntry
from vitkit.objectives.teacher import Teacher
from vitkit.training.config import DataConfig, EvaluationConfig, ModelChoice, ObjectiveConfig, RunConfig, ScheduleConfig
from vitkit.training.run import run_training


class BrierObjective:
    """Mean squared error of probabilities."""

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor) -> LossOutput:
        logits = model(images).float()
        loss = (logits.softmax(dim=1) - targets).square().sum(dim=1).mean()
        return LossOutput(loss, {"correct": (logits.argmax(dim=1) == targets.argmax(dim=1)).sum()})


class BrierBuilder(ObjectiveBuilder):
    def build(self, model: nn.Module, *, preprocessing: Preprocessing, teacher: Teacher | None) -> Objective[Any]:
        return BrierObjective()


@pytest.fixture
def brier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "brier", sys.modules[__name__])
    entry = ObjectiveEntry("brier:BrierBuilder", needs_labels=True)
    monkeypatch.setitem(OBJECTIVES, "brier", entry)


@pytest.mark.usefixtures("brier")
def test_objective_is_added_by_one_registry_entry(tmp_path) -> None:
    settings = ("width=16", "depth=1", "heads=2", "mlp_dim=16")
    config = RunConfig(
        model=ModelChoice(name="Ti/16", image_size=8, patch_size=4, settings=settings),
        data=DataConfig(path="digits", channels=1, workers=0),
        objective=ObjectiveConfig(name="brier"),
        schedule=ScheduleConfig(batch_size=16, epochs=None, steps=2),
        evaluation=EvaluationConfig(every=2),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result = run_training(config, tmp_path / "run")
    torch.set_num_threads(threads)
    assert result.summary is not None
    assert result.summary["objective"] == "brier"
    assert result.summary["evaluated_on"] == "test"
    assert replace(config, objective=ObjectiveConfig()).objective.needs_labels


def test_unknown_objective_has_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"objective\.name is not valid") as caught:
        ObjectiveConfig(name="maee")
    assert "mae" in str(caught.value.hint)
