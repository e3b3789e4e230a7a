"""Datasets whose lists, headers or links would cost gigabytes or minutes are refused with the reason."""

import tarfile
from pathlib import Path

import pytest
from data.layouts import samples, tar_bytes, write

from vitkit.core.errors import DataError
from vitkit.data.layouts import files, manifests
from vitkit.data.layouts.registry import open_dataset

GIGABYTES = 3 << 30
ROWS = {"metadata.csv": b"file_name,label\na.png,a\n", "metadata.jsonl": b'{"file_name": "a.png", "label": "a"}\n'}


def sparse(path: Path, content: bytes) -> Path:
    """Write a file that seems to have three gigabytes and takes none on the disk."""
    write(path, content)
    with path.open("r+b") as file:
        file.truncate(GIGABYTES)
    return path


@pytest.mark.parametrize("name", ROWS)
def test_endless_line_of_a_manifest_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.png", samples()[0].png)
    sparse(tmp_path / name, ROWS[name])
    with pytest.raises(DataError, match=r"line \d is too long"):
        open_dataset(tmp_path)


def test_endless_list_of_classes_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "1.tar", tar_bytes({"1.png": samples()[0].png, "1.cls": b"0"}))
    sparse(tmp_path / "classes.txt", b"a\n")
    with pytest.raises(DataError, match="too many bytes"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_endless_header_of_a_tar_is_refused(tmp_path: Path, kind: bytes) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, GIGABYTES - 10_240
    with pytest.raises(DataError, match="has a header of 3,221,"):
        open_dataset(sparse(tmp_path / "x.tar", header.tobuf(tarfile.GNU_FORMAT)))


@pytest.mark.parametrize(
    ("name", "message"), [("{}.png", "1000 of the first 1000 files missing"), ("a.png", "line 3 repeats a.png")]
)
def test_reading_stops_after_missing_or_repeated_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    rows = 0
    parse_row = manifests.parse_row

    def count_rows(*args: object, **kwargs: object) -> manifests.ManifestRow:
        nonlocal rows
        rows += 1
        return parse_row(*args, **kwargs)

    monkeypatch.setattr(manifests, "parse_row", count_rows)
    write(tmp_path / "a.png", samples()[0].png)
    write(tmp_path / "labels.csv", "file_name,label\n" + "".join(f"{name.format(row)},a\n" for row in range(5_000)))
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path)
    assert rows <= manifests.MAX_MISSING


def test_links_are_followed_a_bounded_number_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for level in range(25):
        (tmp_path / f"{level}").mkdir()
        for link in ("a", "b"):
            (tmp_path / f"{level}" / link).symlink_to(tmp_path / f"{level + 1}")
    write(tmp_path / "25/1.png", samples()[0].png)
    visits, scandir = [], files.os.scandir
    monkeypatch.setattr(files.os, "scandir", lambda path: visits.append(path) or scandir(path))
    with pytest.raises(DataError, match="on too many paths"):
        list(files.walk_files(tmp_path / "0"))
    assert len(visits) <= 26 * files.MAX_VISITS
