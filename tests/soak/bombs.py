"""Small files that cost an unprotected reader seconds or gigabytes."""

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

Bomb = Callable[[], bytes]
BOMBS: dict[str, Bomb] = {}


def bomb(name: str) -> Callable[[Bomb], Bomb]:
    """Register a bomb under a readable name."""

    def register(build: Bomb) -> Bomb:
        BOMBS[name] = build
        return build

    return register


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def zeros(count: int) -> bytes:
    """Return compressed zeros."""
    packer = zlib.compressobj(9)
    block = bytes(1 << 20)
    parts = [packer.compress(block) for _ in range(count >> 20)]
    return b"".join([*parts, packer.compress(bytes(count & 0xFFFFF)), packer.flush()])


def png(width: int, height: int, *, bits: int = 8, color: int = 2, rows: bytes = b"", more: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    body = rows or zlib.compress(bytes(height * (1 + (width * bits * (3 if color == 2 else 1) + 7) // 8)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + more + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def encode(picture: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def noise(side: int, *, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def ifd(entries: list[tuple[int, int, int, int]], *, following: int = 0) -> bytes:
    """Create a TIFF directory of entries (tag, type, count, value or offset)."""
    return (
        struct.pack("<H", len(entries))
        + b"".join(struct.pack("<HHII", *entry) for entry in entries)
        + struct.pack("<I", following)
    )


SMALL_TIFF = [
    *((tag, 3, 1, value) for tag, value in ((256, 8), (257, 8), (258, 8), (259, 1), (262, 1))),
    *((tag, 4, 1, value) for tag, value in ((273, 8), (278, 8), (279, 64))),
]
"""Entries of a gray image of 8 × 8 with pixels at byte 8."""


def heavy_exif(size: int) -> bytes:
    """Create thousands of entries that refer to the same bytes."""
    count = (size - 200) // 12 // 2
    body = size // 2
    return b"II*\0\x08\0\0\0" + ifd([(1000 + number, 7, body, 8) for number in range(min(count, 60_000))]).ljust(
        size, b"\0"
    )


# --- pixels


@bomb("PNG, header of 50,000 × 50,000")
def header_of_pixels() -> bytes:
    return png(50_000, 50_000, rows=b"x")


@bomb("PNG, 30,000 × 30,000 of 1 bit")
def one_bit() -> bytes:
    return png(30_000, 30_000, bits=1, color=0, rows=zeros(30_000 * 3751))


@bomb("WebP, canvas of 16,383 × 16,383")
def webp_canvas() -> bytes:
    side = struct.pack("<I", 16_382)[:3]
    extended = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + side + side
    control = b"ANIM" + struct.pack("<I", 6) + bytes(6)
    still = encode(noise(8), "WEBP", lossless=True)[12:]
    frame = bytes(6) + b"\x07\0\0\x07\0\0" + b"\x64\0\0\0" + still
    animation = b"ANMF" + struct.pack("<I", len(frame)) + frame + bytes(len(frame) % 2)
    body = b"WEBP" + extended + control + animation
    return b"RIFF" + struct.pack("<I", len(body)) + body


@bomb("GIF, screen of 65,535 × 65,535")
def gif_screen() -> bytes:
    return b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + encode(noise(8), "GIF")[10:]


@bomb("TIFF, header of 60,000 × 60,000")
def tiff_pixels() -> bytes:
    sides = [(256, 4, 1, 60_000), (257, 4, 1, 60_000), *SMALL_TIFF[2:]]
    return b"II*\0\x48\0\0\0" + bytes(64) + ifd(sides)


# --- scans


def scans(side: int, count: int) -> bytes:
    """Create a progressive JPEG with many copies of its last scan."""
    content = encode(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    last, end = content.rindex(b"\xff\xda"), content.rindex(b"\xff\xd9")
    return content[:end] + content[last:end] * count + content[end:]


@bomb("JPEG, 500 scans")
def five_hundred_scans() -> bytes:
    return scans(1500, 500)


@bomb("JPEG, 90 scans of 36 million pixels")
def scans_of_many_pixels() -> bytes:
    return scans(6000, 80)


# --- frames


def frames(kind: str, count: int) -> bytes:
    pictures = [noise(4, seed=number) for number in range(count)]
    return encode(pictures[0], kind, save_all=True, append_images=pictures[1:])


@bomb("GIF, 1,000 frames")
def gif_frames() -> bytes:
    return frames("GIF", 1000)


@bomb("APNG, 1,000 frames")
def png_frames() -> bytes:
    return frames("PNG", 1000)


@bomb("WebP, 1,000 frames")
def webp_frames() -> bytes:
    return frames("WEBP", 1000)


@bomb("TIFF, 1,000 frames")
def tiff_frames() -> bytes:
    return frames("TIFF", 1000)


@bomb("MPO, 1,000 frames")
def mpo_frames() -> bytes:
    return frames("MPO", 1000)


@bomb("TIFF, directories in a circle")
def tiff_in_a_circle() -> bytes:
    return b"II*\0\x48\0\0\0" + bytes(64) + ifd(SMALL_TIFF, following=0x48)


# --- remarks


@bomb("PNG, 60 texts of 1 MB each when unpacked")
def png_texts() -> bytes:
    return png(8, 8, more=chunk(b"zTXt", b"a\0\0" + zeros(1_000_000)) * 60)


@bomb("PNG, international texts of 1 MB each when unpacked")
def png_international_texts() -> bytes:
    return png(8, 8, more=chunk(b"iTXt", b"a\0\1\0\0\0" + zeros(1_000_000)) * 60)


@bomb("PNG, a text of 128 MB when unpacked")
def png_long_text() -> bytes:
    return png(8, 8, more=chunk(b"zTXt", b"a\0\0" + zeros(1 << 27)))


@bomb("PNG, color profile of 128 MB when unpacked")
def png_profile() -> bytes:
    return png(8, 8, more=chunk(b"iCCP", b"a\0\0" + zeros(1 << 27)))


@bomb("PNG, 1,000,000 empty chunks")
def png_chunks() -> bytes:
    return png(8, 8, more=chunk(b"teXt", b"") * 1_000_000)


@bomb("JPEG, 4,000,000 empty comments")
def jpeg_comments() -> bytes:
    content = encode(noise(8), "JPEG")
    return content[:2] + b"\xff\xfe\x00\x02" * 4_000_000 + content[2:]


@bomb("JPEG, 15 MB of filling")
def jpeg_filling() -> bytes:
    content = encode(noise(8), "JPEG")
    return content[:2] + b"\xff" * 15_000_000 + content[2:]


@bomb("JPEG, EXIF that claims 64 KB thousands of times")
def jpeg_exif() -> bytes:
    content = encode(noise(8), "JPEG")
    exif = b"Exif\0\0" + heavy_exif(65_000)
    return content[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + content[2:]


@bomb("PNG, EXIF that claims 4 MB thousands of times")
def png_exif() -> bytes:
    return png(8, 8, more=chunk(b"eXIf", heavy_exif(8_000_000)))


@bomb("WebP, EXIF that claims 1 MB thousands of times")
def webp_exif() -> bytes:
    return encode(noise(8), "WEBP", exif=heavy_exif(2_000_000))


@bomb("TIFF, 10,000 entries of 4 MB each")
def tiff_entries() -> bytes:
    claims = [(40_000 + number, 7, 4_000_000, 8) for number in range(10_000)]
    return b"II*\0" + struct.pack("<I", 5_000_000) + bytes(5_000_000 - 8) + ifd(sorted([*SMALL_TIFF, *claims]))


@bomb("GIF, 2,000,000 comments")
def gif_comments() -> bytes:
    content = encode(noise(8), "GIF")
    offset = 13 + (3 << ((content[10] & 7) + 1) if content[10] & 0x80 else 0)
    return content[:offset] + b"\x21\xfe\x01a\0" * 2_000_000 + content[offset:]


@bomb("GIF, 9,000,000 pieces of a byte")
def gif_pieces() -> bytes:
    content = encode(noise(8), "GIF")
    return content[:-2] + b"\x01a" * 9_000_000 + content[-2:]


@bomb("PPM, 15 MB of remarks")
def ppm_remarks() -> bytes:
    return b"P6\n" + b"#\n" * 7_500_000 + b"1 1\n255\n\0\0\0"


@bomb("PPM, 15 MB of digits")
def ppm_digits() -> bytes:
    return b"P2\n2700 2700\n255\n" + b"1 " * (2700 * 2700)


@bomb("PPM, 15 MB at 254 steps")
def ppm_steps() -> bytes:
    return b"P6\n2200 2200\n254\n" + bytes(2200 * 2200 * 3)


@bomb("BMP, 15 MB of runs")
def bmp_runs() -> bytes:
    runs = b"\x01\x05" * 7_400_000 + b"\0\x01"
    head = struct.pack("<IiiHHIIiiII", 40, 7000, 7000, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(runs), 0, 0, 54 + 1024) + head + bytes(1024) + runs
