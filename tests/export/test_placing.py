"""Files are put where they belong whole or not at all, and what is somebody else's stays."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from vitkit.checkpoints import native
from vitkit.core.errors import WeightsError
from vitkit.export.placing import damaged, put_file, put_folder, read_sums, write_sums


def fill(*names: str, asked: bool = True):  # type: ignore[no-untyped-def]
    def write(folder: Path) -> None:
        for name in names:
            (folder / name).write_text(f"new {name}")
        (folder / "proof.json").write_text(json.dumps({"asked": {}} if asked else {}))
        write_sums(folder)

    return write


def test_of_what_was_there_an_export_replaces_its_own_files_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    put_folder(out, fill("model.onnx", "labels.json"))
    (out / "mine.txt").write_text("mine")
    put_folder(out, fill("model.pt2", "labels.json"))
    assert sorted(path.name for path in out.iterdir()) == [
        "SHA256SUMS", "labels.json", "mine.txt", "model.pt2", "proof.json",
    ]  # fmt: skip
    assert damaged(out) is None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("with_proof", [False, True])
def test_files_that_another_program_made_checksums_of_stay(tmp_path: Path, with_proof: bool) -> None:
    (tmp_path / "image.iso").write_text("large")
    if with_proof:
        (tmp_path / "proof.json").write_text("[1, 2]")
    write_sums(tmp_path)
    put_folder(tmp_path, fill("model.pt2"))
    assert (tmp_path / "image.iso").read_text() == "large"


def test_what_somebody_changed_since_an_export_stays_unless_it_is_written_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    put_folder(out, fill("model.onnx", "notes.md", "labels.json"))
    (out / "notes.md").write_text("mine by now")
    (out / "labels.json").write_text("mine, too")
    put_folder(out, fill("model.pt2", "labels.json"))
    assert (out / "notes.md").read_text() == "mine by now"
    assert (out / "labels.json").read_text() == "new labels.json"
    assert not (out / "model.onnx").exists()


def test_of_an_artefact_what_would_make_it_look_like_one_goes_and_of_others_it_stays(tmp_path: Path) -> None:
    names = ("model.safetensors", "config.json", "labels.json", "reference.json")
    for folder in ("artefact", "other"):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(name)
    native.write_checksums(tmp_path / "artefact", names)
    (tmp_path / "other" / "checksums.json").write_text('{"my.iso": "00"}')
    for folder in ("artefact", "other"):
        put_folder(tmp_path / folder, fill("model.pt2"))
    gone = {"labels.json", "reference.json", "checksums.json"}
    assert not gone & {path.name for path in (tmp_path / "artefact").iterdir()}
    assert (tmp_path / "artefact" / "model.safetensors").exists()
    assert {*names, *gone} <= {path.name for path in (tmp_path / "other").iterdir()}


def test_a_folder_in_the_way_is_an_error_before_anything_is_changed(tmp_path: Path) -> None:
    put_folder(tmp_path / "out", fill("model.onnx"))
    (tmp_path / "out" / "model.pt2").mkdir()
    with pytest.raises(WeightsError, match=r"model\.pt2: a folder"):
        put_folder(tmp_path / "out", fill("model.pt2"))
    assert damaged(tmp_path / "out") is None
    assert (tmp_path / "out" / "model.onnx").exists()


def test_through_a_link_to_another_file_system_all_is_written_there(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system here")
    with tempfile.TemporaryDirectory(dir=elsewhere) as place:
        (tmp_path / "out").symlink_to(place)
        put_folder(tmp_path / "out", fill("model.onnx"))
        put_folder(tmp_path / "out", fill("model.pt2"))
        assert sorted(path.name for path in Path(place).iterdir()) == ["SHA256SUMS", "model.pt2", "proof.json"]
        assert (tmp_path / "out").is_symlink()


def test_what_a_killed_export_left_is_removed_by_the_next_and_of_a_living_one_is_not(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "out").mkdir()
    dead = [tmp_path / f".out.{gone.pid}.tmp", tmp_path / "out" / f".out.{gone.pid}.new.tmp"]
    alive = [tmp_path / f".out.{os.getppid()}.tmp", tmp_path / ".out.tmp", tmp_path / ".other.1.tmp"]
    for folder in (*dead, *alive):
        folder.mkdir()
        (folder / "half").write_text("half")
    put_folder(tmp_path / "out", fill("model.pt2"))
    assert not any(folder.exists() for folder in dead)
    assert all(folder.exists() for folder in alive)


def test_checksums_never_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out" / "proof.json").write_text('{"asked": {}}')
    (tmp_path / "out" / "SHA256SUMS").write_text("00  ../precious\n00  /etc/hosts\nnonsense\n")
    assert read_sums(tmp_path / "out") == {}
    put_folder(tmp_path / "out", fill("model.pt2"))
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("there", [False, True])
def test_errors_name_the_place_that_the_user_chose(tmp_path: Path, there: bool) -> None:
    def fail(place: Path) -> None:
        raise WeightsError(f"{place}: is not good", hint="mend it")

    if there:
        (tmp_path / "out").mkdir()
        (tmp_path / "file.npz").write_text("old")
    for put, name in ((put_folder, "out"), (put_file, "file.npz")):
        with pytest.raises(WeightsError) as error:
            put(tmp_path / name, fail)
        assert (error.value.message, error.value.hint) == (f"{tmp_path / name}: is not good", "mend it")
    assert sorted(path.name for path in tmp_path.iterdir()) == (["file.npz", "out"] if there else [])


def test_a_changed_or_missing_file_is_named(tmp_path: Path) -> None:
    put_folder(tmp_path / "out", fill("a", "b"))
    (tmp_path / "out" / "b").write_text("changed")
    assert damaged(tmp_path / "out") == "b"
    (tmp_path / "out" / "a").unlink()
    assert damaged(tmp_path / "out") == "a"
