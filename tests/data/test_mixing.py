"""Target distributions, mixup and cutmix."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitkit.core.errors import ConfigError, DataError
from vitkit.data.augment import mix_batch, one_hot


def batch(size: int = 4, *, side: int = 12, num_classes: int = 5) -> tuple[Tensor, Tensor]:
    """Images that are each filled with their own number, and targets that say which."""
    images = torch.arange(1.0, size + 1)[:, None, None, None].expand(size, 3, side, side + 2).contiguous()
    return images, one_hot(torch.arange(size) % num_classes, num_classes=num_classes)


@given(num_classes=st.integers(1, 30), smoothing=st.floats(0, 0.99), seed=st.integers(0, 99))
def test_targets_are_distributions(num_classes: int, smoothing: float, seed: int) -> None:
    labels = torch.randint(0, num_classes, (6,), generator=torch.Generator().manual_seed(seed))
    targets = one_hot(labels, num_classes=num_classes, smoothing=smoothing)
    torch.testing.assert_close(targets.sum(1), torch.ones(6))
    assert torch.equal(targets.argmax(1), labels)


def test_smoothing_equals_cross_entropy() -> None:
    logits, labels = torch.randn(6, 9), torch.randint(0, 9, (6,))
    ours = torch.nn.functional.cross_entropy(logits, one_hot(labels, num_classes=9, smoothing=0.1))
    theirs = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("labels", [[0, -1], [5]])
def test_label_out_of_range_is_rejected(labels: list[int]) -> None:
    with pytest.raises(DataError, match="a label is out of range"):
        one_hot(torch.tensor(labels), num_classes=5)


def test_smoothing_must_be_a_fraction() -> None:
    with pytest.raises(ConfigError, match="label smoothing is not a fraction"):
        one_hot(torch.tensor([0]), num_classes=5, smoothing=1.0)


@given(
    mixup=st.sampled_from([0.0, 0.2, 0.8, 1.0]),
    cutmix=st.sampled_from([0.0, 0.5, 1.0]),
    size=st.integers(1, 7),
    seed=st.integers(0, 999),
)
def test_images_and_targets_are_mixed_equally(mixup: float, cutmix: float, size: int, seed: int) -> None:
    images, targets = batch(size, num_classes=7)
    mixed, shares = mix_batch(images, targets, mixup=mixup, cutmix=cutmix, rng=np.random.default_rng(seed))
    torch.testing.assert_close(shares.sum(1), torch.ones(size))
    assert (shares >= 0).all()
    # an image is filled with the number of its class + 1, so its mean tells of which images it was made
    expected = shares @ torch.arange(1.0, 8.0)
    torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), expected)


def test_mixup_pairs_with_the_reversed_batch() -> None:
    images, targets = batch(4, num_classes=4)
    _, shares = mix_batch(images, targets, mixup=1.0, rng=np.random.default_rng(0))
    assert torch.equal(shares > 0, torch.eye(4, dtype=torch.bool) | torch.eye(4, dtype=torch.bool).flip(0))
    assert torch.equal(shares.argmax(1), torch.arange(4))


def test_cutmix_inserts_a_box_of_the_partner() -> None:
    images, targets = batch(2, side=20)
    for seed in range(30):
        mixed, shares = mix_batch(images, targets, cutmix=1.0, rng=np.random.default_rng(seed))
        partner = mixed[0, 0] == 2.0
        assert torch.equal(partner | (mixed[0, 0] == 1.0), torch.ones_like(partner))
        assert partner.sum() == partner.any(0).sum() * partner.any(1).sum()
        torch.testing.assert_close(shares[0, 1], partner.float().mean())


def test_mixup_and_cutmix_alternate_randomly() -> None:
    images, targets = batch(2, side=20)
    rng = np.random.default_rng(0)
    mixtures = [mix_batch(images, targets, mixup=1.0, cutmix=1.0, rng=rng)[0] for _ in range(100)]
    blended = sum(not bool(((mixture == 1) | (mixture == 2)).all()) for mixture in mixtures)
    assert 30 <= blended <= 70  # of 100 even draws: four standard deviations either side


def test_mixup_weights_follow_the_beta_distribution() -> None:
    images, targets = batch(2, side=1)
    rng = np.random.default_rng(0)
    own = np.array([float(mix_batch(images, targets, mixup=0.2, rng=rng)[1][0, 0]) for _ in range(2000)])
    shares = np.random.default_rng(1).beta(0.2, 0.2, size=100_000)
    assert abs(own.mean() - np.maximum(shares, 1 - shares).mean()) < 0.02  # five standard errors of 2000 draws


def test_disabled_mixing_draws_no_random_number() -> None:
    images, targets = batch()
    rng = np.random.default_rng(3)
    mixed, shares = mix_batch(images, targets, rng=rng)
    assert mixed is images
    assert shares is targets
    assert rng.random() == np.random.default_rng(3).random()


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing_is_deterministic_and_pure(mixup: float, cutmix: float) -> None:
    images, targets = torch.randn(5, 3, 9, 9), one_hot(torch.arange(5), num_classes=5)
    before = images.clone()
    one, two = (mix_batch(images, targets, mixup=mixup, cutmix=cutmix, rng=np.random.default_rng(5)) for _ in range(2))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    assert torch.equal(images, before)
