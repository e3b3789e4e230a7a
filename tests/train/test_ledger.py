"""What a run cost, by hand."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitkit.model.masked import AutoencoderConfig, MaskedConfig
from vitkit.train.config import ObjectiveConfig, RunConfig
from vitkit.train.ledger import keep_ledger, operations, peak_flops
from vitkit.train.make import around
from vitkit.zoo.lookup import configure, create

CONFIG = configure("Ti/16", image_size=32, classes=10)
SPEED = [
    {"step": 10, "images_per_second": 100.0, "waiting": 0.1},
    {"step": 20, "images_per_second": 50.0, "waiting": 0.0},
    {"step": 30, "images_per_second": 100.0, "waiting": 0.2},
]


def test_the_ledger_adds_up():
    ledger = keep_ledger(CONFIG, parameters=7, images_seen=3_000, speed=SPEED, device=torch.device("cpu"), ranks=2)
    # Four patches and a class token, width 192, depth 12: 2 FLOPs to a multiply-add, and three forward passes' worth.
    tokens, width = 5, 192
    block = tokens * (4 * width * width + 2 * width * 4 * width) + 2 * tokens * tokens * width
    forward = 2 * (4 * 768 * width + 12 * block + width * 10)
    assert ledger.flops_an_image == 3 * forward
    assert ledger.exaflops == pytest.approx(3 * forward * 3_000 / 1e18)
    assert ledger.seconds == pytest.approx(1_000 / 100 + 1_000 / 50 + 1_000 / 100)
    assert ledger.images_per_second == 100.0
    assert ledger.waiting == pytest.approx(0.1)
    assert ledger.flops_a_second == 100.0 * ledger.flops_an_image
    assert ledger.utilisation == pytest.approx(ledger.flops_a_second / ledger.peak_flops_a_second)
    assert (ledger.parameters, ledger.ranks, ledger.device) == (7, 2, "cpu")


def test_the_peak_counts_every_rank(monkeypatch):
    monkeypatch.setattr("vitkit.train.ledger.peak_flops", lambda device: 1e9)
    one, two = (
        keep_ledger(CONFIG, parameters=0, images_seen=1, speed=SPEED, device=torch.device("cpu"), ranks=ranks)
        for ranks in (1, 2)
    )
    assert one.peak_flops_a_second == 1e9
    assert two.peak_flops_a_second == 2e9


def test_a_run_too_short_to_be_timed_has_no_speed():
    ledger = keep_ledger(CONFIG, parameters=0, images_seen=0, speed=[], device=torch.device("cpu"), ranks=1)
    assert ledger.seconds is ledger.images_per_second is ledger.waiting is ledger.utilisation is None
    assert ledger.exaflops == 0


def test_the_measured_peak_is_one_that_a_computer_can_have():
    assert 1e8 < peak_flops(torch.device("cpu"), side=256, repeats=3) < 1e15


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveConfig(name="masked"),
        ObjectiveConfig(name="masked", masked=MaskedConfig(target="downsized")),
        ObjectiveConfig(name="autoencoder", autoencoder=AutoencoderConfig(width=32, depth=2, heads=2)),
    ],
    ids=["masked", "downsized", "autoencoder"],
)
@pytest.mark.parametrize("settings", [(), ("pooling=mean",), ("tokens.registers=3",)], ids=str)
def test_operations_of_pre_training_are_those_that_torch_counts(objective, settings):
    config = configure("Ti/16", image_size=32, patch_size=4, classes=0, settings=("depth=2", *settings))
    run = RunConfig(objective=objective)
    model = around(create(config), run).eval()
    images = torch.zeros(1, 3, 32, 32)
    places = torch.zeros(1, 32 if objective.name == "masked" else 48, dtype=torch.long)
    hidden = [torch.zeros(1, 16, dtype=torch.long)]
    if objective.name == "masked":
        hidden = [torch.zeros(1, 64, dtype=torch.long), torch.zeros(1, 64, dtype=torch.bool)]
    # The fused kernel of a CPU is not counted; its plain form, with the same products, is.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images, *hidden, places)
    assert operations(objective, config) == counter.get_total_flops()
