"""Logits and summed metrics: every image is counted once across ranks."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import DataError
from vitkit.core.signals import StopRequested
from vitkit.data.dataset import Subset
from vitkit.data.layouts.arrays import open_digits
from vitkit.data.loader import make_evaluation_loader
from vitkit.data.preprocessing import Preprocessing
from vitkit.evaluation.logits import CPU, MetricSums, compute_logits, iterate_logits, sum_metrics

PREPROCESSING = Preprocessing(image_size=8, channels=1, mean=(0.5,), std=(0.5,))
SOURCE = Subset(open_digits().splits["test"], range(21))


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()


def tallied(model: nn.Module, *, rank: int = 0, ranks: int = 1, rounds: int = 6) -> MetricSums:
    with make_evaluation_loader(
        SOURCE, preprocessing=PREPROCESSING, batch_size=4, rank=rank, world_size=ranks
    ) as batches:
        return sum_metrics(model, batches, preprocessing=PREPROCESSING, device=CPU, rounds=rounds)


def test_sums_equal_all_logits(model) -> None:
    result = compute_logits(model, SOURCE, preprocessing=PREPROCESSING, batch_size=5)
    assert result.targets.tolist() == SOURCE.labels.tolist()
    sums = tallied(model)
    ranked = result.logits.argsort(dim=1, descending=True)
    assert sums.count == 21
    assert sums.top1 == int((ranked[:, 0] == result.targets).sum())
    assert sums.top5 == int((ranked[:, :5] == result.targets[:, None]).sum())
    expected = functional.cross_entropy(result.logits, result.targets, reduction="sum").item()
    assert sums.loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 3), (4, 2), (8, 1)])
def test_ranks_count_every_image_once(model, ranks, rounds) -> None:
    alone = tallied(model)
    parts = [tallied(model, rank=rank, ranks=ranks, rounds=rounds) for rank in range(ranks)]
    assert sum(part.count for part in parts) == alone.count
    assert sum(part.top1 for part in parts) == alone.top1
    assert sum(part.top5 for part in parts) == alone.top5
    assert sum(part.loss for part in parts) == pytest.approx(alone.loss, rel=1e-5)


def test_every_rank_runs_equal_batches(model) -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.register_forward_hook(count)
    for rank in range(8):
        calls = 0
        tallied(model, rank=rank, ranks=8, rounds=2)
        assert calls == 2


def test_evaluation_stops_between_batches(model) -> None:
    stops = iter([False, False, True])
    with (
        make_evaluation_loader(SOURCE, preprocessing=PREPROCESSING, batch_size=4) as batches,
        pytest.raises(StopRequested),
    ):
        sum_metrics(model, batches, preprocessing=PREPROCESSING, device=CPU, rounds=6, stop=lambda: next(stops))


def test_top5_with_fewer_than_five_classes() -> None:
    few = Subset(SOURCE, [index for index in range(21) if SOURCE.labels[index] < 3])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with make_evaluation_loader(few, preprocessing=PREPROCESSING, batch_size=4) as batches:
        sums = sum_metrics(model, batches, preprocessing=PREPROCESSING, device=CPU, rounds=2)
    assert sums.top5 == sums.count


def test_unlabeled_images_are_rejected(model) -> None:
    empty = Subset(SOURCE, [])
    with pytest.raises(DataError, match="no labels"):
        compute_logits(model, empty, preprocessing=PREPROCESSING)


def test_progress_counts_images(model) -> None:
    observed: list[int] = []
    batches = iterate_logits(model, SOURCE, preprocessing=PREPROCESSING, batch_size=8, progress=observed.append)
    assert [len(batch.targets) for batch in batches] == [8, 8, 5]
    assert observed == [8, 8, 5]
    assert torch.is_grad_enabled()
