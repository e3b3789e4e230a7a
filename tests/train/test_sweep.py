"""Table 4's protocol: rates are tried on held-out images, the best is chosen, and the run is repeated on everything."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli.tiny_runs import photos

from vitkit.core.config import to_toml
from vitkit.core.errors import ConfigError, DataError
from vitkit.core.stopping import Stop
from vitkit.train.config import DataConfig, KeepConfig, ModelChoice, ObjectiveConfig, RunConfig, ScheduleConfig
from vitkit.train.sweep import sweep
from vitkit.train.watch import Pulse, Watcher


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    photos(tmp_path / "photos", each=10)
    settings = ("width=16", "heads=2", "depth=1", "mlp_dim=16")
    return RunConfig(
        model=ModelChoice(name="Ti/16", image_size=16, patch_size=8, settings=settings),
        data=DataConfig(path=str(tmp_path / "photos"), val_share=0.3, workers=0),
        schedule=ScheduleConfig(batch_size=8, epochs=None, steps=2),
        keep=KeepConfig(log_every=1),
    )


class Told(Watcher):
    """Remembers what was said, and asks to stop at a step of a trial."""

    def __init__(self, stop: Stop | None = None, *, at: tuple[int, int] = (0, 0)) -> None:
        self.stop, self.at = stop, at
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)

    def pulse(self, pulse: Pulse) -> None:
        trials = sum(line.startswith("trying") for line in self.lines)
        if self.stop is not None and (trials, pulse.step) == self.at:
            self.stop.signal = "SIGTERM"


def test_the_rate_that_does_best_is_run_on_everything(config, tmp_path):
    told = Told()
    found = sweep(config, [1e-12, 0.03], tmp_path / "out", watcher=told)
    assert [trial.lr for trial in found.trials] == [1e-12, 0.03]
    assert found.final is not None
    assert found.final.summary is not None
    assert found.final.summary["images"] == {"train": 20}
    assert json.loads((tmp_path / "out/sweep.json").read_bytes()) == {
        "chosen": 0.03,
        "trials": [vars(trial) for trial in found.trials],
    }
    assert [line for line in told.lines if "trying" in line] == ["trying lr 1e-12", "trying lr 0.03"]
    assert any(line.startswith("lr 0.03 did best on the held-out images") for line in told.lines)


@pytest.mark.parametrize("name", ["masked", "autoencoder"])
def test_a_run_without_labels_is_refused_before_anything_is_tried(config, tmp_path, name):
    with pytest.raises(ConfigError, match="learns without labels") as caught:
        sweep(replace(config, objective=ObjectiveConfig(name=name)), [0.01, 0.03], tmp_path / "out")
    assert "leave out the sweep" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_among_rates_that_are_right_equally_often_the_lower_loss_wins(config, tmp_path):
    found = sweep(config, [0.02, 0.03], tmp_path / "out")
    best = max(found.trials, key=lambda trial: (trial.val_top1, -trial.val_loss))
    assert json.loads((tmp_path / "out/sweep.json").read_bytes())["chosen"] == best.lr


def test_a_sweep_that_is_asked_to_stop_has_no_final_run_and_goes_on_later(config, tmp_path):
    stop = Stop()
    found = sweep(config, [0.01, 0.02], tmp_path / "out", watcher=Told(stop, at=(2, 1)), stop=stop)
    assert found.final is None
    assert [trial.lr for trial in found.trials] == [0.01]
    assert not (tmp_path / "out/sweep.json").exists()
    again = sweep(config, [0.01, 0.02], tmp_path / "out")
    straight = sweep(config, [0.01, 0.02], tmp_path / "straight")
    assert again.trials == straight.trials
    for name in ("sweep.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_a_sweep_stopped_in_its_final_run_goes_on_with_that(config, tmp_path):
    class InTheFinal(Told):
        def pulse(self, pulse: Pulse) -> None:
            if self.stop is not None and any("did best" in line for line in self.lines):
                self.stop.signal = "SIGTERM"

    stop = Stop()
    found = sweep(config, [0.01], tmp_path / "out", watcher=InTheFinal(stop), stop=stop)
    assert found.final is not None
    assert found.final.summary is None
    assert not (tmp_path / "out/sweep.json").exists()
    told = Told()
    assert sweep(config, [0.01], tmp_path / "out", watcher=told).final is not None
    assert any(line.startswith("going on from step") for line in told.lines)
    assert (tmp_path / "out/sweep.json").exists()


def test_a_sweep_that_ended_is_not_overwritten_by_one_that_chooses_otherwise(config, tmp_path):
    sweep(config, [0.01], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"another schedule\.lr"):
        sweep(config, [1e-12, 0.05], tmp_path / "out")


def test_without_held_out_images_there_is_nothing_to_choose_by(config, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.val_share is 0"):
        sweep(replace(config, data=replace(config.data, val_share=0.0)), [0.1], tmp_path / "out")
    photos(tmp_path / "few", each=1)
    few = replace(config, data=replace(config.data, path=str(tmp_path / "few")))
    with pytest.raises(ConfigError, match="too few images to hold any out"):
        sweep(few, [0.1], tmp_path / "out")


def test_a_mistake_leaves_no_folders(config, tmp_path):
    wrong = replace(config, data=replace(config.data, path=str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match="nothing at"):
        sweep(wrong, [0.1], tmp_path / "out" / "deep")
    assert not (tmp_path / "out").exists()


ON_EVERY_RANK = """
import json, os, sys
from pathlib import Path
from vitkit.core.config import load_toml
from vitkit.train.config import ParallelConfig, RunConfig
from vitkit.train.parallel import joined
from vitkit.train.sweep import sweep

with joined(ParallelConfig(timeout=100.0)):
    sweep(load_toml(sys.argv[1], RunConfig, recipes={}), [0.01, 0.03], sys.argv[2])
    found = Path(sys.argv[2], "sweep.json").exists()
Path(sys.argv[2] + os.environ["RANK"]).write_text(json.dumps(found))
"""


def test_when_a_sweep_ends_its_result_is_there_for_every_rank(config, tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    (tmp_path / "ranks.py").write_text(ON_EVERY_RANK, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(tmp_path / each) for each in ("ranks.py", "run.toml", "out")),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert [(tmp_path / f"out{rank}").read_text() for rank in (0, 1)] == ["true", "true"]
