"""Studies on digits: results, resume, failures, changed studies and bad input."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from vitkit.core.errors import ConfigError, DataError, TrainingError
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.studies import dispatch, worker
from vitkit.studies.plan import plan_runs
from vitkit.studies.registry import find_study
from vitkit.studies.runner import StudyResult, export_study, plan_study, run_study
from vitkit.studies.study import Claim, FewShot, Figure, Study
from vitkit.training import run as run_module
from vitkit.training.callbacks import Callback
from vitkit.training.config import RunConfig
from vitkit.training.run import run_training

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
    assert result.steps == (4, 4)
    assert {row["lr"] for row in result.table} <= {1e-3, 1e-2}
    assert result.claims[0].verdict == "shows"
    assert {"table.csv", "result.json", "figure.png", "figure.svg", "figure.pdf", "report.html"} <= {
        p.name for p in out.iterdir()
    }
    assert json.loads((out / "result.json").read_text())["claims"][0]["verdict"] == "shows"
    page = (out / "report.html").read_text()
    assert "4 steps a run, 8 of 8 runs finished" in page
    assert all(f"runs/{record.path.name}/report.html" in page for record in result.runs)
    assert all((record.path / "report.html").exists() for record in result.runs)


def test_finished_study_repeats_nothing(finished, monkeypatch) -> None:
    out, result = finished
    monkeypatch.setattr(worker, "execute", lambda *_, **__: pytest.fail("a finished run was repeated"))
    assert stable(run(out)) == stable(result)
    settings = {"workers": 3, "parallel.threads": 7}
    other_machine = run_study(STUDY, out=out, data=DATA, settings=settings, isolate=False)
    assert stable(other_machine) == stable(result), "settings of the machine may change"


SMALL = replace(STUDY, rates=(), tune_by=None, seeds=1)


@pytest.fixture(scope="module")
def small_table(tmp_path_factory) -> list[dict[str, object]]:
    return stable(run(tmp_path_factory.mktemp("study") / "out", SMALL))


def test_stopped_study_resumes_to_the_same_table(tmp_path, small_table, monkeypatch) -> None:
    real, calls, stop = worker.execute, [], StopFlag()

    def stop_in_second(job, *, callback, stop):
        calls.append(job.result_file.stem)
        if len(calls) == 2:
            stop.signal = "test"
        return real(job, callback=callback, stop=stop)

    monkeypatch.setattr(worker, "execute", stop_in_second)
    with pytest.raises(StopRequested):
        run(tmp_path / "out", SMALL, stop=stop)
    assert calls == ["class_seed0", "mean_seed0"]
    monkeypatch.undo()
    assert stable(run(tmp_path / "out", SMALL)) == small_table


def test_killed_study_resumes_to_the_same_table(tmp_path, small_table, monkeypatch) -> None:
    """Kill the study again and again before one of its files appears, each time somewhat later."""
    rename, kills, left = Path.replace, 0, 0

    class Killed(BaseException):
        pass

    def kill(path: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", kill)
    while True:
        left = 4 + 3 * kills
        try:
            result = run(tmp_path / "out", SMALL)
        except Killed:
            kills += 1
            continue
        break
    assert kills > 4
    assert stable(result) == small_table


def test_failed_run_is_named_and_the_rest_continues(tmp_path, small_table, monkeypatch) -> None:
    real = worker.execute

    def fail_class(job, *, callback, stop):
        if job.result_file.stem.startswith("class"):
            raise DataError("broken", hint="repair it")
        return real(job, callback=callback, stop=stop)

    monkeypatch.setattr(worker, "execute", fail_class)
    result = run(tmp_path / "out", SMALL)
    assert [record.name for record in result.runs if record.status == "failed"] == ["class_seed0"]
    assert "class_seed0 failed: broken: repair it" in result.warnings
    assert stable(result) == small_table[1:]
    monkeypatch.undo()
    assert stable(run(tmp_path / "out", SMALL)) == small_table


def test_changed_study_is_refused(finished) -> None:
    out = finished[0]
    message = r"holds another study: 8 of its runs differ, such as class_lr0.001_seed0 \(schedule.steps=4, not 5\)"
    with pytest.raises(ConfigError, match=message):
        run_study(STUDY, out=out, data=DATA, settings={"steps": 5}, isolate=False)
    [claim] = STUDY.claims
    with pytest.raises(ConfigError, match="its claims differ"):
        run(out, replace(STUDY, claims=(replace(claim, margin=0.6),)))


def test_another_figure_of_the_same_runs_repeats_nothing(finished, monkeypatch) -> None:
    out, result = finished
    monkeypatch.setattr(worker, "execute", lambda *_, **__: pytest.fail("a finished run was repeated"))
    assert stable(run(out, replace(STUDY, name="other", figure=Figure(column="top1", lines="pooling")))) == stable(
        result
    )


def test_study_of_an_older_version_is_resumed(tmp_path, small_table) -> None:
    """Its plan lacks a setting that has been added since."""
    run(tmp_path / "out", SMALL)
    file = tmp_path / "out/study.json"
    plan = json.loads(file.read_text())
    for each in plan["runs"].values():
        del each["config"]["data"]["add"]
    file.write_text(json.dumps(plan))
    assert stable(run(tmp_path / "out", SMALL)) == small_table


def test_run_that_was_trained_by_its_recipe_is_only_measured(tmp_path, small_table, monkeypatch) -> None:
    out = tmp_path / "out"
    export_study(SMALL, out=out, data=DATA, settings={})
    rows = list(csv.DictReader((out / "recipes/runs.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == ["class_seed0", "mean_seed0"]
    for row in rows:
        *_, recipe, option, directory = row["command"].split()
        assert option == "--out"
        run_training(RunConfig.from_toml(recipe), directory)
    monkeypatch.setattr(run_module, "complete_run", lambda _: pytest.fail("a run was trained again"))
    assert stable(run(out, SMALL)) == small_table
    assert export_study(SMALL, out=out, data=DATA, settings={}).finished == 2


def test_recipe_waits_for_the_learning_rate(tmp_path) -> None:
    result = export_study(STUDY, out=tmp_path / "out", data=DATA, settings={})
    assert {file.stem for file in (tmp_path / "out/recipes").glob("*.toml")} == {
        f"{name}_lr{rate}_seed0" for name in ("class", "mean") for rate in (0.001, 0.01)
    }
    assert result.warnings[0].startswith("4 runs without a recipe, such as class_seed0")
    with pytest.raises(ConfigError, match="fig7 trains nothing"):
        export_study(find_study("fig7"), out=tmp_path, data={}, settings={})


def test_directory_with_other_data_and_a_file_as_directory_are_refused(tmp_path, finished) -> None:
    with pytest.raises(ConfigError, match=r"its data differ \(downstream=digits, not fractals\)"):
        run_study(STUDY, out=finished[0], data=DATA | {"downstream": "fractals"}, settings={}, isolate=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="file is a file"):
        run(tmp_path / "file")


def test_missing_data_is_named_before_anything_starts(tmp_path) -> None:
    def run_with(**data: str) -> None:
        run_study(STUDY, out=tmp_path / "out", data={"upstream": "digits"} | data, settings={})

    with pytest.raises(DataError, match=r"data.downstream=PATH"):
        run_with()
    with pytest.raises(DataError, match="does not exist"):
        run_with(downstream=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"no data called 'downstraem'\n.*did you mean downstream"):
        run_with(downstream="digits", downstraem="digits")
    assert not (tmp_path / "out").exists()


def test_half_downloaded_data_is_refused(tmp_path) -> None:
    for name, count in (("cat", 3), ("dog", 1)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / "data" / name / f"{index}.png")
    with pytest.raises(DataError, match=r"the class dog has 1 training images.*at least 2"):
        run_study(STUDY, out=tmp_path / "out", data=DATA | {"downstream": str(tmp_path / "data")}, settings={})


def dispatcher(out: Path, **changes: object) -> dispatch.Dispatcher:
    values = {"out": out, "runs": [], "data": DATA, "jobs": 1, "callback": Callback(), "stop": StopFlag()}
    return dispatch.Dispatcher(**values | {"isolate": True} | changes)  # type: ignore[arg-type]


def fake_python(monkeypatch, path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(dispatch.sys, "executable", str(path))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -9 $$", "killed by the system, probably out of memory"),
        ("seq 100000 >&2; echo 'out of memory' >&2; exit 1", "out of memory"),
        ("exit 75", "ended with code 75"),
    ],
)
def test_failed_process_has_one_message(tmp_path, monkeypatch, script, message) -> None:
    fake_python(monkeypatch, tmp_path / "python", script)
    error = dispatcher(tmp_path).execute_process("one", "{}")
    assert error is not None
    assert error.startswith(message)
    assert len(error.splitlines()) == 1


def test_run_that_needs_a_failed_one_fails_with_it(tmp_path, monkeypatch) -> None:
    fake_python(monkeypatch, tmp_path / "python", "exit 75")
    runs = plan_runs(STUDY, data=DATA, settings={}, quick=False)
    study = dispatcher(tmp_path, runs=runs)
    study.run()
    assert study.failed == {run.name for run in runs}
    assert (tmp_path / "results/mean_seed0.failed.txt").read_text() == "needs mean_lr0.001_seed0, which failed\n"


def test_run_in_a_process_of_its_own(tmp_path, monkeypatch) -> None:
    """With worker processes, which are forked while a thread of the run waits for the end of its parent."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").write_text("raise ImportError('a file of the user')")
    study = replace(SMALL, axes={"pooling": {"class": {}}}, measures=(), claims=())
    study = replace(study, figure=Figure(column="top1", lines="pooling"))
    [run] = plan_runs(study, data=DATA, settings={"data.workers": 1, "steps": 1}, quick=False)
    dispatcher(tmp_path, runs=[run]).run()
    assert (tmp_path / "results/class_seed0.json").exists()


def test_job_survives_its_file(finished) -> None:
    [*_, last] = plan_runs(STUDY, data=DATA, settings={}, quick=False)
    job = worker.make_job(last, finished[0], data=DATA)
    assert worker.read_job(job.to_json()) == job


def test_best_tuning_run_is_not_repeated(finished) -> None:
    out, result = finished
    paths = {record.name: record.path for record in result.runs}
    assert paths["class_seed0"] in (paths["class_lr0.001_seed0"], paths["class_lr0.01_seed0"])
    assert not (out / "runs/class_seed0").exists()
    assert paths["class_seed1"] == out / "runs/class_seed1"


def test_fig7_inspects_the_checkpoints_of_a_study(tmp_path, finished) -> None:
    study, data = find_study("fig7"), {"upstream": "digits", "runs": str(finished[0])}
    result = run_study(study, out=tmp_path / "fig7", data=data, settings={})
    assert [record.name for record in result.runs] == ["class_seed0", "mean_seed0", "class_seed1", "mean_seed1"]
    assert {(row["model"], row["layer"], row["head"]) for row in result.table} == {
        (model, 1, head) for model in ("class", "mean") for head in (1, 2)
    }
    assert all(0 < float(str(row["distance"])) < 8 for row in result.table)
    page = (tmp_path / "fig7/report.html").read_text()
    assert page.count("<figcaption>Positions") == 2
    assert [run.name for run in plan_study(study, out=tmp_path, data=data, settings={}, quick=False).runs] == [
        record.name for record in result.runs
    ]
    assert "Mean attention distance over training" not in page, "two checkpoints show no training"
    with pytest.raises(DataError, match="has no finished runs"):
        run_study(study, out=tmp_path / "fig7", data=data | {"runs": str(tmp_path)}, settings={})


def test_fig7_shows_the_distance_over_training(tmp_path) -> None:
    settings = {"checkpoint.last": 10, "checkpoint.save_every": 1, "schedule.steps": 4}
    run_study(SMALL, out=tmp_path / "runs", data=DATA, settings=settings, isolate=False, quick=True)
    data = {"upstream": "digits", "runs": str(tmp_path / "runs")}
    run_study(find_study("fig7"), out=tmp_path / "fig7", data=data, settings={})
    rows = list(csv.DictReader((tmp_path / "fig7/distances.csv").read_text().splitlines()))
    assert [(row["run"], row["step"], row["layer"]) for row in rows] == [
        (name, str(step), "1") for name in ("class_seed0", "mean_seed0") for step in (1, 2, 3, 4)
    ]
    page = (tmp_path / "fig7/report.html").read_text()
    assert "Figure 7, quick, 4 steps a run, 2 of 2 runs finished" in page
    assert page.count("<figcaption>Mean attention distance over training") == 2
