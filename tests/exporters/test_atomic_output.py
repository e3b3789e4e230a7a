"""Exports appear completely or not at all, and files of others are kept."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from vitkit.core.errors import WeightsError
from vitkit.exporters.atomic_output import (
    find_damaged_file,
    read_checksums,
    write_checksums,
    write_directory,
    write_file,
)
from vitkit.weights import artifact as artifact_io


def fill(*names: str, asked: bool = True):  # type: ignore[no-untyped-def]
    def write(folder: Path) -> None:
        for name in names:
            (folder / name).write_text(f"new {name}")
        (folder / "verification.json").write_text(json.dumps({"request": {}} if asked else {}))
        write_checksums(folder)

    return write


def test_export_replaces_only_its_own_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_directory(out, fill("model.onnx", "labels.json"))
    (out / "mine.txt").write_text("mine")
    write_directory(out, fill("model.pt2", "labels.json"))
    assert sorted(path.name for path in out.iterdir()) == [
        "SHA256SUMS", "labels.json", "mine.txt", "model.pt2", "verification.json",
    ]  # fmt: skip
    assert find_damaged_file(out) is None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("with_verification", [False, True])
def test_files_with_foreign_checksums_are_kept(tmp_path: Path, with_verification: bool) -> None:
    (tmp_path / "image.iso").write_text("large")
    if with_verification:
        (tmp_path / "verification.json").write_text("[1, 2]")
    write_checksums(tmp_path)
    write_directory(tmp_path, fill("model.pt2"))
    assert (tmp_path / "image.iso").read_text() == "large"


def test_changed_files_are_kept_unless_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_directory(out, fill("model.onnx", "notes.md", "labels.json"))
    (out / "notes.md").write_text("mine by now")
    (out / "labels.json").write_text("mine, too")
    write_directory(out, fill("model.pt2", "labels.json"))
    assert (out / "notes.md").read_text() == "mine by now"
    assert (out / "labels.json").read_text() == "new labels.json"
    assert not (out / "model.onnx").exists()


def test_artifact_files_are_removed(tmp_path: Path) -> None:
    names = ("model.safetensors", "config.json", "labels.json", "reference.json")
    for folder in ("artifact", "other"):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(name)
    artifact_io.write_checksums(tmp_path / "artifact", names)
    (tmp_path / "other" / "checksums.json").write_text('{"my.iso": "00"}')
    for folder in ("artifact", "other"):
        write_directory(tmp_path / folder, fill("model.pt2"))
    gone = {"labels.json", "reference.json", "checksums.json"}
    assert not gone & {path.name for path in (tmp_path / "artifact").iterdir()}
    assert (tmp_path / "artifact" / "model.safetensors").exists()
    assert {*names, *gone} <= {path.name for path in (tmp_path / "other").iterdir()}


def test_directory_with_the_name_of_a_file_is_an_error(tmp_path: Path) -> None:
    write_directory(tmp_path / "out", fill("model.onnx"))
    (tmp_path / "out" / "model.pt2").mkdir()
    with pytest.raises(WeightsError, match=r"model\.pt2: a directory"):
        write_directory(tmp_path / "out", fill("model.pt2"))
    assert find_damaged_file(tmp_path / "out") is None
    assert (tmp_path / "out" / "model.onnx").exists()


def test_link_to_another_file_system_is_followed(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system here")
    with tempfile.TemporaryDirectory(dir=elsewhere) as place:
        (tmp_path / "out").symlink_to(place)
        write_directory(tmp_path / "out", fill("model.onnx"))
        write_directory(tmp_path / "out", fill("model.pt2"))
        assert sorted(path.name for path in Path(place).iterdir()) == ["SHA256SUMS", "model.pt2", "verification.json"]
        assert (tmp_path / "out").is_symlink()


def test_leftovers_of_killed_exports_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "out").mkdir()
    dead = [tmp_path / f".out.{gone.pid}.tmp", tmp_path / "out" / f".out.{gone.pid}.new.tmp"]
    alive = [tmp_path / f".out.{os.getppid()}.tmp", tmp_path / ".out.tmp", tmp_path / ".other.1.tmp"]
    for folder in (*dead, *alive):
        folder.mkdir()
        (folder / "half").write_text("half")
    write_directory(tmp_path / "out", fill("model.pt2"))
    assert not any(folder.exists() for folder in dead)
    assert all(folder.exists() for folder in alive)


def test_checksums_do_not_refer_to_other_directories(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out" / "verification.json").write_text('{"request": {}}')
    (tmp_path / "out" / "SHA256SUMS").write_text("00  ../precious\n00  /etc/hosts\nnonsense\n")
    assert read_checksums(tmp_path / "out") == {}
    write_directory(tmp_path / "out", fill("model.pt2"))
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("there", [False, True])
def test_errors_name_the_final_path(tmp_path: Path, there: bool) -> None:
    def fail(place: Path) -> None:
        raise WeightsError(f"{place}: is not good", hint="fix it")

    if there:
        (tmp_path / "out").mkdir()
        (tmp_path / "file.npz").write_text("old")
    for put, name in ((write_directory, "out"), (write_file, "file.npz")):
        with pytest.raises(WeightsError) as error:
            put(tmp_path / name, fail)
        assert (error.value.message, error.value.hint) == (f"{tmp_path / name}: is not good", "fix it")
    assert sorted(path.name for path in tmp_path.iterdir()) == (["file.npz", "out"] if there else [])


def test_changed_or_missing_file_is_named(tmp_path: Path) -> None:
    write_directory(tmp_path / "out", fill("a", "b"))
    (tmp_path / "out" / "b").write_text("changed")
    assert find_damaged_file(tmp_path / "out") == "b"
    (tmp_path / "out" / "a").unlink()
    assert find_damaged_file(tmp_path / "out") == "a"
