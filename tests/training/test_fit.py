"""Precision, TF32, micro-batches and out-of-memory errors on GPUs that are mocked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from vitkit.core.errors import ConfigError, TrainingError
from vitkit.inference.engine import choose_training_precision
from vitkit.training.config import ModelChoice, OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig
from vitkit.training.distributed import Ranks
from vitkit.training.fit import (
    estimate_memory,
    explain_out_of_memory,
    resolve_accumulate,
    resolve_precision,
    tf32_products,
)
from vitkit.training.run import with_accumulate
from vitkit.training.run_dir import RunContext, RunDir
from vitkit.zoo.registry import configure

GPU, CPU = Ranks(device=torch.device("cuda:0")), Ranks(device=torch.device("cpu"))
CONFIG = RunConfig(model=ModelChoice(name="B/16"), schedule=ScheduleConfig(batch_size=4096))
B16 = configure("B/16")


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch):
    def set_capability(major: int, minor: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))

    return set_capability


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch):
    def set_free(gigabytes: float) -> None:
        free = int(gigabytes * 10**9)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 2 * free))

    return set_free


@dataclass(frozen=True, kw_only=True)
class SecondRank(Ranks):
    """Rank 1, whose main rank broadcasts these values."""

    values: list[int]

    def broadcast_int(self, value: int) -> int:
        """Return the next value of the main rank."""
        return self.values.pop(0)

    def all_reduce_sum(self, numbers: Sequence[int | float]) -> list[float]:
        """Return that the main rank has finished its task."""
        return [1.0]


def bf16(config: RunConfig) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, precision="bf16"))


@pytest.mark.parametrize(("version", "precision"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16")])
def test_precision_follows_the_gpu(capability, tmp_path, version, precision):
    capability(*version)
    assert choose_training_precision(GPU.device) == precision
    assert resolve_precision(CONFIG, RunDir(tmp_path), GPU).parallel.precision == precision


def test_precision_is_fp32_on_the_cpu_and_as_set_elsewhere(capability, tmp_path):
    capability(9)
    assert resolve_precision(CONFIG, RunDir(tmp_path), CPU).parallel.precision == "fp32"
    exact = replace(CONFIG, parallel=ParallelConfig(precision="fp32"))
    assert resolve_precision(exact, RunDir(tmp_path), GPU).parallel.precision == "fp32"


def test_all_ranks_use_the_precision_of_the_main_rank(capability, tmp_path):
    capability(7)
    second = SecondRank(device=GPU.device, rank=1, world_size=2, values=[1, 0])
    assert resolve_precision(CONFIG, RunDir(tmp_path), second).parallel.precision == "bf16"


def test_resumed_run_keeps_precision_and_accumulation(capability, free_memory, tmp_path):
    capability(7)
    free_memory(16)
    run_dir = RunDir(tmp_path)
    config = resolve_precision(CONFIG, run_dir, GPU)
    run_dir.claim(config)
    first = with_accumulate(RunContext(config=config, run_dir=run_dir, ranks=GPU, workers=0), B16).config
    assert first.schedule.micro_batches > 1
    assert run_dir.read_config() == first
    capability(9)
    free_memory(160)
    resumed = resolve_precision(CONFIG, run_dir, GPU)
    assert resumed == first
    run_dir.claim(resumed)
    run_dir.claim(CONFIG)  # "auto" is whatever the run began with
    with pytest.raises(ConfigError, match="precision=fp16, not fp32"):
        run_dir.claim(replace(CONFIG, parallel=ParallelConfig(precision="fp32")))


def test_accumulation_is_chosen_again_if_it_does_not_divide(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.claim(replace(CONFIG, schedule=ScheduleConfig(batch_size=4096, accumulate=4096)))
    assert resolve_precision(CONFIG, run_dir, CPU).schedule.accumulate == 4096
    two = SecondRank(device=CPU.device, rank=0, world_size=2, values=[0, 0])
    assert resolve_precision(CONFIG, run_dir, two).schedule.accumulate == "auto"


@pytest.mark.parametrize("gigabytes", [8, 24, 80])
def test_micro_batch_fits_into_free_memory_and_is_the_largest(free_memory, gigabytes):
    free_memory(gigabytes)
    config, reason = resolve_accumulate(bf16(CONFIG), B16, GPU)
    parts, (fixed, per_image) = config.schedule.micro_batches, estimate_memory(bf16(CONFIG), B16)
    assert fixed + 4096 // parts * per_image <= 0.9 * gigabytes * 10**9
    assert fixed + 2 * 4096 // parts * per_image > 0.9 * gigabytes * 10**9
    assert reason is not None
    assert reason.startswith(f"accumulate={parts}: {4096 // parts} images at a time need about ")


def test_ranks_divide_the_batch_first(free_memory):
    free_memory(80)
    config = bf16(CONFIG)
    alone = resolve_accumulate(config, B16, GPU)[0].schedule.micro_batches
    eight = SecondRank(device=GPU.device, rank=0, world_size=8, values=[1])
    assert alone > 1
    assert resolve_accumulate(config, B16, eight) == (
        replace(config, schedule=replace(config.schedule, accumulate=1)),
        None,
    )


def test_accumulation_is_one_without_a_gpu_and_as_set(free_memory):
    free_memory(1)
    assert resolve_accumulate(CONFIG, B16, CPU)[0].schedule.accumulate == 1
    fixed = replace(CONFIG, schedule=ScheduleConfig(batch_size=4096, accumulate=2))
    assert resolve_accumulate(fixed, B16, GPU) == (fixed, None)


def test_estimate_counts_what_reduces_memory():
    whole = replace(CONFIG, parallel=ParallelConfig(precision="fp32"))
    fixed, per_image = estimate_memory(whole, B16)
    assert fixed == 16 * 86_567_656
    checkpointed = replace(whole, parallel=ParallelConfig(precision="fp32", activation_checkpointing=True))
    assert estimate_memory(checkpointed, B16)[1] < per_image / 5
    assert estimate_memory(bf16(CONFIG), B16)[1] < 0.6 * per_image
    sharded = replace(whole, parallel=ParallelConfig(precision="fp32", mode="fsdp2"))
    assert estimate_memory(sharded, B16, world_size=4)[0] == fixed // 4
    assert estimate_memory(replace(whole, optimizer=OptimizerConfig(trainable="head")), B16)[1] == 0
    averaged = replace(whole, optimizer=OptimizerConfig(ema_decay=0.9))
    assert estimate_memory(averaged, B16)[0] == fixed * 5 // 4


@pytest.mark.parametrize(
    ("precision", "ranks", "inside"),
    [("bf16", GPU, "high"), ("fp16", GPU, "high"), ("fp32", GPU, "highest"), ("bf16", CPU, "highest")],
)
def test_tf32_is_used_for_what_stays_fp32(precision, ranks, inside):
    assert torch.get_float32_matmul_precision() == "highest"
    config = replace(CONFIG, parallel=ParallelConfig(precision=precision))
    with tf32_products(config, ranks):
        assert torch.get_float32_matmul_precision() == inside
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to …"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_names_what_needs_less(error):
    config = replace(CONFIG, schedule=ScheduleConfig(batch_size=4096, accumulate=4))
    with (
        pytest.raises(TrainingError, match="out of memory on cuda:0 with 1,024 images") as caught,
        explain_out_of_memory(config, GPU),
    ):
        raise error
    hint = str(caught.value.hint)
    assert "schedule.accumulate=8" in hint
    assert "parallel.activation_checkpointing=true" in hint


def test_other_errors_are_not_out_of_memory():
    with pytest.raises(RuntimeError, match="shapes differ"), explain_out_of_memory(CONFIG, GPU):
        raise RuntimeError("shapes differ")


def test_out_of_memory_with_one_image_does_not_advise_accumulation():
    config = replace(
        CONFIG,
        schedule=ScheduleConfig(batch_size=4, accumulate=4),
        parallel=ParallelConfig(activation_checkpointing=True),
    )
    with pytest.raises(TrainingError) as caught, explain_out_of_memory(config, GPU):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert caught.value.hint == "run again with a smaller image_size or model"
