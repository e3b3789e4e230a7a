"""The start of a real server: what cannot be served is said in two lines, with the way out."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serve.serving import PATIENCE, is_ready, picture, started, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("starting") / "pets", depth=1)


def failure(*arguments: object) -> tuple[int, str]:
    with started(*arguments) as server:
        code = server.process.wait(PATIENCE)
    return code, "".join(server.talk)


def test_what_cannot_be_served_is_said_in_two_lines(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, said = failure(tmp_path / "empty")
    assert code == 1
    assert said.count("error:") == 1
    assert "Traceback" not in said


def test_a_port_in_use_is_said_with_a_way_out(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = failure(model, "--port", taken.getsockname()[1])
    assert code == 1
    assert "in use" in said
    assert "--port" in said


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "nothing to serve"),
        (["--precision", "fp8"], "fp32, bf16 or int8"),
        (["--runs", "nowhere"], "no folder"),
        (["--token-file", "nowhere"], "token"),
    ],
)
def test_a_command_that_makes_no_sense_is_used_wrongly(model: Path, arguments: list[str], word: str) -> None:
    code, said = failure(*([model, *arguments] if arguments else []))
    assert code == 2
    assert word in said


def test_two_models_of_one_name_are_an_error(model: Path) -> None:
    code, said = failure(model, model)
    assert code == 1
    assert "NAME=RUN" in said


def test_runs_alone_can_be_served(tmp_path: Path) -> None:
    with started("--runs", tmp_path) as server:
        assert is_ready(server)
        assert server.get("/v1/models").json == {"models": []}
        assert server.get("/v1/runs").json["runs"] == []
        assert server.post("/v1/predict", picture()).status == 404


def test_help_needs_no_torch() -> None:
    program = "import sys; from vitkit.cli.main import main; main(['serve', '--help']); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "False"


@pytest.mark.parametrize("extra", ["fastapi", "uvicorn", "prometheus_client"])
def test_without_its_libraries_it_says_what_to_install(model: Path, extra: str) -> None:
    """A module that is None in sys.modules cannot be imported: as if it were not installed."""
    program = (
        f"import sys; sys.modules['{extra}'] = None; from vitkit.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "serve", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'vitkit[serve]'" in done.stderr


def test_a_socket_that_others_can_reach_needs_a_token_too(model: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as sock:
        with started(model, "--fd", sock.fileno(), pass_fds=[sock.fileno()]) as server:
            assert server.process.wait(PATIENCE) == 2
        assert "token" in "".join(server.talk)
