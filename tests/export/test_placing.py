"""Files are put where they belong whole or not at all, and what is somebody else's stays."""

import json
from pathlib import Path

import pytest

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
