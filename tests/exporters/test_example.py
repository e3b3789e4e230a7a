"""The code of `example.py` gives vitkit's pixels for every preprocessing and image format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitkit.data import preprocessing as preprocessing_module
from vitkit.data.preprocessing import ORIGINS, Preprocessing, get_preprocessing
from vitkit.exporters import example as example_module
from vitkit.exporters.example import MAX_RESIZED_PIXELS, format_example
from vitkit.exporters.onnx import ONNX
from vitkit.exporters.torch_export import TORCH

EXIF_ORIENTATION = 0x0112
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HOWS = {
    **{origin: get_preprocessing(origin, image_size=48) for origin in ORIGINS},
    "lanczos": Preprocessing(image_size=(40, 24), interpolation="lanczos", **IMAGENET),
    "nearest": Preprocessing(image_size=32, interpolation="nearest"),
    "area squash": Preprocessing(image_size=(21, 40), interpolation="area"),
    "wide crop": Preprocessing(image_size=(24, 40), resize="crop", crop_fraction=0.8, interpolation="bicubic"),
    "odd crop": Preprocessing(
        image_size=33, resize="crop", crop_fraction=0.9, interpolation="bicubic", crop_rounding="down"
    ),
    "sampled crop": Preprocessing(image_size=(33, 40), resize="squash_crop", antialias=False),
    "gray": get_preprocessing("paper", image_size=32, channels=1),
    "gray crop": get_preprocessing("deit", image_size=32, channels=1),
}
FOUR = {
    "squash": Preprocessing(image_size=32, channels=4, mean=(0.1, 0.2, 0.3, 0.4), std=(0.5,)),
    "paper": get_preprocessing("paper", image_size=32, channels=4),
    "crop": get_preprocessing("deit", image_size=32, channels=4),
}


def prepare(how: Preprocessing) -> Callable[[str], Any]:
    """Return the function `preprocess` of the example."""
    text = format_example(how, run_code="", package="onnxruntime", num_classes=2)
    names: dict[str, Any] = {"__name__": "example", "__file__": "example.py"}
    exec(compile(text, "example.py", "exec"), names)
    preprocess: Callable[[str], Any] = names["preprocess"]
    return preprocess


def shapes(height: int, width: int, channels: int = 3) -> Image.Image:
    """Edges, gradients and noise."""
    generator = np.random.default_rng(height * width)
    small = generator.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    picture = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)).astype(np.int64)
    noisy = np.clip(picture + generator.integers(-20, 21, picture.shape), 0, 255).astype(np.uint8)
    if channels == 4:
        noisy = np.concatenate([noisy, noisy[::-1, :, :1]], axis=2)
    return Image.fromarray(noisy)


def files(folder: Path) -> list[Path]:
    """An image file of each kind: formats, modes, depths, orientations, and a large JPEG."""
    plain = shapes(61, 90)
    made: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "wide.png": (plain, {}),
        "tall.png": (shapes(100, 37), {}),
        "exact.png": (shapes(48, 48), {}),
        "tiny.png": (shapes(3, 2), {}),
        "photo.jpg": (plain, {"quality": 90}),
        "large.jpg": (shapes(700, 900), {"quality": 80}),
        "gray.png": (plain.convert("L"), {}),
        "palette.gif": (plain.convert("P"), {}),
        "alpha.png": (shapes(61, 90, 4), {}),
        "gray-alpha.png": (plain.convert("LA"), {}),
        "bits.png": (plain.convert("1"), {}),
        "cmyk.jpg": (plain.convert("CMYK"), {}),
        "deep.png": (Image.fromarray(np.linspace(0, 65535, 600, dtype=np.uint16).reshape(20, 30)), {}),
        "float.tiff": (Image.fromarray(np.linspace(0, 1, 600, dtype=np.float32).reshape(20, 30)), {}),
        "lossy.webp": (plain, {"quality": 80}),
        "no-exif.jpg": (plain, {"exif": b"Exif\0\0this is none", "dpi": (72, 72)}),
    }
    for number in range(2, 9):
        exif = Image.Exif()
        exif[EXIF_ORIENTATION] = number
        made[f"turned-{number}.jpg"] = (shapes(300, 450), {"exif": exif})
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    made["turned.tiff"], made["turned.png"] = (plain, {"exif": exif}), (plain, {"exif": exif})
    for name, (picture, options) in made.items():
        picture.save(folder / name, **options)
    return [folder / name for name in made]


def assert_same(how: Preprocessing, path: Path, prepared: Callable[[str], Any]) -> None:
    expected = how(path)[0].numpy()
    found = prepared(str(path))
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    if how.antialias:
        assert np.array_equal(found, expected), path.name
    else:  # interpolated by numpy as by torch, up to the last digit of a place among 900 pixels of 255 levels
        assert np.abs(found - expected).max() <= 2e-4, path.name


@pytest.fixture(scope="module")
def every_file(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return files(tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize("name", HOWS)
def test_the_pixels_are_vitkits(every_file: list[Path], name: str) -> None:
    found = prepare(HOWS[name])
    for path in every_file:
        assert_same(HOWS[name], path, found)


@pytest.mark.parametrize("name", FOUR)
def test_four_channels_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    shapes(61, 90, 4).save(tmp_path / "four.png")
    assert_same(FOUR[name], tmp_path / "four.png", prepare(FOUR[name]))
    shapes(61, 90).save(tmp_path / "three.png")
    with pytest.raises(SystemExit, match="4 channels"):
        prepare(FOUR[name])(str(tmp_path / "three.png"))


def test_other_numbers_of_channels_are_read_from_arrays(tmp_path: Path) -> None:
    how = Preprocessing(image_size=16, channels=6, mean=(0.5,), std=(0.5,), interpolation="bicubic")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 6), dtype=np.uint8)
    np.save(tmp_path / "six.npy", pixels)
    assert np.array_equal(prepare(how)(str(tmp_path / "six.npy")), how(pixels)[0].numpy())


@pytest.mark.parametrize("origin", ["deit", "big_vision"])
def test_only_the_center_of_a_long_image_is_resized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    assert MAX_RESIZED_PIXELS == preprocessing_module._MAX_PIXELS_BEFORE_CROP
    for module, name in ((preprocessing_module, "_MAX_PIXELS_BEFORE_CROP"), (example_module, "MAX_RESIZED_PIXELS")):
        monkeypatch.setattr(module, name, 3000)
    shapes(20, 200).save(tmp_path / "strip.png")
    how = get_preprocessing(origin, image_size=48)
    assert_same(how, tmp_path / "strip.png", prepare(how))


def test_example_contains_only_the_needed_code() -> None:
    code = ONNX.example_code(num_classes=2)
    squash = format_example(Preprocessing(), run_code=code, package=ONNX.package, num_classes=2)
    assert 'session.run(["logits"]' in squash
    for name in ("resize_area", "resize_bilinear", "cover_size", "to_gray", "torch", "import vitkit", "openvino"):
        assert name not in squash
    code = TORCH.example_code(num_classes=0)
    headless = format_example(Preprocessing(), run_code=code, package=TORCH.package, num_classes=0)
    assert "top_predictions" not in headless
    assert '["features"]' in headless
    assert "labels.json" not in headless
