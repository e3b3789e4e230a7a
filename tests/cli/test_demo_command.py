"""`vitkit demo` with a few steps per run."""

import json
from pathlib import Path

import pytest

from vitkit.cli.main import main


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "runs"
    assert main(["demo", "--quick", "--out", str(out)]) == 0
    return out


def test_demo_finishes_three_runs_and_compares_them(demo: Path) -> None:
    for run in ("from-scratch", "fractals", "fractals-then-digits"):
        assert (demo / run / "model.safetensors").is_file()
        assert (demo / run / "summary.json").is_file()
    page = (demo / "fractals-then-digits" / "report.html").read_text(encoding="utf-8")
    assert "from-scratch" in page


def test_finished_demo_prints_json_and_changes_nothing(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in demo.rglob("*") if path.is_file()}
    assert main(["demo", "--quick", "--out", str(demo), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [model["label"] for model in figures["models"]] == ["from-scratch", "fractals-then-digits"]
    assert all(0.0 <= model["top1"] <= 1.0 for model in figures["models"])
    assert before == {path: path.stat().st_mtime_ns for path in demo.rglob("*") if path.is_file()}


def test_fine_tuning_has_a_higher_resolution(demo: Path) -> None:
    sizes = [
        json.loads((demo / run / "config.json").read_bytes())["vitkit"]["model"]["image_size"]
        for run in ("fractals", "fractals-then-digits")
    ]
    assert sizes == [16, 24]


def test_demo_prints_next_steps(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick", "--out", str(demo)]) == 0
    assert "vitkit train FOLDER --out runs/mine" in capsys.readouterr().out
