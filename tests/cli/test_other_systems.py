"""Commands on simulated macOS and Windows: subprocesses without the functions that those systems lack."""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli.tiny_runs import TINY, assigned, photos

from vitkit.core.files import write_text
from vitkit.inference.native import library

SOURCES = Path(__file__).parents[2] / "src"
MACOS = """
import multiprocessing, os
for name in [name for name in vars(os) if name.startswith("sched_")]:
    delattr(os, name)
multiprocessing.set_start_method("spawn", force=True)
"""
WINDOWS = (
    MACOS
    + """
import select, sys
import psutil  # its module for Linux uses what its module for Windows does not
del os.fork, os.forkpty, select.poll
sys.modules["fcntl"] = sys.modules["resource"] = None
synced = os.fsync


def fsync(descriptor):
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        flags = int(next(line for line in file if line.startswith("flags")).split()[1], 8)
    if flags & os.O_ACCMODE == os.O_RDONLY and not os.path.isdir(f"/proc/self/fd/{descriptor}"):
        raise OSError(9, "Bad file descriptor")
    synced(descriptor)


os.fsync = fsync
"""
)
"""Without fcntl, filelock, which locks run directories, falls back to a lock that works everywhere."""
SCRIPT = """
import os, sys, warnings
from vitkit.cli.main import main


def run(*arguments):
    print("$", *arguments[:1], flush=True)
    code = main(list(arguments))
    print("exit", arguments[0], code, flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="only soft file lock is available")
    data, out, settings = sys.argv[1], sys.argv[2], sys.argv[3:]
    run("train", data, "--from", "scratch", "--out", out, *settings)
    run("eval", out, data, "--workers", "0")
    run("predict", out, f"{data}/cat/00.png")
    run("inspect", out, f"{data}/cat/00.png", "--out", f"{out}/inspection")
    if hasattr(os, "fork"):
        import urllib.request, vitkit

        with vitkit.serve(out, port=0, block=False) as server, open(f"{data}/cat/00.png", "rb") as image:
            request = urllib.request.Request(f"{server.url}/v1/predict", image.read(), {"Content-Type": "image/png"})
            with urllib.request.urlopen(request) as response:
                print("exit serve", response.status)
    else:
        run("serve", out, "--port", "0")
"""


def run_simulation(folder: Path, setup: str, *, workers: int) -> "subprocess.CompletedProcess[str]":
    (folder / "setup").mkdir()
    (folder / "setup/sitecustomize.py").write_text(setup, encoding="utf-8")
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    data = photos(folder / "photos", each=6)
    path = os.pathsep.join(map(str, (folder / "setup", SOURCES)))
    settings = assigned(TINY, {"workers": workers, "steps": 2, "evaluation.every": None})
    return subprocess.run(
        [sys.executable, folder / "script.py", data, folder / "run", *settings],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        cwd=folder,
        check=False,
    )


BAD_ENVIRONMENT_SCRIPT = """
import os, sys
from vitkit.cli.main import main
from vitkit.core import environment

if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
    environment._read_quotas = lambda root: iter([0.5])
    data, out, *settings = sys.argv[1:]
    codes = [main(["train", data, "--from", "scratch", "--out", out, *settings]), main(["data", "check", data])]
    codes += [main(["predict", out, data, "--json"]), main(["predict", out, f"{data}/cat/00.png"])]
    print("exit codes", *codes, "threads", sys.modules["torch"].get_num_threads())
"""


def test_commands_run_in_a_bad_environment(tmp_path):
    """One core with a quota of a half, an ASCII locale, a cache that cannot be written, and no compiler."""
    data = photos(tmp_path / "photos", classes=("Kätzchen", "dog"), each=6)
    (data / "Kätzchen/00.png").rename(data / "Kätzchen/süß.png")
    (data / "dog").rename(data / "cat")
    (tmp_path / "script.py").write_text(BAD_ENVIRONMENT_SCRIPT, encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(SOURCES)}
    variables |= {"VITKIT_CACHE": str(tmp_path / "script.py/cache"), "CXX": "missing"}
    command = [sys.executable, tmp_path / "script.py", data, tmp_path / "run", *assigned(TINY, {"steps": 2})]
    result = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert result.stdout.splitlines()[-1] == "exit codes 0 0 0 0 threads 1", result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("verification of images is not cached") == 1
    assert "; set VITKIT_CACHE to a directory that can be written to" in result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"file"')]
    assert f"{data}/Kätzchen/süß.png" in {row["file"] for row in rows}
    assert {each["label"] for each in rows[0]["predictions"]} == {"Kätzchen", "cat"}


def exit_codes(result: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("exit ")]
    return {words[1]: words[2] for words in lines}


def test_commands_and_server_run_on_simulated_macos(tmp_path):
    result = run_simulation(tmp_path, MACOS, workers=1)
    expected = {"train": "0", "eval": "0", "predict": "0", "inspect": "0", "serve": "200"}
    assert exit_codes(result) == expected, result.stderr


def test_commands_run_on_simulated_windows(tmp_path):
    result = run_simulation(tmp_path, WINDOWS, workers=0)
    expected = {"train": "0", "eval": "0", "predict": "0", "inspect": "0", "serve": "1"}
    assert exit_codes(result) == expected, result.stderr
    assert "error: serving needs Linux, macOS or WSL" in result.stderr


def test_files_are_synced_through_writable_descriptors(tmp_path, monkeypatch):
    modes = []
    monkeypatch.setattr(os, "fsync", lambda each: modes.append(fcntl.fcntl(each, fcntl.F_GETFL) & os.O_ACCMODE))
    write_text(tmp_path / "file", "text")
    assert modes == [os.O_RDWR, os.O_RDONLY]  # the file, then its directory


COMPILERS = {
    "x86-64 with GCC": ("x86_64", ("g++", "x86_64-linux-gnu-g++"), ()),
    "x86-64 with Clang": ("x86_64", ("clang++",), ("--target=x86_64-linux-gnu",)),
    "aarch64 with GCC": ("aarch64", ("g++", "aarch64-linux-gnu-g++"), ()),
    "aarch64 with Clang": ("aarch64", ("clang++",), ("--target=aarch64-linux-gnu",)),
}


@pytest.mark.parametrize(("architecture", "names", "flags"), COMPILERS.values(), ids=COMPILERS)
def test_native_sources_compile_for(architecture, names, flags):
    native = names[0] if platform.machine() == architecture else names[-1]
    if shutil.which(native) is None:
        pytest.skip(f"{native} is not installed")
    command = [native, *flags, "-std=c++17", "-fsyntax-only", "-w", str(library.SOURCES / "engine.cpp")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
