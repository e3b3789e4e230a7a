"""Fractals: the same picture for the same class and number, alike within a class, different between classes."""

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
from vitkit.data.fractals import FractalConfig, FractalSource, fractal_data
from vitkit.data.source import Source

SMALL = FractalConfig(classes=6, per_class=40, size=32)


def source(config: FractalConfig, split: str = "train") -> Source:
    return fractal_data(config).splits[split]


def pictures(config: FractalConfig, split: str = "train") -> NDArray[np.float64]:
    drawn = source(config, split)
    return np.stack([np.asarray(drawn.content(index), dtype=np.float64) for index in range(len(drawn))])


def digest(drawn: Source, indices: list[int]) -> str:
    return sha256(b"".join(np.asarray(drawn.content(index)).tobytes() for index in indices)).hexdigest()


def shrunk(images: NDArray[np.float64], side: int = 16) -> NDArray[np.float64]:
    """Means over cells, one row an image."""
    cell = images.shape[1] // side
    return images.reshape(-1, side, cell, side, cell).mean(axis=(2, 4)).reshape(-1, side * side)


@pytest.mark.parametrize("colour", [False, True])
def test_the_same_index_gives_the_same_picture_in_any_order(colour: bool) -> None:
    config = FractalConfig(classes=6, per_class=40, size=32, colour=colour)
    forwards, backwards = source(config), source(config)
    order = list(range(0, 240, 17))
    there = {index: forwards.content(index) for index in order}
    back = {index: backwards.content(index) for index in reversed(order)}
    for index in order:
        np.testing.assert_array_equal(there[index], back[index])
        np.testing.assert_array_equal(there[index], forwards.content(index))


def test_another_process_draws_the_same_picture() -> None:
    program = (
        "import sys; from hashlib import sha256; from vitkit.data.fractals import *\n"
        "drawn = fractal_data(FractalConfig(classes=6, per_class=40, size=32)).splits['train']\n"
        "print(sha256(b''.join(drawn.content(index).tobytes() for index in (200, 3, 77))).hexdigest())"
    )
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=alone)
    assert answer.stdout.strip() == digest(source(SMALL), [200, 3, 77])


def test_a_source_travels_to_a_worker() -> None:
    drawn = source(SMALL)
    copy = pickle.loads(pickle.dumps(drawn))
    assert digest(copy, [5, 100]) == digest(drawn, [5, 100])


def test_a_full_cache_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digest(source(SMALL), [0, 100, 239, 0])
    monkeypatch.setattr("vitkit.data.fractals.CACHED_CLASSES", 1)
    drawn = source(SMALL)
    assert isinstance(drawn, FractalSource)
    assert digest(drawn, [0, 100, 239, 0]) == expected
    assert len(drawn._prepared) == 1


def test_more_classes_or_images_leave_the_others_as_they_are() -> None:
    """So a small trial sees what the large run will see."""
    larger = source(FractalConfig(classes=50, per_class=100, size=32))
    smaller = source(SMALL)
    np.testing.assert_array_equal(larger.content(2 * 100 + 7), smaller.content(2 * 40 + 7))


def test_another_seed_gives_other_pictures() -> None:
    other = source(FractalConfig(classes=6, per_class=40, size=32, seed=1))
    assert not np.array_equal(other.content(0), source(SMALL).content(0))


def test_splits_have_the_same_classes_and_no_picture_in_common() -> None:
    data = fractal_data(SMALL)
    train, val = data.splits["train"], data.splits["val"]
    assert (len(train), len(val)) == (240, 12)
    assert train.classes == val.classes == ("0000", "0001", "0002", "0003", "0004", "0005")
    assert data.place == data.kind == "fractals"
    names = [split.name(index) for split in (train, val) for index in range(len(split))]
    assert len(set(names)) == 252
    digests = [digest(split, [index]) for split in (train, val) for index in range(len(split))]
    assert len(set(digests)) == 252


def test_names_say_the_label_and_the_number() -> None:
    drawn = source(FractalConfig(classes=50, per_class=100))
    assert drawn.name(42 * 100 + 17) == "0042/000017"
    assert drawn.name(-1) == "0049/000099"
    assert source(FractalConfig(classes=50, per_class=100), "val").name(7) == "0001/000102"
    assert [drawn.classes[label] for label in drawn.labels[::700]] == [
        drawn.name(index).partition("/")[0] for index in range(0, len(drawn), 700)
    ]


def test_at_least_one_validation_image_a_class() -> None:
    assert source(FractalConfig(classes=3, per_class=1), "val").labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("index", [240, -241])
def test_an_index_outside_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        source(SMALL).content(index)


@pytest.mark.parametrize("size", [8, 33, 64, 224])
@pytest.mark.parametrize(("colour", "shape"), [(False, ()), (True, (3,))])
def test_pictures_are_bytes_of_the_size_asked_for(size: int, colour: bool, shape: tuple[int, ...]) -> None:
    picture = source(FractalConfig(classes=3, per_class=2, size=size, colour=colour)).content(4)
    assert isinstance(picture, np.ndarray)
    assert picture.dtype == np.uint8
    assert picture.shape == (size, size, *shape)
    assert picture.flags.c_contiguous


@pytest.mark.parametrize("seed", [0, 1])
def test_no_picture_is_empty_or_full(seed: int) -> None:
    images = pictures(FractalConfig(classes=200, per_class=1, size=64, colour=False, seed=seed))
    filled = (images > 0).mean(axis=(1, 2))
    assert filled.min() > 0.04  # a class fills 0.14 at least; perturbation may spread it thinner
    assert filled.max() < 0.8
    assert images.std(axis=(1, 2)).min() > 20
    assert (images == 255).mean(axis=(1, 2)).max() < 0.15  # not saturated


def test_the_fractal_stands_out_from_its_background() -> None:
    """The grey picture says where the fractal is; there the colour picture differs from what is around."""
    grey = pictures(FractalConfig(classes=50, per_class=2, size=64, colour=False))
    colour = pictures(FractalConfig(classes=50, per_class=2, size=64)).mean(axis=-1)
    contrasts = [abs(image[mask].mean() - image[~mask].mean()) for image, mask in zip(colour, grey > 100, strict=True)]
    assert min(contrasts) > 15


def test_a_class_is_the_same_formula_at_every_size() -> None:
    small, large = (
        shrunk(pictures(FractalConfig(classes=8, per_class=1, size=size, colour=False))) for size in (64, 128)
    )
    for one, other in zip(small, large, strict=True):
        assert np.corrcoef(one, other)[0, 1] > 0.9


def test_a_linear_classifier_on_pixels_tells_the_classes_apart() -> None:
    """Ridge regression on 16 × 16 means: instances must be alike, and classes different."""
    config = FractalConfig(classes=10, per_class=60, size=32, colour=False)
    features = shrunk(pictures(config))
    labels = source(config).labels
    features = (features - features.mean(axis=0)) / 64
    trains = np.arange(len(labels)) % 2 == 0
    targets = 2 * np.eye(10)[labels] - 1
    kernel = features[trains] @ features[trains].T + 10 * np.eye(trains.sum())
    scores = features[~trains] @ features[trains].T @ np.linalg.solve(kernel, targets[trains])
    accuracy = (scores.argmax(axis=1) == labels[~trains]).mean()
    assert accuracy > 0.6  # chance is 0.1


def test_colours_say_nothing_of_the_class() -> None:
    """The mean colours of a class's images spread as widely as those of all images."""
    images = pictures(FractalConfig(classes=10, per_class=40, size=16))
    means = images.mean(axis=(1, 2)).reshape(10, 40, 3)
    within, over_all = means.std(axis=1).mean(), means.reshape(-1, 3).std(axis=0).mean()
    assert within > 0.9 * over_all


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"classes": 1}, "fractals.classes is out of range"),
        ({"per_class": 0}, "fractals.per_class is out of range"),
        ({"size": 7}, "fractals.size is out of range"),
        ({"size": 100_000}, "fractals.size is out of range"),
        ({"seed": -1}, "fractals.seed is out of range"),
        ({"seed": 2**32}, "fractals.seed is out of range"),
        ({"classes": 1_000_000, "per_class": 1000}, "too many fractals"),
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FractalConfig(**values)
