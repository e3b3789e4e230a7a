"""What a run cost, by hand."""

import pytest
import torch

from vitkit.train.ledger import keep_ledger, peak_flops
from vitkit.zoo.lookup import configure

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
