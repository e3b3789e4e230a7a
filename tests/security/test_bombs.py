"""Guarantee S6 for every reader of images: decompression bombs are rejected cheaply."""

import contextlib
import io
import time

import numpy as np
import pytest
from PIL import Image, ImageFile
from soak.bombs import BOMBS, encode, png

from vitkit.core.errors import DataError
from vitkit.data.decode import decode
from vitkit.data.decode_limits import DecodeLimits, check_structure
from vitkit.data.preprocessing import Preprocessing

LIMITS = DecodeLimits(max_bytes=20_000_000, max_pixels=50_000_000)
"""Limits of a server."""
HARMLESS = {
    "TIFF, directories in a circle",
    "JPEG, EXIF that claims 64 KB thousands of times",
    "PNG, EXIF that claims 4 MB thousands of times",
    "WebP, EXIF that claims 1 MB thousands of times",
}
"""Small images with unusual parts that are not decoded."""


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("name", BOMBS)
def test_bomb_is_rejected_or_harmless(name):
    content = BOMBS[name]()
    decode(png(8, 8), limits=LIMITS)
    before = time.process_time()
    with contextlib.nullcontext() if name in HARMLESS else pytest.raises(DataError, match=r"^.{5,150}$"):
        decode(content, limits=LIMITS)
    assert time.process_time() - before < 0.3  # the guarantee is a tenth of a second; slow machines take their time


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_ordinary_image_of_every_format_passes(kind, mode):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (900, 1200, 3), dtype=np.uint8))
    content = encode(noise.convert("L" if (kind, mode) == ("JPEG", "1") else mode), kind)
    check_structure(content, max_frames=1)
    assert decode(content).size == (1200, 900)


def test_photo_with_much_metadata_passes(monkeypatch):
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 20)  # Pillow 11 writes the comment to a buffer of this size
    exif = Image.Exif()
    for tag in (0x010E, 0x010F, 0x0110, 0x0131, 0x013B, 0x8298):  # description, make, model, software, artist, rights
        exif[tag] = "a remark of some length" * 10
    exif[0x0112] = 1
    profile, stream = bytes(500_000), io.BytesIO()
    picture = Image.fromarray(np.zeros((64, 64, 3), dtype=np.uint8))
    picture.save(stream, "JPEG", exif=exif, icc_profile=profile, comment=b"x" * 60_000, progressive=True)
    assert decode(stream.getvalue()).size == (64, 64)


@pytest.mark.parametrize("cut", range(0, 400, 7))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM"])
def test_truncated_bomb_raises_only_data_errors(kind, cut):
    content = encode(Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8)), kind)
    may_lack_its_header = contextlib.suppress(DataError) if kind == "PPM" else contextlib.nullcontext()
    with may_lack_its_header:
        check_structure(content[:cut], max_frames=4)


@pytest.mark.parametrize("sides", [(1_000_000, 1), (1, 1_000_000)])
@pytest.mark.parametrize("resize", ["squash", "crop"])
@pytest.mark.parametrize("resampling", ["bilinear", "bicubic", "area"])
def test_strip_is_preprocessed_in_bounded_memory(resampling, resize, sides):
    how = Preprocessing(image_size=32, resize=resize, interpolation=resampling)
    picture = Image.new("RGB", sides, (200, 100, 50))
    before = time.process_time()
    pixels = how.to_pixels(picture)
    assert time.process_time() - before < 3  # as floats at full height it was gigabytes, and ten seconds
    assert pixels.shape == (3, 32, 32)
    assert pixels.reshape(3, -1).min(axis=1).tolist() == [200, 100, 50]
