"""`vitkit predict`: every image has its answer, once, whatever interrupts, and the same in every form of file."""

import csv
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
from vitkit.engine import choose
from vitkit.predict import stream, tables

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
    place = tmp_path_factory.mktemp("predicted")
    photos(place / "photos", each=6)
    assert main(["train", str(place / "photos"), "--out", str(place / "run"), *assigned(SHAPE, {})]) == 0
    return place


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(trained / "run")
    photos(tmp_path / "photos", each=6)
    return Shell(capsys)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_an_image_is_answered_with_labels_and_shares(shell: Shell) -> None:
    said = shell("predict", "run", "photos/cat/00.png")
    assert said.code == 0
    assert said.out.splitlines()[0] == "photos/cat/00.png"
    assert {line.split()[0] for line in said.out.splitlines()[1:]} == {"cat", "dog"}


def test_json_is_a_line_an_image_as_scripts_rely_on(shell: Shell) -> None:
    said = shell("predict", "run", "photos/dog", "photos/cat/00.png", "--top", 1, "--json")
    found = lines(said.out)
    assert [row["file"] for row in found] == [f"photos/dog/{number:02}.png" for number in range(6)] + [
        "photos/cat/00.png"
    ]
    for row in found:
        assert row.keys() == {"file", "predictions"}
        ((label, share),) = [(each["label"], each["probability"]) for each in row["predictions"]]
        assert label in ("cat", "dog")
        assert 0.5 <= share <= 1


def test_predict_finds_what_eval_counts(shell: Shell) -> None:
    judged = shell("eval", "run", "photos", "--workers", 0, "--json").json
    found = lines(shell("predict", "run", "photos", "--json").out)
    right = [row["predictions"][0]["label"] == row["file"].split("/")[1] for row in found]
    assert (sum(right) / len(right), len(right)) == (judged["top1"], judged["count"])


def test_all_forms_of_file_say_the_same(shell: Shell, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    printed = lines(shell("predict", "run", "photos", "--features", "--json").out)
    for form in ("csv", "jsonl", "parquet"):
        said = shell("predict", "run", "photos", "--features", "--out", f"made/answers.{form}")
        assert (said.code, said.out) == (0, f"made/answers.{form}\n")
    assert lines(Path("made/answers.jsonl").read_text()) == printed
    with Path("made/answers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    table = pyarrow.read_table("made/answers.parquet").to_pylist()
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
    assert {path.name for path in (tmp_path / "made").iterdir()} == {
        f"answers.{form}{end}" for form in ("csv", "jsonl", "parquet") for end in ("", ".json")
    }


def test_bad_images_are_named_and_the_others_answered(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "photos/cat/02.png").write_bytes(b"no picture")
    said = shell("predict", "run", "photos", "--out", "answers.csv")
    assert said.code == 0
    assert "left out photos/cat/02.png: " in said.talk
    about = json.loads(Path("answers.csv.json").read_text())
    assert (about["images"], [bad["file"] for bad in about["bad"]]) == (12, ["photos/cat/02.png"])
    printed = shell("predict", "run", "photos", "--json")
    assert printed.code == 0
    assert [row["file"] for row in lines(printed.out) if "error" in row] == ["photos/cat/02.png"]
    assert shell("predict", "run", "photos/cat/02.png").code == 1  # nothing was answered


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGINT"])
def test_an_interrupted_command_goes_on_where_it_was(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_name: str
) -> None:
    options = ("--batch-size", 2, "--workers", 0)
    shell("predict", "run", "photos", "--out", "whole.jsonl", *options)
    computed = stream.computed
    asked: list[int] = []

    def asked_to_stop(*arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == 3:
            os.kill(os.getpid(), getattr(signal, signal_name))
        return computed(*arguments)

    monkeypatch.setattr(stream, "computed", asked_to_stop)
    stopped = shell("predict", "run", "photos", "--out", "cut.jsonl", *options)
    assert (stopped.code, len(asked)) == (75, 3)
    assert not Path("cut.jsonl").exists()
    with Path("cut.jsonl.partial").open("ab") as file:
        file.write(b'{"file": "photos/ca')  # as a power cut leaves it
    again = shell("predict", "run", "photos", "--out", "cut.jsonl", *options)
    assert (again.code, len(asked)) == (0, 6)  # each batch once
    assert "going on after 6 of 12 images" in again.talk
    assert Path("cut.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert not Path("cut.jsonl.partial").exists()


def test_a_finished_command_says_so_and_changes_nothing(shell: Shell) -> None:
    shell("predict", "run", "photos", "--out", "answers.csv")
    before = Path("answers.csv").stat().st_mtime_ns
    again = shell("predict", "run", "photos", "--out", "answers.csv")
    assert (again.code, "done already: answers.csv" in again.talk) == (0, True)
    assert Path("answers.csv").stat().st_mtime_ns == before
    other = shell("predict", "run", "photos/cat", "--out", "answers.csv")
    assert other.code == 1
    assert "answers another question" in other.talk
    assert Path("answers.csv").stat().st_mtime_ns == before


class KilledError(BaseException):
    """What nobody expects, and nobody handles."""


class Interrupter:
    """Lets `vitkit predict run photos --out FILE` be killed after its first batch of two."""

    def __init__(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shell, self.monkeypatch = shell, monkeypatch

    def __call__(self, model: str, out: str) -> None:
        computed, asked = stream.computed, []

        def killed(*arguments: Any) -> Any:
            asked.append(1)
            if len(asked) == 2:
                raise KilledError
            return computed(*arguments)

        with self.monkeypatch.context() as patch:
            patch.setattr(stream, "computed", killed)
            with pytest.raises(KilledError):
                self.shell("predict", model, "photos", "--out", out, "--batch-size", 2, "--workers", 0)


@pytest.fixture
def interrupted(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Interrupter:
    return Interrupter(shell, monkeypatch)


def test_answers_of_another_question_are_not_gone_on_with_and_not_lost(shell: Shell, interrupted: Interrupter) -> None:
    interrupted("run", "answers.jsonl")
    before = Path("answers.jsonl.partial").read_bytes()
    said = shell("predict", "run", "photos", "--out", "answers.jsonl", "--top", 1)
    assert (said.code, len(said.errors), len(said.hints)) == (1, 1, 1)
    assert "answers.jsonl.partial is there already, and answers another question" in said.errors[0]
    assert Path("answers.jsonl.partial").read_bytes() == before
    assert "going on after 2 of 12 images" in shell("predict", "run", "photos", "--out", "answers.jsonl").talk


@pytest.mark.parametrize("left", [b"", b'{"asked": {"mod', b'{"asked": {}, "seen": {}}\n', b'{"asked": {}}\n{"file'])
def test_where_no_answer_is_lost_another_question_begins_anew(shell: Shell, left: bytes) -> None:
    Path("answers.jsonl.partial").write_bytes(left)
    assert shell("predict", "run", "photos", "--out", "answers.jsonl").code == 0
    assert len(lines(Path("answers.jsonl").read_text())) == 12


@pytest.mark.parametrize("change", ["added", "removed", "renamed"])
def test_changed_images_are_noticed(shell: Shell, interrupted: Interrupter, change: str) -> None:
    assert shell("predict", "run", "photos", "--out", "done.jsonl").code == 0
    interrupted("run", "begun.jsonl")
    if change == "added":
        shutil.copy("photos/cat/00.png", "photos/cat/000.png")
    elif change == "removed":
        Path("photos/dog/05.png").unlink()
    else:
        Path("photos/dog/05.png").rename("photos/dog/05 again.png")
    for name, file in (("done.jsonl", "done.jsonl"), ("begun.jsonl", "begun.jsonl.partial")):
        before = Path(file).read_bytes()
        said = shell("predict", "run", "photos", "--out", name)
        assert (said.code, len(said.hints)) == (1, 1)
        assert f"{file} is there already, and the images changed since" in said.errors[0]
        assert Path(file).read_bytes() == before


def test_changed_weights_are_noticed(shell: Shell, interrupted: Interrupter) -> None:
    model = vitkit.load("run")
    vitkit.save(model, "model")
    assert shell("predict", "model", "photos", "--out", "done.jsonl").code == 0
    interrupted("model", "begun.jsonl")
    vitkit.save(model, "model")  # the same ones again
    assert "done already" in shell("predict", "model", "photos", "--out", "done.jsonl").talk
    model.head.weight.data += 1.0
    vitkit.save(model, "model")
    for name, file in (("done.jsonl", "done.jsonl"), ("begun.jsonl", "begun.jsonl.partial")):
        said = shell("predict", "model", "photos", "--out", name)
        assert said.code == 1
        assert f"{file} is there already, and the weights changed since" in said.errors[0]


def test_files_of_answers_from_before_there_were_marks_are_still_done(shell: Shell) -> None:
    shell("predict", "run", "photos", "--out", "answers.jsonl")
    about = json.loads(Path("answers.jsonl.json").read_text())
    assert about.pop("seen").keys() == {"images", "weights"}
    Path("answers.jsonl.json").write_text(json.dumps(about))
    assert "done already" in shell("predict", "run", "photos", "--out", "answers.jsonl").talk


@pytest.mark.parametrize("moment", ["before what is known of them", "before their file", "before what is left over"])
def test_a_kill_while_the_file_is_finished_costs_nothing(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    shell("predict", "run", "photos", "--out", "whole.jsonl")

    def killed(*_: object) -> None:
        raise KilledError

    @contextmanager
    def never_named(path: Path) -> Iterator[Path]:
        yield path.with_name("aside")
        raise KilledError

    with monkeypatch.context() as patch:
        if moment == "before what is known of them":
            patch.setattr(tables, "write_text", killed)
        elif moment == "before their file":
            patch.setattr(tables, "written_aside", never_named)
        else:
            patch.setattr(Path, "unlink", lambda path, **_: killed() if path.suffix == ".partial" else None)
        with pytest.raises(KilledError):
            shell("predict", "run", "photos", "--out", "cut.jsonl")
    assert Path("cut.jsonl.partial").exists()
    again = shell("predict", "run", "photos", "--out", "cut.jsonl")
    assert again.code == 0
    assert Path("cut.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert not Path("cut.jsonl.partial").exists()
    assert "done already" in shell("predict", "run", "photos", "--out", "cut.jsonl").talk


HOLDING = """
import fcntl, sys
with open("answers.csv.partial", "ab+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_do_not_write_one_file(shell: Shell, interrupted: Interrupter) -> None:
    pytest.importorskip("fcntl", reason="this system has no such locks")
    interrupted("run", "answers.csv")
    before = Path("answers.csv.partial").read_bytes()
    with subprocess.Popen([sys.executable, "-c", HOLDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        said = shell("predict", "run", "photos", "--out", "answers.csv")
        assert (said.code, len(said.hints)) == (1, 1)
        assert "another process is writing answers.csv.partial" in said.errors[0]
        assert Path("answers.csv.partial").read_bytes() == before
        other.communicate(timeout=60)
    assert shell("predict", "run", "photos", "--out", "answers.csv").code == 0


@pytest.mark.parametrize("options", [(), ("--features", "--top", 1)])
def test_the_csv_parts_of_several_processes_have_the_same_columns(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...]
) -> None:
    for path in Path("photos/cat").iterdir():
        path.write_bytes(b"no picture")
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


def test_the_parts_of_several_processes_are_the_whole(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
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
        # Batches of other sizes: matrix products sum in another order.
        assert one["predictions"][0]["probability"] == pytest.approx(other["predictions"][0]["probability"], abs=1e-6)


def test_a_tar_is_answered_as_the_folder_in_it(shell: Shell) -> None:
    with tarfile.open("photos.tar", "w") as archive:
        for number, path in enumerate(sorted(Path("photos").rglob("*.png"))):
            archive.add(path, arcname=f"{number:02}.png")
    packed, loose = (lines(shell("predict", "run", place, "--json").out) for place in ("photos.tar", "photos"))
    assert [row["predictions"] for row in packed] == [row["predictions"] for row in loose]
    assert packed[0]["file"].startswith("photos.tar/")


def test_a_missing_library_is_found_before_any_work(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    said = shell("predict", "run", "photos", "--out", "answers.parquet")
    assert said.code == 1
    assert "parquet needs pyarrow" in said.talk
    assert not Path("answers.parquet.partial").exists()


def test_fewer_bits_say_how_far_they_agree_and_the_file_remembers(shell: Shell) -> None:
    said = shell("predict", "run", "photos", "--out", "answers.jsonl", "--precision", "int8")
    assert said.code == 0
    (line,) = [line for line in said.talk.splitlines() if line.startswith("int8 beside fp32 as written: ")]
    assert "of 12 images, logits at most " in line
    about = json.loads(Path("answers.jsonl.json").read_text())
    assert (about["precision"], about["merge"]) == ("int8", 0)
    assert about["engine"]
    assert about["agreement"]["images"] == 12
    assert 0 <= about["agreement"]["mean_difference"] <= about["agreement"]["largest_difference"] < 0.1
    assert about["asked"]["precision"] == "int8"
    other = shell("predict", "run", "photos", "--out", "answers.jsonl")
    assert (other.code, "answers another question" in other.talk) == (1, True)
    again = shell("predict", "run", "photos", "--out", "answers.jsonl", "--precision", "int8")
    assert (again.code, "done already" in again.talk, "beside fp32" in again.talk) == (0, True, False)


def test_in_fp32_nothing_is_measured_and_older_files_of_answers_stay_valid(shell: Shell) -> None:
    said = shell("predict", "run", "photos", "--out", "answers.jsonl", "--precision", "fp32")
    assert "beside fp32" not in said.talk
    about = json.loads(Path("answers.jsonl.json").read_text())
    assert about["asked"].keys() == {"model", "images", "top", "features", "part"}
    assert "agreement" not in about
    assert about["engine"]


def test_merged_tokens_say_how_far_they_agree(shell: Shell) -> None:
    said = shell("predict", "run", "photos/cat", "--merge", 1, "--json")
    assert said.code == 0
    assert len(lines(said.out)) == 6
    assert "fp32, 1 token merged a layer beside fp32 as written: same top-1 class for " in said.talk
    assert "engine: torch, prepacked, 1 token merged a layer; " in said.talk


def test_agreement_is_measured_on_calibration_images_where_given(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "photos/dog/00.png").write_bytes(b"no picture")
    said = shell("predict", "run", "photos/cat/00.png", "--precision", "bf16", "--calibration", "photos/dog")
    assert said.code == 0
    assert " of 5 images, logits" in said.talk  # six, and one is bad


def test_where_no_image_can_be_read_agreement_is_not_known(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "photos/dog/00.png").write_bytes(b"no picture")
    said = shell("predict", "run", "photos/dog/00.png", "--precision", "int8")
    assert (said.code, "agreement with fp32 is not known" in said.talk) == (1, True)


def test_a_part_without_images_knows_how_far_the_others_agree(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    said = shell("predict", "run", "photos/cat/00.png", "photos/dog/00.png", "--out", "a.csv", "--precision", "int8")
    assert said.code == 0
    about = json.loads(Path("a-00000-of-00003.csv.json").read_text())
    assert (about["images"], about["agreement"]["images"]) == (0, 2)


def test_what_is_done_needs_no_model_any_more(shell: Shell, tmp_path: Path) -> None:
    assert shell("predict", "run", "photos", "--out", "answers.csv").code == 0
    (tmp_path / "run").unlink()
    again = shell("predict", "run", "photos", "--out", "answers.csv")
    assert (again.code, "done already" in again.talk) == (0, True)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_an_answer_that_is_no_number_is_an_error_and_stays_json(shell: Shell, precision: str) -> None:
    model = vitkit.load("run")
    model.head.weight.data.fill_(float("nan"))
    vitkit.save(model, "damaged")
    said = shell("predict", "damaged", "photos/cat", "--json", "--precision", precision)
    assert said.code == 1  # not one was answered
    assert [set(row) for row in lines(said.out)] == [{"file", "error"}] * 6
    assert "NaN" not in said.out
    written = shell("predict", "damaged", "photos/cat", "--out", "answers.jsonl", "--precision", precision, "--json")
    assert len(written.json["bad"]) == 6


def test_the_first_start_says_that_it_builds(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "needs_building", lambda *_, **__: True)
    said = shell("predict", "run", "photos/cat/00.png")
    assert said.code == 0
    assert said.talk.count("building the fast engine for this machine, once …\n") == 1
    assert re.search(r"^built in \d+ s$", said.talk, re.MULTILINE) or "it could not be built" in said.talk
    assert shell("predict", "run", "photos/cat/00.png").out == said.out


def test_without_a_compiler_the_answers_are_the_same(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = lines(shell("predict", "run", "photos", "--json").out)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    choose.build_failure.cache_clear()
    try:
        said = shell("predict", "run", "photos", "--json")
    finally:
        choose.build_failure.cache_clear()
    assert said.code == 0
    assert said.talk.count("the native engine could not be made: no C++ compiler") == 1
    assert "building" not in said.talk
    for one, other in zip(lines(said.out), usual, strict=True):
        assert one["predictions"][0]["label"] == other["predictions"][0]["label"]
        # fp32 promises logits within 1e-4, which is less of a probability.
        assert one["predictions"][0]["probability"] == pytest.approx(other["predictions"][0]["probability"], abs=1e-4)


def test_a_model_whose_tokens_cannot_be_merged_is_refused(shell: Shell) -> None:
    model = vitkit.create("Ti/16", image_size=32, classes=2, settings=["depth=1", "positions.kind=rotary"])
    vitkit.save(model, "rotary", labels=["cat", "dog"])
    said = shell("predict", "rotary", "photos", "--merge", 2)
    assert (said.code, len(said.errors), len(said.hints)) == (1, 1, 1)
    assert "tokens can be merged only where all positions are added at the stem" in said.errors[0]


MISTAKES = [
    (["run", "missing.jpg"], "there is nothing at missing.jpg"),
    (["run", "photos", "--out", "answers.txt"], "the ending says no form"),
    (["run", "photos", "--features"], "features are too many to print"),
    (["nowhere", "photos"], "nowhere"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_has_one_clear_message(shell: Shell, tmp_path: Path, arguments: list[str], message: str) -> None:
    before = sorted(tmp_path.iterdir())
    said = shell("predict", *arguments)
    assert said.code == 1
    assert len(said.errors) == 1
    assert message in said.errors[0]
    assert sorted(tmp_path.iterdir()) == before
