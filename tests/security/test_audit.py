"""Guarantees X1 and X3: loading and serving unpickle nothing, start no program and do not use the network.

The audit hook observes every test (tests/conftest.py). These tests check the hook itself, and a whole server with it.
"""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from security.audit import ALLOWED, get_audit
from security.audit import is_fault as is_fault_of
from server.serving import encode_image, request, run_server, save_tiny_model

import vitkit

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src"


class Harmless:
    def __reduce__(self) -> tuple[type[list[int]], tuple[()]]:
        return list, ()


def as_vitkit(code: str, *, module: str = "vitkit.weights.io.fake") -> None:
    """Run code as if it were in a module of vitkit."""
    exec(compile(code, "fake.py", "exec"), {"__name__": module})


@pytest.mark.parametrize(
    ("code", "event"),
    [
        (f"import pickle; pickle.loads({pickle.dumps(Harmless())!r})", "pickle.find_class"),
        ("import subprocess; subprocess.run(['/bin/true'])", "subprocess.Popen"),
        ("import os; os.system('true')", "os.system"),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", "os.posix_spawn"),
        ("import socket\nwith socket.socket() as s: s.connect_ex(('127.0.0.1', 9))", "socket.connect"),
    ],
)
def test_forbidden_events_are_reported(code, event):
    with get_audit().redirect() as heard:
        as_vitkit(code)
    faults = [each for each in heard if is_fault_of(each)]
    assert [each.name for each in faults][:1] == [event]
    assert faults[0].vitkit == "vitkit.weights.io.fake"
    assert faults[0].line >= 1


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("socket.getaddrinfo", ("vitkit.invalid", 80, 0, 0, 0)),
        ("socket.connect", (None, ("203.0.113.1", 80))),
        ("socket.connect", (None, ("2001:db8::1", 80, 0, 0))),
        ("socket.sendto", (None, ("203.0.113.1", 53))),
        ("socket.gethostbyname", ("vitkit.invalid",)),
        ("urllib.Request", ("http://203.0.113.1/", None, {}, "GET")),
    ],
)
def test_network_access_of_a_test_is_reported(event, arguments):
    with get_audit().redirect() as heard:
        sys.audit(event, *arguments)  # as the real call would, which is not made
    assert [is_fault_of(each) and each.outside for each in heard] == [True]


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("socket.getaddrinfo", ("localhost", 80, 0, 0, 0)),
        ("socket.getaddrinfo", (None, 80, 0, 0, 0)),
        ("socket.connect", (None, ("127.0.0.1", 80))),
        ("socket.connect", (None, ("::1", 80, 0, 0))),
        ("socket.connect", (None, "/run/a.sock")),
        ("urllib.Request", ("http://127.0.0.1:8000/", None, {}, "GET")),
        ("urllib.Request", ("file:///a", None, {}, "GET")),
    ],
)
def test_loopback_is_allowed(event, arguments):
    with get_audit().redirect() as heard:
        sys.audit(event, *arguments)
    assert [is_fault_of(each) for each in heard] == [False]


def test_listed_exceptions_are_allowed():
    with get_audit().redirect() as heard:
        as_vitkit("import subprocess; subprocess.run(['/bin/true'])", module="vitkit.inference.native.library")
        with socket.socket() as link:
            link.connect_ex(("127.0.0.1", 9))
        socket.getaddrinfo("localhost", 80)
        subprocess.run(["/bin/true"], check=True)
    assert len(heard) == 4
    assert not any(map(is_fault_of, heard))
    assert all(len(reason) > 20 for reason in ALLOWED.values())


def test_audit_fails_the_test_with_the_event(tmp_path):
    (tmp_path / "test_bad.py").write_text(
        "def test_bad():\n    code = compile('import os; os.system(chr(58))', 'f', 'exec')\n"
        "    exec(code, {'__name__': 'vitkit.data.f'})\n"
        "def test_good():\n    pass\n",
        encoding="utf-8",
    )
    (tmp_path / "conftest.py").write_text(
        "from security import audit\ndef pytest_configure(config):\n    audit.install(config)\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"]
    run = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": f"{TESTS}"},
    )  # fmt: skip
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "forbidden audit events" in run.stdout
    assert "os.system" in run.stdout


def test_server_triggers_no_forbidden_event(tmp_path):
    model, report = save_tiny_model(tmp_path / "model"), tmp_path / "heard.jsonl"
    listening = {"PYTHONPATH": f"{TESTS / 'security' / 'listening'}:{TESTS}", "VITKIT_TEST_AUDIT": str(report)}
    with run_server(model, environment=listening) as server:
        worker = server.worker()
        for path in ("/v1/predict", "/v1/features", "/v1/attention"):
            assert server.post(path, encode_image()).status == 200
            assert server.post(path, b"\x80\x04cposix\nsystem\n(S'true'\ntR.").status == 422
        assert server.post(
            "/v1/predict", b'["http://203.0.113.1/cat.jpg"]', Content_Type="application/json"
        ).status in (
            400,
            422,
        )
        front = server.process.pid
    heard = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    assert {front, worker} <= {each["process"] for each in heard if each["name"] == "begun"}
    assert [each for each in heard if each["fault"]] == []


def test_background_server_triggers_no_forbidden_event(tmp_path, monkeypatch):
    report = tmp_path / "heard.jsonl"
    monkeypatch.setenv("PYTHONPATH", f"{TESTS / 'security' / 'listening'}:{TESTS}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("VITKIT_TEST_AUDIT", str(report))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = vitkit.load(save_tiny_model(tmp_path / "model"))
    with vitkit.serve(model, port=0, token="secret", block=False) as server:
        front, url = server.process.pid, server.url
        assert request(f"{url}/v1/predict", body=encode_image()).status == 401
        headers = {"Authorization": "Bearer secret"}
        assert request(f"{url}/v1/predict", body=encode_image(), headers=headers).status == 200
        assert request(f"{url}/v1/predict", body=b"\x80\x04cposix\n", headers=headers).status == 422
        assert (
            b"secret" not in Path(f"/proc/{front}/cmdline").read_bytes() + Path(f"/proc/{front}/environ").read_bytes()
        )
    heard = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    assert front in {each["process"] for each in heard if each["name"] == "begun"}
    assert len({each["process"] for each in heard}) == 2  # the server and its worker
    assert [each for each in heard if each["fault"]] == []


def in_no_network(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    script = 'ip link set lo up 2>/dev/null || python3 -c "$UP"; exec "$@"'
    up = (
        "import fcntl,socket,struct; s=socket.socket(); "
        "fcntl.ioctl(s,0x8914,struct.pack('16sH14s',b'lo',0x49,b''))"  # SIOCSIFFLAGS: up and running
    )
    return subprocess.run(
        ["unshare", "--net", "--map-root-user", "sh", "-c", script, "sh", *command],
        capture_output=True, text=True, check=False, env={**os.environ, "UP": up}, **options,
    )  # fmt: skip


def may_unshare() -> bool:
    return bool(shutil.which("unshare")) and in_no_network(["true"]).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="this machine gives nobody a network of their own")
def test_sample_of_the_suite_passes_offline(tmp_path):
    sample = ["tests/core/test_files.py", "tests/weights/test_hub.py"]
    # What is still open when that process ends is not the subject, and depends on when Python collects it.
    quiet = ["-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"]
    own = ["-p", "no:cacheprovider", "--basetemp", str(tmp_path / "sample")]  # it tidies up after nobody else
    plain = ["-o", "addopts=--import-mode=importlib"]  # without type checks, which take most of the time to import
    command = [sys.executable, "-m", "pytest", "-q", *plain, *own, *quiet, *sample]
    run = in_no_network(command, cwd=TESTS.parent)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
