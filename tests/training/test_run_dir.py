"""Run directories: claims, format version, summaries."""

from dataclasses import replace

import pytest

from vitkit.core.errors import ConfigError, TrainingError
from vitkit.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelChoice,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.training.run_dir import RunDir, reproducibility_key

CONFIG = RunConfig(model=ModelChoice(name="Ti/16"))


def test_claim_creates_directory_with_config(tmp_path) -> None:
    run_dir = RunDir(tmp_path / "deep" / "run")
    run_dir.claim(CONFIG)
    assert [path.name for path in run_dir.path.iterdir()] == ["config.toml"]
    assert run_dir.read_summary() is None


def test_same_run_is_accepted_and_temporary_files_removed(tmp_path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.claim(CONFIG)
    before = run_dir.config.stat().st_mtime_ns
    (tmp_path / ".data.json.7.tmp").write_bytes(b"half")
    run_dir.claim(CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert run_dir.config.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "changed",
    [
        replace(CONFIG, data=DataConfig(workers=3)),
        replace(CONFIG, parallel=ParallelConfig(threads=2, timeout=5.0, mode="ddp")),
        replace(CONFIG, checkpoint=CheckpointConfig(last=7, save_every=3), logging=LoggingConfig(tensorboard=True)),
        replace(CONFIG, schedule=ScheduleConfig(accumulate=4)),
    ],
)
def test_machine_settings_may_change(tmp_path, changed) -> None:
    RunDir(tmp_path).claim(CONFIG)
    RunDir(tmp_path).claim(changed)
    assert reproducibility_key(changed) == reproducibility_key(CONFIG)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (replace(CONFIG, seed=1), "seed"),
        (replace(CONFIG, model=ModelChoice(name="S/16")), r"model\.name"),
        (replace(CONFIG, data=DataConfig(val_fraction=0.3)), r"data\.val_fraction"),
        (replace(CONFIG, optimizer=OptimizerConfig(clip=None)), r"optimizer\.clip"),
        (replace(CONFIG, schedule=ScheduleConfig(batch_size=64)), r"schedule\.batch_size"),
        (replace(CONFIG, parallel=ParallelConfig(precision="bf16")), r"parallel\.precision"),
        (replace(CONFIG, evaluation=EvaluationConfig(every=3)), r"evaluation\.every"),
    ],
)
def test_settings_that_decide_the_result_may_not_change(tmp_path, changed, key) -> None:
    RunDir(tmp_path).claim(CONFIG)
    with pytest.raises(ConfigError, match=key):
        RunDir(tmp_path).claim(changed)


def test_directory_with_other_files_is_rejected(tmp_path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(TrainingError, match=r"photo\.jpg"):
        RunDir(tmp_path).claim(CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_file_is_rejected(tmp_path) -> None:
    (tmp_path / "run").write_bytes(b"x")
    with pytest.raises(TrainingError, match="run"):
        RunDir(tmp_path / "run").claim(CONFIG)


def test_damaged_summary_is_an_error(tmp_path) -> None:
    (tmp_path / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(TrainingError, match=r"summary\.json"):
        RunDir(tmp_path).read_summary()


def test_run_of_an_older_format_is_rejected(tmp_path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.claim(CONFIG)
    first, *rest = run_dir.config.read_text(encoding="utf-8").splitlines(keepends=True)
    run_dir.config.write_text("".join(rest), encoding="utf-8")
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    for action in (run_dir.read_config, run_dir.read_summary, lambda: run_dir.claim(CONFIG)):
        with pytest.raises(TrainingError, match="another version of vitkit") as caught:
            action()
        assert "another --out" in str(caught.value.hint)
    run_dir.config.write_text(first + "".join(rest), encoding="utf-8")
    assert run_dir.read_config() == CONFIG
