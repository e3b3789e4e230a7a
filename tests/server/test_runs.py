"""Routes for training runs: states, records of growing logs, and names that must not leave the directory."""

import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vitkit.core.config import to_toml
from vitkit.core.lock import HOLDER_FILE, LOCK_FILE, lock_directory
from vitkit.core.metrics_log import MetricsLog, truncate_metrics
from vitkit.server import runs_api
from vitkit.server.routes import add_error_handlers
from vitkit.training.config import RunConfig, ScheduleConfig
from vitkit.training.run import plan_intervals


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    path.mkdir()
    return path


def create_run(directory: Path, name: str = "first", *, steps: int = 40) -> Path:
    """Create the directory of a run that has just started."""
    run = directory / name
    run.mkdir()
    (run / "config.toml").write_text(f"[schedule]\nsteps = {steps}\n", encoding="utf-8")
    return run


def create_client(directory: Path | None) -> TestClient:
    app = FastAPI()
    add_error_handlers(app)
    app.include_router(runs_api.create_router(directory))
    return TestClient(app)


def get_json(client: TestClient, path: str, status: int = 200) -> Any:
    response = client.get(path)
    assert response.status_code == status, response.text
    return response.json()


def test_run_is_running_while_its_lock_is_held(directory: Path) -> None:
    run = create_run(directory)
    client = create_client(directory)
    with MetricsLog(run / "metrics.jsonl") as log, lock_directory(run):
        log.write(step=10, loss=2.0)
        for file in ("config.toml", "metrics.jsonl"):
            os.utime(run / file, (1e9, 1e9))  # a step may take years
        (listed,) = get_json(client, "/v1/runs")["runs"]
        assert (listed["name"], listed["state"], listed["step"], listed["steps"]) == ("first", "running", 10, 40)
    assert get_json(client, "/v1/runs")["runs"][0]["state"] == "stopped"
    (run / "summary.json").write_text('{"result": {"top1": 0.5}}', encoding="utf-8")
    assert get_json(client, "/v1/runs")["runs"][0]["state"] == "done"
    assert get_json(client, "/v1/runs/first")["summary"] == {"result": {"top1": 0.5}}


def test_killed_run_is_stopped_although_its_lock_file_remains(directory: Path) -> None:
    run = create_run(directory)
    (run / LOCK_FILE).touch()
    (run / HOLDER_FILE).write_text('{"pid": 1, "host": "here"}', encoding="utf-8")
    client = create_client(directory)
    assert get_json(client, "/v1/runs")["runs"][0]["state"] == "stopped"
    with lock_directory(run):  # the question did not take it
        assert get_json(client, "/v1/runs")["runs"][0]["state"] == "running"


def test_unchanged_runs_are_not_parsed_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    read_toml, last_record = runs_api.read_toml, runs_api._read_last_record
    monkeypatch.setattr(runs_api, "read_toml", lambda path: (parsed.append(path.parent.name), read_toml(path))[1])
    monkeypatch.setattr(
        runs_api, "_read_last_record", lambda path: (parsed.append(path.parent.name), last_record(path))[1]
    )
    for name in "abc":
        (create_run(directory, name) / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    client = create_client(directory)
    first = get_json(client, "/v1/runs")["runs"]
    assert sorted(parsed) == ["a", "a", "b", "b", "c", "c"]
    parsed.clear()
    assert get_json(client, "/v1/runs")["runs"] == first
    assert parsed == []
    with (directory / "b" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2}\n')
    steps = {run["name"]: run["step"] for run in get_json(client, "/v1/runs")["runs"]}
    assert (steps, parsed) == ({"a": 1, "b": 2, "c": 1}, ["b", "b"])
    parsed.clear()
    (directory / "a" / "config.toml").write_text("[schedule]\nsteps = 1000\n", encoding="utf-8")
    assert {run["steps"] for run in get_json(client, "/v1/runs")["runs"]} == {40, 1000}
    assert parsed == ["a", "a"]


def test_length_is_known_as_soon_as_the_images_are_counted(directory: Path) -> None:
    run, client = create_run(directory), create_client(directory)
    (run / "config.toml").write_text("[schedule]\nepochs = 2\nbatch_size = 10\n", encoding="utf-8")
    assert get_json(client, "/v1/runs")["runs"][0]["steps"] is None
    (run / "data.json").write_text('{"images": {"train": 50}}', encoding="utf-8")
    assert get_json(client, "/v1/runs")["runs"][0]["steps"] == 10


@pytest.mark.parametrize(("epochs", "images", "batch"), [(3.0, 1000, 32), (0.5, 77, 16), (11.0, 49000, 32)])
def test_number_of_steps_is_that_of_training(directory: Path, epochs: float, images: int, batch: int) -> None:
    config = RunConfig(schedule=ScheduleConfig(epochs=epochs, batch_size=batch))
    run = create_run(directory)
    (run / "config.toml").write_text(to_toml(config), encoding="utf-8")
    (run / "data.json").write_text(json.dumps({"images": {"train": images}}), encoding="utf-8")
    assert (
        get_json(create_client(directory), "/v1/runs")["runs"][0]["steps"]
        == plan_intervals(config, images=images).total_steps
    )


def test_records_follow_a_log_that_grows_or_is_truncated(directory: Path) -> None:
    path = create_run(directory) / "metrics.jsonl"
    client = create_client(directory)
    assert get_json(client, "/v1/runs/first")["records"] == []
    with MetricsLog(path) as log:
        log.write(step=1, loss=3.0)
        log.write(step=2, loss=float("inf"))
    records = get_json(client, "/v1/runs/first")["records"]
    assert records == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": "inf"}]
    with path.open("ab") as file:
        file.write(b'{"step": 3, "lo')  # the run is writing this line now
    assert get_json(client, "/v1/runs/first?after=1")["records"] == records[1:]
    with path.open("ab") as file:
        file.write(b'ss": 1.0}\n')
    assert get_json(client, "/v1/runs/first?after=2")["records"] == [{"step": 3, "loss": 1.0}]
    truncate_metrics(path, 1)
    with MetricsLog(path) as log:
        log.write(step=2, loss=2.5)
    response = get_json(client, "/v1/runs/first")
    assert (response["records"], response["step"]) == ([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}], 2)


def test_long_log_is_returned_in_parts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_api, "MAX_RECORDS", 7)
    monkeypatch.setattr(runs_api, "_MAX_READ", 100)
    lines = [{"step": step, "loss": 1 / step} for step in range(1, 41)]
    (create_run(directory) / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    client, got = create_client(directory), []
    for _ in range(100):
        response = get_json(client, f"/v1/runs/first?after={got[-1]['step'] if got else -1}")
        assert len(response["records"]) <= 7
        got += response["records"]
        if not response["more"]:
            break
    assert got == lines


def test_damaged_lines_are_counted(directory: Path) -> None:
    content = b'{"step": 1}\nnot json\n[1]\n{"step": true}\n{"step": "2"}\n\xff\n{"step": 3, "loss": NaN}\n'
    (create_run(directory) / "metrics.jsonl").write_bytes(content + b'{"step": 4, "x": ' + b"[" * 5000 + b"\n")
    response = get_json(create_client(directory), "/v1/runs/first")
    assert response["records"] == [{"step": 1}, {"step": 3, "loss": "nan"}]
    assert response["damaged"] == 6


@pytest.mark.parametrize("what", ["config.toml", "data.json", "summary.json", "speed.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[]", b"{", b'{"images": 3, "step": []}\n', b"[[" * 3000])
def test_invalid_files_are_tolerated(directory: Path, what: str, content: bytes) -> None:
    run = create_run(directory)
    (run / what).write_bytes(content)
    client = create_client(directory)
    assert len(get_json(client, "/v1/runs")["runs"]) == 1
    assert get_json(client, "/v1/runs/first")["name"] == "first"


EXTREME = [
    "schedule.epochs = 1e308\nschedule.batch_size = 1e-320",
    f"schedule.steps = {'9' * 400}",
    f"schedule.steps = {'9' * 5000}",
    "schedule.steps = inf",
    "schedule.epochs = nan",
    "schedule" + ".a" * 20_000 + " = 1",
    f"[{'a.' * 20_000}b]",
    f'"{"x"}"' + '."y"' * 10_000 + " = 1",
    "a = 'x" + "." * 200,
    "a = {" + "b." * 20_000 + "c = 1}",
]


@pytest.mark.parametrize("config", EXTREME)
def test_extreme_configuration_does_not_hide_other_runs(directory: Path, config: str) -> None:
    create_run(directory, "good")
    (create_run(directory, "bad") / "config.toml").write_text(config, encoding="utf-8")
    (directory / "bad" / "data.json").write_text('{"images": {"train": 1e300}}', encoding="utf-8")
    tracemalloc.start()
    try:
        listed = {run["name"]: run["steps"] for run in get_json(create_client(directory), "/v1/runs")["runs"]}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert listed == {"good": 40, "bad": None}
    assert peak < 10**7
    assert get_json(create_client(directory), "/v1/runs/bad")["steps"] is None


def test_unexpected_error_in_one_run_is_logged(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path) -> int:
        if path.name == "bad":
            raise OverflowError("unexpected")
        return 7

    monkeypatch.setattr(runs_api, "_compute_total_steps", fail)
    for name in ("bad", "good"):
        create_run(directory, name)
    listed = {run["name"]: run["steps"] for run in get_json(create_client(directory), "/v1/runs")["runs"]}
    assert listed == {"good": 7, "bad": None}
    assert "bad cannot be read" in caplog.text


def test_deeply_nested_values_are_damaged_or_left_out(directory: Path) -> None:
    """Near the recursion limit a value can be parsed and not encoded again."""
    run, client = create_run(directory), create_client(directory)
    for depth in range(sys.getrecursionlimit() - 30, sys.getrecursionlimit()):
        nested = '"x": ' + "[" * depth + "]" * depth
        (run / "metrics.jsonl").write_text(f'{{"step": 1, {nested}}}\n{{"step": 2}}\n', encoding="utf-8")
        (run / "summary.json").write_text(f"{{{nested}}}", encoding="utf-8")
        response = client.get("/v1/runs/first")
        assert response.status_code == 200
        assert response.content.endswith(b'{"step": 2}]}')


def test_infinite_numbers_are_sent_as_valid_json(directory: Path) -> None:
    run = create_run(directory)
    (run / "summary.json").write_text('{"a": 1e999, "b": [Infinity, -1e999, NaN, 1e3]}', encoding="utf-8")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1e999}\n', encoding="utf-8")
    text = create_client(directory).get("/v1/runs/first").text
    constants: list[str] = []
    response = json.loads(text, parse_constant=constants.append)
    assert constants == []
    assert response["summary"] == {"a": "inf", "b": ["inf", "-inf", "nan", 1000.0]}
    assert response["records"] == [{"step": 1, "loss": "inf"}]


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
def test_name_cannot_leave_the_directory(directory: Path, name: str) -> None:
    create_run(directory)
    secret = create_run(directory.parent, "secret")
    (secret / "metrics.jsonl").write_text('{"step": 1, "secret": 1}\n', encoding="utf-8")
    (directory / "link").symlink_to(secret, target_is_directory=True)
    (directory / "circle").symlink_to(directory / "circle")
    client = create_client(directory)
    response = client.get(f"/v1/runs/{name}")
    assert "secret" not in response.text.replace("..", "")
    if response.status_code == 200:  # the client itself made /v1/runs of it
        assert [run["name"] for run in response.json().get("runs", [])] == ["first"]
    else:
        assert response.status_code == 404
        assert set(response.json()) == {"error", "hint"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_pipe_instead_of_a_log_does_not_block(directory: Path) -> None:
    run = create_run(directory)
    for name in ("metrics.jsonl", "speed.jsonl", "summary.json", "data.json"):
        os.mkfifo(run / name)
    assert get_json(create_client(directory), "/v1/runs/first")["records"] == []
    assert get_json(create_client(directory), "/v1/runs")["runs"][0]["state"] == "stopped"


def test_directory_may_be_a_run_itself(directory: Path) -> None:
    run = create_run(directory, "alone")
    assert [each["name"] for each in get_json(create_client(run), "/v1/runs")["runs"]] == ["alone"]


def test_without_a_directory_the_hint_names_the_option(directory: Path) -> None:
    for path in ("/v1/runs", "/v1/runs/first"):
        assert "--runs" in get_json(create_client(None), path, 404)["hint"]
    assert get_json(create_client(directory / "missing"), "/v1/runs")["runs"] == []


def test_undecodable_name_is_listed(directory: Path) -> None:
    run = Path(os.fsdecode(os.fsencode(directory) + b"/run-\xe9"))
    try:
        run.mkdir()
    except OSError:
        pytest.skip("this file system takes only text as names")
    (run / "metrics.jsonl").write_text('{"step": 5}\n', encoding="utf-8")
    client = create_client(directory)
    (listed,) = get_json(client, "/v1/runs")["runs"]
    assert get_json(client, f"/v1/runs/{listed['name']}")["step"] == 5


def test_only_the_latest_runs_are_listed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_api, "MAX_RUNS", 2)
    for number, name in enumerate("abc"):
        run = create_run(directory, name)
        os.utime(run / "config.toml", (1e9 + number, 1e9 + number))
    response = get_json(create_client(directory), "/v1/runs")
    assert [run["name"] for run in response["runs"]] == ["c", "b"]
    assert response["left_out"] == 1
