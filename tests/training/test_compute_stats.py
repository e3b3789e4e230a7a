"""Compute statistics of a run, compared with values computed by hand and with torch's FLOP counter."""

import shlex

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitkit.core.config import parse_assignments
from vitkit.model.pretraining_config import MAEConfig, MaskedConfig
from vitkit.objectives.config import ObjectiveConfig, get_builder
from vitkit.training.config import DataConfig, ModelChoice, RunConfig
from vitkit.training.finalize import (
    ComputeStats,
    compute_rows,
    measure_compute,
    measure_peak_flops,
    next_steps,
    suggest_pretrained,
)
from vitkit.training.run_dir import RunDir
from vitkit.zoo.registry import configure, create

CONFIG = configure("Ti/16", image_size=32, num_classes=10)
SPEED = [
    {"step": 10, "images_per_second": 100.0, "data_wait": 0.1},
    {"step": 20, "images_per_second": 50.0, "data_wait": 0.0},
    {"step": 30, "images_per_second": 100.0, "data_wait": 0.2},
]


def measure(*, images_seen: int = 1, speed: list[dict[str, float]] = SPEED, ranks: int = 1) -> ComputeStats:
    flops = get_builder(ObjectiveConfig()).forward_flops(CONFIG)
    return measure_compute(
        parameters=7,
        images_seen=images_seen,
        forward_flops=flops,
        speed=speed,
        device=torch.device("cpu"),
        ranks=ranks,
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


def test_peak_counts_every_rank(monkeypatch):
    monkeypatch.setattr("vitkit.training.finalize.measure_peak_flops", lambda device: 1e9)
    one, two = (measure(ranks=ranks) for ranks in (1, 2))
    assert one.peak_flops_per_second == 1e9
    assert two.peak_flops_per_second == 2e9


def test_run_without_speed_log_has_no_speed():
    stats = measure(images_seen=0, speed=[])
    assert stats.seconds is stats.images_per_second is stats.data_wait is stats.utilization is None
    assert stats.exaflops == 0


def test_measured_peak_is_plausible():
    assert 1e8 < measure_peak_flops(torch.device("cpu"), side=256, repeats=3) < 1e15


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


def test_utilization_above_the_peak_is_left_out(monkeypatch):
    monkeypatch.setattr("vitkit.training.finalize.measure_peak_flops", lambda device: 1.0)
    stats = measure()
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
    assert suggest_pretrained(config, top1) == (command if suggested else None)
