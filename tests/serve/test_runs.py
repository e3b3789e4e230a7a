import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vitkit.core.config import to_toml
from vitkit.core.runlog import RunLog, truncate_after
from vitkit.serve import runs
from vitkit.serve.app import add_errors
from vitkit.train.config import RunConfig, ScheduleConfig
from vitkit.train.run import rhythm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    path.mkdir()
    return path


def begun(folder: Path, name: str = "first", *, steps: int = 40) -> Path:
    """A run folder whose run has just begun."""
    run = folder / name
    run.mkdir()
    (run / "config.toml").write_text(f"[schedule]\nsteps = {steps}\n", encoding="utf-8")
    return run


def client(folder: Path | None) -> TestClient:
    app = FastAPI()
    add_errors(app)
    app.include_router(runs.routes(folder))
    return TestClient(app)


def asked(client: TestClient, path: str, status: int = 200) -> Any:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_run_is_running_until_it_is_quiet_and_done_once_it_has_a_result(folder: Path) -> None:
    run = begun(folder)
    with RunLog(run / "metrics.jsonl") as log:
        log.write(step=10, loss=2.0)
    ask = client(folder)
    (found,) = asked(ask, "/v1/runs")["runs"]
    assert (found["name"], found["state"], found["step"], found["steps"]) == ("first", "running", 10, 40)
    for file in run.iterdir():
        os.utime(file, (1e9, 1e9))
    assert asked(ask, "/v1/runs")["runs"][0]["state"] == "stopped"
    (run / "summary.json").write_text('{"result": {"top1": 0.5}}', encoding="utf-8")
    assert asked(ask, "/v1/runs")["runs"][0]["state"] == "done"
    assert asked(ask, "/v1/runs/first")["summary"] == {"result": {"top1": 0.5}}


def test_a_slow_run_has_more_time_before_it_counts_as_stopped(folder: Path) -> None:
    run = begun(folder)
    (run / "config.toml").write_text(
        "[schedule]\nsteps = 40\nbatch_size = 100\n[keep]\nlog_every = 10\n", encoding="utf-8"
    )
    (run / "speed.jsonl").write_text('{"step": 10, "images_per_second": 1.0}\n', encoding="utf-8")
    now = asked(client(folder), "/v1/runs")["now"]
    for file in run.iterdir():
        os.utime(file, (now - 3600, now - 3600))  # a line takes it 1000 s
    assert asked(client(folder), "/v1/runs")["runs"][0]["state"] == "running"


@pytest.mark.parametrize(("epochs", "images", "batch"), [(3.0, 1000, 32), (0.5, 77, 16), (11.0, 49000, 32)])
def test_the_number_of_steps_is_the_one_that_training_counts(
    folder: Path, epochs: float, images: int, batch: int
) -> None:
    config = RunConfig(schedule=ScheduleConfig(epochs=epochs, batch_size=batch))
    run = begun(folder)
    (run / "config.toml").write_text(to_toml(config), encoding="utf-8")
    (run / "data.json").write_text(json.dumps({"images": {"train": images}}), encoding="utf-8")
    assert asked(client(folder), "/v1/runs")["runs"][0]["steps"] == rhythm(config, images=images).steps


def test_records_come_after_a_step_as_the_log_grows_and_follow_it_when_it_goes_back(folder: Path) -> None:
    path = begun(folder) / "metrics.jsonl"
    ask = client(folder)
    assert asked(ask, "/v1/runs/first")["records"] == []
    with RunLog(path) as log:
        log.write(step=1, loss=3.0)
        log.write(step=2, loss=float("inf"))
    records = asked(ask, "/v1/runs/first")["records"]
    assert records == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": "inf"}]
    with path.open("ab") as file:
        file.write(b'{"step": 3, "lo')  # the run is writing this line now
    assert asked(ask, "/v1/runs/first?after=1")["records"] == records[1:]
    with path.open("ab") as file:
        file.write(b'ss": 1.0}\n')
    assert asked(ask, "/v1/runs/first?after=2")["records"] == [{"step": 3, "loss": 1.0}]
    truncate_after(path, 1)
    with RunLog(path) as log:
        log.write(step=2, loss=2.5)
    answer = asked(ask, "/v1/runs/first")
    assert (answer["records"], answer["step"]) == ([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}], 2)


def test_a_long_log_comes_in_parts_that_make_the_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MOST_RECORDS", 7)
    monkeypatch.setattr(runs, "_READ_AT_ONCE", 100)
    lines = [{"step": step, "loss": 1 / step} for step in range(1, 41)]
    (begun(folder) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    ask, got = client(folder), []
    for _ in range(100):
        answer = asked(ask, f"/v1/runs/first?after={got[-1]['step'] if got else -1}")
        assert len(answer["records"]) <= 7
        got += answer["records"]
        if not answer["more"]:
            break
    assert got == lines


def test_damaged_lines_are_counted_and_the_others_shown(folder: Path) -> None:
    content = b'{"step": 1}\nnot json\n[1]\n{"step": true}\n{"step": "2"}\n\xff\n{"step": 3, "loss": NaN}\n'
    (begun(folder) / "metrics.jsonl").write_bytes(content + b'{"step": 4, "x": ' + b"[" * 5000 + b"\n")
    answer = asked(client(folder), "/v1/runs/first")
    assert answer["records"] == [{"step": 1}, {"step": 3, "loss": "nan"}]
    assert answer["damaged"] == 6


@pytest.mark.parametrize("what", ["config.toml", "data.json", "summary.json", "speed.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[]", b"{", b'{"images": 3, "step": []}\n', b"[[" * 3000])
def test_files_that_say_nothing_sensible_harm_nothing(folder: Path, what: str, content: bytes) -> None:
    run = begun(folder)
    (run / what).write_bytes(content)
    ask = client(folder)
    assert len(asked(ask, "/v1/runs")["runs"]) == 1
    assert asked(ask, "/v1/runs/first")["name"] == "first"


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../secret",
        "%2e%2e",
        "..%2fsecret",
        "%2e%2e%2fsecret",
        "first/../../secret",
        "/etc",
        ".",
        "first%00",
        "link",
    ],
)
def test_no_name_leads_out_of_the_folder(folder: Path, name: str) -> None:
    begun(folder)
    secret = begun(folder.parent, "secret")
    (secret / "metrics.jsonl").write_text('{"step": 1, "secret": 1}\n', encoding="utf-8")
    (folder / "link").symlink_to(secret, target_is_directory=True)
    (folder / "circle").symlink_to(folder / "circle")
    ask = client(folder)
    answer = ask.get(f"/v1/runs/{name}")
    assert "secret" not in answer.text.replace("..", "")
    if answer.status_code == 200:  # the client itself made /v1/runs of it
        assert [run["name"] for run in answer.json().get("runs", [])] == ["first"]
    else:
        assert answer.status_code == 404
        assert set(answer.json()) == {"error", "hint"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_in_place_of_a_log_does_not_hold_the_server_up(folder: Path) -> None:
    run = begun(folder)
    for name in ("metrics.jsonl", "speed.jsonl", "summary.json", "data.json"):
        os.mkfifo(run / name)
    assert asked(client(folder), "/v1/runs/first")["records"] == []
    assert asked(client(folder), "/v1/runs")["runs"][0]["state"] == "running"


def test_a_folder_that_is_itself_a_run_is_shown_as_one(folder: Path) -> None:
    run = begun(folder, "alone")
    assert [each["name"] for each in asked(client(run), "/v1/runs")["runs"]] == ["alone"]


def test_without_a_folder_the_answer_says_how_to_name_one(folder: Path) -> None:
    for path in ("/v1/runs", "/v1/runs/first"):
        assert "--runs" in asked(client(None), path, 404)["hint"]
    assert asked(client(folder / "missing"), "/v1/runs")["runs"] == []


def test_a_name_that_is_not_text_does_not_break_the_list(folder: Path) -> None:
    run = Path(os.fsdecode(os.fsencode(folder) + b"/run-\xe9"))
    try:
        run.mkdir()
    except OSError:
        pytest.skip("this file system takes only text as names")
    (run / "metrics.jsonl").write_text('{"step": 5}\n', encoding="utf-8")
    ask = client(folder)
    (found,) = asked(ask, "/v1/runs")["runs"]
    assert asked(ask, f"/v1/runs/{found['name']}")["step"] == 5


def test_only_the_latest_of_very_many_runs_are_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MOST_RUNS", 2)
    for number, name in enumerate("abc"):
        run = begun(folder, name)
        os.utime(run / "config.toml", (1e9 + number, 1e9 + number))
    answer = asked(client(folder), "/v1/runs")
    assert [run["name"] for run in answer["runs"]] == ["c", "b"]
    assert answer["left_out"] == 1
