"""Compute statistics of a run, compared with values computed by hand and with torch's FLOP counter."""

import itertools
import shlex

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitkit.core.config import parse_assignments
from vitkit.model.pretraining_config import MAEConfig, MaskedConfig
from vitkit.objectives.config import ObjectiveConfig, get_builder
from vitkit.training import finalize
from vitkit.training.config import DataConfig, ModelChoice, ParallelConfig, RunConfig
from vitkit.training.distributed import Ranks
from vitkit.training.finalize import (
    ComputeStats,
    compute_rows,
    measure_compute,
    next_steps,
    suggest_pretrained,
    time_products,
)
from vitkit.training.run_dir import RunDir
from vitkit.zoo.registry import configure, create

CONFIG = configure("Ti/16", image_size=32, num_classes=10)
SPEED = [
    {"step": 10, "images_per_second": 100.0, "data_wait": 0.1},
    {"step": 20, "images_per_second": 50.0, "data_wait": 0.0},
    {"step": 30, "images_per_second": 100.0, "data_wait": 0.2},
]


def measure(
    *, images_seen: int = 1, speed: list[dict[str, float]] = SPEED, ranks: int = 1, peak: float = 1e15
) -> ComputeStats:
    flops = get_builder(ObjectiveConfig()).forward_flops(CONFIG)
    return measure_compute(
        parameters=7,
        images_seen=images_seen,
        forward_flops=flops,
        speed=speed,
        peak=peak,
        precision="bf16",
        ranks=Ranks(device=torch.device("cpu"), world_size=ranks),
    )


def test_compute_stats_match_hand_computed_values():
    stats = measure(images_seen=3_000, ranks=2)
    # Four patches and a class token, width 192, depth 12; training costs three forward passes.
    tokens, width = 5, 192
    block = tokens * (4 * width * width + 2 * width * 4 * width) + 2 * tokens * tokens * width
    forward = 2 * (4 * 768 * width + 12 * block + width * 10)
    assert stats.flops_per_image == 3 * forward
    assert stats.exaflops == pytest.approx(3 * forward * 3_000 / 1e18)
    assert stats.seconds == pytest.approx(1_000 / 100 + 1_000 / 50 + 1_000 / 100)
    assert stats.images_per_second == 100.0
    assert stats.data_wait == pytest.approx(0.1)
    assert stats.flops_per_second == 100.0 * stats.flops_per_image
    assert stats.utilization == pytest.approx(stats.flops_per_second / stats.peak_flops_per_second)
    assert (stats.parameters, stats.ranks, stats.device) == (7, 2, "cpu")
    assert "Peak, bf16 matrix products" in dict(compute_rows(stats))


def test_peak_counts_every_rank():
    one, two = (measure(ranks=ranks, peak=1e9) for ranks in (1, 2))
    assert one.peak_flops_per_second == 1e9
    assert two.peak_flops_per_second == 2e9


def test_run_without_speed_log_has_no_speed():
    stats = measure(images_seen=0, speed=[])
    assert stats.seconds is stats.images_per_second is stats.data_wait is stats.utilization is None
    assert stats.exaflops == 0


def test_measured_peak_is_plausible():
    assert 1e8 < time_products(torch.device("cpu"), side=256, repeats=3) < 1e15


@pytest.mark.parametrize(("busy", "expected"), [(0.25, 4.0), (0.0, 1.0), (3.0, 1.0)])
def test_peak_counts_only_time_in_which_threads_compute(monkeypatch, busy, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    wall, cpu = itertools.count(0.0, 1.0), itertools.count(0.0, 2 * busy)
    rate = time_products(
        torch.device("cpu"), side=2, repeats=3, wall_clock=lambda: next(wall), cpu_clock=lambda: next(cpu)
    )
    assert rate == 16 * expected


@pytest.mark.parametrize(
    ("precision", "device", "dtypes"),
    [
        ("fp32", "cpu", [torch.float32]),
        ("bf16", "cpu", [torch.float32, torch.bfloat16]),
        ("fp16", "cpu", [torch.float32]),
        ("fp16", "meta", [torch.float32, torch.float16]),
    ],
)
def test_peak_is_of_the_precision_of_the_run(monkeypatch, precision, device, dtypes):
    timed = []
    monkeypatch.setattr(finalize, "time_products", lambda device, *, dtype, side: timed.append(dtype) or len(timed))
    config = RunConfig(parallel=ParallelConfig(precision=precision))
    assert finalize.measure_peak_flops(config, Ranks(device=torch.device(device))) == len(dtypes)
    assert timed == dtypes


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveConfig(name="masked"),
        ObjectiveConfig(name="masked", masked=MaskedConfig(target="downsized")),
        ObjectiveConfig(name="mae", mae=MAEConfig(width=32, depth=2, heads=2)),
    ],
    ids=["masked", "downsized", "mae"],
)
@pytest.mark.parametrize("settings", [(), ("pooling=mean",), ("tokens.registers=3",)], ids=str)
def test_pretraining_flops_match_torch(objective, settings):
    config = configure(
        "Ti/16", image_size=32, patch_size=4, num_classes=0, settings=parse_assignments(("depth=2", *settings))
    )
    builder = get_builder(objective)
    model = builder.wrap(create(config)).eval()
    images = torch.zeros(1, 3, 32, 32)
    predicted = torch.zeros(1, 32 if objective.name == "masked" else 48, dtype=torch.long)
    hidden = [torch.zeros(1, 16, dtype=torch.long)]
    if objective.name == "masked":
        hidden = [torch.zeros(1, 64, dtype=torch.long), torch.zeros(1, 64, dtype=torch.bool)]
    # The fused kernel of a CPU is not counted; its plain form, with the same products, is.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images, *hidden, predicted)
    assert builder.forward_flops(config) == counter.get_total_flops()


def test_utilization_above_the_peak_is_left_out():
    stats = measure(peak=1.0)
    assert stats.utilization is None
    assert "Utilization" not in dict(compute_rows(stats))
    assert "Images per second" in dict(compute_rows(stats))


def test_commands_in_the_report_quote_the_path(tmp_path):
    steps = next_steps(RunDir(tmp_path / "my run"), needs_labels=True)
    assert all(shlex.split(command)[2] == str(tmp_path / "my run") for _, command in steps)


@pytest.mark.parametrize(("top1", "init", "suggested"), [(0.4, None, True), (0.9, None, False), (0.4, "runs/a", False)])
def test_poor_result_suggests_pretrained_weights(top1, init, suggested):
    config = RunConfig(model=ModelChoice(name=None if init else "Ti/16", init=init), data=DataConfig(path="my photos"))
    command = "vitkit train 'my photos' --from auto --out NEW"
    assert suggest_pretrained(config, top1, tried={}) == (command if suggested else None)
    assert suggest_pretrained(config, top1, tried={"tried": [{"steps": 0}, {"steps": 9}]}) is None
