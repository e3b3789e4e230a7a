"""A run's folder: its own, another's, or nobody's."""

from dataclasses import replace

import pytest

from vitkit.core.errors import ConfigError, TrainingError
from vitkit.train.config import (
    DataConfig,
    KeepConfig,
    ModelChoice,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.train.folder import RunFolder, deciding

CONFIG = RunConfig(model=ModelChoice(name="Ti/16"))


def test_a_new_folder_is_claimed_with_its_configuration(tmp_path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    folder.claim(CONFIG)
    assert [path.name for path in folder.path.iterdir()] == ["config.toml"]
    assert folder.result() is None


def test_the_same_run_is_at_home_and_its_leftovers_go(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    folder.claim(CONFIG)
    before = folder.config.stat().st_mtime_ns
    (tmp_path / ".data.json.7.tmp").write_bytes(b"half")
    folder.claim(CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert folder.config.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "changed",
    [
        replace(CONFIG, data=DataConfig(workers=3)),
        replace(CONFIG, parallel=ParallelConfig(threads=2, timeout=5.0, mode="ddp")),
        replace(CONFIG, keep=KeepConfig(last=7, save_every=3, tensorboard=True)),
        replace(CONFIG, schedule=ScheduleConfig(accumulate=4)),
    ],
)
def test_how_the_machine_is_used_may_change(tmp_path, changed) -> None:
    RunFolder(tmp_path).claim(CONFIG)
    RunFolder(tmp_path).claim(changed)
    assert deciding(changed) == deciding(CONFIG)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (replace(CONFIG, seed=1), "seed"),
        (replace(CONFIG, model=ModelChoice(name="S/16")), r"model\.name"),
        (replace(CONFIG, data=DataConfig(val_share=0.3)), r"data\.val_share"),
        (replace(CONFIG, optimizer=OptimizerConfig(clip=None)), r"optimizer\.clip"),
        (replace(CONFIG, schedule=ScheduleConfig(batch_size=64)), r"schedule\.batch_size"),
        (replace(CONFIG, parallel=ParallelConfig(precision="bf16")), r"parallel\.precision"),
        (replace(CONFIG, keep=KeepConfig(evaluate_every=3)), r"keep\.evaluate_every"),
    ],
)
def test_what_decides_the_result_may_not_and_is_named(tmp_path, changed, key) -> None:
    RunFolder(tmp_path).claim(CONFIG)
    with pytest.raises(ConfigError, match=key):
        RunFolder(tmp_path).claim(changed)


def test_a_folder_with_other_things_is_left_alone(tmp_path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(TrainingError, match=r"photo\.jpg"):
        RunFolder(tmp_path).claim(CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_file_is_no_folder(tmp_path) -> None:
    (tmp_path / "run").write_bytes(b"x")
    with pytest.raises(TrainingError, match="run"):
        RunFolder(tmp_path / "run").claim(CONFIG)


def test_a_damaged_summary_is_named(tmp_path) -> None:
    (tmp_path / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(TrainingError, match=r"summary\.json"):
        RunFolder(tmp_path).result()
