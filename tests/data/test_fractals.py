"""Fractals: deterministic images, similar within a class and different between classes."""

import os
import pickle
import subprocess
import sys
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vitkit.core.errors import ConfigError
from vitkit.data.config import FractalConfig
from vitkit.data.dataset import ImageSource
from vitkit.data.fractals import FractalSource, make_fractals

SMALL = FractalConfig(num_classes=6, per_class=40, size=32)


def source(config: FractalConfig, split: str = "train") -> ImageSource:
    return make_fractals(config).splits[split]


def pictures(config: FractalConfig, split: str = "train") -> NDArray[np.float64]:
    drawn = source(config, split)
    return np.stack([np.asarray(drawn.read(index), dtype=np.float64) for index in range(len(drawn))])


def digest(drawn: ImageSource, indices: list[int]) -> str:
    return sha256(b"".join(np.asarray(drawn.read(index)).tobytes() for index in indices)).hexdigest()


def shrunk(images: NDArray[np.float64], side: int = 16) -> NDArray[np.float64]:
    """Means over cells, one row an image."""
    cell = images.shape[1] // side
    return images.reshape(-1, side, cell, side, cell).mean(axis=(2, 4)).reshape(-1, side * side)


@pytest.mark.parametrize("color", [False, True])
def test_images_do_not_depend_on_the_order(color: bool) -> None:
    config = FractalConfig(num_classes=6, per_class=40, size=32, color=color)
    forwards, backwards = source(config), source(config)
    order = list(range(0, 240, 17))
    there = {index: forwards.read(index) for index in order}
    back = {index: backwards.read(index) for index in reversed(order)}
    for index in order:
        np.testing.assert_array_equal(there[index], back[index])
        np.testing.assert_array_equal(there[index], forwards.read(index))


def test_another_process_generates_the_same_image() -> None:
    program = (
        "import sys; from hashlib import sha256; from vitkit.data.fractals import *\n"
        "drawn = make_fractals(FractalConfig(num_classes=6, per_class=40, size=32)).splits['train']\n"
        "print(sha256(b''.join(drawn.read(index).tobytes() for index in (200, 3, 77))).hexdigest())"
    )
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=alone)
    assert answer.stdout.strip() == digest(source(SMALL), [200, 3, 77])


def test_source_can_be_pickled() -> None:
    drawn = source(SMALL)
    copy = pickle.loads(pickle.dumps(drawn))
    assert digest(copy, [5, 100]) == digest(drawn, [5, 100])


def test_full_cache_does_not_change_images(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digest(source(SMALL), [0, 100, 239, 0])
    monkeypatch.setattr("vitkit.data.fractals.CACHED_CLASSES", 1)
    drawn = source(SMALL)
    assert isinstance(drawn, FractalSource)
    assert digest(drawn, [0, 100, 239, 0]) == expected
    assert len(drawn._systems) == 1


def test_more_classes_do_not_change_the_others() -> None:
    """So a small trial sees what the large run will see."""
    larger = source(FractalConfig(num_classes=50, per_class=100, size=32))
    smaller = source(SMALL)
    np.testing.assert_array_equal(larger.read(2 * 100 + 7), smaller.read(2 * 40 + 7))


def test_another_seed_gives_other_images() -> None:
    other = source(FractalConfig(num_classes=6, per_class=40, size=32, seed=1))
    assert not np.array_equal(other.read(0), source(SMALL).read(0))


def test_splits_share_classes_but_no_image() -> None:
    data = make_fractals(SMALL)
    train, val = data.splits["train"], data.splits["val"]
    assert (len(train), len(val)) == (240, 12)
    assert train.classes == val.classes == ("0000", "0001", "0002", "0003", "0004", "0005")
    assert data.path == data.layout == "fractals"
    names = [split.name(index) for split in (train, val) for index in range(len(split))]
    assert len(set(names)) == 252
    digests = [digest(split, [index]) for split in (train, val) for index in range(len(split))]
    assert len(set(digests)) == 252


def test_names_contain_label_and_number() -> None:
    drawn = source(FractalConfig(num_classes=50, per_class=100))
    assert drawn.name(42 * 100 + 17) == "0042/000017"
    assert drawn.name(-1) == "0049/000099"
    assert source(FractalConfig(num_classes=50, per_class=100), "val").name(7) == "0001/000102"
    assert [drawn.classes[label] for label in drawn.labels[::700]] == [
        drawn.name(index).partition("/")[0] for index in range(0, len(drawn), 700)
    ]


def test_every_class_has_a_validation_image() -> None:
    assert source(FractalConfig(num_classes=3, per_class=1), "val").labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("index", [240, -241])
def test_index_out_of_range_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        source(SMALL).read(index)


@pytest.mark.parametrize("size", [8, 33, 64, 224])
@pytest.mark.parametrize(("color", "shape"), [(False, ()), (True, (3,))])
def test_images_have_the_configured_size(size: int, color: bool, shape: tuple[int, ...]) -> None:
    picture = source(FractalConfig(num_classes=3, per_class=2, size=size, color=color)).read(4)
    assert isinstance(picture, np.ndarray)
    assert picture.dtype == np.uint8
    assert picture.shape == (size, size, *shape)
    assert picture.flags.c_contiguous


@pytest.mark.parametrize("seed", [0, 1])
def test_no_image_is_empty_or_full(seed: int) -> None:
    images = pictures(FractalConfig(num_classes=200, per_class=1, size=64, color=False, seed=seed))
    filled = (images > 0).mean(axis=(1, 2))
    assert filled.min() > 0.04  # a class fills 0.14 at least; perturbation may spread it thinner
    assert filled.max() < 0.8
    assert images.std(axis=(1, 2)).min() > 20
    assert (images == 255).mean(axis=(1, 2)).max() < 0.15  # not saturated


def test_fractal_contrasts_with_background() -> None:
    """The gray picture says where the fractal is; there the color picture differs from what is around."""
    gray = pictures(FractalConfig(num_classes=50, per_class=2, size=64, color=False))
    color = pictures(FractalConfig(num_classes=50, per_class=2, size=64)).mean(axis=-1)
    contrasts = [abs(image[mask].mean() - image[~mask].mean()) for image, mask in zip(color, gray > 100, strict=True)]
    assert min(contrasts) > 15


def test_class_has_the_same_formula_at_every_size() -> None:
    small, large = (
        shrunk(pictures(FractalConfig(num_classes=8, per_class=1, size=size, color=False))) for size in (64, 128)
    )
    for one, other in zip(small, large, strict=True):
        assert np.corrcoef(one, other)[0, 1] > 0.9


def test_linear_classifier_separates_classes() -> None:
    """Ridge regression on 16 × 16 means: instances must be alike, and classes different."""
    config = FractalConfig(num_classes=10, per_class=60, size=32, color=False)
    features = shrunk(pictures(config))
    labels = source(config).labels
    features = (features - features.mean(axis=0)) / 64
    trains = np.arange(len(labels)) % 2 == 0
    targets = 2 * np.eye(10)[labels] - 1
    kernel = features[trains] @ features[trains].T + 10 * np.eye(trains.sum())
    scores = features[~trains] @ features[trains].T @ np.linalg.solve(kernel, targets[trains])
    accuracy = (scores.argmax(axis=1) == labels[~trains]).mean()
    assert accuracy > 0.6  # chance is 0.1


def test_colors_do_not_depend_on_the_class() -> None:
    """The mean colors of a class's images spread as widely as those of all images."""
    images = pictures(FractalConfig(num_classes=10, per_class=40, size=16))
    means = images.mean(axis=(1, 2)).reshape(10, 40, 3)
    within, over_all = means.std(axis=1).mean(), means.reshape(-1, 3).std(axis=0).mean()
    assert within > 0.9 * over_all


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_classes": 1}, "fractals.num_classes is out of range"),
        ({"per_class": 0}, "fractals.per_class is out of range"),
        ({"size": 7}, "fractals.size is out of range"),
        ({"size": 100_000}, "fractals.size is out of range"),
        ({"seed": -1}, "fractals.seed is out of range"),
        ({"seed": 2**32}, "fractals.seed is out of range"),
        ({"num_classes": 1_000_000, "per_class": 1000}, "too many fractals"),
    ],
)
def test_invalid_config_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FractalConfig(**values)
