"""Two hosts, each a network namespace, train one model with the command of the guide."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from soak.victim import Launcher

HOSTS = {"vitkit-a": "10.91.0.1", "vitkit-b": "10.91.0.2"}
RUN = """
model = {name = "Ti/16", image_size = 16, patch_size = 8, settings = ["width=16", "heads=2", "depth=1", "mlp_dim=16"]}
data = {path = "digits", channels = 1, workers = 0}
schedule = {epochs = "none", steps = 8, batch_size = 32, warmup_steps = 2}
augment = {crop = "none", flip = false}
parallel = {threads = 1, timeout = 600.0}
"""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine makes no network namespaces: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Create two network namespaces connected by a veth pair."""
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux, iproute2 and root")
    number = os.getpid() % 30000
    cards = {host: f"vk{number}{host[-1]}" for host in HOSTS}
    try:
        for host in HOSTS:
            ip("netns", "add", f"{host}-{number}")
        first, second = cards.values()
        ip("link", "add", first, "type", "veth", "peer", "name", second)
        for host, address in HOSTS.items():
            ip("link", "set", cards[host], "netns", f"{host}-{number}")
            ip("-n", f"{host}-{number}", "addr", "add", f"{address}/24", "dev", cards[host])
            ip("-n", f"{host}-{number}", "link", "set", "lo", "up")
            ip("-n", f"{host}-{number}", "link", "set", cards[host], "up")
        yield {f"{host}-{number}": cards[host] for host in HOSTS}
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", f"{host}-{number}"], capture_output=True, check=False)


def test_two_hosts_learn_the_same_as_one_process(hosts: dict[str, str], launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    master = ["--master-addr", next(iter(HOSTS.values())), "--master-port", "29511"]
    train = ["-m", "vitkit", "train", str(tmp_path / "run.toml"), "--out"]
    both = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *launch, "--node-rank", str(rank), *master, *train, str(tmp_path / "two")],
            env=environment | {"GLOO_SOCKET_IFNAME": card},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, (host, card) in enumerate(hosts.items())
    ]
    try:
        outputs = [host.communicate(timeout=900)[0] for host in both]
    finally:
        for host in both:
            host.kill()
    assert [host.returncode for host in both] == [0, 0], "\n".join(outputs)
    alone = launcher.fork([*train[2:], str(tmp_path / "one")], tmp_path / "one.log")
    assert alone.wait() == 0, alone.words()
    one, two = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "two"))
    for name, weights in one.items():
        if name.endswith("qkv.bias"):
            # Softmax does not see a bias on the keys: its gradient is rounding, which Adam makes as large as any other.
            parts = zip(weights.chunk(3), two[name].chunk(3), strict=True)
            queries, _, values = parts
            torch.testing.assert_close(*queries, atol=1e-5, rtol=0)
            torch.testing.assert_close(*values, atol=1e-5, rtol=0)
        else:
            torch.testing.assert_close(weights, two[name], atol=1e-5, rtol=0)
