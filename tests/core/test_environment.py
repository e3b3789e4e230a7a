"""Number of usable cores, and the limit of threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.api import sources
from vitkit.core import environment
from vitkit.core.environment import limit_threads, usable_cores

SOURCES = Path(__file__).parents[2] / "src/vitkit"


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def write_cgroup(root, membership, files):
    """Write /proc/self/cgroup and files below /sys/fs/cgroup."""
    for name, text in (("proc/self/cgroup", membership), *files.items()):
        path = root / name if name.startswith("proc") else root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


CGROUPS = {
    "version 2": ("0::/", {"cpu.max": "200000 100000"}, 2),
    "version 2, unlimited": ("0::/", {"cpu.max": "max 100000"}, 8),
    "version 2, half a core": ("0::/", {"cpu.max": "50000 100000"}, 1),
    "version 2, more than the affinity": ("0::/", {"cpu.max": "6400000 100000"}, 8),
    "version 2, two and a half": ("0::/", {"cpu.max": "250000 100000"}, 2),
    "version 2, own group": ("0::/user/job", {"user/job/cpu.max": "300000 100000"}, 3),
    "version 2, a parent": ("0::/user/job", {"user/job/cpu.max": "max 100000", "user/cpu.max": "400000 100000"}, 4),
    "version 1": ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    "version 1, unlimited": ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    "version 1, the path is outside the container": (
        "4:cpuacct,cpu:/docker/0123",
        {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "50000"},
        1,
    ),
    "other controllers": ("7:cpuset:/\n5:memory:/a", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "1"}, 8),
    "garbage": ("no colons", {"cpu.max": ""}, 8),
}


@pytest.mark.parametrize(("membership", "files", "cores"), CGROUPS.values(), ids=CGROUPS)
def test_usable_cores_respect_quotas(tmp_path, membership, files, cores):
    write_cgroup(tmp_path, membership, files)
    assert usable_cores(tmp_path) == cores


def test_usable_cores_without_affinity_and_cgroups(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_cores(tmp_path) == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1


def test_limit_threads_lowers_the_threads_of_torch(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(environment, "_read_quotas", lambda root: iter([2.0]))
    try:
        torch.set_num_threads(4)
        limit_threads()
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        limit_threads()
        assert torch.get_num_threads() == 1  # never raises them
        torch.set_num_threads(4)
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        limit_threads()
        assert torch.get_num_threads() == 4  # as the user has chosen
    finally:
        torch.set_num_threads(before)


def test_public_functions_limit_threads(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(environment, "_read_quotas", lambda root: iter([0.5]))
    try:
        torch.set_num_threads(4)
        vitkit.create("Ti/16", device="meta")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("quota", "given", "expected"), [(2.0, None, "2"), (2.0, "6", "6"), (64.0, None, None)])
def test_limit_threads_before_torch_is_imported(monkeypatch, quota, given, expected):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(environment, "_read_quotas", lambda root: iter([quota]))
    limit_threads()
    assert os.environ.get("OMP_NUM_THREADS") == expected


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 2), (64, 2)])
def test_decoding_processes_do_not_exceed_the_cores(monkeypatch, cores, workers):
    monkeypatch.setattr(sources, "usable_cores", lambda: cores)
    assert sources.resolve_workers(None) == workers
    assert sources.resolve_workers(5) == 5


def test_no_other_module_counts_cores():
    counted = ("sched_getaffinity", "cpu_count(", "process_cpu_count")
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in counted)
    }
    assert found == {"core/environment.py"}


def test_commands_limit_threads_without_importing_torch():
    code = (
        "import os, sys; from vitkit.core import environment; os.sched_getaffinity = lambda pid: set(range(8))\n"
        "environment._read_quotas = lambda root: iter([2.0])\n"
        "from vitkit.cli.main import main; main(['--version'])\n"
        "print(os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)"
    )
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=True)
    assert done.stdout.splitlines()[-1] == "2 False"
