"""How often a model is right: every image counted once, whoever shares the work."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from vitkit.core.errors import DataError
from vitkit.core.stopping import Stopped
from vitkit.data.loader import evaluation_batches
from vitkit.data.source import Subset
from vitkit.data.sources.embedded import digits
from vitkit.data.transforms import Preprocessing
from vitkit.evaluate.accuracy import CPU, Tally, answers, tally

PREPROCESSING = Preprocessing(image_size=8, channels=1, mean=(0.5,), deviation=(0.5,))
SOURCE = Subset(digits().splits["test"], range(21))


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()


def tallied(model: nn.Module, *, rank: int = 0, ranks: int = 1, rounds: int = 6) -> Tally:
    with evaluation_batches(SOURCE, preprocessing=PREPROCESSING, batch_size=4, rank=rank, ranks=ranks) as batches:
        return tally(model, batches, preprocessing=PREPROCESSING, device=CPU, rounds=rounds)


def test_sums_are_those_of_all_answers(model) -> None:
    found = answers(model, SOURCE, preprocessing=PREPROCESSING, batch_size=5)
    assert found.labels.tolist() == SOURCE.labels.tolist()
    sums = tallied(model)
    ranked = found.logits.argsort(dim=1, descending=True)
    assert sums.count == 21
    assert sums.first == int((ranked[:, 0] == found.labels).sum())
    assert sums.five == int((ranked[:, :5] == found.labels[:, None]).sum())
    wanted = functional.cross_entropy(found.logits, found.labels, reduction="sum").item()
    assert sums.loss == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 3), (4, 2), (8, 1)])
def test_ranks_together_count_every_image_once(model, ranks, rounds) -> None:
    alone = tallied(model)
    parts = [tallied(model, rank=rank, ranks=ranks, rounds=rounds) for rank in range(ranks)]
    assert sum(part.count for part in parts) == alone.count
    assert sum(part.first for part in parts) == alone.first
    assert sum(part.five for part in parts) == alone.five
    assert sum(part.loss for part in parts) == pytest.approx(alone.loss, rel=1e-5)


def test_every_rank_calls_the_model_equally_often(model) -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.register_forward_hook(count)
    for rank in range(8):
        calls = 0
        tallied(model, rank=rank, ranks=8, rounds=2)
        assert calls == 2


def test_evaluation_can_be_stopped_between_batches(model) -> None:
    looks = iter([False, False, True])
    with (
        evaluation_batches(SOURCE, preprocessing=PREPROCESSING, batch_size=4) as batches,
        pytest.raises(Stopped),
    ):
        tally(model, batches, preprocessing=PREPROCESSING, device=CPU, rounds=6, stop=lambda: next(looks))


def test_fewer_than_five_classes_are_all_among_the_first_five() -> None:
    few = Subset(SOURCE, [index for index in range(21) if SOURCE.labels[index] < 3])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with evaluation_batches(few, preprocessing=PREPROCESSING, batch_size=4) as batches:
        sums = tally(model, batches, preprocessing=PREPROCESSING, device=CPU, rounds=2)
    assert sums.five == sums.count


def test_images_without_labels_cannot_judge(model) -> None:
    empty = Subset(SOURCE, [])
    with pytest.raises(DataError, match="no labels"):
        answers(model, empty, preprocessing=PREPROCESSING)


def test_progress_counts_images(model) -> None:
    seen: list[int] = []
    answers(model, SOURCE, preprocessing=PREPROCESSING, batch_size=8, progress=seen.append)
    assert seen == [8, 8, 5]
    assert torch.is_grad_enabled()
