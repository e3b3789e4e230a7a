"""`vitkit predict`: one prediction per image, in every output format and after any interruption."""

import csv
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli.tiny_runs import Shell, assigned, photos

import vitkit
from vitkit.cli.main import main
from vitkit.inference import outputs, predictor, select

SHAPE = {
    "model.name": "Ti/16",
    "image_size": 16,
    "model.patch_size": 8,
    "model.settings": '["width=16","heads=2","depth=1","mlp_dim=16"]',
    "steps": 4,
    "batch_size": 8,
    "workers": 0,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predict")
    photos(path / "photos", each=6)
    assert main(["train", str(path / "photos"), "--out", str(path / "run"), *assigned(SHAPE, {})]) == 0
    return path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(trained / "run")
    photos(tmp_path / "photos", each=6)
    return Shell(capsys)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def write_archive(path: Path, image: Path) -> None:
    """Write a tar or parquet file with one image."""
    if path.suffix == ".tar":
        with tarfile.open(path, "w") as tar:
            tar.add(image, arcname=image.name)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = importlib.import_module("pyarrow").table({"image": [image.read_bytes()]})
        parquet.write_table(table, path)


def test_text_output_has_labels(shell: Shell) -> None:
    result = shell("predict", "run", "photos/cat/00.png")
    assert result.code == 0
    assert result.out.splitlines()[0] == "photos/cat/00.png"
    assert {line.split()[0] for line in result.out.splitlines()[1:]} == {"cat", "dog"}


def test_json_output_has_one_line_per_image(shell: Shell) -> None:
    result = shell("predict", "run", "photos/dog", "photos/cat/00.png", "--top", 1, "--json")
    actual = lines(result.out)
    assert [row["file"] for row in actual] == [f"photos/dog/{number:02}.png" for number in range(6)] + [
        "photos/cat/00.png"
    ]
    for row in actual:
        assert row.keys() == {"file", "predictions"}
        ((label, probability),) = [(each["label"], each["probability"]) for each in row["predictions"]]
        assert label in ("cat", "dog")
        assert 0.5 <= probability <= 1


def test_predictions_match_the_accuracy_of_eval(shell: Shell) -> None:
    evaluation = shell("eval", "run", "photos", "--workers", 0, "--json").json
    result = lines(shell("predict", "run", "photos", "--json").out)
    right = [row["predictions"][0]["label"] == row["file"].split("/")[1] for row in result]
    assert (sum(right) / len(right), len(right)) == (evaluation["top1"], evaluation["count"])


def test_all_file_formats_hold_the_same_predictions(shell: Shell, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    printed = lines(shell("predict", "run", "photos", "--features", "--json").out)
    for form in ("csv", "jsonl", "parquet"):
        result = shell("predict", "run", "photos", "--features", "--out", f"out/predictions.{form}")
        assert (result.code, result.out) == (0, f"out/predictions.{form}\n")
    assert lines(Path("out/predictions.jsonl").read_text()) == printed
    with Path("out/predictions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    table = pyarrow.read_table("out/predictions.parquet").to_pylist()
    for row, column, expected in zip(rows, table, printed, strict=True):
        best = expected["predictions"][0]
        assert (row["file"], row["label_1"], float(row["probability_1"])) == (
            expected["file"],
            best["label"],
            best["probability"],
        )
        assert [float(row[f"feature_{number}"]) for number in range(16)] == expected["features"]
        assert column["labels"] == [each["label"] for each in expected["predictions"]]
        assert column["features"] == pytest.approx(expected["features"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"predictions.{form}{end}" for form in ("csv", "jsonl", "parquet") for end in ("", ".json")
    }


def test_unreadable_images_are_reported_and_skipped(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "photos/cat/02.png").write_bytes(b"not an image")
    result = shell("predict", "run", "photos", "--out", "predictions.csv")
    assert result.code == 0
    assert "skipped photos/cat/02.png: " in result.stderr
    metadata = json.loads(Path("predictions.csv.json").read_text())
    assert (metadata["images"], [bad["file"] for bad in metadata["bad"]]) == (12, ["photos/cat/02.png"])
    printed = shell("predict", "run", "photos", "--json")
    assert printed.code == 0
    assert [row["file"] for row in lines(printed.out) if "error" in row] == ["photos/cat/02.png"]
    assert shell("predict", "run", "photos/cat/02.png").code == 1  # no prediction at all


def test_left_out_files_are_reported(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "photos/cat/9.svg").write_bytes(b"<svg/>")
    (tmp_path / "b.pdf").write_bytes(b"%PDF")
    result = shell("predict", "run", "photos", "b.pdf", "--workers", "0", "--json")
    assert result.code == 0
    assert len(lines(result.out)) == 13
    assert lines(result.out)[-1]["error"].startswith("not a JPEG")
    assert "left out 1 file that is not an image (1 .svg): photos/cat/9.svg" in result.stderr
    assert shell("predict", "run", "photos", "--workers", "0", "--out", "p.csv").code == 0
    assert "1 .svg" in shell("predict", "run", "photos", "--out", "p.csv").stderr


@pytest.mark.parametrize("name", ["notes.csv", "broken.tar", "broken.npz"])
def test_file_that_cannot_be_opened_does_not_stop_the_others(shell: Shell, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"a,b\n1,2\n")
    result = shell("predict", "run", "photos/cat/01.png", name, "--workers", "0", "--json")
    assert result.code == 0
    first, second = lines(result.out)
    assert "predictions" in first
    assert second["file"] == name
    assert second["error"]
    assert shell("predict", "run", name).code == 1


@pytest.mark.parametrize("suffix", [".parquet", ".tar"])
@pytest.mark.parametrize("images", ["mixed", "mixed/{0..2}"])
def test_damaged_archive_does_not_stop_the_others(shell: Shell, suffix: str, images: str) -> None:
    Path("mixed").mkdir()
    write_archive(Path(f"mixed/0{suffix}"), Path("photos/cat/01.png"))
    Path(f"mixed/1{suffix}").write_bytes(Path(f"mixed/0{suffix}").read_bytes()[:100])
    shutil.copy(f"mixed/0{suffix}", f"mixed/2{suffix}")
    result = shell("predict", "run", images if images == "mixed" else images + suffix, "--workers", "0", "--json")
    assert result.code == 0
    *rows, damaged = lines(result.out)
    assert [row["file"].split("/")[1] for row in rows] == [f"0{suffix}", f"2{suffix}"]
    assert all("predictions" in row for row in rows)
    assert damaged["file"] == f"mixed/1{suffix}"
    assert damaged["error"].startswith("is not a ")


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGINT"])
def test_interrupted_command_resumes(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_name: str
) -> None:
    options = ("--batch-size", 2, "--workers", 0)
    shell("predict", "run", "photos", "--out", "whole.jsonl", *options)
    compute = predictor.compute_outputs
    calls: list[int] = []

    def interrupt_third_batch(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), getattr(signal, signal_name))
        return compute(*arguments)

    monkeypatch.setattr(predictor, "compute_outputs", interrupt_third_batch)
    stopped = shell("predict", "run", "photos", "--out", "cut.jsonl", *options)
    assert (stopped.code, len(calls)) == (75, 3)
    assert not Path("cut.jsonl").exists()
    with Path("cut.jsonl.partial").open("ab") as file:
        file.write(b'{"file": "photos/ca')  # as after a power failure
    again = shell("predict", "run", "photos", "--out", "cut.jsonl", *options)
    assert (again.code, len(calls)) == (0, 6)  # each batch once
    assert "resuming after 6 of 12 images" in again.stderr
    assert Path("cut.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert not Path("cut.jsonl.partial").exists()


def test_completed_command_changes_nothing(shell: Shell) -> None:
    shell("predict", "run", "photos", "--out", "predictions.csv")
    before = Path("predictions.csv").stat().st_mtime_ns
    again = shell("predict", "run", "photos", "--out", "predictions.csv")
    assert (again.code, "already complete: predictions.csv" in again.stderr) == (0, True)
    assert Path("predictions.csv").stat().st_mtime_ns == before
    other = shell("predict", "run", "photos/cat", "--out", "predictions.csv")
    assert other.code == 1
    assert "predictions of another request" in other.stderr
    assert Path("predictions.csv").stat().st_mtime_ns == before


class KilledError(BaseException):
    """An exception that no code handles, like a kill."""


class Interrupter:
    """Kills `vitkit predict MODEL photos --out FILE` after its first batch of two."""

    def __init__(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shell, self.monkeypatch = shell, monkeypatch

    def __call__(self, model: str, out: str) -> None:
        compute, calls = predictor.compute_outputs, []

        def kill_second_batch(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise KilledError
            return compute(*arguments)

        with self.monkeypatch.context() as patch:
            patch.setattr(predictor, "compute_outputs", kill_second_batch)
            with pytest.raises(KilledError):
                self.shell("predict", model, "photos", "--out", out, "--batch-size", 2, "--workers", 0)


@pytest.fixture
def interrupt(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Interrupter:
    return Interrupter(shell, monkeypatch)


def test_partial_file_of_another_request_is_kept(shell: Shell, interrupt: Interrupter) -> None:
    interrupt("run", "predictions.jsonl")
    before = Path("predictions.jsonl.partial").read_bytes()
    result = shell("predict", "run", "photos", "--out", "predictions.jsonl", "--top", 1)
    assert (result.code, len(result.errors), len(result.hints)) == (1, 1, 1)
    assert "predictions.jsonl.partial already exists and holds the predictions of another request" in result.errors[0]
    assert Path("predictions.jsonl.partial").read_bytes() == before
    assert "resuming after 2 of 12 images" in shell("predict", "run", "photos", "--out", "predictions.jsonl").stderr


@pytest.mark.parametrize(
    "left", [b"", b'{"request": {"mod', b'{"request": {}, "fingerprints": {}}\n', b'{"request": {}}\n{"file']
)
def test_partial_file_without_predictions_is_replaced(shell: Shell, left: bytes) -> None:
    Path("predictions.jsonl.partial").write_bytes(left)
    assert shell("predict", "run", "photos", "--out", "predictions.jsonl").code == 0
    assert len(lines(Path("predictions.jsonl").read_text())) == 12


@pytest.mark.parametrize("byte", [b"\xff", b"\n", b"}"])
def test_damaged_line_of_a_partial_file_is_predicted_again(shell: Shell, interrupt: Interrupter, byte: bytes) -> None:
    interrupt("run", "predictions.jsonl")
    header, first, second = Path("predictions.jsonl.partial").read_bytes().splitlines(keepends=True)
    Path("predictions.jsonl.partial").write_bytes(header + first + second[:9] + byte + second[9:])
    result = shell("predict", "run", "photos", "--out", "predictions.jsonl")
    assert "resuming after 1 of 12 images" in result.stderr
    assert len(lines(Path("predictions.jsonl").read_text())) == 12


@pytest.mark.parametrize("change", ["added", "removed", "renamed"])
def test_changed_images_are_detected(shell: Shell, interrupt: Interrupter, change: str) -> None:
    assert shell("predict", "run", "photos", "--out", "done.jsonl").code == 0
    interrupt("run", "partial.jsonl")
    if change == "added":
        shutil.copy("photos/cat/00.png", "photos/cat/000.png")
    elif change == "removed":
        Path("photos/dog/05.png").unlink()
    else:
        Path("photos/dog/05.png").rename("photos/dog/05 again.png")
    for name, file in (("done.jsonl", "done.jsonl"), ("partial.jsonl", "partial.jsonl.partial")):
        before = Path(file).read_bytes()
        result = shell("predict", "run", "photos", "--out", name)
        assert (result.code, len(result.hints)) == (1, 1)
        assert f"{file} already exists, and the images changed since" in result.errors[0]
        assert Path(file).read_bytes() == before


def test_changed_weights_are_detected(shell: Shell, interrupt: Interrupter) -> None:
    model = vitkit.load("run")
    vitkit.save(model, "model")
    assert shell("predict", "model", "photos", "--out", "done.jsonl").code == 0
    interrupt("model", "partial.jsonl")
    vitkit.save(model, "model")  # the same ones again
    assert "already complete" in shell("predict", "model", "photos", "--out", "done.jsonl").stderr
    model.head.weight.data += 1.0
    vitkit.save(model, "model")
    for name, file in (("done.jsonl", "done.jsonl"), ("partial.jsonl", "partial.jsonl.partial")):
        result = shell("predict", "model", "photos", "--out", name)
        assert result.code == 1
        assert f"{file} already exists, and the weights changed since" in result.errors[0]


def test_file_without_fingerprints_counts_as_complete(shell: Shell) -> None:
    shell("predict", "run", "photos", "--out", "predictions.jsonl")
    metadata = json.loads(Path("predictions.jsonl.json").read_text())
    assert metadata.pop("fingerprints").keys() == {"images", "weights"}
    Path("predictions.jsonl.json").write_text(json.dumps(metadata))
    assert "already complete" in shell("predict", "run", "photos", "--out", "predictions.jsonl").stderr


@pytest.mark.parametrize("moment", ["before metadata", "before rename", "before cleanup"])
def test_kill_while_finalizing_loses_nothing(shell: Shell, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    shell("predict", "run", "photos", "--out", "whole.jsonl")

    def killed(*_: object) -> None:
        raise KilledError

    @contextmanager
    def never_renamed(path: Path) -> Iterator[Path]:
        yield path.with_name("aside")
        raise KilledError

    with monkeypatch.context() as patch:
        if moment == "before metadata":
            patch.setattr(outputs, "write_json", killed)
        elif moment == "before rename":
            patch.setattr(outputs, "atomic_write", never_renamed)
        else:
            patch.setattr(Path, "unlink", lambda path, **_: killed() if path.suffix == ".partial" else None)
        with pytest.raises(KilledError):
            shell("predict", "run", "photos", "--out", "cut.jsonl")
    assert Path("cut.jsonl.partial").exists()
    again = shell("predict", "run", "photos", "--out", "cut.jsonl")
    assert again.code == 0
    assert Path("cut.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert not Path("cut.jsonl.partial").exists()
    assert "already complete" in shell("predict", "run", "photos", "--out", "cut.jsonl").stderr


HOLDING = """
import fcntl, sys
with open("predictions.csv.partial", "ab+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_second_process_cannot_write_the_same_file(shell: Shell, interrupt: Interrupter) -> None:
    pytest.importorskip("fcntl", reason="this system has no file locks")
    interrupt("run", "predictions.csv")
    before = Path("predictions.csv.partial").read_bytes()
    with subprocess.Popen([sys.executable, "-c", HOLDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        result = shell("predict", "run", "photos", "--out", "predictions.csv")
        assert (result.code, len(result.hints)) == (1, 1)
        assert "another process is writing predictions.csv.partial" in result.errors[0]
        assert Path("predictions.csv.partial").read_bytes() == before
        other.communicate(timeout=60)
    assert shell("predict", "run", "photos", "--out", "predictions.csv").code == 0


@pytest.mark.parametrize("options", [(), ("--features", "--top", 1)])
def test_csv_files_of_all_processes_have_equal_columns(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...]
) -> None:
    for path in Path("photos/cat").iterdir():
        path.write_bytes(b"not an image")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert shell("predict", "run", "photos", "--out", "part.csv", *options).code == 0
    rows: list[list[list[str]]] = []
    for rank in range(2):
        with Path(f"part-{rank:05}-of-00002.csv").open(encoding="utf-8", newline="") as file:
            rows.append(list(csv.reader(file)))
    classes, features = (1, 16) if options else (2, 0)
    names = [f"{what}_{number + 1}" for number in range(classes) for what in ("label", "probability")]
    head = ["file", *names, *(f"feature_{number}" for number in range(features)), "error"]
    assert rows[0][0] == rows[1][0] == head
    assert {len(row) for part in rows for row in part} == {len(head)}
    assert [[bool(row[1]), bool(row[-1])] for part in rows for row in part[1:]] == [[False, True]] * 6 + [
        [True, False]
    ] * 6


def test_files_of_all_processes_cover_all_images(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell("predict", "run", "photos", "--out", "whole.jsonl")
    monkeypatch.setenv("WORLD_SIZE", "5")
    for rank in range(5):
        monkeypatch.setenv("RANK", str(rank))
        assert shell("predict", "run", "photos", "--out", "part.jsonl").code == 0
    parts = [Path(f"part-{rank:05}-of-00005.jsonl").read_text() for rank in range(5)]
    assert [len(lines(part)) for part in parts] == [2, 2, 3, 2, 3]
    together, whole = lines("".join(parts)), lines(Path("whole.jsonl").read_text())
    for one, other in zip(together, whole, strict=True):
        assert one["file"] == other["file"]
        assert one["predictions"][0]["label"] == other["predictions"][0]["label"]
        # Other batch sizes change the order of summation.
        assert one["predictions"][0]["probability"] == pytest.approx(other["predictions"][0]["probability"], abs=1e-6)


def test_tar_gives_the_predictions_of_its_files(shell: Shell) -> None:
    with tarfile.open("photos.tar", "w") as archive:
        for number, path in enumerate(sorted(Path("photos").rglob("*.png"))):
            archive.add(path, arcname=f"{number:02}.png")
    packed, loose = (lines(shell("predict", "run", path, "--json").out) for path in ("photos.tar", "photos"))
    assert [row["predictions"] for row in packed] == [row["predictions"] for row in loose]
    assert packed[0]["file"].startswith("photos.tar/")


def test_missing_pyarrow_is_reported_before_any_work(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    result = shell("predict", "run", "photos", "--out", "predictions.parquet")
    assert result.code == 1
    assert "parquet needs pyarrow" in result.stderr
    assert not Path("predictions.parquet.partial").exists()


def test_int8_reports_and_stores_agreement(shell: Shell) -> None:
    result = shell("predict", "run", "photos", "--out", "predictions.jsonl", "--precision", "int8")
    assert result.code == 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("int8 compared with fp32: ")]
    assert "of 12 images, logits differ by at most " in line
    metadata = json.loads(Path("predictions.jsonl.json").read_text())
    assert (metadata["precision"], metadata["merge"]) == ("int8", 0)
    assert metadata["engine"]
    assert metadata["agreement"]["images"] == 12
    assert 0 <= metadata["agreement"]["mean_difference"] <= metadata["agreement"]["largest_difference"] < 0.1
    assert metadata["request"]["precision"] == "int8"
    other = shell("predict", "run", "photos", "--out", "predictions.jsonl")
    assert (other.code, "predictions of another request" in other.stderr) == (1, True)
    again = shell("predict", "run", "photos", "--out", "predictions.jsonl", "--precision", "int8")
    assert (again.code, "already complete" in again.stderr, "compared with" in again.stderr) == (0, True, False)


def test_fp32_measures_no_agreement(shell: Shell) -> None:
    result = shell("predict", "run", "photos", "--out", "predictions.jsonl", "--precision", "fp32")
    assert "compared with" not in result.stderr
    metadata = json.loads(Path("predictions.jsonl.json").read_text())
    assert metadata["request"].keys() == {"model", "images", "top", "features", "part"}
    assert "agreement" not in metadata
    assert metadata["engine"]


def test_merged_tokens_report_agreement(shell: Shell) -> None:
    result = shell("predict", "run", "photos/cat", "--merge", 1, "--json")
    assert result.code == 0
    assert len(lines(result.out)) == 6
    assert "fp32, merging 1 token per layer compared with fp32: same top-1 class for " in result.stderr
    assert "engine: torch, packed, merging 1 token per layer; " in result.stderr


def test_calibration_images_are_used_for_agreement(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "photos/dog/00.png").write_bytes(b"not an image")
    result = shell("predict", "run", "photos/cat/00.png", "--precision", "bf16", "--calibration", "photos/dog")
    assert result.code == 0
    assert " of 5 images, logits" in result.stderr  # six, one unreadable


def test_agreement_is_unknown_without_readable_images(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "photos/dog/00.png").write_bytes(b"not an image")
    result = shell("predict", "run", "photos/dog/00.png", "--precision", "int8")
    assert (result.code, "agreement with fp32 is unknown" in result.stderr) == (1, True)


def test_empty_part_still_reports_agreement(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    result = shell("predict", "run", "photos/cat/00.png", "photos/dog/00.png", "--out", "a.csv", "--precision", "int8")
    assert result.code == 0
    metadata = json.loads(Path("a-00000-of-00003.csv.json").read_text())
    assert (metadata["images"], metadata["agreement"]["images"]) == (0, 2)


def test_completed_file_does_not_need_the_model(shell: Shell, tmp_path: Path) -> None:
    assert shell("predict", "run", "photos", "--out", "predictions.csv").code == 0
    (tmp_path / "run").unlink()
    again = shell("predict", "run", "photos", "--out", "predictions.csv")
    assert (again.code, "already complete" in again.stderr) == (0, True)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_nonfinite_output_is_an_error_in_valid_json(shell: Shell, precision: str) -> None:
    model = vitkit.load("run")
    model.head.weight.data.fill_(float("nan"))
    vitkit.save(model, "damaged")
    result = shell("predict", "damaged", "photos/cat", "--json", "--precision", precision)
    assert result.code == 1  # no prediction at all
    assert [set(row) for row in lines(result.out)] == [{"file", "error"}] * 6
    assert "NaN" not in result.out
    written = shell(
        "predict", "damaged", "photos/cat", "--out", "predictions.jsonl", "--precision", precision, "--json"
    )
    assert len(written.json["bad"]) == 6


def test_first_use_reports_the_native_build(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "needs_native_build", lambda *_, **__: True)
    result = shell("predict", "run", "photos/cat/00.png")
    assert result.code == 0
    assert result.stderr.count("building the native engine for this machine (once) …\n") == 1
    assert re.search(r"^built in \d+ s$", result.stderr, re.MULTILINE) or "build failed" in result.stderr
    assert shell("predict", "run", "photos/cat/00.png").out == result.out


def test_predictions_are_equal_without_a_compiler(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = lines(shell("predict", "run", "photos", "--json").out)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    select.try_build_native.cache_clear()
    try:
        result = shell("predict", "run", "photos", "--json")
    finally:
        select.try_build_native.cache_clear()
    assert result.code == 0
    assert result.stderr.count("the native engine is not available: no C++ compiler") == 1
    assert "building" not in result.stderr
    for one, other in zip(lines(result.out), usual, strict=True):
        assert one["predictions"][0]["label"] == other["predictions"][0]["label"]
        # fp32 guarantees logits within 1e-4, and probabilities differ by less.
        assert one["predictions"][0]["probability"] == pytest.approx(other["predictions"][0]["probability"], abs=1e-4)


def test_model_without_mergeable_tokens_is_rejected(shell: Shell) -> None:
    model = vitkit.create("Ti/16", image_size=32, num_classes=2, settings={"depth": 1, "positions.kind": "rotary"})
    vitkit.save(model, "rotary", labels=["cat", "dog"])
    result = shell("predict", "rotary", "photos", "--merge", 2)
    assert (result.code, len(result.errors), len(result.hints)) == (1, 1, 1)
    assert "tokens can be merged only if positions are added at the stem" in result.errors[0]


MISTAKES = [
    (["run", "missing.jpg"], "missing.jpg does not exist"),
    (["run", "photos", "--out", "predictions.txt"], "unknown suffix"),
    (["run", "photos", "--features"], "features are too long to print"),
    (["nowhere", "photos"], "nowhere"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_invalid_arguments_have_one_error_line(
    shell: Shell, tmp_path: Path, arguments: list[str], message: str
) -> None:
    before = sorted(tmp_path.iterdir())
    result = shell("predict", *arguments)
    assert result.code == 1
    assert len(result.errors) == 1
    assert message in result.errors[0]
    assert sorted(tmp_path.iterdir()) == before
