"""Detection of bad files, and their exclusion."""

import csv
import io
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vitkit.core.errors import DataError
from vitkit.data.dataset import ImageSource, StoredImage
from vitkit.data.verify import (
    BadFile,
    check_bad_fraction,
    exclude_files,
    map_images,
    read_bad_files,
    skip_unreadable,
    verify_images,
    write_bad_files,
)


class Listed(ImageSource):
    """Images from a list; an OSError in it is raised."""

    layout = "a list"
    classes = ("all",)

    def __init__(self, contents: list[StoredImage | OSError]) -> None:
        self.contents = contents
        self.labels = np.zeros(len(contents), dtype=np.int64)

    def name(self, index: int) -> str:
        return f"all/{index}.jpg"

    def read(self, index: int) -> StoredImage:
        content = self.contents[index]
        if isinstance(content, OSError):
            raise content
        return content


def jpeg(seed: int, side: int = 160) -> bytes:
    stream = io.BytesIO()
    colors = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(colors).save(stream, "JPEG")
    return stream.getvalue()


@pytest.fixture
def mixed() -> Listed:
    contents: list[StoredImage | OSError] = [jpeg(seed) for seed in range(60)]
    contents[3] = b""
    contents[17] = contents[17][: len(contents[17]) // 2]
    contents[40] = OSError(13, "Permission denied")
    contents[41] = b"<html>"
    contents[59] = b"\x89PNG\r\n\x1a\n"
    return Listed(contents)


BAD = [
    BadFile("all/3.jpg", "the file is empty"),
    BadFile("all/17.jpg", "the file is truncated"),
    BadFile("all/40.jpg", "cannot be read: permission denied"),
    BadFile("all/41.jpg", "not a JPEG, PNG, GIF, BMP, TIFF, WEBP, PPM, AVIF or HEIF file"),
    BadFile("all/59.jpg", "damaged PNG file: its header cannot be read"),
]


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_bad_files_are_named_with_reasons(mixed, workers):
    told: list[int] = []
    assert verify_images(mixed, workers=workers, progress=told.append).bad == BAD
    assert told == [1] * 60


def test_command_in_the_hint_quotes_the_path():
    with pytest.raises(DataError, match="none of the 2 images can be read") as info:
        skip_unreadable(Listed([b"", b""]), path="my photos")
    assert "vitkit data check 'my photos'" in info.value.hint


def test_empty_source_has_no_bad_files():
    assert verify_images(Listed([]), workers=2).bad == []


def test_channels_are_checked():
    source = Listed([jpeg(0, side=64), jpeg(1, side=32), np.zeros((8, 8, 2), dtype=np.uint8)])
    assert [file.name for file in verify_images(source).bad] == ["all/2.jpg"]
    assert [file.name for file in verify_images(source, channels=2).bad] == ["all/0.jpg", "all/1.jpg"]


def _survive_signals(source: ImageSource, index: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    return index


def test_workers_ignore_signals():
    assert list(map_images(Listed([b""] * 30), _survive_signals, workers=2)) == list(range(30))


def _die(source: ImageSource, index: int) -> int:
    if index == 20:
        os._exit(9)
    return index


def test_dead_worker_is_an_error_with_a_position():
    with pytest.raises(DataError, match=r"a process died while decoding all/\d+\.jpg"):
        list(map_images(Listed([b""] * 30), _die, workers=2))


@pytest.mark.skipif(sys.platform != "linux", reason="kills a process group's leader")
def test_workers_exit_when_the_parent_is_killed():
    script = """
import threading
import numpy as np
from vitkit.data.dataset import ImageSource
from vitkit.data.verify import map_images

class Slow(ImageSource):
    layout, classes, labels = "slow", (), np.zeros(100, dtype=np.int64)
    def name(self, index):
        return str(index)
    def read(self, index):
        return b""

def work(source, index):
    if index == 0:
        return 0
    if index >= 8:
        threading.Event().wait()
    return index

for result in map_images(Slow(), work, workers=3):
    print(result, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        process.kill()
        process.stdout.read()  # the workers hold the pipe open: this returns when the last one has exited


# Bad files, kept and left out


def test_bad_files_round_trip(tmp_path):
    names = [
        "=1+2.jpg",
        "+a",
        "-b",
        "@c",
        'quote".jpg',
        "comma,.jpg",
        "line\nbreak",
        "carriage\rreturn",
        "ü",
        "\udcff",
        "",
    ]
    bad = [BadFile(name, f"reason, {name}") for name in names]
    write_bad_files(tmp_path / "bad_files.csv", bad)
    assert read_bad_files(tmp_path / "bad_files.csv") == bad


def test_list_of_bad_files_is_csv(tmp_path):
    write_bad_files(tmp_path / "bad_files.csv", BAD)
    with (tmp_path / "bad_files.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {"file": "all/3.jpg", "reason": "the file is empty"}
    assert len(rows) == 5
    write_bad_files(tmp_path / "none.csv", [])
    assert read_bad_files(tmp_path / "none.csv") == []


@pytest.mark.parametrize("text", ["", "file,cause\r\n", "file,reason\r\na\r\n"])
def test_other_csv_is_rejected(tmp_path, text):
    (tmp_path / "x.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="not a list of bad files"):
        read_bad_files(tmp_path / "x.csv")


def test_missing_list_of_bad_files_is_named(tmp_path):
    with pytest.raises(DataError, match=r"x\.csv: No such file"):
        read_bad_files(tmp_path / "x.csv")


def test_too_many_bad_files_are_an_error():
    check_bad_fraction(BAD, total=50, max_fraction=0.1)
    check_bad_fraction([], total=0, max_fraction=0)
    with pytest.raises(DataError, match=r"5 of 49 images .*all/3\.jpg.*all/17\.jpg.*all/40\.jpg.*and 2 more") as caught:
        check_bad_fraction(BAD, total=49, max_fraction=0.1)
    assert "all/41.jpg" not in str(caught.value)
    assert caught.value.hint


def test_excluding_bad_files_equals_never_having_them(mixed):
    rest = exclude_files(mixed, BAD)
    assert [rest.name(index) for index in range(len(rest))] == [
        f"all/{index}.jpg" for index in range(60) if index not in (3, 17, 40, 41, 59)
    ]
    assert verify_images(rest).bad == []


def test_source_without_bad_files_is_unchanged(mixed):
    assert exclude_files(mixed, []) is mixed
    assert exclude_files(mixed, [BadFile("other/1.jpg", "the file is empty")]) is mixed
