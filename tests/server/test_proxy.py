"""deploy/nginx.conf in front of real servers."""

import http.client
import itertools
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from server.front_end import WorkerFleet, run_front_end
from server.serving import TIMEOUT, HTTPResponse, RunningServer, encode_image, run_server, save_tiny_model, wait_until

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"
NAME = "vision.example"
NGINX, OPENSSL = shutil.which("nginx") or "", shutil.which("openssl") or ""

pytestmark = pytest.mark.skipif(not (NGINX and OPENSSL), reason="nginx or openssl is not installed")


@dataclass
class Proxy:
    """A running nginx, by its port."""

    port: int

    def ask(self, method: str, path: str, body: bytes | None = None) -> HTTPResponse:
        """Send one request under the public name."""
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=TIMEOUT, context=unchecked)
        try:
            connection.request(method, path, body=body, headers={"Host": NAME})
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return HTTPResponse(response.status, headers, response.read())
        finally:
            connection.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def run_nginx(folder: Path, *servers: str) -> Iterator[Proxy]:
    """Run nginx with the shipped configuration and other ports, servers and certificate."""
    folder.mkdir()
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    line = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={NAME}"]
    subprocess.run([OPENSSL, *line, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    port = free_port()
    text = CONFIGURATION.read_text(encoding="utf-8")
    upstreams = "".join(f"server {server.removeprefix('http://')} max_fails=0;\n" for server in servers)
    for old, new in {
        r"^    server 127\.0\.0\.1:8000 .*$": upstreams,
        r"listen 80;": f"listen 127.0.0.1:{free_port()};",
        r"listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        r"ssl_certificate /.*;": f"ssl_certificate {certificate};",
        r"ssl_certificate_key /.*;": f"ssl_certificate_key {key};",
    }.items():
        text, count = re.subn(old, new, text, flags=re.MULTILINE)
        assert count == 1, old
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off;\n{temporary}\n{text}\n}}\n"
    )
    command = [NGINX, "-p", folder, "-e", folder / "error.log", "-c", folder / "nginx.conf"]
    checked = subprocess.run([*command, "-t"], check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "warn" not in checked.stderr
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: is_open(port))
            yield Proxy(port)
        finally:
            process.send_signal(signal.SIGQUIT)


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("proxy") / "photos")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with run_server(model, f"hosts={NAME}") as running:
        yield running


@pytest.fixture(scope="module")
def proxy(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with run_nginx(tmp_path_factory.mktemp("nginx") / "run", server.url) as running:
        yield running


def test_page_and_predictions_pass(proxy: Proxy, server: RunningServer) -> None:
    assert b"<html" in proxy.ask("GET", "/").body
    response = proxy.ask("POST", "/v1/predict", encode_image())
    assert response.status == 200
    assert response.json == server.post("/v1/predict", encode_image()).json
    assert response.headers["strict-transport-security"]
    assert response.headers["x-content-type-options"] == "nosniff"


def test_metrics_are_hidden(proxy: Proxy, server: RunningServer) -> None:
    assert proxy.ask("GET", "/metrics").status == 404
    assert server.get("/metrics").status == 200


def test_large_body_is_rejected_as_json(proxy: Proxy) -> None:
    for size in (20_000_001, 21_000_000):  # nginx counts in 2^20 bytes and lets the first pass
        response = proxy.ask("POST", "/v1/predict", bytes(size))
        assert response.status == 413
        assert "too large" in response.json["error"]


def test_rejections_pass_with_retry_after(tmp_path: Path) -> None:
    """The worker holds the only request that the queue has room for."""
    fleet = WorkerFleet(holds=True)
    fleet.ready |= {"min_in_flight": 1, "max_in_flight": 1, "seconds_per_image": 10.0}
    with (
        run_front_end(fleet=fleet, hosts=(NAME,)) as front_end,
        run_nginx(tmp_path / "run", front_end.url) as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        accepted = pool.submit(proxy.ask, "POST", "/v1/predict", b"an image")
        fleet.wait_for(1)
        rejected = proxy.ask("POST", "/v1/predict", b"an image")
        fleet.release()
        assert accepted.result(TIMEOUT).status == 200
    assert (rejected.status, rejected.headers["retry-after"]) == (429, "10")
    assert "error" in rejected.json


def test_restarts_in_turn_lose_no_request(model: Path, tmp_path: Path) -> None:
    stop, statuses = threading.Event(), []
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        first, second = ExitStack(), stack.enter_context(ExitStack())
        stack.push(first)
        arguments = (model, f"hosts={NAME}", "--port")
        first.enter_context(run_server(*arguments, ports[0]))
        second.enter_context(run_server(*arguments, ports[1]))
        proxy = stack.enter_context(run_nginx(tmp_path / "run", *(f"127.0.0.1:{port}" for port in ports)))

        def load() -> None:
            for number in itertools.count():
                if stop.is_set():
                    return
                statuses.append(proxy.ask("POST", "/v1/predict", encode_image(number % 5)).status)

        with ThreadPoolExecutor(3) as pool:
            loads = [pool.submit(load) for _ in range(3)]
            try:
                for server, port in zip((first, second), ports, strict=True):
                    before = len(statuses)
                    wait_until(lambda before=before: len(statuses) > before + 10)
                    server.close()  # SIGTERM, drain, the end
                    wait_until(lambda before=before: len(statuses) > before + 20)
                    server.enter_context(run_server(*arguments, port))
            finally:
                stop.set()
            for each in loads:
                each.result()
    assert len(statuses) > 40
    assert set(statuses) == {200}
