"""`vitkit demo` with a few steps per run."""

import json
from pathlib import Path

import pytest

import vitkit
import vitkit.api.training
from vitkit.cli.main import main


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "runs"
    assert main(["demo", "--quick", "--out", str(out)]) == 0
    return out


def test_demo_finishes_and_compares_with_scratch(demo: Path) -> None:
    for run in ("scratch", "digits"):
        assert (demo / run / "model.safetensors").is_file()
        assert (demo / run / "summary.json").is_file()


def test_finished_demo_prints_json_and_changes_nothing(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in demo.rglob("*") if path.is_file()}
    assert main(["demo", "--quick", "--out", str(demo), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [model["label"] for model in figures["models"]] == ["scratch", "digits"]
    assert all(0.0 <= model["top1"] <= 1.0 for model in figures["models"])
    assert before == {path: path.stat().st_mtime_ns for path in demo.rglob("*") if path.is_file()}


def test_demo_compares_with_the_trial_of_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def train(data: object, **options: object) -> vitkit.Run:
        calls.append((data, options["minutes"]))
        return vitkit.Run(tmp_path / "digits")

    vitkit.demo(out=tmp_path, quick=True, progress=False)
    (tmp_path / "digits" / "trials").mkdir()
    (tmp_path / "scratch").rename(tmp_path / "digits" / "trials" / "scratch")
    monkeypatch.setattr(vitkit.api.training, "train", train)
    result = vitkit.demo(out=tmp_path, progress=False)
    assert calls == [("digits", 3.0)]
    assert [model.label for model in result.models] == ["scratch", "digits"]


def test_demo_prints_next_steps(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick", "--out", str(demo)]) == 0
    assert "vitkit train FOLDER" in capsys.readouterr().out
