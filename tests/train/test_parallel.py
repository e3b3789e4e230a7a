"""Ranks: one process, DDP and FSDP2 learn the same; what is saved on two goes on with one or four."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vitkit.checkpoints.native import read_tensors
from vitkit.core import runlog
from vitkit.core.config import to_toml
from vitkit.core.errors import ConfigError
from vitkit.engine.devices import choose_device
from vitkit.train.config import (
    DataConfig,
    KeepConfig,
    ModelChoice,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.train.parallel import joined
from vitkit.train.run import run

ALONE = RunConfig(
    model=ModelChoice(
        name="Ti/16", image_size=8, patch_size=4, settings=("width=16", "depth=2", "heads=2", "mlp_dim=32")
    ),
    data=DataConfig(path="digits", channels=1, workers=0),
    optimizer=OptimizerConfig(name="sgd", average=0.9),
    schedule=ScheduleConfig(batch_size=16, epochs=None, steps=20, lr=0.1),
    keep=KeepConfig(log_every=1, evaluate_every=10, save_every=10),
)
DDP = replace(ALONE, parallel=ParallelConfig(mode="ddp"))
FSDP2 = replace(ALONE, parallel=ParallelConfig(mode="fsdp2"))


def accumulating(config: RunConfig) -> RunConfig:
    return replace(config, schedule=replace(config.schedule, accumulate=2))


def with_adam(config: RunConfig) -> RunConfig:
    return replace(config, optimizer=OptimizerConfig(), schedule=replace(config.schedule, lr=1e-3))


def with_lora(config: RunConfig) -> RunConfig:
    return replace(config, optimizer=replace(config.optimizer, tune="lora", lora_rank=2))


def torchrun(folder: Path, jobs: list[tuple[str, RunConfig, int | None]], *, ranks: int) -> None:
    listed = []
    for number, (out, config, stop) in enumerate(jobs):
        toml = folder / f"{ranks}-{number}.toml"
        toml.write_text(to_toml(config), encoding="utf-8")
        listed.append({"config": str(toml), "out": str(folder / out), "stop": stop})
    file = folder / f"jobs-{ranks}.json"
    file.write_text(json.dumps(listed), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    script = Path(__file__).with_name("ranks.py")
    with (folder / f"output-{ranks}").open("w+b") as output:
        process = subprocess.Popen([*command, str(script), str(file)], env=environment, stdout=output, stderr=output)
        try:
            code = process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun passes it on to the ranks
            process.wait(timeout=60)
            code = -1
        output.seek(0)
        assert code == 0, output.read().decode()[-3000:]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Iterator[Path]:
    """A folder of runs: alone, on two ranks, and on four."""
    folder = tmp_path_factory.mktemp("ranks")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torchrun(
        folder,
        [
            ("ddp", DDP, None),
            ("fsdp2", FSDP2, None),
            ("ddp-accumulating", accumulating(DDP), None),
            ("fsdp2-accumulating", accumulating(FSDP2), None),
            ("ddp-adam", with_adam(DDP), None),
            ("fsdp2-adam", with_adam(FSDP2), None),
            ("ddp-lora", with_lora(DDP), None),
            ("fsdp2-lora", with_lora(FSDP2), None),
            ("then-one", FSDP2, 7),
            ("then-four", DDP, 7),
            ("then-two", FSDP2, 7),
            ("then-two", FSDP2, None),
        ],
        ranks=2,
    )
    torchrun(folder, [("then-four", FSDP2, None)], ranks=4)
    run(ALONE, folder / "alone")
    run(with_adam(ALONE), folder / "adam")
    run(with_lora(ALONE), folder / "lora")
    run(ALONE, folder / "then-one")
    yield folder
    torch.set_num_threads(threads)


def difference(left: Path, right: Path) -> float:
    one, other = (read_tensors(folder / "model.safetensors") for folder in (left, right))
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "ddp-accumulating", "fsdp2-accumulating"])
def test_any_sharing_out_learns_the_same(ran, name) -> None:
    assert difference(ran / "alone", ran / name) < 1e-5
    mine, theirs = (runlog.read(ran / run / "metrics.jsonl") for run in ("alone", name))
    assert len(mine) == len(theirs) == 22
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key] == pytest.approx(other[key], abs=1e-4), (one["step"], key)


@pytest.mark.parametrize("name", ["ddp-adam", "fsdp2-adam"])
def test_adam_learns_the_same(ran, name) -> None:
    one, other = (read_tensors(ran / run / "model.safetensors") for run in ("adam", name))
    for key in one:
        # The gradient of a key's bias is zero but for rounding, and Adam makes whole steps of rounding.
        if not key.endswith("qkv.bias"):
            torch.testing.assert_close(one[key], other[key], rtol=0, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["then-one", "then-two", "then-four"])
def test_a_run_saved_on_two_ranks_goes_on_with_one_two_or_four(ran, name) -> None:
    assert difference(ran / "alone", ran / name) < 1e-5
    assert [record["step"] for record in runlog.read(ran / name / "metrics.jsonl") if "loss" in record] == [
        *range(1, 21)
    ]


def test_a_stopped_run_on_two_ranks_is_the_same_bit_for_bit(ran) -> None:
    assert difference(ran / "fsdp2", ran / "then-two") == 0.0
    straight, stopped = ((ran / name / "metrics.jsonl").read_bytes() for name in ("fsdp2", "then-two"))
    assert straight == stopped


def test_low_rank_additions_learn_the_same_with_ddp_and_are_not_sharded(ran) -> None:
    assert difference(ran / "lora", ran / "ddp-lora") < 1e-5
    assert "LoRA" in (ran / "fsdp2-lora.error").read_text(encoding="utf-8")
    assert not (ran / "fsdp2-lora" / "summary.json").exists()


def test_only_the_refused_run_failed(ran) -> None:
    assert [path.name for path in ran.glob("*.error")] == ["fsdp2-lora.error"]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_single_process_cannot_be_spread(mode) -> None:
    with pytest.raises(ConfigError, match="more than one process"), joined(ParallelConfig(mode=mode)):
        pass


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no device"):
        choose_device("cuda:77")
