"""Distributed training: one process, DDP and FSDP2 learn the same; resume with other numbers of ranks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from soak.victim import Launcher
from training.jobs import Job, train_on_ranks

from vitkit.core import metrics_log
from vitkit.core.errors import ConfigError
from vitkit.inference.engine import resolve_device
from vitkit.training import build
from vitkit.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelChoice,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.training.distributed import join_ranks
from vitkit.training.run import run_training
from vitkit.weights.artifact import read_tensors

ALONE = RunConfig(
    model=ModelChoice(
        name="Ti/16", image_size=8, patch_size=4, settings=("width=16", "depth=2", "heads=2", "mlp_dim=32")
    ),
    data=DataConfig(path="digits", channels=1, workers=0),
    optimizer=OptimizerConfig(name="sgd", ema_decay=0.9),
    schedule=ScheduleConfig(batch_size=16, epochs=None, steps=8, lr=0.1),
    evaluation=EvaluationConfig(every=4),
    checkpoint=CheckpointConfig(save_every=4),
    logging=LoggingConfig(log_every=1),
)
DDP = replace(ALONE, parallel=ParallelConfig(mode="ddp"))
FSDP2 = replace(ALONE, parallel=ParallelConfig(mode="fsdp2"))


def accumulating(config: RunConfig) -> RunConfig:
    return replace(config, schedule=replace(config.schedule, accumulate=2))


def with_adam(config: RunConfig) -> RunConfig:
    return replace(config, optimizer=OptimizerConfig(), schedule=replace(config.schedule, lr=1e-3))


def with_muon(config: RunConfig) -> RunConfig:
    return replace(config, optimizer=OptimizerConfig(name="muon"), schedule=replace(config.schedule, lr=0.02))


def with_fp16(config: RunConfig) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, precision="fp16"))


def with_lora(config: RunConfig) -> RunConfig:
    return replace(config, optimizer=replace(config.optimizer, trainable="lora", lora_rank=2))


def for_three_ranks(config: RunConfig) -> RunConfig:
    return replace(config, schedule=replace(config.schedule, batch_size=12))


def stopped_and_not(name: str, config: RunConfig) -> list[Job]:
    return [(name, config, None), (f"{name}-stopped", config, 3), (f"{name}-stopped", config, None)]


@pytest.fixture(scope="module")
def ran(launcher: Launcher, tmp_path_factory) -> Iterator[Path]:
    """Train alone, on two ranks and on four."""
    folder = tmp_path_factory.mktemp("ranks")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train_on_ranks(
        launcher,
        folder,
        [
            ("ddp", DDP, None),
            ("fsdp2", FSDP2, None),
            ("ddp-accumulating", accumulating(DDP), None),
            ("fsdp2-accumulating", accumulating(FSDP2), None),
            ("ddp-adam", with_adam(DDP), None),
            ("fsdp2-adam", with_adam(FSDP2), None),
            ("ddp-muon", with_muon(DDP), None),
            ("fsdp2-muon", with_muon(FSDP2), None),
            ("muon-stopped", with_muon(FSDP2), 3),
            ("muon-stopped", with_muon(FSDP2), None),
            ("ddp-fp16", with_fp16(DDP), None),
            ("fsdp2-fp16", with_fp16(FSDP2), None),
            ("fp16-stopped", with_fp16(FSDP2), 3),
            ("fp16-stopped", with_fp16(FSDP2), None),
            ("ddp-lora", with_lora(DDP), None),
            ("fsdp2-lora", with_lora(FSDP2), None),
            ("then-one", FSDP2, 3),
            ("then-four", DDP, 3),
            ("then-two", FSDP2, 3),
            ("then-two", FSDP2, None),
        ],
        ranks=2,
    )
    train_on_ranks(launcher, folder, [*stopped_and_not("ddp-3", for_three_ranks(with_adam(DDP)))], ranks=3)
    jobs = [("then-four", FSDP2, None), *stopped_and_not("ddp-4", with_adam(DDP))]
    train_on_ranks(launcher, folder, jobs, ranks=4)
    run_training(ALONE, folder / "alone")
    run_training(with_adam(ALONE), folder / "adam")
    run_training(with_muon(ALONE), folder / "muon")
    run_training(with_lora(ALONE), folder / "lora")
    run_training(ALONE, folder / "then-one")
    yield folder
    torch.set_num_threads(threads)


def difference(left: Path, right: Path) -> float:
    one, other = (read_tensors(folder / "model.safetensors") for folder in (left, right))
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "ddp-accumulating", "fsdp2-accumulating"])
def test_ranks_and_accumulation_learn_the_same(ran, name) -> None:
    assert difference(ran / "alone", ran / name) < 1e-5
    mine, theirs = (metrics_log.read_metrics(ran / run / "metrics.jsonl") for run in ("alone", name))
    assert len(mine) == len(theirs) == 10
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


@pytest.mark.parametrize("name", ["ddp-muon", "fsdp2-muon"])
def test_muon_learns_the_same(ran, name) -> None:
    # Muon scales every update to the same size, so that rounding of a gradient is not small; bias gradients as above.
    one, other = (read_tensors(ran / run / "model.safetensors") for run in ("muon", name))
    for key in one:
        if not key.endswith("qkv.bias"):
            torch.testing.assert_close(one[key], other[key], rtol=0, atol=1e-3, msg=key)


def test_resumed_muon_on_two_ranks_is_bit_exact(ran) -> None:
    assert difference(ran / "fsdp2-muon", ran / "muon-stopped") == 0.0


def test_fp16_with_a_scaled_loss_on_two_ranks(ran) -> None:
    for name in ("ddp-fp16", "fsdp2-fp16"):
        assert difference(ran / "alone", ran / name) < 5e-3  # of fp16 itself
    assert difference(ran / "fsdp2-fp16", ran / "fp16-stopped") == 0.0


@pytest.mark.parametrize("name", ["then-one", "then-two", "then-four"])
def test_run_of_two_ranks_resumes_on_one_two_or_four(ran, name) -> None:
    assert difference(ran / "alone", ran / name) < 1e-5
    assert [
        record["step"] for record in metrics_log.read_metrics(ran / name / "metrics.jsonl") if "loss" in record
    ] == [*range(1, 9)]


def test_resumed_run_on_two_ranks_is_bit_exact(ran) -> None:
    assert difference(ran / "fsdp2", ran / "then-two") == 0.0
    straight, stopped = ((ran / name / "metrics.jsonl").read_bytes() for name in ("fsdp2", "then-two"))
    assert straight == stopped


@pytest.mark.parametrize("ranks", [3, 4])
def test_resumed_ddp_is_bit_exact_on_more_than_two_ranks(ran, ranks) -> None:
    assert difference(ran / f"ddp-{ranks}", ran / f"ddp-{ranks}-stopped") == 0.0


def test_lora_works_with_ddp_and_not_with_fsdp2(ran) -> None:
    assert difference(ran / "lora", ran / "ddp-lora") < 1e-5
    assert "LoRA" in (ran / "fsdp2-lora.error").read_text(encoding="utf-8")
    assert not (ran / "fsdp2-lora" / "summary.json").exists()


def test_only_the_rejected_run_failed(ran) -> None:
    assert [path.name for path in ran.glob("*.error")] == ["fsdp2-lora.error"]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_single_process_cannot_be_parallelized(mode) -> None:
    with pytest.raises(ConfigError, match="more than one process"), join_ranks(ParallelConfig(mode=mode)):
        pass


@pytest.mark.parametrize(("visible", "device"), [(1, "cuda:0"), (8, "cuda:3")])
def test_local_rank_selects_a_visible_device(monkeypatch, visible, device) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch, "empty", lambda *_, device: SimpleNamespace(device=torch.device(device)))
    assert resolve_device("auto", local_rank=3) == torch.device(device)


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(2, 1, 1), (16, 1, 15), (96, 8, 11), (4, 8, 1)])
def test_ranks_share_the_cores_for_loading(monkeypatch, cores, ranks, workers) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert build.resolve_workers(replace(ALONE, data=DataConfig())) == workers


def test_missing_device_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no device"):
        resolve_device("cuda:77")
