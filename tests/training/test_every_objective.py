"""Contract of every objective: ranks, stops, micro-batches and checkpointing do not change the result."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from soak.victim import Launcher
from training.jobs import train_on_ranks

from vitkit.core import metrics_log
from vitkit.core.signals import StopFlag
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.stored_targets import NAMES, crop_path
from vitkit.model.pretraining_config import MAEConfig
from vitkit.objectives.config import OBJECTIVES as REGISTRY
from vitkit.objectives.config import DistillationConfig, FeatureDistillationConfig
from vitkit.training.callbacks import Callback, StepMetrics
from vitkit.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelChoice,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.training.run import run_training
from vitkit.weights.artifact import read_tensors

BASE = RunConfig(
    model=ModelChoice(
        name="Ti/16", image_size=16, patch_size=4, settings=("width=16", "depth=2", "heads=2", "mlp_dim=32")
    ),
    data=DataConfig(path="digits", channels=1, workers=0, val_fraction=0.05),
    optimizer=OptimizerConfig(name="sgd", ema_decay=0.9),
    schedule=ScheduleConfig(batch_size=16, epochs=None, steps=6, lr=0.05),
    evaluation=EvaluationConfig(every=3),
    checkpoint=CheckpointConfig(save_every=3),
    logging=LoggingConfig(log_every=1),
)
OBJECTIVES = {
    "supervised": ObjectiveConfig(),
    "masked": ObjectiveConfig(name="masked"),
    "mae": ObjectiveConfig(name="mae", mae=MAEConfig(width=16, depth=1, heads=2)),
    "distillation": ObjectiveConfig(name="distillation"),
    "feature_distillation": ObjectiveConfig(name="feature_distillation"),
}
UNLABELED = [name for name, objective in OBJECTIVES.items() if not objective.needs_labels]
every = pytest.mark.parametrize("name", OBJECTIVES)


def config_for(name: str, ran: Path) -> RunConfig:
    """Return the run of an objective; the teacher is the supervised run."""
    objective = OBJECTIVES[name]
    if objective.name == "distillation":
        objective = replace(objective, distillation=DistillationConfig(teacher=str(ran / "supervised")))
    if objective.name == "feature_distillation":
        settings = FeatureDistillationConfig(targets=str(write_targets(ran / "targets", crops=2)), crops=2)
        objective = replace(objective, feature_distillation=settings)
    return replace(BASE, objective=objective)


def write_targets(directory: Path, *, crops: int) -> Path:
    """Write random features of the training images."""
    source = open_dataset("digits").splits["train"]
    directory.mkdir(exist_ok=True)
    (directory / NAMES).write_text("".join(f"{source.name(index)}\n" for index in range(len(source))))
    rng = np.random.default_rng(0)
    for crop in range(crops):
        np.save(crop_path(directory, crop), rng.normal(size=(len(source), 6)).astype(np.float16))
    return directory


class StopAt(Callback):
    """Requests a stop after a step."""

    def __init__(self, step: int) -> None:
        self.step, self.stop = step, StopFlag()

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step == self.step:
            self.stop.signal = "SIGTERM"


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Iterator[Path]:
    """Train every objective in a single process."""
    directory = tmp_path_factory.mktemp("objectives")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in OBJECTIVES:
        run_training(config_for(name, directory), directory / name)
    yield directory
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shared(ran, launcher: Launcher) -> Path:
    """Train every objective on two ranks with DDP and FSDP2."""
    jobs = [
        (f"{name}-{mode}", replace(config_for(name, ran), parallel=ParallelConfig(mode=mode)), None)
        for name in OBJECTIVES
        for mode in ("ddp", "fsdp2")
    ]
    train_on_ranks(launcher, ran, jobs, ranks=2)
    return ran


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_contract_covers_the_registry() -> None:
    assert {objective.name for objective in OBJECTIVES.values()} == set(REGISTRY)


@every
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_learn_the_same(shared, name, mode) -> None:
    alone, together = shared / name, shared / f"{name}-{mode}"
    assert not (shared / f"{name}-{mode}.error").exists()
    for one, other in zip(
        *(metrics_log.read_metrics(each / "metrics.jsonl") for each in (alone, together)), strict=True
    ):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key] == pytest.approx(other[key], abs=1e-4), (one["step"], key)
    files = ["model.safetensors"] + (["pretraining.safetensors"] if name in UNLABELED else [])
    for file in files:
        mine, theirs = (read_tensors(each / file) for each in (alone, together))
        assert mine.keys() == theirs.keys()
        for key in mine:
            # Sums in another order, over six steps of SGD.
            torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=1e-5, msg=key)


@every
@pytest.mark.parametrize("asked", [2, 3])
def test_resumed_run_equals_uninterrupted_run(ran, tmp_path, name, asked) -> None:
    callback = StopAt(asked)
    assert run_training(config_for(name, ran), tmp_path / "run", callback=callback, stop=callback.stop).summary is None
    assert run_training(config_for(name, ran), tmp_path / "run").summary is not None
    files = ["model.safetensors", "metrics.jsonl", "checkpoints/step-00000006/state.safetensors"]
    files += ["pretraining.safetensors", "pretraining.json", "reconstructions.png"] if name in UNLABELED else []
    for file in files:
        assert sha256(tmp_path / "run" / file) == sha256(ran / name / file), file


@every
def test_bfloat16_learns_nearly_the_same(ran, tmp_path, name) -> None:
    run_training(replace(config_for(name, ran), parallel=ParallelConfig(precision="bf16")), tmp_path / "run")
    one, other = (
        [record for record in metrics_log.read_metrics(folder / "metrics.jsonl") if "val_loss" in record][-1]
        for folder in (ran / name, tmp_path / "run")
    )
    # bfloat16 has 8 bits: a part in 256 of each product, and losses of a few units.
    assert one["val_loss"] == pytest.approx(other["val_loss"], rel=0.05)
    assert one["val_loss"] != other["val_loss"]


@every
def test_accumulation_equals_one_large_batch(ran, tmp_path, name) -> None:
    config = config_for(name, ran)
    run_training(replace(config, schedule=replace(config.schedule, accumulate=2)), tmp_path / "run")
    one, other = (read_tensors(folder / "model.safetensors") for folder in (ran / name, tmp_path / "run"))
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=1e-5, msg=key)


@every
def test_activation_checkpointing_is_bit_exact(ran, tmp_path, name) -> None:
    run_training(
        replace(config_for(name, ran), parallel=ParallelConfig(activation_checkpointing=True)), tmp_path / "run"
    )
    assert sha256(tmp_path / "run" / "metrics.jsonl") == sha256(ran / name / "metrics.jsonl")
