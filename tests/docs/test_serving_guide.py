"""The serving guide and deploy/ say what is: their commands, addresses, settings and metrics exist, and agree."""

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

from serve.serving import Running, served, tiny_model

from vitkit.cli import serve
from vitkit.serve.config import EngineConfig, LimitsConfig, ServeConfig, settings_and_models
from vitkit.serve.gate import route_of
from vitkit.serve.metrics import Metrics

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


def yaml_of(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the comparison tools")
    return list(yaml.safe_load_all(read(DEPLOY / name)))


def check_command(arguments: Sequence[str]) -> ServeConfig:
    """The settings that `vitkit serve` with these arguments stands for; a wrong one is an error."""
    given = serve.command.make_context("serve", list(arguments)).params
    settings, models = settings_and_models(given["runs_and_settings"], precisions=serve.chosen(given["precision"]))
    assert models
    return settings


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every `vitkit serve` of the guide and the files, with where it stands."""
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
    [compose], [deployment, *_] = yaml_of("compose.yaml"), yaml_of("kubernetes.yaml")
    yield "compose.yaml", entry[2:] + compose["services"]["vitkit"]["command"]
    yield "kubernetes.yaml", entry[2:] + deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def test_every_command_is_one() -> None:
    found = list(commands())
    assert len(found) >= 9
    for _, arguments in found:
        check_command(arguments)


def test_a_wrong_command_would_be_found() -> None:
    with pytest.raises(Exception, match="no-such"):
        check_command(["runs/photos", "--no-such", "x"])
    with pytest.raises(Exception, match=r"limits\.line"):
        check_command(["runs/photos", "limits.line=3"])


def test_what_others_can_reach_goes_by_its_public_name() -> None:
    for place, arguments in commands():
        if place not in {"serving.md", "Containerfile"}:
            assert "vision.example" in str(check_command(arguments).hosts), place


@files
def test_addresses_exist(file: Path) -> None:
    begin = r"(?:(?<![\w./])|(?<=:8000))"
    named = {path.rstrip(".") for path in re.findall(begin + r"/v[12]/[\w{}/.-]+", read(file))}
    named |= set(re.findall(begin + r"/(?:metrics|docs|openapi\.json)\b", read(file)))
    unknown = {path for path in named if route_of(path.replace("{name}", "name")) == "other"} - {"/v2/health"}
    assert not unknown
    assert named or file.name in {"vitkit.service", "vitkit.socket", "compose.yaml", "prometheus.yml", "alerts.yml"}


@files
def test_metrics_exist(file: Path) -> None:
    kinds = list(Metrics().registry.collect())
    known = {name for kind in kinds for name in (kind.name, f"{kind.name}_total", f"{kind.name}_bucket")}
    named = set(re.findall(r"\bvitkit_[a-z_]+", read(file)))
    assert named <= known
    if file == GUIDE:
        assert {kind.name for kind in kinds} == {name.removesuffix("_total") for name in named}


def test_guide_has_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| (\S+) \| (.+) \|$", read(GUIDE), flags=re.MULTILINE)
    told = {(section, name): value for section, name, value, _ in rows}
    sections = {"limits": LimitsConfig, "engine": EngineConfig}
    assert told == {
        (section, field.name): str(field.default)
        for section, config in sections.items()
        for field in dataclasses.fields(config)
    }


@files
def test_settings_that_comments_name_are_the_defaults(file: Path) -> None:
    for name, value in re.findall(r"limits\.(\w+)=(\d+)", re.sub(r"vitkit serve[^\n`]*", "", read(file))):
        assert getattr(LIMITS, name) == float(value), name


# Numbers that must fit together


def test_everyone_waits_longer_than_the_server_drains() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(read(DEPLOY / "vitkit.service"))
    assert float(unit["Service"]["TimeoutStopSec"]) > LIMITS.drain
    assert unit["Service"]["KillMode"] == "mixed"
    [compose], [deployment, *_] = yaml_of("compose.yaml"), yaml_of("kubernetes.yaml")
    assert float(compose["services"]["vitkit"]["stop_grace_period"].removesuffix("s")) > LIMITS.drain
    pod = deployment["spec"]["template"]["spec"]
    sleep = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > LIMITS.drain + sleep


def test_proxies_take_what_the_server_takes_and_wait_longer() -> None:
    nginx, caddy = read(DEPLOY / "nginx.conf"), read(DEPLOY / "Caddyfile")

    def number(pattern: str, text: str) -> float:
        [found] = re.findall(pattern, text)
        return float(found)

    assert number(r"client_max_body_size (\d+)m", nginx) * 2**20 >= LIMITS.bytes
    assert number(r"client_body_buffer_size (\d+)m", nginx) >= number(r"client_max_body_size (\d+)m", nginx)
    assert number(r"max_size (\d+)MB", caddy) * 10**6 >= LIMITS.bytes
    assert number(r"proxy_read_timeout (\d+)s", nginx) > LIMITS.deadline
    assert number(r"response_header_timeout (\d+)s", caddy) > LIMITS.deadline
    assert number(r"\bkeepalive_timeout (\d+)s", nginx) < LIMITS.keep_alive
    assert number(r"\bkeepalive (\d+)s", caddy) < LIMITS.keep_alive


def test_kubernetes_objects_belong_together() -> None:
    deployment, service, budget, policy = yaml_of("kubernetes.yaml")
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


def test_compose_gives_as_many_threads_as_cores() -> None:
    [compose] = yaml_of("compose.yaml")
    server, caddy = compose["services"]["vitkit"], compose["services"]["caddy"]
    assert f"engine.threads={server['cpus']}" in server["command"]
    assert caddy["environment"]["VITKIT_UPSTREAM"] == "vitkit:8000"
    assert {"VITKIT_NAME", "VITKIT_UPSTREAM"} == set(re.findall(r"\{\$(\w+):", read(DEPLOY / "Caddyfile")))


def test_container_copies_files_that_are_there() -> None:
    container = read(DEPLOY / "Containerfile")
    for line in re.findall(r"^COPY (?!--from)(.+)$", container, flags=re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line


# The programs themselves, where they are installed


def run_if_installed(program: str, *arguments: object) -> None:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    (tmp_path / "vitkit.socket").write_text(read(DEPLOY / "vitkit.socket"))
    unit = read(DEPLOY / "vitkit.service").replace("/opt/vitkit/bin/vitkit", sys.executable)
    (tmp_path / "vitkit.service").write_text(unit)
    run_if_installed("systemd-analyze", "verify", "--recursive-errors=yes", tmp_path / "vitkit.service")


def test_caddy_takes_its_file() -> None:
    run_if_installed("caddy", "adapt", "--adapter", "caddyfile", "--config", DEPLOY / "Caddyfile")


def test_prometheus_takes_its_files() -> None:
    run_if_installed("promtool", "check", "rules", DEPLOY / "alerts.yml")
    run_if_installed("promtool", "check", "config", "--syntax-only", DEPLOY / "prometheus.yml")


# The clients that the guide shows


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with served(tiny_model(tmp_path_factory.mktemp("guide") / "photos")) as running:
        yield running


@pytest.fixture
def photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (40, 30), "orange").save(tmp_path / "cat.jpg")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("photo")
@pytest.mark.parametrize("number", [0, 1])
def test_python_clients_print_an_answer(server: Running, number: int) -> None:
    code = blocks("py")[number]
    if "tritonclient" in code:
        pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
    done = subprocess.run([sys.executable, "-c", at(server, code)], capture_output=True, text=True, check=False)
    assert "class-" in done.stdout, done.stderr


@pytest.mark.usefixtures("photo")
def test_curl_gets_answers(server: Running) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    [code] = blocks("bash")
    for line in at(server, code).splitlines():
        done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True)
        assert '"model' in done.stdout
        assert '"error"' not in done.stdout


def at(server: Running, code: str) -> str:
    """The code with the address of a server that runs."""
    assert "127.0.0.1:8000" in code
    return code.replace("127.0.0.1:8000", server.url.removeprefix("http://"))
