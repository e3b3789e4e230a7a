"""Choice of initial weights: the hub if it answers in time with the right files, else the embedded weights."""

import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from hub_cache import TIMM_TINY, fill, publish, random_bundle, read_all

from vitkit.core.errors import MissingDependencyError, WeightsError
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.weights import download, hub, initial
from vitkit.weights.initial import EMBEDDED_TERMS, choose_initial_weights
from vitkit.weights.load import EMBEDDED, load, resolve_source

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no HF_HUB_OFFLINE."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(initial, "is_offline", lambda: False)
    return tmp_path / "hub"


def published(directory: Path) -> Path:
    """Return a repository with one layer of the default model."""
    if not (directory / TIMM_TINY).exists():
        publish(directory / "other", TIMM_TINY, random_bundle("Ti/16", {"depth": 1}), to="timm", directory=directory)
    return directory / TIMM_TINY


def test_embedded_is_a_model_source():
    model = load(EMBEDDED)
    assert str(model.dtype) == "torch.float32"
    assert model.num_classes == 180
    assert resolve_source(EMBEDDED).name == EMBEDDED


def test_file_named_embedded_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(EMBEDDED).mkdir()
    assert resolve_source(EMBEDDED) == Path(EMBEDDED)


def test_cached_weights_are_used_without_a_network(cache, tmp_path):
    fill(cache, TIMM_TINY, read_all(published(tmp_path)))
    chosen = choose_initial_weights(device="cpu", fetch=lambda _: pytest.fail("downloaded"))
    assert chosen.messages() == (f"initial weights: hub:{TIMM_TINY} (in the hub cache)",)


def test_weights_are_downloaded(cache, tmp_path):
    names: list[str] = []

    def fetch(name: str) -> Path:
        names.append(name)
        return published(tmp_path)

    assert choose_initial_weights(device="cpu", fetch=fetch).reason == "downloaded"
    assert names == [f"hub:{TIMM_TINY}"]
    assert choose_initial_weights(device="gpu", fetch=fetch).source == f"hub:{TIMM_TINY.replace('tiny', 'small')}"


def test_slow_download_falls_back_to_embedded_weights(cache):
    blocked = threading.Event()
    chosen = choose_initial_weights(device="cpu", seconds=0.0, fetch=lambda _: Path(str(blocked.wait())))
    blocked.set()
    assert chosen.source == EMBEDDED
    assert "the download took longer than 0 s" in chosen.reason
    assert EMBEDDED_TERMS in chosen.messages()


def test_download_takes_a_part_of_the_time_budget(cache, monkeypatch):
    limits: list[float] = []

    def fail(fetch, *, seconds: float, name: str, stop: StopFlag) -> Path:
        limits.append(seconds)
        raise WeightsError("unreachable")

    monkeypatch.setattr(initial, "run_with_limit", fail)
    for minutes in (1.0, 60.0, None):
        choose_initial_weights(device="cpu", minutes=minutes)
    assert limits == [15.0, 120.0, 120.0]


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_wrong_file_falls_back_to_embedded_weights(cache, tmp_path, damage):
    path = published(tmp_path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10] if damage == "cut" else b"<html>not found</html>")
    assert choose_initial_weights(device="cpu", fetch=lambda _: path).source == EMBEDDED


def test_failed_download_falls_back_with_its_reason(cache):
    def fail(name: str) -> Path:
        raise WeightsError(f"{name}: download failed: connection reset")

    chosen = choose_initial_weights(device="cpu", fetch=fail)
    assert chosen.source == EMBEDDED
    assert chosen.describe().endswith("download failed: connection reset)")


def test_offline_does_not_download(cache, monkeypatch):
    monkeypatch.setattr(initial, "is_offline", lambda: True)
    chosen = choose_initial_weights(device="cpu", fetch=lambda _: pytest.fail("downloaded"))
    assert (chosen.source, chosen.reason.rpartition(", ")[2]) == (EMBEDDED, "and HF_HUB_OFFLINE is set")


def test_damaged_cache_is_to_be_deleted(cache, tmp_path):
    files = read_all(published(tmp_path)) | {"model.safetensors": b"<html>not found</html>"}
    snapshot = fill(cache, TIMM_TINY, files)
    chosen = choose_initial_weights(device="cpu", fetch=lambda _: pytest.fail("downloaded"))
    assert chosen.source == EMBEDDED
    assert f"delete {snapshot}, connect" in str(chosen.advice)


def test_stop_ends_the_wait_for_a_download(cache):
    stop, blocked = StopFlag(), threading.Event()

    def fetch(_: str) -> Path:
        stop.signal = "SIGINT"
        return Path(str(blocked.wait()))

    with pytest.raises(StopRequested):
        choose_initial_weights(device="cpu", seconds=1e6, fetch=fetch, stop=stop)
    blocked.set()


def test_download_is_made_by_a_child_process(cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of the child
    monkeypatch.setattr(download, "announce_download", lambda _: True)
    with pytest.raises(WeightsError, match="the weights not in"):
        download.download(f"hub:{TIMM_TINY}")
    snapshot = fill(cache, TIMM_TINY, {"config.json": b"{}", "model.safetensors": b"w"})
    assert download.download(f"hub:{TIMM_TINY}") == snapshot


def test_blocked_download_does_not_keep_the_process(cache, tmp_path):
    code = f"""
import subprocess, sys, threading
from vitkit.weights import download
download.announce_download = lambda name: True
started, communicate = threading.Event(), subprocess.Popen.communicate
def wait(process):
    print(process.pid)
    started.set()
    return communicate(process)
subprocess.Popen.communicate = wait
sys.executable = {str(tmp_path / "blocked")!r}
threading.Thread(target=download.download, args=("hub:a/b",), daemon=True).start()
started.wait()
"""
    blocked = tmp_path / "blocked"
    blocked.write_text("#!/bin/sh\nexec sleep 1000\n")
    blocked.chmod(0o755)
    ended = subprocess.run([sys.executable, "-c", code], check=True, timeout=100, stdout=subprocess.PIPE, text=True)
    status = psutil.Process(int(ended.stdout)).status() if psutil.pid_exists(int(ended.stdout)) else "ended"
    assert status in ("ended", psutil.STATUS_ZOMBIE)


def test_missing_extra_says_how_to_get_better_weights(cache, monkeypatch):
    def fail(module: str) -> None:
        raise MissingDependencyError("hub: names need huggingface_hub", hint="pip install 'vitkit[hub]'")

    monkeypatch.setattr(hub, "import_hub_library", fail)
    chosen = choose_initial_weights(device="cpu")
    assert chosen.messages()[1:] == (
        EMBEDDED_TERMS,
        "downloaded weights would likely do better: pip install 'vitkit[hub]'",
    )


def test_model_name_narrows_the_choice(cache):
    def fail(name: str) -> Path:
        raise WeightsError("unreachable")

    assert choose_initial_weights(device="cpu", model="B/16", fetch=fail).source is None
    assert choose_initial_weights(device="cpu", model="Ti/4").reason == "no weights of Ti/4 are published"
