"""Learning-rate sweeps: choice on held-out images, final run on all images, resume."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli.tiny_runs import photos

from vitkit.core.config import to_toml
from vitkit.core.errors import ConfigError, DataError
from vitkit.core.signals import StopFlag
from vitkit.training.callbacks import Callback, StepMetrics
from vitkit.training.config import DataConfig, LoggingConfig, ModelChoice, ObjectiveConfig, RunConfig, ScheduleConfig
from vitkit.training.run import run_sweep


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    photos(tmp_path / "photos", each=10)
    settings = ("width=16", "heads=2", "depth=1", "mlp_dim=16")
    return RunConfig(
        model=ModelChoice(name="Ti/16", image_size=16, patch_size=8, settings=settings),
        data=DataConfig(path=str(tmp_path / "photos"), val_fraction=0.3, workers=0),
        schedule=ScheduleConfig(batch_size=8, epochs=None, steps=2),
        logging=LoggingConfig(log_every=1),
    )


class Recorder(Callback):
    """Records messages, and requests a stop at a step of a trial."""

    def __init__(self, stop: StopFlag | None = None, *, at: tuple[int, int] = (0, 0)) -> None:
        self.stop, self.at = stop, at
        self.lines: list[str] = []

    def on_message(self, text: str) -> None:
        self.lines.append(text)

    def on_step(self, metrics: StepMetrics) -> None:
        trials = sum(line.startswith("trying") for line in self.lines)
        if self.stop is not None and (trials, metrics.step) == self.at:
            self.stop.signal = "SIGTERM"


def test_best_rate_is_trained_on_all_images(config, tmp_path):
    recorder = Recorder()
    result = run_sweep(config, [1e-12, 0.03], tmp_path / "out", callback=recorder)
    assert [trial.lr for trial in result.trials] == [1e-12, 0.03]
    assert result.summary is not None
    assert result.summary["images"] == {"train": 20}
    assert json.loads((tmp_path / "out/sweep.json").read_bytes()) == {
        "chosen": 0.03,
        "trials": [trial._asdict() for trial in result.trials],
    }
    assert [line for line in recorder.lines if "trying" in line] == ["trying lr 1e-12", "trying lr 0.03"]
    assert any(line.startswith("lr 0.03 is best on held-out images") for line in recorder.lines)


@pytest.mark.parametrize("name", ["masked", "mae"])
def test_objective_without_labels_is_rejected(config, tmp_path, name):
    with pytest.raises(ConfigError, match="uses no labels") as caught:
        run_sweep(replace(config, objective=ObjectiveConfig(name=name)), [0.01, 0.03], tmp_path / "out")
    assert "set schedule.lr" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_equal_accuracy_is_decided_by_loss(config, tmp_path):
    result = run_sweep(config, [0.02, 0.03], tmp_path / "out")
    best = max(result.trials, key=lambda trial: (trial.val_top1, -trial.val_loss))
    assert json.loads((tmp_path / "out/sweep.json").read_bytes())["chosen"] == best.lr


def test_sweep_stopped_in_a_trial_resumes(config, tmp_path):
    stop = StopFlag()
    result = run_sweep(config, [0.01, 0.02], tmp_path / "out", callback=Recorder(stop, at=(2, 1)), stop=stop)
    assert result.summary is None
    assert [trial.lr for trial in result.trials] == [0.01]
    assert not (tmp_path / "out/sweep.json").exists()
    again = run_sweep(config, [0.01, 0.02], tmp_path / "out")
    straight = run_sweep(config, [0.01, 0.02], tmp_path / "straight")
    assert again.trials == straight.trials
    for name in ("sweep.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_sweep_stopped_in_final_run_resumes(config, tmp_path):
    class StopInFinalRun(Recorder):
        def on_step(self, metrics: StepMetrics) -> None:
            if self.stop is not None and any("is best on" in line for line in self.lines):
                self.stop.signal = "SIGTERM"

    stop = StopFlag()
    result = run_sweep(config, [0.01], tmp_path / "out", callback=StopInFinalRun(stop), stop=stop)
    assert result.summary is None
    assert not (tmp_path / "out/sweep.json").exists()
    recorder = Recorder()
    assert run_sweep(config, [0.01], tmp_path / "out", callback=recorder).summary is not None
    assert any(line.startswith("resuming from step") for line in recorder.lines)
    assert (tmp_path / "out/sweep.json").exists()


def test_finished_sweep_rejects_another_choice(config, tmp_path):
    run_sweep(config, [0.01], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"schedule\.lr="):
        run_sweep(config, [1e-12, 0.05], tmp_path / "out")


def test_sweep_needs_held_out_images(config, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.val_fraction is 0"):
        run_sweep(replace(config, data=replace(config.data, val_fraction=0.0)), [0.1], tmp_path / "out")
    photos(tmp_path / "few", each=1)
    few = replace(config, data=replace(config.data, path=str(tmp_path / "few")))
    with pytest.raises(ConfigError, match="too few images to hold any out"):
        run_sweep(few, [0.1], tmp_path / "out")


def test_failed_sweep_leaves_no_directories(config, tmp_path):
    wrong = replace(config, data=replace(config.data, path=str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match="does not exist"):
        run_sweep(wrong, [0.1], tmp_path / "out" / "deep")
    assert not (tmp_path / "out").exists()


ON_EVERY_RANK = """
import json, os, sys
from pathlib import Path
from vitkit.core.config import load_toml
from vitkit.training.config import ParallelConfig, RunConfig
from vitkit.training.distributed import join_ranks
from vitkit.training.run import run_sweep

with join_ranks(ParallelConfig(timeout=600.0)):
    run_sweep(load_toml(sys.argv[1], RunConfig, recipes={}), [0.01, 0.03], sys.argv[2])
    exists = Path(sys.argv[2], "sweep.json").exists()
Path(sys.argv[2] + os.environ["RANK"]).write_text(json.dumps(exists))
"""


def test_every_rank_finds_the_sweep_result(config, launcher, tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    script = tmp_path / "ranks.py"
    script.write_text(ON_EVERY_RANK, encoding="utf-8")
    arguments = (str(tmp_path / each) for each in ("run.toml", "out"))
    launcher.run_ranks(script, *arguments, ranks=2, log=tmp_path / "output")
    assert [(tmp_path / f"out{rank}").read_text() for rank in (0, 1)] == ["true", "true"]
