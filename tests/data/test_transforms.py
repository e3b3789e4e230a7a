"""Evaluation's pixels, their normalisation, and what is stored of both."""

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
from vitkit.data.geometry import averaged, crop, crop_resize, flip, planes, sampled
from vitkit.data.image_processors import unread
from vitkit.data.transforms import ORIGINS, Preprocessing, preprocessing


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size=(height, width, channels), dtype=np.uint8)


def as_picture(array: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def bilinear(plane: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.float64]:
    """Bilinear without antialias from its definition: half-pixel centres, neighbours clamped to the edge."""

    def weights(source: int, target: int) -> NDArray[np.float64]:
        matrix = np.zeros((target, source))
        for place in range(target):
            centre = (place + 0.5) * source / target - 0.5
            lower = math.floor(centre)
            for neighbour, weight in ((lower, 1 - (centre - lower)), (lower + 1, centre - lower)):
                matrix[place, min(max(neighbour, 0), source - 1)] += weight
        return matrix

    down, across = weights(plane.shape[0], size[0]), weights(plane.shape[1], size[1])
    return down @ plane.astype(np.float64) @ across.T


@given(height=st.integers(1, 70), width=st.integers(1, 70), target=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_papers_pixels_are_bilinear_without_antialias(height: int, width: int, target: tuple[int, int]) -> None:
    picture = noise(height, width)
    pixels = Preprocessing(image_size=target, antialias=False).pixels(as_picture(picture))
    assert pixels.dtype == np.float32
    expected = np.stack([bilinear(picture[:, :, channel], target) for channel in range(3)])
    # float32 places the neighbours within 70 · 2⁻²⁴ pixels, a pixel differs from its neighbour by up to 255
    np.testing.assert_allclose(pixels, expected, atol=5e-3, rtol=0)


def test_papers_pixels_are_not_rounded_and_antialiased_ones_are_whole() -> None:
    picture = as_picture(noise(37, 53))
    exact = ORIGINS["paper"].pixels(picture)
    assert not np.array_equal(exact, np.rint(exact))
    assert Preprocessing().pixels(picture).dtype == np.uint8


def test_squash_then_crop_takes_the_middle_of_the_squashed() -> None:
    picture = noise(50, 61)
    pixels = Preprocessing(image_size=28, resize="squash_crop", antialias=False).pixels(as_picture(picture))
    np.testing.assert_array_equal(pixels, sampled(planes(picture), (32, 32))[:, 2:30, 2:30])


@pytest.mark.parametrize("resize", ["squash", "crop", "squash_crop"])
@pytest.mark.parametrize("resampling", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_channels_are_resized_each_for_itself(resize: str, resampling: str) -> None:
    array = noise(45, 60, channels=5)
    config = from_mapping(
        Preprocessing, {"image_size": 32, "resize": resize, "filter": resampling, "mean": [0.5], "deviation": [0.5]}
    )
    together = replace(config, channels=5).pixels(array)
    alone = [replace(config, channels=1).pixels(as_picture(array[:, :, [channel]])) for channel in range(5)]
    np.testing.assert_array_equal(together, np.concatenate(alone))


@given(height=st.integers(1, 90), width=st.integers(1, 90), size=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_pixels_always_have_the_image_size(height: int, width: int, size: tuple[int, int]) -> None:
    picture = as_picture(noise(height, width))
    for origin in ("paper", "timm_augreg", "torchvision", "huggingface_dinov2"):
        assert preprocessing(origin, image_size=size).pixels(picture).shape == (3, *size)


@pytest.mark.parametrize("sides", [(1, 60_000), (60_000, 1), (3, 3000), (2000, 2)])
def test_strip_is_cropped_without_being_made_huge(sides: tuple[int, int]) -> None:
    ramp = np.broadcast_to(np.linspace(0, 255, max(sides)).astype(np.uint8).reshape(-1, 1, 1), (max(sides), 1, 3))
    strip = np.ascontiguousarray(np.broadcast_to(ramp if sides[0] > sides[1] else ramp.transpose(1, 0, 2), (*sides, 3)))
    pixels = ORIGINS["torchvision"].pixels(as_picture(strip))
    assert pixels.shape == (3, 224, 224)
    assert abs(int(np.median(pixels)) - 127) <= 1


@pytest.mark.parametrize("sides", [(7, 500), (500, 9), (40, 70)])
def test_strip_has_the_pixels_of_the_long_way(sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    strip = as_picture(noise(*sides))
    config = ORIGINS["torchvision"]
    whole = config.pixels(strip).astype(int)
    monkeypatch.setattr("vitkit.data.transforms._MOST_BEFORE_CROP", 0)
    assert np.abs(config.pixels(strip) - whole).max() <= 1  # the crop begins at a rounded place


def test_picture_of_the_right_size_is_left_as_it_is() -> None:
    array = noise(32, 32)
    pixels = Preprocessing(image_size=32).pixels(as_picture(array))
    np.testing.assert_array_equal(pixels, array.transpose(2, 0, 1))
    pixels[:] = 0  # and the pixels are nobody else's memory
    assert array.any()


@pytest.mark.parametrize("side", [20, 100])
@pytest.mark.parametrize("channels", [1, 2, 3, 7])
def test_planes_are_the_pictures_channels_in_writable_memory(side: int, channels: int) -> None:
    array = noise(side, side + 1, channels)
    picture = as_picture(array) if channels in (1, 3) else array
    pixels = planes(picture)
    np.testing.assert_array_equal(pixels, array.transpose(2, 0, 1))
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert not np.shares_memory(pixels, array)


@given(box=st.tuples(*[st.integers(-12, 12)] * 2), size=st.integers(1, 12))
def test_array_is_cropped_like_a_picture(box: tuple[int, int], size: int) -> None:
    array = noise(7, 9)
    corners = (*box, box[0] + size, box[1] + size)
    np.testing.assert_array_equal(crop(array, box=corners), np.asarray(crop(as_picture(array), box=corners)))


def test_array_is_flipped_like_a_picture() -> None:
    array = noise(7, 9)
    np.testing.assert_array_equal(flip(array), np.asarray(flip(as_picture(array))))


def test_reducing_gap_changes_nothing_until_pictures_are_four_times_larger() -> None:
    picture = as_picture(noise(890, 890))
    exact, quick = (
        crop_resize(picture, box=(0, 0, 890, 890), size=(224, 224), resampling="bilinear", reducing_gap=gap)
        for gap in (None, 2.0)
    )
    np.testing.assert_array_equal(exact, quick)


# Normalisation


def test_paper_normalises_exactly_to_plus_and_minus_one() -> None:
    levels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256)
    expected = (levels.float() - 127.5) / 127.5
    assert torch.equal(ORIGINS["paper"].normalise(levels), expected)
    assert torch.equal(ORIGINS["paper"].normalise(levels.float()), expected)


def test_normalised_batch_is_what_shares_of_one_would_give() -> None:
    batch = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8)
    config = ORIGINS["deit"]
    mean, deviation = (
        torch.tensor(numbers, dtype=torch.float64)[:, None, None] for numbers in (config.mean, config.deviation)
    )
    expected = (batch.double() / 255 - mean) / deviation
    # three roundings of float32, of numbers up to 2.7
    torch.testing.assert_close(config.normalise(batch).double(), expected, atol=1e-6, rtol=0)


def test_normalising_leaves_its_input_alone() -> None:
    batch = torch.full((1, 3, 2, 2), 7.0)
    Preprocessing().normalise(batch)
    assert torch.equal(batch, torch.full((1, 3, 2, 2), 7.0))


def test_one_mean_stands_for_all_channels() -> None:
    batch = torch.randint(0, 256, (2, 5, 3, 3), dtype=torch.uint8)
    one = Preprocessing(channels=5, mean=(0.3,), deviation=(0.2,))
    each = Preprocessing(channels=5, mean=(0.3,) * 5, deviation=(0.2,) * 5)
    assert torch.equal(one.normalise(batch), each.normalise(batch))


def test_other_channels_are_refused() -> None:
    with pytest.raises(InputError, match="expected 3, got 1"):
        Preprocessing().pixels(Image.new("L", (8, 8)))
    with pytest.raises(InputError, match="expected 3, got 4"):
        Preprocessing().pixels(noise(8, 8, channels=4))
    with pytest.raises(InputError, match="expected 3, got 2"):
        Preprocessing().normalise(torch.zeros(1, 2, 4, 4))


# Configuration


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image_size": 0}, "image_size must be positive"),
        ({"image_size": [224, 0]}, "image_size must be positive"),
        ({"channels": 0}, "channels must be positive"),
        ({"channels": 4}, "mean has a number for each channel"),
        ({"deviation": [0.5, 0.5]}, "deviation has a number for each channel"),
        ({"deviation": [0.5, 0.0, 0.5]}, "deviation must be positive"),
        ({"mean": [0.5, math.inf, 0.5]}, "mean must be finite"),
        ({"crop_share": 0.0}, "crop_share is not a share"),
        ({"crop_share": 1.1}, "crop_share is not a share"),
        ({"antialias": False, "filter": "bicubic"}, "paper's bilinear squash alone"),
        ({"antialias": False, "resize": "crop"}, "paper's bilinear squash alone"),
    ],
)
def test_impossible_preprocessing_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(Preprocessing, wrong)


def test_preprocessing_takes_assignments_like_any_config() -> None:
    changed = apply_overrides(Preprocessing(), ["image_size=224x320", "mean=[0.1]", "resize=crop"])
    assert changed == Preprocessing(image_size=(224, 320), mean=(0.1,), resize="crop")
    assert from_mapping(Preprocessing, to_mapping(changed)) == changed


@pytest.mark.parametrize("origin", sorted(ORIGINS))
def test_origin_has_any_size_and_any_channels(origin: str) -> None:
    assert preprocessing(origin, image_size=224) == ORIGINS[origin]
    for channels in (1, 2, 3, 6):
        config = preprocessing(origin, image_size=48, channels=channels)
        picture = as_picture(noise(50, 60, channels)) if channels in (1, 3) else noise(50, 60, channels)
        batch = torch.from_numpy(config.pixels(picture))[None]
        assert config.normalise(batch).shape == (1, channels, 48, 48)


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
    assert ORIGINS[origin].resized == (resized, resized)


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
def test_area_filter_is_the_mean_of_what_a_pixel_covers(height: int, width: int, target: tuple[int, int]) -> None:
    picture = noise(height, width)
    pixels = np.asarray(averaged(as_picture(picture), target), dtype=np.float64)
    expected = np.stack([covered(picture[:, :, channel], target) for channel in range(3)], axis=2)
    # Cut to whole numbers: less than one below, and not above but by what rounding may have taken.
    assert (pixels <= expected + 1e-3).all()
    assert (pixels > expected - 1).all()
    np.testing.assert_array_equal(averaged(picture, target), pixels)


def test_area_filter_leaves_an_even_picture_even() -> None:
    for value in (1, 254, 255):
        picture = Image.new("L", (341, 257), value)
        assert np.asarray(averaged(picture, (101, 99))).min() == value


def test_big_vision_resizes_the_shorter_side_and_takes_the_middle() -> None:
    picture = noise(300, 403)
    how = preprocessing("big_vision", image_size=224)
    resized = np.asarray(averaged(as_picture(picture), (256, 344)))  # 256 · 403 / 300 is 343.9
    np.testing.assert_array_equal(how.pixels(as_picture(picture)), np.moveaxis(resized[16:240, 60:284], 2, 0))
    assert preprocessing("big_vision", image_size=384).resized == (448, 448)  # as its configuration for transfers


@pytest.mark.parametrize(("origin", "size"), [("timm_augreg", 384), ("mae", 448), ("torchvision", 384)])
def test_large_images_lose_nothing_where_the_origin_says_so(origin: str, size: int) -> None:
    assert preprocessing(origin, image_size=size).resized == (size, size)


def test_middle_of_an_odd_border_begins_at_the_even_pixel_or_below() -> None:
    picture = noise(1, 4)  # a border of 3 beside one pixel: 1.5 is 2 or 1
    even = Preprocessing(image_size=1, resize="crop", crop_share=1.0)
    for config, column in ((even, 2), (replace(even, crop_rounding="down"), 1)):
        np.testing.assert_array_equal(config.pixels(as_picture(picture))[:, 0, 0], picture[0, column])


def test_unknown_origin_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        preprocessing("dinov4", image_size=224)
    assert caught.value.hint == "did you mean dinov3?"


# Hugging Face's form


@pytest.mark.parametrize("origin", sorted(ORIGINS))
@pytest.mark.parametrize("size", [224, (160, 320)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_hub_form_round_trips_exactly_through_json(origin: str, size: int | tuple[int, int], channels: int) -> None:
    config = preprocessing(origin, image_size=size, channels=channels)
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
def test_published_hub_form_is_what_its_origin_does(data: dict[str, object], origin: str) -> None:
    assert Preprocessing.from_hub(data) == preprocessing(origin, image_size=(224, 224))
    assert unread(data) == ()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"size": 224, "resample": 2}, Preprocessing(image_size=(224, 224))),
        ({"size": [160, 224]}, Preprocessing(image_size=(160, 224))),
        (
            {"size": {"height": 384, "width": 384}, "resample": 3},
            Preprocessing(image_size=(384, 384), filter="bicubic"),
        ),
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "resample": 3},
            Preprocessing(image_size=(224, 224), resize="crop", filter="bicubic", crop_rounding="down"),
        ),
        (
            {"size": 256, "crop_size": 224, "resample": 2, "image_processor_type": "DeiTImageProcessor"},
            Preprocessing(image_size=(224, 224), resize="squash_crop", crop_rounding="down"),
        ),
        (
            {"size": 256, "crop_size": 224, "do_center_crop": False, "image_processor_type": "DeiTImageProcessor"},
            Preprocessing(image_size=(256, 256), filter="bicubic"),
        ),
        (
            {"size": 256, "crop_size": 224, "resample": 2, "image_processor_type": "ViTImageProcessor"},
            Preprocessing(image_size=(256, 256)),
        ),
        (
            {"size": {"shortest_edge": 224}, "crop_pct": 0.9},
            Preprocessing(resize="crop", crop_share=0.9, crop_rounding="down"),
        ),
        (
            {"size": 384, "crop_pct": 0.9, "image_processor_type": "ConvNextImageProcessor"},
            Preprocessing(image_size=(384, 384), filter="bicubic"),
        ),
        (
            {"size": 224, "do_normalize": False},
            Preprocessing(image_size=(224, 224), mean=(0.0,) * 3, deviation=(1.0,) * 3),
        ),
        ({"size": 224, "image_mean": 0.5, "image_std": [0.5]}, replace(SQUARE, mean=(0.5,), deviation=(0.5,))),
        (
            {"size": 224, "rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
            replace(SQUARE, mean=(0.5,) * 3, deviation=(0.5,) * 3),
        ),
        (
            {"size": 224, "do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3},
            replace(SQUARE, mean=(0.5,) * 3, deviation=(0.5,) * 3),
        ),
        (
            {"size": 224, "image_mean": [0.5], "image_std": [0.25]},
            replace(SQUARE, mean=(0.5,), deviation=(0.25,)),
        ),
    ],
)
def test_foreign_hub_form_is_understood(data: dict[str, object], expected: Preprocessing) -> None:
    assert Preprocessing.from_hub(data) == expected


@given(side=st.integers(16, 600), border=st.integers(0, 200))
def test_foreign_crop_keeps_the_resized_side(side: int, border: int) -> None:
    found = Preprocessing.from_hub({"size": {"shortest_edge": side + border}, "crop_size": side})
    assert found.resized == (side + border, side + border)


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
        ({"size": 224, "image_mean": "grey"}, "image_mean is grey"),
        ({"size": 224, "image_mean": [0.5] * 3, "image_std": [0.5] * 2}, "deviation has a number"),
        ({"size": {"shortest_edge": 224}}, "no crop"),
        ({"size": {"longest_edge": 224}}, "longest_edge"),
        ({"size": {"shortest_edge": 224, "longest_edge": 300}, "crop_size": 224}, "longest_edge"),
        ({"size": {"shortest_edge": 0}, "crop_size": 224}, "above 0"),
        ({"size": {"shortest_edge": 224}, "crop_size": 256}, "borders are not filled"),
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 160, "width": 224}}, "only squares"),
        ({"size": {"height": 256, "width": 512}, "crop_size": 224}, "same share"),
        ({"size": {"shortest_edge": 256}, "crop_size": 224, "crop_pct": 0.5}, "crop_pct is 0.5"),
        ({"size": {"shortest_edge": 256}, "crop_size": 224, "crop_pct": "half"}, ""),
        ({"size": 224, "do_pad": True}, "do_pad is True"),
        ({"size": 224, "do_flip_channel_order": True}, "do_flip_channel_order"),
        ({"size": 224, "keep_aspect_ratio": True}, "keep_aspect_ratio"),
        ({"size": 224, "image_processor_type": "PerceiverImageProcessor"}, "PerceiverImageProcessor is none"),
    ],
)
def test_foreign_hub_form_that_asks_for_something_else_is_refused(data: dict[str, object], told: str) -> None:
    with pytest.raises(WeightsError, match=r"preprocessor_config\.json asks for what we cannot do") as caught:
        Preprocessing.from_hub(data)
    assert told in str(caught.value)
    assert caught.value.hint


def test_keys_that_nobody_knows_are_named() -> None:
    assert unread({"size": 224, "colour": "warm", "device": "cuda", "do_pad": False}) == ("colour",)
    assert unread(Preprocessing(resize="crop").to_hub()) == ()


def test_hub_form_that_was_changed_beside_our_section_is_refused() -> None:
    data = Preprocessing().to_hub() | {"image_mean": [0.4, 0.4, 0.4]}
    with pytest.raises(WeightsError, match="says two things: image_mean"):
        Preprocessing.from_hub(data)
