"""Preprocessing for evaluation: pixels, normalization and the stored configuration."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from vitkit.core.config import apply_overrides, from_mapping, to_mapping
from vitkit.core.errors import ConfigError, InputError, UnknownNameError, WeightsError
from vitkit.data.image_processors import find_unknown_keys
from vitkit.data.preprocessing import (
    ORIGINS,
    Preprocessing,
    crop,
    crop_resize,
    flip_horizontal,
    get_preprocessing,
    resize_area,
    resize_bilinear,
    to_chw,
)


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size=(height, width, channels), dtype=np.uint8)


def as_picture(array: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def bilinear(plane: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.float64]:
    """Bilinear without antialias from its definition: half-pixel centers, neighbors clamped to the edge."""

    def weights(source: int, target: int) -> NDArray[np.float64]:
        matrix = np.zeros((target, source))
        for place in range(target):
            center = (place + 0.5) * source / target - 0.5
            lower = math.floor(center)
            for neighbor, weight in ((lower, 1 - (center - lower)), (lower + 1, center - lower)):
                matrix[place, min(max(neighbor, 0), source - 1)] += weight
        return matrix

    down, across = weights(plane.shape[0], size[0]), weights(plane.shape[1], size[1])
    return down @ plane.astype(np.float64) @ across.T


@given(height=st.integers(1, 70), width=st.integers(1, 70), target=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_paper_pixels_equal_bilinear_reference(height: int, width: int, target: tuple[int, int]) -> None:
    picture = noise(height, width)
    pixels = Preprocessing(image_size=target, antialias=False).to_pixels(as_picture(picture))
    assert pixels.dtype == np.float32
    expected = np.stack([bilinear(picture[:, :, channel], target) for channel in range(3)])
    # float32 places the neighbors within 70 · 2⁻²⁴ pixels, a pixel differs from its neighbor by up to 255
    np.testing.assert_allclose(pixels, expected, atol=5e-3, rtol=0)


def test_only_antialiased_pixels_are_rounded() -> None:
    picture = as_picture(noise(37, 53))
    exact = ORIGINS["paper"].to_pixels(picture)
    assert not np.array_equal(exact, np.rint(exact))
    assert Preprocessing().to_pixels(picture).dtype == np.uint8


def test_squash_crop_takes_the_center() -> None:
    picture = noise(50, 61)
    pixels = Preprocessing(image_size=28, resize="squash_crop", antialias=False).to_pixels(as_picture(picture))
    np.testing.assert_array_equal(pixels, resize_bilinear(to_chw(picture), (32, 32))[:, 2:30, 2:30])


@pytest.mark.parametrize("resize", ["squash", "crop", "squash_crop"])
@pytest.mark.parametrize("resampling", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_channels_are_resized_independently(resize: str, resampling: str) -> None:
    array = noise(45, 60, channels=5)
    config = from_mapping(
        Preprocessing, {"image_size": 32, "resize": resize, "interpolation": resampling, "mean": [0.5], "std": [0.5]}
    )
    together = replace(config, channels=5).to_pixels(array)
    alone = [replace(config, channels=1).to_pixels(as_picture(array[:, :, [channel]])) for channel in range(5)]
    np.testing.assert_array_equal(together, np.concatenate(alone))


@given(height=st.integers(1, 90), width=st.integers(1, 90), size=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_pixels_always_have_the_image_size(height: int, width: int, size: tuple[int, int]) -> None:
    picture = as_picture(noise(height, width))
    for origin in ("paper", "timm_augreg", "torchvision", "huggingface_dinov2"):
        assert get_preprocessing(origin, image_size=size).to_pixels(picture).shape == (3, *size)


@pytest.mark.parametrize("sides", [(1, 60_000), (60_000, 1), (3, 3000), (2000, 2)])
def test_strip_is_cropped_in_bounded_memory(sides: tuple[int, int]) -> None:
    ramp = np.broadcast_to(np.linspace(0, 255, max(sides)).astype(np.uint8).reshape(-1, 1, 1), (max(sides), 1, 3))
    strip = np.ascontiguousarray(np.broadcast_to(ramp if sides[0] > sides[1] else ramp.transpose(1, 0, 2), (*sides, 3)))
    pixels = ORIGINS["torchvision"].to_pixels(as_picture(strip))
    assert pixels.shape == (3, 224, 224)
    assert abs(int(np.median(pixels)) - 127) <= 1


@pytest.mark.parametrize("sides", [(7, 500), (500, 9), (40, 70)])
def test_strip_equals_resize_then_crop(sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    strip = as_picture(noise(*sides))
    config = ORIGINS["torchvision"]
    whole = config.to_pixels(strip).astype(int)
    monkeypatch.setattr("vitkit.data.preprocessing._MAX_PIXELS_BEFORE_CROP", 0)
    assert np.abs(config.to_pixels(strip) - whole).max() <= 1  # the crop begins at a rounded place


def test_image_of_the_right_size_is_unchanged() -> None:
    array = noise(32, 32)
    pixels = Preprocessing(image_size=32).to_pixels(as_picture(array))
    np.testing.assert_array_equal(pixels, array.transpose(2, 0, 1))
    pixels[:] = 0  # and the pixels are nobody else's memory
    assert array.any()


@pytest.mark.parametrize("side", [20, 100])
@pytest.mark.parametrize("channels", [1, 2, 3, 7])
def test_chw_pixels_are_writable(side: int, channels: int) -> None:
    array = noise(side, side + 1, channels)
    picture = as_picture(array) if channels in (1, 3) else array
    pixels = to_chw(picture)
    np.testing.assert_array_equal(pixels, array.transpose(2, 0, 1))
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert not np.shares_memory(pixels, array)


@given(box=st.tuples(*[st.integers(-12, 12)] * 2), size=st.integers(1, 12))
def test_array_crop_equals_pillow(box: tuple[int, int], size: int) -> None:
    array = noise(7, 9)
    corners = (*box, box[0] + size, box[1] + size)
    np.testing.assert_array_equal(crop(array, box=corners), np.asarray(crop(as_picture(array), box=corners)))


def test_array_flip_equals_pillow() -> None:
    array = noise(7, 9)
    np.testing.assert_array_equal(flip_horizontal(array), np.asarray(flip_horizontal(as_picture(array))))


def test_reducing_gap_affects_only_large_images() -> None:
    picture = as_picture(noise(890, 890))
    exact, quick = (
        crop_resize(picture, box=(0, 0, 890, 890), size=(224, 224), interpolation="bilinear", reducing_gap=gap)
        for gap in (None, 2.0)
    )
    np.testing.assert_array_equal(exact, quick)


# Normalization


def test_paper_normalizes_to_plus_minus_one() -> None:
    levels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256)
    expected = (levels.float() - 127.5) / 127.5
    assert torch.equal(ORIGINS["paper"].normalize(levels), expected)
    assert torch.equal(ORIGINS["paper"].normalize(levels.float()), expected)


def test_normalize_equals_float64_reference() -> None:
    batch = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8)
    config = ORIGINS["deit"]
    mean, deviation = (
        torch.tensor(numbers, dtype=torch.float64)[:, None, None] for numbers in (config.mean, config.std)
    )
    expected = (batch.double() / 255 - mean) / deviation
    # three roundings of float32, of numbers up to 2.7
    torch.testing.assert_close(config.normalize(batch).double(), expected, atol=1e-6, rtol=0)


def test_normalize_does_not_modify_its_input() -> None:
    batch = torch.full((1, 3, 2, 2), 7.0)
    Preprocessing().normalize(batch)
    assert torch.equal(batch, torch.full((1, 3, 2, 2), 7.0))


def test_single_mean_applies_to_all_channels() -> None:
    batch = torch.randint(0, 256, (2, 5, 3, 3), dtype=torch.uint8)
    one = Preprocessing(channels=5, mean=(0.3,), std=(0.2,))
    each = Preprocessing(channels=5, mean=(0.3,) * 5, std=(0.2,) * 5)
    assert torch.equal(one.normalize(batch), each.normalize(batch))


def test_other_channels_are_rejected() -> None:
    with pytest.raises(InputError, match="expected 3, got 1"):
        Preprocessing().to_pixels(Image.new("L", (8, 8)))
    with pytest.raises(InputError, match="expected 3, got 4"):
        Preprocessing().to_pixels(noise(8, 8, channels=4))
    with pytest.raises(InputError, match="expected 3, got 2"):
        Preprocessing().normalize(torch.zeros(1, 2, 4, 4))


# Configuration


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image_size": 0}, "image_size must be positive"),
        ({"image_size": [224, 0]}, "image_size must be positive"),
        ({"channels": 0}, "channels must be positive"),
        ({"channels": 4}, "mean must have one number per channel"),
        ({"std": [0.5, 0.5]}, "std must have one number per channel"),
        ({"std": [0.5, 0.0, 0.5]}, "std must be positive"),
        ({"mean": [0.5, math.inf, 0.5]}, "mean must be finite"),
        ({"crop_fraction": 0.0}, "crop_fraction is not a fraction"),
        ({"crop_fraction": 1.1}, "crop_fraction is not a fraction"),
        ({"antialias": False, "interpolation": "bicubic"}, "only for the paper's bilinear squash"),
        ({"antialias": False, "resize": "crop"}, "only for the paper's bilinear squash"),
    ],
)
def test_invalid_preprocessing_is_rejected(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(Preprocessing, wrong)


def test_preprocessing_accepts_overrides() -> None:
    changed = apply_overrides(Preprocessing(), ["image_size=224x320", "mean=[0.1]", "resize=crop"])
    assert changed == Preprocessing(image_size=(224, 320), mean=(0.1,), resize="crop")
    assert from_mapping(Preprocessing, to_mapping(changed)) == changed


@pytest.mark.parametrize("origin", sorted(ORIGINS))
def test_origin_adapts_size_and_channels(origin: str) -> None:
    assert get_preprocessing(origin, image_size=224) == ORIGINS[origin]
    for channels in (1, 2, 3, 6):
        config = get_preprocessing(origin, image_size=48, channels=channels)
        picture = as_picture(noise(50, 60, channels)) if channels in (1, 3) else noise(50, 60, channels)
        batch = torch.from_numpy(config.to_pixels(picture))[None]
        assert config.normalize(batch).shape == (1, channels, 48, 48)


RESIZED = [
    ("timm_augreg", 248),
    ("deit", 256),
    ("paper", 224),
    ("bit", 224),
    ("dinov3", 224),
    ("huggingface_deit", 256),
]


@pytest.mark.parametrize(("origin", "resized"), RESIZED)
def test_origin_resizes_as_published(origin: str, resized: int) -> None:
    assert ORIGINS[origin].resize_size == (resized, resized)


def covered(plane: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.float64]:
    """The mean over the area of each new pixel, from its definition: every old pixel by how much of it lies inside."""

    def weights(source: int, target: int) -> NDArray[np.float64]:
        share = np.zeros((target, source))
        for place in range(target):
            start, end = place * source / target, (place + 1) * source / target
            for pixel in range(source):
                share[place, pixel] = max(0.0, min(end, pixel + 1) - max(start, pixel)) * target / source
        return share

    return weights(plane.shape[0], size[0]) @ plane.astype(np.float64) @ weights(plane.shape[1], size[1]).T


@given(height=st.integers(1, 60), width=st.integers(1, 60), target=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_area_equals_mean_of_covered_pixels(height: int, width: int, target: tuple[int, int]) -> None:
    picture = noise(height, width)
    pixels = np.asarray(resize_area(as_picture(picture), target), dtype=np.float64)
    expected = np.stack([covered(picture[:, :, channel], target) for channel in range(3)], axis=2)
    # Cut to whole numbers: less than one below, and not above but by what rounding may have taken.
    assert (pixels <= expected + 1e-3).all()
    assert (pixels > expected - 1).all()
    np.testing.assert_array_equal(resize_area(picture, target), pixels)


def test_area_keeps_uniform_images_uniform() -> None:
    for value in (1, 254, 255):
        picture = Image.new("L", (341, 257), value)
        assert np.asarray(resize_area(picture, (101, 99))).min() == value


def test_big_vision_resizes_and_crops_center() -> None:
    picture = noise(300, 403)
    how = get_preprocessing("big_vision", image_size=224)
    resized = np.asarray(resize_area(as_picture(picture), (256, 344)))  # 256 · 403 / 300 is 343.9
    np.testing.assert_array_equal(how.to_pixels(as_picture(picture)), np.moveaxis(resized[16:240, 60:284], 2, 0))
    assert get_preprocessing("big_vision", image_size=384).resize_size == (
        448,
        448,
    )  # as its configuration for transfers


@pytest.mark.parametrize(("origin", "size"), [("timm_augreg", 384), ("mae", 448), ("torchvision", 384)])
def test_large_sizes_are_not_cropped(origin: str, size: int) -> None:
    assert get_preprocessing(origin, image_size=size).resize_size == (size, size)


def test_odd_borders_round_as_configured() -> None:
    picture = noise(1, 4)  # a border of 3 beside one pixel: 1.5 is 2 or 1
    even = Preprocessing(image_size=1, resize="crop", crop_fraction=1.0)
    for config, column in ((even, 2), (replace(even, crop_rounding="down"), 1)):
        np.testing.assert_array_equal(config.to_pixels(as_picture(picture))[:, 0, 0], picture[0, column])


def test_unknown_origin_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        get_preprocessing("dinov4", image_size=224)
    assert caught.value.hint == "did you mean dinov3?"


# Hugging Face's form


@pytest.mark.parametrize("origin", sorted(ORIGINS))
@pytest.mark.parametrize("size", [224, (160, 320)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_hub_config_round_trips_through_json(origin: str, size: int | tuple[int, int], channels: int) -> None:
    config = get_preprocessing(origin, image_size=size, channels=channels)
    assert Preprocessing.from_hub(json.loads(json.dumps(config.to_hub()))) == config


SQUARE = Preprocessing(image_size=(224, 224))
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
NULLS: dict[str, object] = dict.fromkeys(("crop_size", "do_center_crop", "do_convert_rgb", "device", "pad_size"))
# The files of the repositories on the hub, in the words of the version of transformers that wrote them.
PUBLISHED: dict[str, tuple[dict[str, object], str]] = {
    "google/vit-base-patch16-224": (
        {"do_normalize": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": 224},
        "huggingface",
    ),
    "a ViT of today": (
        {
            "image_processor_type": "ViTImageProcessorFast",
            "do_rescale": True,
            "rescale_factor": 0.00392156862745098,
            "resample": 2,
            "size": {"height": 224, "width": 224},
            **NULLS,
        },
        "huggingface",
    ),
    "facebook/deit-base-distilled-patch16-224": (
        {
            "crop_size": 224,
            "do_center_crop": True,
            "do_normalize": True,
            "do_resize": True,
            "feature_extractor_type": "DeiTFeatureExtractor",
            "resample": 3,
            "size": 256,
            **IMAGENET,
        },
        "huggingface_deit",
    ),
    "facebook/vit-mae-base": (
        {"do_resize": True, "feature_extractor_type": "ViTFeatureExtractor", "resample": 2, "size": 224, **IMAGENET},
        "huggingface_mae",
    ),
    "facebook/dinov2-small": (
        {
            "crop_size": {"height": 224, "width": 224},
            "do_center_crop": True,
            "do_convert_rgb": True,
            "image_processor_type": "BitImageProcessor",
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
            "size": {"shortest_edge": 256},
            **IMAGENET,
        },
        "huggingface_dinov2",
    ),
    "facebook/dinov3-vits16-pretrain-lvd1689m": (
        {
            "default_to_square": True,
            "data_format": "channels_first",
            "image_processor_type": "DINOv3ViTImageProcessorFast",
            "resample": 2,
            "size": {"height": 224, "width": 224},
            **IMAGENET,
            **NULLS,
        },
        "dinov3",
    ),
}


@pytest.mark.parametrize(("data", "origin"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_hub_config_equals_its_origin(data: dict[str, object], origin: str) -> None:
    assert Preprocessing.from_hub(data) == get_preprocessing(origin, image_size=(224, 224))
    assert find_unknown_keys(data) == ()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"size": 224, "resample": 2}, Preprocessing(image_size=(224, 224))),
        ({"size": [160, 224]}, Preprocessing(image_size=(160, 224))),
        (
            {"size": {"height": 384, "width": 384}, "resample": 3},
            Preprocessing(image_size=(384, 384), interpolation="bicubic"),
        ),
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "resample": 3},
            Preprocessing(image_size=(224, 224), resize="crop", interpolation="bicubic", crop_rounding="down"),
        ),
        (
            {"size": 256, "crop_size": 224, "resample": 2, "image_processor_type": "DeiTImageProcessor"},
            Preprocessing(image_size=(224, 224), resize="squash_crop", crop_rounding="down"),
        ),
        (
            {"size": 256, "crop_size": 224, "do_center_crop": False, "image_processor_type": "DeiTImageProcessor"},
            Preprocessing(image_size=(256, 256), interpolation="bicubic"),
        ),
        (
            {"size": 256, "crop_size": 224, "resample": 2, "image_processor_type": "ViTImageProcessor"},
            Preprocessing(image_size=(256, 256)),
        ),
        (
            {"size": {"shortest_edge": 224}, "crop_pct": 0.9},
            Preprocessing(resize="crop", crop_fraction=0.9, crop_rounding="down"),
        ),
        (
            {"size": 384, "crop_pct": 0.9, "image_processor_type": "ConvNextImageProcessor"},
            Preprocessing(image_size=(384, 384), interpolation="bicubic"),
        ),
        (
            {"size": 224, "do_normalize": False},
            Preprocessing(image_size=(224, 224), mean=(0.0,) * 3, std=(1.0,) * 3),
        ),
        ({"size": 224, "image_mean": 0.5, "image_std": [0.5]}, replace(SQUARE, mean=(0.5,), std=(0.5,))),
        (
            {"size": 224, "rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
            replace(SQUARE, mean=(0.5,) * 3, std=(0.5,) * 3),
        ),
        (
            {"size": 224, "do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3},
            replace(SQUARE, mean=(0.5,) * 3, std=(0.5,) * 3),
        ),
        (
            {"size": 224, "image_mean": [0.5], "image_std": [0.25]},
            replace(SQUARE, mean=(0.5,), std=(0.25,)),
        ),
    ],
)
def test_transformers_config_is_parsed(data: dict[str, object], expected: Preprocessing) -> None:
    assert Preprocessing.from_hub(data) == expected


@given(side=st.integers(16, 600), border=st.integers(0, 200))
def test_crop_fraction_keeps_the_resize_size(side: int, border: int) -> None:
    found = Preprocessing.from_hub({"size": {"shortest_edge": side + border}, "crop_size": side})
    assert found.resize_size == (side + border, side + border)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({}, "size"),
        ({"size": "large"}, "size is large"),
        ({"size": {"height": 224}}, "size is"),
        ({"size": {"height": 224, "width": 0}}, "above 0"),
        ({"size": 224, "do_resize": False}, "do_resize is false"),
        ({"size": 224, "rescale_factor": 0}, "rescale_factor is 0"),
        ({"size": 224, "resample": 4}, "resample is 4"),
        ({"size": 224, "image_mean": "gray"}, "image_mean is gray"),
        ({"size": 224, "image_mean": [0.5] * 3, "image_std": [0.5] * 2}, "std must have one number"),
        ({"size": {"shortest_edge": 224}}, "without a crop"),
        ({"size": {"longest_edge": 224}}, "longest_edge"),
        ({"size": {"shortest_edge": 224, "longest_edge": 300}, "crop_size": 224}, "longest_edge"),
        ({"size": {"shortest_edge": 0}, "crop_size": 224}, "above 0"),
        ({"size": {"shortest_edge": 224}, "crop_size": 256}, "padding is not supported"),
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 160, "width": 224}}, "is not square"),
        ({"size": {"height": 256, "width": 512}, "crop_size": 224}, "same fraction"),
        ({"size": {"shortest_edge": 256}, "crop_size": 224, "crop_pct": 0.5}, "crop_pct is 0.5"),
        ({"size": {"shortest_edge": 256}, "crop_size": 224, "crop_pct": "half"}, ""),
        ({"size": 224, "do_pad": True}, "do_pad is True"),
        ({"size": 224, "do_flip_channel_order": True}, "do_flip_channel_order"),
        ({"size": 224, "keep_aspect_ratio": True}, "keep_aspect_ratio"),
        ({"size": 224, "image_processor_type": "PerceiverImageProcessor"}, "PerceiverImageProcessor is not supported"),
    ],
)
def test_unsupported_hub_config_is_rejected(data: dict[str, object], told: str) -> None:
    with pytest.raises(WeightsError, match=r"preprocessor_config\.json is not supported") as caught:
        Preprocessing.from_hub(data)
    assert told in str(caught.value)
    assert caught.value.hint


def test_unknown_keys_are_named() -> None:
    assert find_unknown_keys({"size": 224, "color": "warm", "device": "cuda", "do_pad": False}) == ("color",)
    assert find_unknown_keys(Preprocessing(resize="crop").to_hub()) == ()


def test_contradictory_hub_config_is_rejected() -> None:
    data = Preprocessing().to_hub() | {"image_mean": [0.4, 0.4, 0.4]}
    with pytest.raises(WeightsError, match="contradicts itself: image_mean"):
        Preprocessing.from_hub(data)
