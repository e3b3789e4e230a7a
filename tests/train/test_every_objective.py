"""The contract of every objective: ranks, stops, micro-batches and recomputing change nothing that is learned."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from train.test_parallel import torchrun

from vitkit.checkpoints.native import read_tensors
from vitkit.core import runlog
from vitkit.core.stopping import Stop
from vitkit.model.masked import AutoencoderConfig
from vitkit.objectives.distillation import DistillationConfig
from vitkit.train.config import (
    DataConfig,
    KeepConfig,
    ModelChoice,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.train.run import run
from vitkit.train.watch import Pulse, Watcher

BASE = RunConfig(
    model=ModelChoice(
        name="Ti/16", image_size=16, patch_size=4, settings=("width=16", "depth=2", "heads=2", "mlp_dim=32")
    ),
    data=DataConfig(path="digits", channels=1, workers=0, val_share=0.05),
    optimizer=OptimizerConfig(name="sgd", average=0.9),
    schedule=ScheduleConfig(batch_size=16, epochs=None, steps=6, lr=0.05),
    keep=KeepConfig(log_every=1, evaluate_every=3, save_every=3),
)
OBJECTIVES = {
    "supervised": ObjectiveConfig(),
    "masked": ObjectiveConfig(name="masked"),
    "autoencoder": ObjectiveConfig(name="autoencoder", autoencoder=AutoencoderConfig(width=16, depth=1, heads=2)),
    "distillation": ObjectiveConfig(name="distillation"),
}
UNLABELLED = [name for name, objective in OBJECTIVES.items() if not objective.labelled]
every = pytest.mark.parametrize("name", OBJECTIVES)


def config_of(name: str, ran: Path) -> RunConfig:
    """The run of an objective; a teacher is the supervised one."""
    objective = OBJECTIVES[name]
    if objective.name == "distillation":
        objective = replace(objective, distillation=DistillationConfig(teacher=str(ran / "supervised")))
    return replace(BASE, objective=objective)


class StopAt(Watcher):
    """Asks to stop after a step."""

    def __init__(self, step: int) -> None:
        self.step, self.stop = step, Stop()

    def pulse(self, pulse: Pulse) -> None:
        if pulse.step == self.step:
            self.stop.signal = "SIGTERM"


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Iterator[Path]:
    """A folder of runs of every objective, each alone."""
    folder = tmp_path_factory.mktemp("objectives")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in OBJECTIVES:
        run(config_of(name, folder), folder / name)
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shared(ran) -> Path:
    """The same folder with runs on two ranks, in both ways."""
    jobs = [
        (f"{name}-{mode}", replace(config_of(name, ran), parallel=ParallelConfig(mode=mode)), None)
        for name in OBJECTIVES
        for mode in ("ddp", "fsdp2")
    ]
    torchrun(ran, jobs, ranks=2)
    return ran


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_contract_has_every_objective() -> None:
    names = get_args(get_type_hints(ObjectiveConfig)["name"])
    assert {objective.name for objective in OBJECTIVES.values()} == set(names)


@every
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_learn_what_one_learns(shared, name, mode) -> None:
    alone, together = shared / name, shared / f"{name}-{mode}"
    assert not (shared / f"{name}-{mode}.error").exists()
    for one, other in zip(*(runlog.read(each / "metrics.jsonl") for each in (alone, together)), strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key] == pytest.approx(other[key], abs=1e-4), (one["step"], key)
    files = ["model.safetensors"] + (["pretraining.safetensors"] if name in UNLABELLED else [])
    for file in files:
        mine, theirs = (read_tensors(each / file) for each in (alone, together))
        assert mine.keys() == theirs.keys()
        for key in mine:
            # Sums in another order, over six steps of SGD.
            torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=1e-5, msg=key)


@every
@pytest.mark.parametrize("asked", [2, 3])
def test_a_run_that_is_stopped_and_resumed_ends_the_same_bit_for_bit(ran, tmp_path, name, asked) -> None:
    watcher = StopAt(asked)
    assert run(config_of(name, ran), tmp_path / "run", watcher=watcher, stop=watcher.stop).summary is None
    assert run(config_of(name, ran), tmp_path / "run").summary is not None
    files = ["model.safetensors", "metrics.jsonl", "checkpoints/step-00000006/state.safetensors"]
    files += ["pretraining.safetensors", "pretraining.json", "reconstructions.png"] if name in UNLABELLED else []
    for file in files:
        assert sha256(tmp_path / "run" / file) == sha256(ran / name / file), file


@every
def test_bfloat16_runs_and_learns_nearly_the_same(ran, tmp_path, name) -> None:
    run(replace(config_of(name, ran), parallel=ParallelConfig(precision="bf16")), tmp_path / "run")
    one, other = (
        [record for record in runlog.read(folder / "metrics.jsonl") if "val_loss" in record][-1]
        for folder in (ran / name, tmp_path / "run")
    )
    # bfloat16 has 8 bits: a part in 256 of each product, and losses of a few units.
    assert one["val_loss"] == pytest.approx(other["val_loss"], rel=0.05)
    assert one["val_loss"] != other["val_loss"]


@every
def test_accumulation_is_the_big_batch(ran, tmp_path, name) -> None:
    config = config_of(name, ran)
    run(replace(config, schedule=replace(config.schedule, accumulate=2)), tmp_path / "run")
    one, other = (read_tensors(folder / "model.safetensors") for folder in (ran / name, tmp_path / "run"))
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=1e-5, msg=key)


@every
def test_activations_computed_again_change_nothing(ran, tmp_path, name) -> None:
    run(replace(config_of(name, ran), parallel=ParallelConfig(activation_checkpointing=True)), tmp_path / "run")
    assert sha256(tmp_path / "run" / "metrics.jsonl") == sha256(ran / name / "metrics.jsonl")
