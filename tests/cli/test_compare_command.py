"""`vitkit compare`: runs as they were evaluated, or evaluated again on images that none was trained on."""

import csv
import json
from pathlib import Path

import pytest
from cli.tiny_runs import TINY, Shell, assigned, photos

from vitkit.cli.main import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on the same photos, and one on others of the same classes."""
    path = tmp_path_factory.mktemp("compared")
    photos(path / "photos", each=12)
    photos(path / "others", each=10)
    for data, run, steps in (("photos", "short", 1), ("photos", "long", 6), ("others", "apart", 2)):
        assert main(["train", str(path / data), "--out", str(path / run), *assigned(TINY, {"steps": steps})]) == 0
    return path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "others", "short", "long", "apart"):
        (tmp_path / name).symlink_to(trained / name)
    return Shell(capsys)


def test_runs_have_their_own_scores(shell: Shell) -> None:
    result = shell("compare", "short", "long", "--json")
    assert result.code == 0
    assert "warning" not in result.stderr
    runs = result.json["models"]
    for run in runs:
        summary = json.loads(Path(run["label"], "summary.json").read_bytes())
        assert run["top1"] == summary["result"]["top1"]
        assert run["exaflops"] == summary["compute"]["exaflops"]
        assert run["parameters"] == summary["compute"]["parameters"]
    assert [run["label"] for run in runs] == ["short", "long"]
    assert runs[0]["family"] == "ViT"
    assert result.json["differences"] == []


def test_different_images_give_a_warning(shell: Shell) -> None:
    result = shell("compare", "short", "apart")
    assert result.code == 0
    assert "warning: evaluated on different images" in result.stderr


def test_data_option_evaluates_and_tests_differences(shell: Shell) -> None:
    result = shell("compare", "short", "long", "--data", "photos", "--workers", "0", "--out", "out", "--json")
    assert result.code == 0
    held_out = json.loads(Path("short/data.json").read_bytes())["images"]["val"]
    assert [run["count"] for run in result.json["models"]] == [held_out] * 2
    [difference] = result.json["differences"]
    first, second = result.json["models"]
    assert difference["estimate"] == pytest.approx(second["top1"] - first["top1"])
    assert (difference["model"], difference["baseline"]) == ("long", "short")
    assert {path.name for path in Path("out").iterdir()} == {
        *("compare.json", "compare.csv", "report.html"),
        *("exaflops.svg", "parameters.svg", "speed.svg", "differences.svg"),
    }
    assert json.loads(Path("out/compare.json").read_bytes()) == result.json
    rows = list(csv.DictReader(Path("out/compare.csv").read_text(encoding="utf-8").splitlines()))
    assert [float(row["top1"]) for row in rows] == [first["top1"], second["top1"]]


def test_only_images_that_no_run_trained_on_are_used(shell: Shell) -> None:
    """`apart` has seen none of the photos, so all are held out from it; `short` held out a few."""
    result = shell("compare", "apart", "short", "--data", "photos", "--workers", "0", "--json")
    held_out = json.loads(Path("short/data.json").read_bytes())["images"]["val"]
    assert {run["count"] for run in result.json["models"]} == {held_out}
    assert "held out different images" in result.stderr


def test_scores_equal_eval(shell: Shell) -> None:
    compared = shell("compare", "short", "long", "--data", "others", "--workers", "0", "--json").json["models"]
    for run in compared:
        expected = shell("eval", run["label"], "others", "--workers", "0", "--json").json
        assert (run["top1"], run["ece"], run["count"]) == (expected["top1"], expected["ece"], expected["count"])


def test_baseline_may_be_the_best(shell: Shell) -> None:
    result = shell("compare", "short", "long", "--data", "photos", "--against", "best", "--workers", "0", "--json").json
    [difference] = result["differences"]
    best = max(result["models"], key=lambda run: run["top1"])
    assert difference["baseline"] == best["label"]
    assert difference["estimate"] <= 0


def test_measure_option(shell: Shell) -> None:
    assert [run["speed"] for run in shell("compare", "short", "--json").json["models"]] == [None]
    measured = shell("compare", "short", "long", "--measure", "--json").json["models"]
    assert all(run["speed"] > 0 for run in measured)


def test_text_output(shell: Shell) -> None:
    result = shell("compare", "short", "long", "--data", "photos", "--workers", "0")
    assert result.code == 0
    assert "top-1" in result.out
    assert "exaFLOPs" in result.out
    assert "…" not in result.out.split("no significant difference")[0].split("is better")[0].split("is worse")[0]
    assert "points (95 % interval" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("short", "short"), "listed twice"),
        (("short", "nowhere"), "nowhere"),
        (("short", "--split", "test"), "need --data"),
        (("short", "--layout", "folders"), "need --data"),
        (("short", "long", "--data", "photos", "--split", "test"), "no split test"),
    ],
)
def test_invalid_arguments_are_reported(shell: Shell, arguments: tuple[str, ...], message: str) -> None:
    result = shell("compare", *arguments)
    assert result.code in (1, 2)
    assert message in result.errors[0]


def test_model_without_the_classes_is_named(shell: Shell) -> None:
    photos(Path("birds"), ("owl", "dog"), each=3)
    result = shell("compare", "short", "long", "--data", "birds", "--workers", "0")
    assert result.code == 1
    assert "error: short: the model does not have the class owl" in result.errors[0]
    assert "fine-tune" in result.hints[0]


def test_run_without_weights_is_rejected(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").write_bytes(Path("short/config.toml").read_bytes())
    result = shell("compare", "short", "begun")
    assert result.code == 1
    assert "begun" in result.errors[0]
