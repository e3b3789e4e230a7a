"""Real processes: start, stop, signals, a dead worker, stderr; and errors of the command line."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from server.serving import (
    TIMEOUT,
    Client,
    RunningServer,
    encode_image,
    save_tiny_model,
    start_server,
    wait_until,
)

from vitkit.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("lifecycle") / "pets", depth=1)


def process_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


# Stop


def test_dead_worker_is_replaced_and_interrupt_is_a_clean_exit(model: Path) -> None:
    """Ctrl-C interrupts the whole process group; that a worker ends with its front end is tested with the worker."""
    with start_server(model, "engine.merge=1", start_new_session=True) as server:
        wait_until(server.is_ready)
        expected = server.post("/v1/predict", encode_image()).body
        first = server.worker()
        os.kill(first, signal.SIGKILL)
        second = wait_until(lambda: replacement(server, first))
        wait_until(server.is_ready)
        assert server.post("/v1/predict", encode_image()).body == expected
        assert server.metric("vitkit_worker_restarts_total") == 1
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(TIMEOUT) == 0
    wait_until(lambda: process_ended(second))
    assert "Traceback" not in "".join(server.log)


def replacement(server: RunningServer, first: int) -> int | None:
    with suppress(StopIteration, OSError):
        worker = server.worker()
        return None if worker == first else worker
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="the capacity of a pipe is known on Linux")
def test_log_that_nobody_reads_blocks_nothing(model: Path) -> None:
    """The pipe is full before the server starts; then it logs more than any pipe holds."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    options = ("--port", "0", "--access-log", "limits.deadline=600")
    command = [sys.executable, "-m", "vitkit", "serve", str(model), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, text=True) as process:
        os.close(writer)
        try:
            assert process.stdout is not None
            client = Client(process.stdout.readline().strip())
            wait_until(client.is_ready)
            assert all(client.get("/nothing/" + "x" * 190).status == 404 for _ in range(400))
            assert client.post("/v1/predict", encode_image()).status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == 0
        finally:
            process.kill()
            os.close(reader)


def test_server_runs_without_standard_files() -> None:
    """Some service managers close them, and pass a token. The port was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    program = "import os, sys; [os.close(number) for number in (0, 1, 2)]; os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-m", "vitkit", "serve", "--runs", ".", "--port", str(port)]
    environment = os.environ | {"VITKIT_TOKEN": "a token"}
    with subprocess.Popen([sys.executable, "-c", program, *command], env=environment) as process:
        try:
            client, token = Client(f"http://127.0.0.1:{port}"), "Bearer a token"

            def is_ready() -> bool:
                with suppress(OSError):
                    return client.is_ready()
                return False

            wait_until(is_ready)
            assert client.get("/v1/runs").status == 401
            assert client.get("/v1/runs", authorization=token).status == 200
            assert client.get("/v1/models", authorization=token).json == {"models": []}
            assert client.post("/v1/predict", encode_image(), authorization=token).status == 404
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == 0
        finally:
            process.kill()


# Start


def test_model_that_cannot_be_loaded_is_one_error(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        assert server.process.wait(TIMEOUT) == 1
    log = "".join(server.log)
    assert log.count("error:") == 1
    assert "Traceback" not in log


def test_log_is_json_if_requested(server: RunningServer) -> None:
    server.get("/v1/%1b[31mred")
    wait_until(lambda: any("[31mred" in entry for entry in server.log))
    records = [json.loads(line) for line in server.log if line[0] == "{"]  # C libraries write text
    assert {"time", "level", "logger", "message"} <= set(records[0])
    access = next(record for record in records if "[31mred" in record["message"])
    assert (access["method"], access["status"]) == ("GET", 404)
    assert "\x1b" not in "".join(server.log)


def fail_to_serve(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["serve", *map(str, arguments)])
    return code, capsys.readouterr().err


def test_port_in_use_is_an_error_with_hint(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        code, text = fail_to_serve(capsys, model, "--port", sock.getsockname()[1])
    assert code == 1
    assert "in use" in text
    assert "--port" in text


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "nothing to serve"),
        (["pets", "--precision", "fp8"], "'fp32', 'bf16', 'int8'"),
        (["pets", "--runs", "nowhere"], "does not exist"),
        (["pets", "--token-file", "nowhere"], "token"),
        (["pets", "--host", "0.0.0.0"], "token"),
        (["pets", "--host", "::"], "token"),
        (["pets", "--host", "192.0.2.1"], "token"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VITKIT_TOKEN", raising=False)
    code, text = fail_to_serve(capsys, *arguments)
    assert code == 2
    assert word in text


def test_public_inherited_socket_needs_a_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VITKIT_TOKEN", raising=False)
    with socket.create_server(("0.0.0.0", 0)) as sock:
        code, text = fail_to_serve(capsys, "pets", "--fd", os.dup(sock.fileno()))
    assert code == 2
    assert "token" in text


def test_models_with_equal_names_are_an_error(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = fail_to_serve(capsys, model, model)
    assert code == 1
    assert "NAME=RUN" in text


@pytest.mark.parametrize("module", ["fastapi", "uvicorn", "prometheus_client"])
def test_missing_extra_is_named(
    module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that is None in sys.modules cannot be imported, as if it were not installed."""
    # Not the configuration: it needs no extra, and other modules would keep the exceptions of a second copy.
    for name in [name for name in sys.modules if name.startswith("vitkit.server.") and not name.endswith(".config")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    code, text = fail_to_serve(capsys, "pets")
    assert code == 1
    assert "pip install 'vitkit[serve]'" in text


def test_help_imports_no_torch() -> None:
    program = "import sys; from vitkit.cli.main import main; main(['serve', '--help']); print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "False"
