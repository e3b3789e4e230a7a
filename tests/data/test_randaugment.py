"""RandAugment's operations, their scale and their determinism."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitkit.core.errors import ConfigError
from vitkit.data.augment import OPERATIONS, randaugment

NEUTRAL = {
    "Rotate": [0],
    "ShearX": [0],
    "ShearY": [0],
    "TranslateX": [0],
    "TranslateY": [0],
    "Cutout": [0],
    "SolarizeAdd": [0],
    "Color": [5],
    "Contrast": [5],
    "Brightness": [5],
    "Sharpness": [5],
    "Posterize": [20, 25, 30],
    "Solarize": [10, 20, 30],
}


def noise(mode: str, *, size: tuple[int, int] = (40, 30), seed: int = 0) -> Image.Image:
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8))


def applied(name: str, picture: Image.Image, magnitude: int, seed: int = 0) -> np.ndarray:
    return np.asarray(OPERATIONS[name](picture, magnitude, np.random.default_rng(seed))).astype(int)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(("name", "magnitude"), [(name, number) for name in NEUTRAL for number in NEUTRAL[name]])
def test_operation_at_its_neutral_magnitude_is_the_identity(name: str, magnitude: int, mode: str) -> None:
    picture = noise(mode)
    for seed in range(4):
        np.testing.assert_array_equal(applied(name, picture, magnitude, seed), np.asarray(picture))


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"AutoContrast"}))
@pytest.mark.parametrize("magnitude", [2, 8])
def test_operation_changes_the_image(name: str, magnitude: int) -> None:
    picture = noise("RGB", size=(60, 80))
    assert not np.array_equal(applied(name, picture, magnitude), np.asarray(picture))


def test_operations_are_googles_sixteen() -> None:
    assert len(OPERATIONS) == 16


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("name", sorted(OPERATIONS))
@given(magnitude=st.integers(0, 30), size=st.tuples(st.integers(1, 20), st.integers(1, 20)), seed=st.integers(0, 99))
def test_operation_keeps_mode_size_and_input(
    name: str, mode: str, magnitude: int, size: tuple[int, int], seed: int
) -> None:
    picture = noise(mode, size=size, seed=seed)
    before = picture.tobytes()
    result = OPERATIONS[name](picture, magnitude, np.random.default_rng(seed))
    assert (result.mode, result.size) == (mode, size)
    assert picture.tobytes() == before


def test_invert_twice_is_the_identity() -> None:
    picture = noise("RGB")
    twice = Image.fromarray(applied("Invert", picture, 0).astype(np.uint8))
    np.testing.assert_array_equal(applied("Invert", twice, 0), np.asarray(picture))


def test_solarize_inverts_above_its_threshold() -> None:
    picture = noise("RGB")
    levels = np.asarray(picture).astype(int)
    np.testing.assert_array_equal(applied("Solarize", picture, 0), 255 - levels)
    np.testing.assert_array_equal(applied("Solarize", picture, 5), np.where(levels < 128, levels, 255 - levels))


@pytest.mark.parametrize(("magnitude", "bits"), [(0, 1), (2, 1), (5, 2), (10, 4), (15, 6), (19, 7)])
def test_posterize_keeps_googles_bits(magnitude: int, bits: int) -> None:
    picture = noise("RGB")
    shift = 8 - bits
    np.testing.assert_array_equal(applied("Posterize", picture, magnitude), np.asarray(picture) >> shift << shift)


def test_solarize_add_brightens_the_dark_half() -> None:
    picture = noise("L")
    levels = np.asarray(picture).astype(int)
    expected = np.where(levels < 128, np.minimum(levels + 165, 255), levels)
    np.testing.assert_array_equal(applied("SolarizeAdd", picture, 15), expected)


@pytest.mark.parametrize("name", ["TranslateX", "TranslateY"])
def test_translation_scales_and_fills_gray(name: str) -> None:
    picture = noise("RGB", size=(224, 224))
    levels = np.asarray(picture).astype(int)
    axis = 1 if name == "TranslateX" else 0
    moved = np.moveaxis(applied(name, picture, 1), axis, 0)
    levels = np.moveaxis(levels, axis, 0)
    forwards = np.concatenate([np.full_like(levels[:10], 128), levels[:-10]])
    backwards = np.concatenate([levels[10:], np.full_like(levels[:10], 128)])
    assert np.array_equal(moved, forwards) or np.array_equal(moved, backwards)


def test_both_directions_are_drawn() -> None:
    picture = noise("RGB")
    for name in ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"):
        assert len({applied(name, picture, 6, seed).tobytes() for seed in range(20)}) == 2


def test_cutout_is_a_gray_square() -> None:
    black = Image.new("RGB", (224, 224))
    for seed in range(20):
        gray = (applied("Cutout", black, 10, seed) == 128).all(axis=2)
        rows, columns = gray.any(axis=1), gray.any(axis=0)
        assert gray.sum() == rows.sum() * columns.sum()  # a box
        assert 40 <= rows.sum() <= 80
        assert 40 <= columns.sum() <= 80


def test_randaugment_is_deterministic() -> None:
    picture = noise("RGB")
    one, two = (
        [randaugment(picture, layers=2, magnitude=15, rng=rng).tobytes() for _ in range(30)]
        for rng in (np.random.default_rng(7), np.random.default_rng(7))
    )
    assert one == two
    assert len(set(one)) > 10


def test_no_layers_are_the_identity() -> None:
    picture = noise("L")
    assert randaugment(picture, layers=0, magnitude=15, rng=np.random.default_rng(0)) is picture


@pytest.mark.parametrize("magnitude", [-1, 31])
def test_magnitude_out_of_range_is_rejected(magnitude: int) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        randaugment(noise("L"), layers=1, magnitude=magnitude, rng=np.random.default_rng(0))
