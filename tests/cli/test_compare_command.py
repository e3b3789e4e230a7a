"""`vitkit compare`: runs side by side as they were judged, or judged anew on the images that none has learned from."""

import csv
import json
from pathlib import Path

import pytest
from cli.tiny_runs import TINY, Shell, assigned, photos

from vitkit.cli.main import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on the same photos, and one on others of the same classes."""
    place = tmp_path_factory.mktemp("compared")
    photos(place / "photos", each=12)
    photos(place / "others", each=10)
    for data, run, steps in (("photos", "short", 1), ("photos", "long", 6), ("others", "apart", 2)):
        assert main(["train", str(place / data), "--out", str(place / run), *assigned(TINY, {"steps": steps})]) == 0
    return place


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "others", "short", "long", "apart"):
        (tmp_path / name).symlink_to(trained / name)
    return Shell(capsys)


def test_runs_are_shown_as_they_were_judged(shell: Shell) -> None:
    said = shell("compare", "short", "long", "--json")
    assert said.code == 0
    assert "warning" not in said.talk
    runs = said.json["runs"]
    for run in runs:
        summary = json.loads(Path(run["label"], "summary.json").read_bytes())
        assert run["top1"] == summary["result"]["top1"]
        assert run["exaflops"] == summary["ledger"]["exaflops"]
        assert run["parameters"] == summary["ledger"]["parameters"]
    assert [run["label"] for run in runs] == ["short", "long"]
    assert runs[0]["family"] == "ViT"
    assert said.json["differences"] == []


def test_runs_judged_on_different_images_are_told_of(shell: Shell) -> None:
    said = shell("compare", "short", "apart")
    assert said.code == 0
    assert "warning: these were judged on different images" in said.talk


def test_with_data_all_are_judged_anew_and_differences_tested(shell: Shell) -> None:
    said = shell("compare", "short", "long", "--data", "photos", "--workers", "0", "--out", "out", "--json")
    assert said.code == 0
    held_out = json.loads(Path("short/data.json").read_bytes())["images"]["val"]
    assert [run["count"] for run in said.json["runs"]] == [held_out] * 2
    [difference] = said.json["differences"]
    first, second = said.json["runs"]
    assert difference["difference"] == pytest.approx(second["top1"] - first["top1"])
    assert (difference["run"], difference["against"]) == ("long", "short")
    assert {path.name for path in Path("out").iterdir()} == {
        *("compare.json", "compare.csv", "report.html"),
        *("exaflops.svg", "parameters.svg", "speed.svg", "differences.svg"),
    }
    assert json.loads(Path("out/compare.json").read_bytes()) == said.json
    rows = list(csv.DictReader(Path("out/compare.csv").read_text(encoding="utf-8").splitlines()))
    assert [float(row["top1"]) for row in rows] == [first["top1"], second["top1"]]


def test_only_images_that_no_run_learned_from_are_judged(shell: Shell) -> None:
    """`apart` has seen none of the photos, so all are held out from it; `short` held out a few."""
    said = shell("compare", "apart", "short", "--data", "photos", "--workers", "0", "--json")
    held_out = json.loads(Path("short/data.json").read_bytes())["images"]["val"]
    assert {run["count"] for run in said.json["runs"]} == {held_out}
    assert "held out different images" in said.talk


def test_the_numbers_are_those_of_eval(shell: Shell) -> None:
    compared = shell("compare", "short", "long", "--data", "others", "--workers", "0", "--json").json["runs"]
    for run in compared:
        judged = shell("eval", run["label"], "others", "--workers", "0", "--json").json
        assert (run["top1"], run["ece"], run["count"]) == (judged["top1"], judged["ece"], judged["count"])


def test_the_best_can_be_what_others_are_measured_against(shell: Shell) -> None:
    found = shell("compare", "short", "long", "--data", "photos", "--against", "best", "--workers", "0", "--json").json
    [difference] = found["differences"]
    best = max(found["runs"], key=lambda run: run["top1"])
    assert difference["against"] == best["label"]
    assert difference["difference"] <= 0


def test_speeds_are_measured_on_request(shell: Shell) -> None:
    assert [run["speed"] for run in shell("compare", "short", "--json").json["runs"]] == [None]
    measured = shell("compare", "short", "long", "--measure", "--json").json["runs"]
    assert all(run["speed"] > 0 for run in measured)


def test_a_person_reads_a_table_and_a_sentence(shell: Shell) -> None:
    said = shell("compare", "short", "long", "--data", "photos", "--workers", "0")
    assert said.code == 0
    assert "top-1" in said.out
    assert "exaFLOPs" in said.out
    assert "…" not in said.out.split("cannot be told apart")[0].split("is better")[0].split("is worse")[0]
    assert "points (95 % interval" in said.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("short", "short"), "named twice"),
        (("short", "nowhere"), "nowhere"),
        (("short", "--split", "test"), "are those of --data"),
        (("short", "--kind", "folders"), "are those of --data"),
        (("short", "long", "--data", "photos", "--split", "test"), "no split test"),
    ],
)
def test_a_mistake_is_named(shell: Shell, arguments: tuple[str, ...], message: str) -> None:
    said = shell("compare", *arguments)
    assert said.code in (1, 2)
    assert message in said.errors[0]


def test_the_run_that_cannot_be_judged_is_named(shell: Shell) -> None:
    photos(Path("birds"), ("owl", "dog"), each=3)
    said = shell("compare", "short", "long", "--data", "birds", "--workers", "0")
    assert said.code == 1
    assert "error: short: the model does not know the class owl" in said.errors[0]
    assert "fine-tune" in said.hints[0]


def test_a_run_that_is_not_finished_is_told_from_a_folder_that_is_none(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").write_bytes(Path("short/config.toml").read_bytes())
    said = shell("compare", "short", "begun")
    assert "begun is a run that is not finished" in said.errors[0]
