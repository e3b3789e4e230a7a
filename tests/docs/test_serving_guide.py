"""Serving guide and deploy/: commands, routes, settings and metrics exist and are consistent."""

import ast
import configparser
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from server.serving import RunningServer, run_server, save_tiny_model

from vitkit.cli import serve
from vitkit.cli.main import add_global_options
from vitkit.server.config import (
    EngineConfig,
    LimitsConfig,
    ServeConfig,
    configure_server,
    parse_arguments,
)
from vitkit.server.metrics import Metrics
from vitkit.server.middleware import match_route

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GUIDE = ROOT / "docs" / "guides" / "serving.md"
FILES = [GUIDE, *(path for path in sorted(DEPLOY.iterdir()) if path.is_file())]
LIMITS = LimitsConfig()

files = pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(GUIDE), flags=re.DOTALL | re.MULTILINE)


def read_yaml(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the comparison tools")
    return list(yaml.safe_load_all(read(DEPLOY / name)))


def check_command(arguments: Sequence[str]) -> ServeConfig:
    """Parse the arguments of `vitkit serve` and return its settings."""
    add_global_options(serve.command)
    params = serve.command.make_context("serve", list(arguments)).params
    settings, models = configure_server(*parse_arguments(params["runs_and_settings"]), precisions=params["precision"])
    assert models
    return settings


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield every `vitkit serve` command of the guide and the files, with the file name."""
    for code in [*blocks("text"), *blocks("bash")]:
        for line in code.replace("\\\n", " ").splitlines():
            if line.startswith("vitkit serve"):
                yield "serving.md", shlex.split(line, comments=True)[2:]
    for line in re.findall(r"`vitkit serve (.+?)`", read(GUIDE)):
        yield "serving.md", shlex.split(line)
    [line] = re.findall(r"^ExecStart=\S+/vitkit serve (.+)$", read(DEPLOY / "vitkit.service"), flags=re.MULTILINE)
    yield "vitkit.service", shlex.split(line)
    container = read(DEPLOY / "Containerfile")
    entry = ast.literal_eval(re.findall(r"^ENTRYPOINT (.+)$", container, flags=re.MULTILINE)[0])
    assert entry[:2] == ["vitkit", "serve"]
    yield "Containerfile", entry[2:] + ast.literal_eval(re.findall(r"^CMD (.+)$", container, flags=re.MULTILINE)[0])
    [compose], [deployment, *_] = read_yaml("compose.yaml"), read_yaml("kubernetes.yaml")
    yield "compose.yaml", entry[2:] + compose["services"]["vitkit"]["command"]
    yield "kubernetes.yaml", entry[2:] + deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def test_every_command_is_valid() -> None:
    all_commands = list(commands())
    assert len(all_commands) >= 9
    for _, arguments in all_commands:
        check_command(arguments)


def test_wrong_commands_are_detected() -> None:
    with pytest.raises(Exception, match="no-such"):
        check_command(["runs/photos", "--no-such", "x"])
    with pytest.raises(Exception, match=r"limits\.line"):
        check_command(["runs/photos", "limits.line=3"])


def test_public_deployments_allow_their_host_name() -> None:
    for file, arguments in commands():
        if file not in {"serving.md", "Containerfile"}:
            assert "vision.example" in str(check_command(arguments).hosts), file


@files
def test_routes_exist(file: Path) -> None:
    begin = r"(?:(?<![\w./])|(?<=:8000))"
    mentioned = {path.rstrip(".") for path in re.findall(begin + r"/v[12]/[\w{}/.-]+", read(file))}
    mentioned |= set(re.findall(begin + r"/(?:metrics|docs|openapi\.json)\b", read(file)))
    unknown = {path for path in mentioned if match_route(path.replace("{name}", "name")) == "other"} - {"/v2/health"}
    assert not unknown
    assert mentioned or file.name in {"vitkit.service", "vitkit.socket", "compose.yaml", "prometheus.yml", "alerts.yml"}


@files
def test_metrics_exist(file: Path) -> None:
    kinds = list(Metrics().registry.collect())
    valid = {name for kind in kinds for name in (kind.name, f"{kind.name}_total", f"{kind.name}_bucket")}
    mentioned = set(re.findall(r"\bvitkit_[a-z_]+", read(file)))
    assert mentioned <= valid
    if file == GUIDE:
        assert {kind.name for kind in kinds} == {name.removesuffix("_total") for name in mentioned}


def test_guide_has_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| (\S+) \| (.+) \|$", read(GUIDE), flags=re.MULTILINE)
    documented = {(section, name): value for section, name, value, _ in rows}
    sections = {"limits": LimitsConfig, "engine": EngineConfig}
    assert documented == {
        (section, field.name): str(field.default)
        for section, config in sections.items()
        for field in dataclasses.fields(config)
    }


@files
def test_defaults_in_comments_are_correct(file: Path) -> None:
    for name, value in re.findall(r"limits\.(\w+)=(\d+)", re.sub(r"vitkit serve[^\n`]*", "", read(file))):
        assert getattr(LIMITS, name) == float(value), name


# Consistency of limits


def test_stop_timeouts_exceed_the_drain_limit() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(read(DEPLOY / "vitkit.service"))
    assert float(unit["Service"]["TimeoutStopSec"]) > LIMITS.drain
    assert unit["Service"]["KillMode"] == "mixed"
    [compose], [deployment, *_] = read_yaml("compose.yaml"), read_yaml("kubernetes.yaml")
    assert float(compose["services"]["vitkit"]["stop_grace_period"].removesuffix("s")) > LIMITS.drain
    pod = deployment["spec"]["template"]["spec"]
    sleep = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > LIMITS.drain + sleep


def test_proxy_limits_exceed_the_server_limits() -> None:
    nginx, caddy = read(DEPLOY / "nginx.conf"), read(DEPLOY / "Caddyfile")

    def number(pattern: str, text: str) -> float:
        [value] = re.findall(pattern, text)
        return float(value)

    assert number(r"client_max_body_size (\d+)m", nginx) * 2**20 >= LIMITS.bytes
    assert number(r"client_body_buffer_size (\d+)m", nginx) >= number(r"client_max_body_size (\d+)m", nginx)
    assert number(r"max_size (\d+)MB", caddy) * 10**6 >= LIMITS.bytes
    assert number(r"proxy_read_timeout (\d+)s", nginx) > LIMITS.deadline
    assert number(r"response_header_timeout (\d+)s", caddy) > LIMITS.deadline
    assert number(r"\bkeepalive_timeout (\d+)s", nginx) < LIMITS.keep_alive
    assert number(r"\bkeepalive (\d+)s", caddy) < LIMITS.keep_alive


def test_kubernetes_objects_are_consistent() -> None:
    deployment, service, budget, policy = read_yaml("kubernetes.yaml")
    pod = deployment["spec"]["template"]
    labels, [container] = pod["metadata"]["labels"], pod["spec"]["containers"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
        policy["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector == labels
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}
    assert f"engine.threads={container['resources']['limits']['cpu']}" in container["args"]
    assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    [port] = container["ports"]
    assert (port["name"], port["containerPort"]) == (service["spec"]["ports"][0]["targetPort"], 8000)


def test_compose_sets_one_thread_per_core() -> None:
    [compose] = read_yaml("compose.yaml")
    server, caddy = compose["services"]["vitkit"], compose["services"]["caddy"]
    assert f"engine.threads={server['cpus']}" in server["command"]
    assert caddy["environment"]["VITKIT_UPSTREAM"] == "vitkit:8000"
    assert {"VITKIT_NAME", "VITKIT_UPSTREAM"} == set(re.findall(r"\{\$(\w+):", read(DEPLOY / "Caddyfile")))


def test_container_copies_existing_files() -> None:
    container = read(DEPLOY / "Containerfile")
    for line in re.findall(r"^COPY (?!--from)(.+)$", container, flags=re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line


# Validation by the programs themselves, if they are installed


def run_if_installed(program: str, *arguments: object) -> None:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    result = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    (tmp_path / "vitkit.socket").write_text(read(DEPLOY / "vitkit.socket"))
    unit = read(DEPLOY / "vitkit.service").replace("/opt/vitkit/bin/vitkit", sys.executable)
    (tmp_path / "vitkit.service").write_text(unit)
    run_if_installed("systemd-analyze", "verify", "--recursive-errors=yes", tmp_path / "vitkit.service")


def test_caddy_accepts_its_file() -> None:
    run_if_installed("caddy", "adapt", "--adapter", "caddyfile", "--config", DEPLOY / "Caddyfile")


def test_prometheus_accepts_its_files() -> None:
    run_if_installed("promtool", "check", "rules", DEPLOY / "alerts.yml")
    run_if_installed("promtool", "check", "config", "--syntax-only", DEPLOY / "prometheus.yml")


# Clients of the guide


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server(save_tiny_model(tmp_path_factory.mktemp("guide") / "photos")) as running:
        yield running


@pytest.fixture
def photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (40, 30), "orange").save(tmp_path / "cat.jpg")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("photo")
@pytest.mark.parametrize("number", [0, 1])
def test_python_clients_print_predictions(server: RunningServer, number: int) -> None:
    code = blocks("py")[number]
    if "tritonclient" in code:
        pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
    result = subprocess.run(
        [sys.executable, "-c", with_address(server, code)], capture_output=True, text=True, check=False
    )
    assert "class-" in result.stdout, result.stderr


@pytest.mark.usefixtures("photo")
def test_curl_gets_predictions(server: RunningServer) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    [code] = blocks("bash")
    for line in with_address(server, code).splitlines():
        result = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True)
        assert '"model' in result.stdout
        assert '"error"' not in result.stdout


def with_address(server: RunningServer, code: str) -> str:
    """Insert the address of a running server into code."""
    assert "127.0.0.1:8000" in code
    return code.replace("127.0.0.1:8000", server.url.removeprefix("http://"))
