"""Augmentation of single images: crops, colors, erasing and determinism."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from vitkit.core.config import apply_overrides, from_mapping
from vitkit.core.errors import ConfigError, InputError, UnknownNameError
from vitkit.data.augment import augment_image, inception_crop
from vitkit.data.config import AugmentConfig, augreg_config, check_augment
from vitkit.data.preprocessing import Preprocessing, get_preprocessing

STILL = AugmentConfig(crop="none", flip=False)
SMALL = Preprocessing(image_size=32)


def noise(height: int = 45, width: int = 60, channels: int = 3, seed: int = 0) -> Image.Image | NDArray[np.uint8]:
    array = np.random.default_rng(seed).integers(0, 256, size=(height, width, channels), dtype=np.uint8)
    if channels in (1, 3):
        return Image.fromarray(array[:, :, 0] if channels == 1 else array)
    return array


def example(
    picture: Image.Image | NDArray[np.uint8],
    augment: AugmentConfig,
    *,
    how: Preprocessing = SMALL,
    seed: int = 0,
) -> NDArray[np.uint8]:
    return augment_image(picture, preprocessing=how, augment=augment, rng=np.random.default_rng(seed))


EVERYTHING = AugmentConfig(randaugment_layers=2, randaugment_magnitude=15, color_jitter=0.4, erasing=0.5)


@pytest.mark.parametrize("crop", ["inception", "pad", "none"])
@pytest.mark.parametrize("origin", ["paper", "deit", "timm_augreg"])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_augmentation_is_deterministic(crop: str, origin: str, channels: int) -> None:
    colors = {} if channels == 5 else {"randaugment_layers": 2, "randaugment_magnitude": 15, "color_jitter": 0.4}
    augment = from_mapping(AugmentConfig, {"crop": crop, "erasing": 0.5, **colors})
    how = get_preprocessing(origin, image_size=(24, 32), channels=channels)
    picture = noise(channels=channels)
    for seed in range(5):
        one, two = (example(picture, augment, how=how, seed=seed) for _ in range(2))
        assert one.dtype == np.uint8
        assert one.shape == (channels, 24, 32)
        assert one.flags.c_contiguous
        assert one.flags.writeable
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(example(picture, augment, how=how, seed=1), example(picture, augment, how=how, seed=2))


def test_input_is_not_modified() -> None:
    picture = noise(32, 32)
    assert isinstance(picture, Image.Image)
    before = picture.tobytes()
    for seed in range(20):
        example(picture, EVERYTHING, seed=seed)
        example(picture, AugmentConfig(crop="none", flip=False, erasing=1.0), seed=seed)
    assert picture.tobytes() == before


@pytest.mark.parametrize("origin", ["deit", "timm_augreg", "bit"])
def test_no_augmentation_equals_evaluation(origin: str) -> None:
    how = get_preprocessing(origin, image_size=32)
    np.testing.assert_array_equal(example(noise(), STILL, how=how), np.rint(how.to_pixels(noise())))


def test_half_of_the_images_are_flipped() -> None:
    picture = noise(32, 32)
    straight = np.moveaxis(np.asarray(picture), 2, 0)
    flips = 0
    for seed in range(200):
        pixels = example(picture, AugmentConfig(crop="none"), seed=seed)
        flips += np.array_equal(pixels, straight[:, :, ::-1])
        assert np.array_equal(pixels, straight) or np.array_equal(pixels, straight[:, :, ::-1])
    assert 70 <= flips <= 130  # of 200 even draws: four standard deviations either side


# Crops


@given(
    sides=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    least=st.floats(0.01, 1.0),
    span=st.floats(0.0, 1.0),
    seed=st.integers(0, 999),
)
def test_inception_crop_keeps_area_and_aspect(sides: tuple[int, int], least: float, span: float, seed: int) -> None:
    area = (least, least + span * (1 - least))
    box = inception_crop(sides, area=area, aspect=(3 / 4, 4 / 3), rng=np.random.default_rng(seed))
    left, top, right, bottom = box
    if box == (0, 0, sides[1], sides[0]):
        return
    assert 0 <= left < right <= sides[1]
    assert 0 <= top < bottom <= sides[0]
    height, width = bottom - top, right - left
    assert area[0] - 1e-9 <= height * width / math.prod(sides) <= area[1] + 1e-9
    assert 3 / 4 * height - 0.5 <= width <= 4 / 3 * height + 0.5  # the width is rounded


def test_inception_crops_are_uniform() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array(
        [inception_crop((300, 400), area=(0.05, 1.0), aspect=(3 / 4, 4 / 3), rng=rng) for _ in range(4000)]
    )
    left, top, right, bottom = boxes.T
    aspects, areas = (right - left) / (bottom - top), (right - left) * (bottom - top) / 120_000
    # of even aspects in 3/4…4/3: mean 1.04, standard error 0.003
    assert abs(aspects.mean() - (3 / 4 + 4 / 3) / 2) < 0.02
    assert areas.min() < 0.06
    assert areas.max() > 0.9
    assert abs((left + right).mean() / 2 - 200) < 5
    assert abs((top + bottom).mean() / 2 - 150) < 5


@pytest.mark.parametrize("sides", [(2, 3000), (3000, 2)])
def test_inception_crop_of_a_strip_is_the_whole_image(sides: tuple[int, int]) -> None:
    box = inception_crop(sides, area=(0.05, 1.0), aspect=(3 / 4, 4 / 3), rng=np.random.default_rng(0))
    assert box == (0, 0, sides[1], sides[0])
    assert example(noise(*sides), AugmentConfig()).shape == (3, 32, 32)


@pytest.mark.parametrize("sides", [(1, 1), (1, 2), (2, 1), (3, 3)])
def test_tiny_image_is_enlarged(sides: tuple[int, int]) -> None:
    for seed in range(10):
        assert example(noise(*sides), AugmentConfig(), seed=seed).shape == (3, 32, 32)


@pytest.mark.parametrize("channels", [3, 4])
def test_pad_crop_shifts_over_black(channels: int) -> None:
    picture = noise(32, 32, channels)
    how = Preprocessing(image_size=32, channels=channels, mean=(0.5,), std=(0.5,))
    padded = np.pad(np.moveaxis(np.asarray(picture), 2, 0), ((0, 0), (4, 4), (4, 4)))
    windows = {padded[:, y : y + 32, x : x + 32].tobytes() for y in range(9) for x in range(9)}
    augment = AugmentConfig(crop="pad", flip=False)
    found = {example(picture, augment, how=how, seed=seed).tobytes() for seed in range(1000)}
    assert found == windows  # a window is missed by 1000 draws of 81 with a probability of 3 in 10 000


def test_paper_crop_is_not_antialiased() -> None:
    # A chequerboard of single pixels stays black and white where it is sampled, and turns gray where it is averaged.
    board = Image.fromarray((np.indices((320, 320)).sum(axis=0) % 2 * 255).astype(np.uint8)).convert("RGB")
    augment = AugmentConfig(crop_area=(1.0, 1.0), crop_aspect=(1.0, 1.0), flip=False)
    plain = example(board, augment, how=get_preprocessing("paper", image_size=64))
    smooth = example(board, augment, how=get_preprocessing("torchvision", image_size=64))
    assert plain.std() > 60
    assert smooth.std() < 20


# Colors and erasing


def test_color_jitter_keeps_gray_images_gray() -> None:
    gray = Image.new("RGB", (32, 32), (100, 100, 100))
    levels = {tuple(np.unique(example(gray, AugmentConfig(color_jitter=0.4), seed=seed))) for seed in range(50)}
    assert all(len(level) == 1 and 55 <= level[0] <= 145 for level in levels)
    assert len(levels) > 10


def test_erasing_inserts_a_box_of_noise() -> None:
    black = Image.new("RGB", (64, 64))
    augment = AugmentConfig(crop="none", flip=False, erasing=1.0)
    for seed in range(50):
        erased = example(black, augment, how=Preprocessing(image_size=64), seed=seed).any(axis=0)
        rows, columns = np.flatnonzero(erased.any(axis=1)), np.flatnonzero(erased.any(axis=0))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert 0.015 <= height * width / 64**2 <= 0.35  # sides are rounded
        assert erased.sum() == height * width or erased.sum() > 0.99 * height * width  # noise has a few zeros


def test_erasing_has_its_probability() -> None:
    black = Image.new("L", (16, 16))
    how = Preprocessing(image_size=16, channels=1, mean=(0.5,), std=(0.5,))
    augment = AugmentConfig(crop="none", erasing=0.25)
    erased = sum(example(black, augment, how=how, seed=seed).any() for seed in range(400))
    assert 65 <= erased <= 135  # of 400 draws at a quarter: four standard deviations either side


@pytest.mark.parametrize("name", ["color_jitter=0.4", "randaugment_layers=2"])
def test_color_operations_reject_other_channels(name: str) -> None:
    augment = apply_overrides(AugmentConfig(), [name])
    for channels in (1, 3):
        check_augment(augment, channels=channels)
    with pytest.raises(ConfigError, match="gray or RGB"):
        check_augment(augment, channels=4)
    how = Preprocessing(image_size=32, channels=4, mean=(0.5,), std=(0.5,))
    with pytest.raises(ConfigError, match="gray or RGB"):
        example(noise(channels=4), augment, how=how)


def test_other_operations_accept_any_channels() -> None:
    check_augment(AugmentConfig(erasing=0.5, mixup=0.2, cutmix=1.0, crop="pad"), channels=12)


def test_wrong_number_of_channels_is_rejected() -> None:
    with pytest.raises(InputError, match="expected 3, got 1"):
        example(Image.new("L", (8, 8)), AugmentConfig())


# Configuration


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"crop_area": [0.0, 1.0]}, "crop_area"),
        ({"crop_area": [0.5, 0.4]}, "crop_area"),
        ({"crop_area": [0.5, 1.1]}, "crop_area"),
        ({"crop_aspect": [0.0, 1.0]}, "crop_aspect"),
        ({"crop_aspect": [2.0, 1.0]}, "crop_aspect"),
        ({"pad": -1}, "pad cannot be negative"),
        ({"randaugment_layers": -1}, "randaugment_layers cannot be negative"),
        ({"randaugment_magnitude": 31}, "magnitude"),
        ({"color_jitter": -0.1}, "color_jitter cannot be negative"),
        ({"erasing": 1.5}, "erasing is not a probability"),
        ({"mixup": -0.2}, "mixup cannot be negative"),
        ({"cutmix": math.nan}, "cutmix must be finite"),
    ],
)
def test_invalid_augmentation_is_rejected(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(AugmentConfig, wrong)


@pytest.mark.parametrize(
    ("level", "mixup", "randaugment"),
    [
        ("none", 0.0, (0, 0)),
        ("light1", 0.0, (2, 0)),
        ("light2", 0.2, (2, 10)),
        ("medium1", 0.2, (2, 15)),
        ("medium2", 0.5, (2, 15)),
        ("strong1", 0.5, (2, 20)),
        ("strong2", 0.8, (2, 20)),
    ],
)
def test_augreg_levels_equal_the_paper(level: str, mixup: float, randaugment: tuple[int, int]) -> None:
    found = augreg_config(level)
    assert (found.mixup, (found.randaugment_layers, found.randaugment_magnitude)) == (mixup, randaugment)
    assert (found.crop, found.crop_area, found.flip) == ("inception", (0.05, 1.0), True)


def test_unknown_level_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        augreg_config("medium3")
    assert caught.value.hint in ("did you mean medium1?", "did you mean medium2?")
