"""Studies on digits: results, resume, failures, changed studies and bad input."""

import json
from pathlib import Path

import pytest

from vitkit.core.errors import ConfigError, DataError
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.studies import runner, worker
from vitkit.studies.registry import NAMES, find_study
from vitkit.studies.runner import StudyResult, run_study
from vitkit.studies.study import Claim, FewShot, Figure, Study, load_study, plan_runs

TINY = {
    "model.name": "Ti/16",
    "model.image_size": 8,
    "model.patch_size": 4,
    "model.settings": ["width=16", "heads=2", "depth=1", "mlp_dim=16"],
    "data.channels": 1,
    "data.workers": 0,
    "schedule.batch_size": 16,
    "schedule.steps": 4,
    "evaluation.every": 2,
    "logging.log_every": 1,
}
STUDY = Study(
    name="tiny",
    title="Tiny study",
    paper="",
    axes={"pooling": {"class": {}, "mean": {"model.settings": ["pooling=mean"]}}},
    settings=TINY,
    data=("upstream", "downstream"),
    measures=(FewShot(shots=(2,), draws=2),),
    rates=(1e-3, 1e-2),
    tune_by="pooling",
    seeds=2,
    claims=(
        Claim(
            text="equal", kind="equal", column="downstream_2shot", axis="pooling", labels=("class", "mean"), margin=0.5
        ),
    ),
    figure=Figure(column="downstream_2shot", lines="pooling"),
)
DATA = {"upstream": "digits", "downstream": "digits"}


def run(out: Path, study: Study = STUDY, **arguments: object) -> StudyResult:
    return run_study(study, out=out, data=DATA, settings={}, isolate=False, **arguments)  # type: ignore[arg-type]


def stable(result: StudyResult) -> list[dict[str, object]]:
    return [
        {key: value for key, value in row.items() if key not in ("images_per_second", "hours")} for row in result.table
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, StudyResult]:
    out = tmp_path_factory.mktemp("study") / "out"
    return out, run(out)


def test_study_runs_to_the_report(finished) -> None:
    out, result = finished
    assert len(result.table) == 4
    assert {row["lr"] for row in result.table} <= {1e-3, 1e-2}
    assert result.claims[0].verdict == "shows"
    assert {"table.csv", "result.json", "figure.png", "figure.svg", "figure.pdf", "report.html"} <= {
        p.name for p in out.iterdir()
    }
    assert json.loads((out / "result.json").read_text())["claims"][0]["verdict"] == "shows"
    page = (out / "report.html").read_text()
    assert all(f"runs/{record.name}/report.html" in page for record in result.runs)


def test_finished_study_repeats_nothing(finished, monkeypatch) -> None:
    out, result = finished
    monkeypatch.setattr(worker, "execute", lambda *_, **__: pytest.fail("a finished run was repeated"))
    assert stable(run(out)) == stable(result)


def test_stopped_study_resumes_to_the_same_table(tmp_path, finished, monkeypatch) -> None:
    real, calls, stop = worker.execute, [], StopFlag()

    def stop_in_third(job, *, callback, stop):
        calls.append(job.name)
        if len(calls) == 3:
            stop.signal = "test"
        return real(job, callback=callback, stop=stop)

    monkeypatch.setattr(worker, "execute", stop_in_third)
    with pytest.raises(StopRequested):
        run(tmp_path / "out", stop=stop)
    assert len(calls) == 3
    monkeypatch.undo()
    assert stable(run(tmp_path / "out")) == stable(finished[1])


def test_failed_run_is_named_and_the_rest_continues(tmp_path, monkeypatch) -> None:
    real = worker.execute

    def fail_mean(job, *, callback, stop):
        if job.name.startswith("mean_seed1"):
            raise DataError("broken")
        return real(job, callback=callback, stop=stop)

    monkeypatch.setattr(worker, "execute", fail_mean)
    result = run(tmp_path / "out")
    assert [record.name for record in result.runs if record.status == "failed"] == ["mean_seed1"]
    assert "mean_seed1 failed: broken" in result.warnings
    assert len(result.table) == 3
    monkeypatch.undo()
    assert len(run(tmp_path / "out").table) == 4


def test_changed_study_is_refused(finished) -> None:
    with pytest.raises(ConfigError, match="holds another study"):
        run_study(STUDY, out=finished[0], data=DATA, settings={"steps": 5}, isolate=False)


def test_missing_data_is_named_before_anything_starts(tmp_path) -> None:
    with pytest.raises(DataError, match=r"data.downstream=PATH"):
        run_study(STUDY, out=tmp_path / "out", data={"upstream": "digits"}, settings={})
    with pytest.raises(DataError):
        run_study(STUDY, out=tmp_path / "out", data=DATA | {"downstream": str(tmp_path / "nowhere")}, settings={})
    assert not (tmp_path / "out").exists()


def test_process_killed_for_memory_has_one_message(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runner.sys, "executable", str(tmp_path / "killed"))
    (tmp_path / "killed").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "killed").chmod(0o755)
    dispatcher = runner.Dispatcher(
        out=tmp_path, runs=[], data={}, jobs=1, callback=runner.Callback(), stop=StopFlag(), isolate=True
    )
    assert "out of memory" in str(dispatcher.execute_process("one", "{}"))


def test_job_survives_its_file() -> None:
    [*_, last] = plan_runs(STUDY, data=DATA, settings={}, quick=False)
    results = {name: {"val_top1": 0.5, "val_loss": 1.0} for name in last.needs}
    job = worker.make_job(last, Path("out"), data=DATA, results=results)
    assert worker.read_job(job.to_json()) == job


@pytest.mark.parametrize("name", NAMES)
def test_declared_study_is_consistent(name) -> None:
    study = find_study(name)
    study.check()
    if not study.inspects:
        full, quick = (plan_runs(study, data={}, settings={}, quick=quick) for quick in (False, True))
        assert len(quick) < len(full)
        assert all(need in {run.name for run in full} for run in full for need in run.needs)


def test_families_have_about_equal_flops() -> None:
    runs = plan_runs(find_study("fig5"), data={}, settings={}, quick=True)
    flops = [run.forward_flops for run in runs]
    assert max(flops) < 1.15 * min(flops)


USER_STUDY = """
title = "Mine"
seeds = 2
[settings.model]
name = "Ti/16"
[axes.depth.shallow]
"model.settings" = ["depth=1"]
[axes.depth.deep]
"model.settings" = ["depth=2"]
[[claims]]
text = "deeper is better"
kind = "greater"
column = "COLUMN"
axis = "depth"
labels = ["deep", "shallow"]
"""


def test_user_study_is_a_toml_file(tmp_path) -> None:
    (tmp_path / "mine.toml").write_text(USER_STUDY.replace("COLUMN", "top1"))
    study = load_study(tmp_path / "mine.toml")
    assert [run.name for run in plan_runs(study, data={}, settings={}, quick=False)][:2] == [
        "shallow_seed0",
        "deep_seed0",
    ]


def test_claim_about_an_unknown_column_is_an_error(tmp_path) -> None:
    (tmp_path / "mine.toml").write_text(USER_STUDY.replace("COLUMN", "top_1"))
    with pytest.raises(ConfigError, match=r"column that does not exist.*top_1.*\n.*did you mean top1"):
        load_study(tmp_path / "mine.toml")
