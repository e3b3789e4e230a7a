"""Fingerprints of contents, and the cache of verified images."""

import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.layouts import parquet, samples, webdataset_cls

from vitkit.core.errors import DataError
from vitkit.data import image_cache, verify
from vitkit.data.dataset import ConcatSource, DecodedImage, ImageSource, StoredImage, Subset, hold_out
from vitkit.data.fingerprint import Fingerprint, describe_changes, fingerprint_contents
from vitkit.data.image_cache import ImageCache, open_image_cache
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import BadFile, exclude_files, verify_images


def png(number: int) -> bytes:
    return samples()[number % 24].png


class CountingSource(Subset):
    """A source that lists which images are read."""

    def __init__(self, source: ImageSource) -> None:
        super().__init__(source, range(len(source)))
        self.reads: list[str] = []

    def read(self, index: int) -> StoredImage:
        self.reads.append(self.name(index))
        return super().read(index)

    def checksum(self, index: int) -> bytes:
        self.reads.append(self.name(index))
        return super().checksum(index)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        for number in range(3):
            file = tmp_path / "photos" / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png(10 * label + number))
    return tmp_path / "photos"


@pytest.fixture
def cache(tmp_path: Path) -> ImageCache:
    return open_image_cache(tmp_path / "cache")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the images that were decoded to verify them."""
    sizes: list[int] = []
    original = verify.decode

    def count(image: StoredImage, **options: Any) -> DecodedImage:
        sizes.append(len(image))
        return original(image, **options)

    monkeypatch.setattr(verify, "decode", count)
    return sizes


def count_reads(path: Path) -> CountingSource:
    return CountingSource(open_dataset(path).first_split)


def test_second_verification_decodes_nothing(photos: Path, cache: ImageCache, decoded: list[int]) -> None:
    (photos / "dog" / "3.png").write_bytes(b"broken")
    bad = verify_images(count_reads(photos), cache=cache).bad
    assert [file.name for file in bad] == ["dog/3.png"]
    assert len(decoded) == 7
    source, progress = count_reads(photos), list[int]()
    assert verify_images(source, cache=cache, progress=progress.append).bad == bad
    assert len(decoded) == 7
    assert source.reads == []
    assert sum(progress) == 7


def test_only_new_and_changed_images_are_decoded(photos: Path, cache: ImageCache, decoded: list[int]) -> None:
    verify_images(count_reads(photos), cache=cache)
    (photos / "cat" / "1.png").write_bytes(b"broken")
    (photos / "cat" / "9.png").write_bytes(png(20))
    source = count_reads(photos)
    decoded.clear()
    assert verify_images(source, cache=cache).bad == [
        BadFile("cat/1.png", "not a JPEG, PNG, GIF, BMP, TIFF, WEBP, PPM, AVIF or HEIF file")
    ]
    assert source.reads == ["cat/1.png", "cat/9.png"]
    assert len(decoded) == 2


def test_interrupted_verification_continues(
    photos: Path, cache: ImageCache, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_cache, "SAVE_EVERY", 2)

    def stop(images: int) -> None:
        if len(decoded) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_images(count_reads(photos), cache=cache, progress=stop)
    assert verify_images(count_reads(photos), cache=cache).bad == []
    assert len(decoded) == 6


def test_other_channels_are_verified_again(photos: Path, cache: ImageCache, decoded: list[int]) -> None:
    verify_images(count_reads(photos), cache=cache)
    assert len(verify_images(count_reads(photos), cache=cache, channels=2).bad) == 6
    assert len(decoded) == 12


@pytest.mark.parametrize("layout", ["webdataset", "parquet"])
def test_images_in_archives_are_cached(layout: str, tmp_path: Path, cache: ImageCache, decoded: list[int]) -> None:
    dataset = open_dataset(parquet(tmp_path) if layout == "parquet" else webdataset_cls(tmp_path))
    everything = ConcatSource(list(dataset.splits.values()))
    verify_images(everything, cache=cache)
    total = len(decoded)
    assert total == len(everything)
    for source in dataset.splits.values():
        reads = CountingSource(source)
        verify_images(reads, cache=cache)
        contents = fingerprint_contents(reads, cache=cache)
        assert reads.reads == []
        assert np.array_equal(contents.digests[:, 0], [source.checksum(index)[0] for index in range(len(source))])
    assert len(decoded) == total


def test_damaged_cache_is_replaced(photos: Path, cache: ImageCache, caplog: pytest.LogCaptureFixture) -> None:
    assert cache.path is not None
    path = cache.path
    path.write_bytes(b"noise" * 1000)
    assert verify_images(count_reads(photos), cache=cache).bad == []
    assert "not a database" in caplog.text
    again = ImageCache(path)
    verify_images(count_reads(photos), cache=again)
    source = count_reads(photos)
    verify_images(source, cache=again)
    assert source.reads == []


def test_locked_cache_does_not_fail_the_run(photos: Path, cache: ImageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> sqlite3.Connection:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr("vitkit.data.image_cache.sqlite3.connect", fail)
    assert verify_images(count_reads(photos), cache=cache).bad == []


def test_fingerprint_reads_nothing_after_verification(photos: Path, cache: ImageCache) -> None:
    verify_images(count_reads(photos), cache=cache)
    source = count_reads(photos)
    first = fingerprint_contents(source, cache=cache)
    assert source.reads == []
    assert first.checksum == fingerprint_contents(count_reads(photos), cache=ImageCache(None)).checksum


def test_files_are_examined_once_for_verification_and_fingerprint(
    photos: Path, cache: ImageCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "dog" / "3.png").write_bytes(b"broken")
    source = count_reads(photos)
    verified = verify_images(source, cache=cache)
    good = exclude_files(source, verified.bad)
    parts = hold_out(good, fraction=0.5)
    expected = [fingerprint_contents(part, cache=cache) for part in parts]
    source.reads.clear()
    monkeypatch.setattr(image_cache, "_read_status", pytest.fail)
    for part, known in zip(parts, expected, strict=True):
        fingerprint = fingerprint_contents(part, cache=cache, verified=[verified])
        assert describe_changes(known, fingerprint) is None
        assert np.array_equal(fingerprint.statuses, known.statuses)
        assert fingerprint.checksum == known.checksum
    assert source.reads == []


def test_images_that_were_not_verified_are_read(photos: Path) -> None:
    first, second = map(CountingSource, hold_out(open_dataset(photos).first_split, fraction=0.5))
    verified = verify_images(first, cache=ImageCache(None))
    for source in (second, ConcatSource([first, second])):
        fingerprint = fingerprint_contents(source, cache=ImageCache(None), verified=[verified])
        assert fingerprint.checksum == fingerprint_contents(source, cache=ImageCache(None)).checksum
        assert fingerprint.digests.any(axis=1).all()


def test_previous_fingerprint_serves_as_cache(photos: Path, tmp_path: Path) -> None:
    fingerprint_contents(count_reads(photos), cache=ImageCache(None)).save(tmp_path / "fingerprint.npz")
    previous = Fingerprint.load(tmp_path / "fingerprint.npz")
    os.utime(photos / "dog" / "0.png", ns=(0, 0))
    source = count_reads(photos)
    now = fingerprint_contents(source, cache=ImageCache(None), previous=previous)
    assert source.reads == ["dog/0.png"]
    assert describe_changes(previous, now) is None


def test_swapped_class_directories_are_described(photos: Path, cache: ImageCache) -> None:
    for file in photos.rglob("*.png"):
        os.utime(file, ns=(0, 0))
    before = fingerprint_contents(count_reads(photos), cache=cache)
    (photos / "cat").rename(photos / "other")
    (photos / "dog").rename(photos / "cat")
    (photos / "other").rename(photos / "dog")
    after = fingerprint_contents(count_reads(photos), cache=cache)
    expected = "6 images with other contents: cat/0.png, cat/1.png, cat/2.png and 3 more"
    assert describe_changes(before, after) == expected


def test_overwritten_file_with_same_size_and_time_is_found(photos: Path, cache: ImageCache) -> None:
    before, file = fingerprint_contents(count_reads(photos), cache=cache), photos / "cat" / "0.png"
    status = file.stat()
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = fingerprint_contents(count_reads(photos), cache=cache)
    assert describe_changes(before, after) == "1 image with other contents: cat/0.png"


def test_added_removed_and_relabeled_images_are_described(tmp_path: Path, cache: ImageCache) -> None:
    def fingerprint_lines(lines: str) -> Fingerprint:
        (tmp_path / "labels.csv").write_text("file_name,label\n" + lines)
        return fingerprint_contents(open_dataset(tmp_path).first_split, cache=cache)

    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    before = fingerprint_lines("0.png,cat\n1.png,dog\n2.png,dog\n")
    after = fingerprint_lines("0.png,dog\n1.png,dog\n3.png,cat\n")
    assert describe_changes(before, after) == (
        "1 image with another label: 0.png (cat → dog); 1 image added: 3.png; 1 image removed: 2.png"
    )
    assert describe_changes(before, before) is None


def test_fingerprint_of_generated_images_draws_none() -> None:
    source = CountingSource(open_dataset("fractals").splits["val"])
    fingerprint = fingerprint_contents(source, cache=ImageCache(None))
    assert len(np.unique(fingerprint.digests, axis=0)) == len(source)


@pytest.mark.parametrize("content", [b"", b"noise", b"PK\x05\x06" + bytes(18)])
def test_damaged_fingerprint_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "fingerprint.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"damaged(?!.*allow_pickle)"):
        Fingerprint.load(tmp_path / "fingerprint.npz")


def test_missing_file_is_not_cached(photos: Path, cache: ImageCache) -> None:
    (photos / "cat" / "5.png").symlink_to(photos / "nowhere")
    fingerprint = fingerprint_contents(count_reads(photos), cache=cache)
    assert not fingerprint.digests[3].any()
    assert [file.name for file in verify_images(count_reads(photos), cache=cache).bad] == ["cat/5.png"]
    (photos / "cat" / "5.png").unlink()
    (photos / "cat" / "5.png").write_bytes(png(5))
    assert verify_images(count_reads(photos), cache=cache).bad == []
