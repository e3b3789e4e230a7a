"""Decoding: every file is an upright 8-bit image or a DataError."""

import io
import struct
import sys
import tarfile
import threading
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from vitkit.core.errors import DataError
from vitkit.data.decode import check_pixels, decode, read_header
from vitkit.data.decode_limits import DecodeLimits

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
HOSTILE = SHARED / "hostile" / "hostile-images.tar.gz"
PHOTOS = SHARED / "photos"

# How a picture is stored so that a reader who turns it by its EXIF orientation sees it upright.
STORED = {
    1: lambda upright: upright,
    2: np.fliplr,
    3: lambda upright: np.rot90(upright, 2),
    4: np.flipud,
    5: lambda upright: np.swapaxes(upright, 0, 1),
    6: lambda upright: np.rot90(upright, 1),
    7: lambda upright: np.rot90(np.swapaxes(upright, 0, 1), 2),
    8: lambda upright: np.rot90(upright, -1),
}


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 256], axis=-1).astype(np.uint8)


def file(picture: Image.Image | np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    picture = picture if isinstance(picture, Image.Image) else Image.fromarray(np.ascontiguousarray(picture))
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def png(width: int, height: int, *, bits: int, color: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


def pixels(content: bytes | np.ndarray, **options: object) -> np.ndarray:
    return np.asarray(decode(content, **options))


# Real files


@pytest.mark.skipif(not PHOTOS.is_dir(), reason="the shared photos are not here")
def test_photo_equals_pillow():
    photos = sorted(PHOTOS.glob("*.jpg"))[::25]
    for photo in photos:
        with Image.open(photo) as image:
            expected = np.asarray(image.convert("RGB"))
        assert np.array_equal(pixels(photo.read_bytes()), expected), photo.name


@pytest.mark.skipif(not HOSTILE.is_file(), reason="the shared hostile images are not here")
@pytest.mark.parametrize("options", [{}, {"draft_size": (64, 64)}, {"channels": 1}, {"channels": 4}], ids=str)
def test_hostile_file_is_decoded_or_rejected(options, capfd):
    decoded = refused = 0
    with tarfile.open(HOSTILE) as archive:
        for member in archive:
            stream = archive.extractfile(member)
            if stream is None:
                continue
            content = stream.read()
            before = time.process_time()
            try:
                picture = decode(content, **options)
            except DataError as error:
                refused += 1
                reason = str(error)
                assert reason.isprintable(), member.name
                assert 5 < len(reason) < 150, member.name
                assert "0x" not in reason, member.name
            else:
                decoded += 1
                assert min(np.asarray(picture).shape) > 0, member.name
            # None takes a tenth of this on a slow laptop; a bomb would take seconds.
            assert time.process_time() - before < 2, member.name
    assert decoded + refused == 1714
    assert decoded > (700 if options.get("channels") != 4 else 50)
    assert capfd.readouterr().out == ""


# Modes


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("channels", [1, 3])
def test_png_of_each_mode_equals_pillow(mode, channels):
    picture = Image.fromarray(smooth(20, 30)).convert(mode)
    wanted = picture.convert("RGB" if channels == 3 else "L")
    decoded = decode(file(picture), channels=channels)
    assert decoded.mode == wanted.mode
    assert np.array_equal(np.asarray(decoded), np.asarray(wanted))


def test_alpha_is_dropped():
    colors = np.concatenate([smooth(8, 8), np.zeros((8, 8, 1), dtype=np.uint8)], axis=2)
    assert np.array_equal(pixels(file(colors)), smooth(8, 8))


@pytest.mark.parametrize("transparency", [3, bytes(range(256))], ids=["one color", "alpha of each color"])
def test_palette_with_transparency_keeps_colors(transparency):
    picture = Image.fromarray(smooth(16, 16)).convert("P")
    content = file(picture, transparency=transparency)
    assert np.array_equal(pixels(content), np.asarray(picture.convert("RGB")))
    assert pixels(content, channels=4).shape == (16, 16, 4)


def test_cmyk_keeps_colors():
    picture = Image.fromarray(smooth(64, 64))
    content = file(picture.convert("CMYK"), "JPEG", quality=95)
    difference = np.abs(pixels(content).astype(int) - np.asarray(picture))
    assert difference.mean() < 4  # JPEG's own loss; inverted colors would be off by about 128
    assert pixels(content, channels=4).shape == (64, 64, 4)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bits_are_scaled_to_8(kind):
    gray = np.array([[0, 128, 129, 257, 32768, 65535]], dtype=np.uint16)
    content = file(Image.fromarray(gray), kind)
    assert pixels(content, channels=1).tolist() == [[0, 0, 1, 1, 128, 255]]
    assert pixels(content).tolist() == [[[value] * 3 for value in (0, 0, 1, 1, 128, 255)]]


def test_8_bit_values_survive_16_bits():
    values = np.arange(256, dtype=np.uint16)[None]
    assert pixels(file(Image.fromarray(values * 257)), channels=1)[0].tolist() == list(range(256))


@pytest.mark.parametrize(
    ("floats", "expected"), [([0.0, 0.5, 1.0], [0, 128, 255]), ([0.0, 99.6, 255.0], [0, 100, 255])]
)
def test_scale_of_floats_is_detected(floats, expected):
    content = file(Image.fromarray(np.array([floats], dtype=np.float32)), "TIFF")
    assert pixels(content, channels=1)[0].tolist() == expected


@pytest.mark.parametrize(
    "values",
    [
        np.array([[-1.0, 0.0]], dtype=np.float32),
        np.array([[0.0, 256.0]], dtype=np.float32),
        np.array([[0.0, np.nan]], dtype=np.float32),
        np.array([[0, 65536]], dtype=np.int32),
        np.array([[-1, 3]], dtype=np.int32),
    ],
)
def test_unknown_range_is_rejected(values):
    with pytest.raises(DataError, match=r"unknown range"):
        decode(file(Image.fromarray(values), "TIFF"))


def test_other_channels_return_an_array():
    colors = noise(5, 7, 4)
    assert np.array_equal(pixels(file(colors), channels=4), colors)
    assert isinstance(decode(file(colors, "TIFF"), channels=4), np.ndarray)
    gray_and_alpha = noise(5, 7, 2)
    assert np.array_equal(pixels(file(Image.fromarray(gray_and_alpha, "LA")), channels=2), gray_and_alpha)
    with pytest.raises(DataError, match=r"wrong number of channels \(expected 4, got 3 \(RGB\)\)"):
        decode(file(smooth(5, 7)), channels=4)
    with pytest.raises(DataError, match=r"expected 2, got 1 \(P\)"):
        decode(file(Image.fromarray(smooth(5, 7)).convert("P")), channels=2)


# Arrays


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1)])
def test_gray_arrays_are_converted(shape):
    gray = noise(*shape)
    assert np.array_equal(pixels(gray, channels=1), gray.reshape(4, 6))
    assert np.array_equal(pixels(gray), np.repeat(gray.reshape(4, 6, 1), 3, axis=2))


def test_color_arrays_are_converted():
    colors = smooth(4, 6)
    assert np.array_equal(pixels(colors), colors)
    assert np.array_equal(pixels(colors, channels=1), np.asarray(Image.fromarray(colors).convert("L")))
    many = noise(4, 6, 13)
    assert np.array_equal(pixels(many, channels=13), many)


@pytest.mark.parametrize(
    ("shape", "channels", "message"),
    [
        ((4, 6, 2), 3, "expected 3, got 2"),
        ((4, 6), 4, "expected 4, got 1"),
        ((4, 6, 3), 4, "expected 4, got 3"),
        ((4,), 3, "not an image"),
        ((1, 2, 3, 4), 3, "not an image"),
        ((0, 6, 3), 3, "no pixels"),
    ],
)
def test_array_that_is_no_image_is_rejected(shape, channels, message):
    array = np.zeros(shape, dtype=np.uint8)
    with pytest.raises(DataError, match=message):
        decode(array, channels=channels)
    with pytest.raises(DataError, match=message):
        check_pixels(array, channels=channels)


def test_limits_apply_to_arrays():
    with pytest.raises(DataError, match="too many pixels"):
        decode(noise(11, 10), limits=DecodeLimits(max_pixels=100))


# Orientation


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_exif_orientations_are_equivalent(kind, orientation):
    upright = noise(6, 10, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = file(STORED[orientation](upright), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    assert np.array_equal(pixels(content), upright)
    assert np.array_equal(pixels(content, channels=1), np.asarray(Image.fromarray(upright).convert("L")))
    assert read_header(content)[2:] == (6, 10)


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("fit", [(96, 64), (64, 96), (200, 8), (8, 200), (384, 640), (500, 700)], ids=str)
def test_drafted_jpeg_is_not_below_draft_size(orientation, fit):
    upright = smooth(384, 640)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = file(STORED[orientation](upright), "JPEG", exif=exif, quality=95)
    drafted = decode(content, draft_size=fit)
    factor = max((scale for scale in (1, 2, 4, 8) if 384 // scale >= fit[0] and 640 // scale >= fit[1]), default=1)
    assert drafted.size == (640 // factor, 384 // factor)
    small = np.asarray(Image.fromarray(upright).resize(drafted.size, Image.Resampling.BOX)).astype(int)
    # The third channel's sawtooth is not kept by a smaller picture; red and green are ramps, which all scales keep.
    assert np.abs(np.asarray(drafted)[..., :2] - small[..., :2]).mean() < 8


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0garbage of no meaning"])
def test_unreadable_exif_is_ignored(exif):
    picture = smooth(32, 48)
    plain = pixels(file(picture, "JPEG"))
    assert np.array_equal(pixels(file(picture, "JPEG", exif=exif)), plain)


def test_metadata_is_removed():
    exif = Image.Exif()
    exif.get_ifd(0x8825)[1] = "N"
    picture = decode(file(smooth(8, 8), "JPEG", exif=exif, comment=b"at home"))
    assert picture.info == {}
    assert not picture.getexif()


# Damage and the gate


@pytest.mark.parametrize("fit", [None, (64, 64)])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_truncated_jpeg_is_rejected_when_drafted(fit, progressive, share):
    content = file(noise(512, 512, 3), "JPEG", progressive=progressive)
    with pytest.raises(DataError, match="truncated"):
        decode(content[: int(len(content) * share)], draft_size=fit)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_truncated_file_is_rejected(kind):
    content = file(noise(64, 64, 3), kind)
    with pytest.raises(DataError):
        decode(content[: len(content) * 2 // 3])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"<html>", "not a JPEG, PNG, GIF, BMP, TIFF, WEBP, PPM, AVIF or HEIF file"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a JPEG, PNG"),
        (b"\x89PNG\r\n\x1a\n", "damaged PNG file: its header cannot be read"),
        (b"\xff\xd8\xff", "damaged JPEG file"),
    ],
)
def test_error_describes_a_file_that_is_no_image(content, message):
    with pytest.raises(DataError, match=message):
        decode(content)


def test_format_that_is_not_allowed_is_rejected():
    with pytest.raises(DataError, match="not a PNG file"):
        decode(file(smooth(8, 8), "JPEG"), limits=DecodeLimits(formats=("PNG",)))


def many_frames(kind: str, count: int) -> bytes:
    frames = [Image.fromarray(noise(4, 4, seed=number)) for number in range(count)]
    return file(frames[0], kind, save_all=True, append_images=frames[1:])


def many_scans() -> bytes:
    content = file(noise(64, 64), "JPEG", progressive=True)
    last, end = content.rindex(b"\xff\xda"), content.rindex(b"\xff\xd9")
    return content[:end] + content[last:end] * 300 + content[end:]


BOMBS = {
    "a header of pixels": (png(50_000, 50_000, bits=8, color=2, rows=b"\0"), "too many pixels"),
    "one bit a pixel": (png(12_000, 12_000, bits=1, color=0, rows=bytes(12_000 * 1501)), "too many pixels"),
    "scans": (many_scans(), "too many scans"),
    "frames of a GIF": (many_frames("GIF", 300), "too many frames"),
    "frames of a TIFF": (many_frames("TIFF", 300), "too many frames"),
    "frames of a PNG": (many_frames("PNG", 300), "too many frames"),
    "frames of a WEBP": (many_frames("WEBP", 300), "too many frames"),
    "bytes": (b"\xff\xd8" + bytes(65_000_000), "too many bytes"),
}


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("bomb", BOMBS)
def test_bomb_is_rejected_cheaply(bomb):
    content, message = BOMBS[bomb]
    before = time.process_time()
    with pytest.raises(DataError, match=message):
        decode(content)
    assert time.process_time() - before < 0.3  # the promise is a tenth of a second; slow machines take their time


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "PNG", "WEBP"])
def test_first_frame_is_used(kind):
    content = many_frames(kind, 5)
    limits = DecodeLimits(max_frames=5)
    assert decode(content, limits=limits).size == (4, 4)
    if kind != "WEBP":  # not lossless here
        assert np.array_equal(pixels(content, channels=1, limits=limits), noise(4, 4))
    with pytest.raises(DataError, match="too many frames"):
        decode(content, limits=DecodeLimits(max_frames=4))


# The process around it


def test_process_settings_are_unchanged():
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    warns = png(9500, 9500, bits=1, color=0, rows=bytes(9500 * 1189))  # Pillow warns above 89 million pixels
    filters = list(warnings.filters)
    assert read_header(warns)[2:] == (9500, 9500)
    assert list(warnings.filters) == filters
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


def test_threads_keep_the_warning_filters():
    filters = list(warnings.filters)
    palette = file(Image.fromarray(smooth(64, 64)).convert("P"), transparency=bytes(256))
    failures: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(50):
                decode(palette)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert list(warnings.filters) == filters


def heic(picture: np.ndarray, **options: object) -> bytes:
    heif = pytest.importorskip("pillow_heif", reason="needs the extra heif")
    stream = io.BytesIO()
    heif.from_pillow(Image.fromarray(picture)).save(stream, **options)
    return stream.getvalue()


@pytest.mark.parametrize("orientation", [1, 6, 8])
@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
def test_phone_formats_are_upright(kind: str, orientation: int) -> None:
    upright = smooth(32, 48)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(STORED[orientation](upright))
    options = {"quality": 95, "exif": exif.tobytes()}
    content = heic(stored, **options) if kind == "HEIF" else file(stored, kind, **options)
    assert read_header(content) == (kind, "RGB", 32, 48)
    decoded = np.asarray(decode(content, draft_size=(8, 8))).astype(int)
    assert decoded.shape == (32, 48, 3)
    assert abs(decoded - upright).mean() < 8  # both formats are lossy; a wrong orientation differs by more than 60


@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
def test_phone_formats_keep_the_limits(kind: str) -> None:
    content = heic(smooth(64, 64)) if kind == "HEIF" else file(smooth(64, 64), kind)
    with pytest.raises(DataError, match="too many pixels"):
        decode(content, limits=DecodeLimits(max_pixels=64 * 64 - 1))
    with pytest.raises(DataError, match=f"damaged {kind} file|the file is truncated"):
        decode(content[: len(content) // 2])
    with pytest.raises(DataError, match="not a PNG file"):
        decode(content, limits=DecodeLimits(formats=("PNG",)))


def test_missing_pillow_heif_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(DataError, match=r"pip install 'vitkit\[heif\]'"):
        decode(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100))
