"""`benchmark`, `export` and `serve`: the results of the commands, and a server in a child process."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.tiny_runs import Shell, photos
from server.serving import TIMEOUT, encode_image, request

import vitkit
from vitkit.api import deployment
from vitkit.errors import ArgumentError, ConfigError, DataError, UnknownNameError, VitkitError, WeightsError
from vitkit.exporters import exporter
from vitkit.server.background import Server

SETTINGS = {"width": 32, "depth": 1, "heads": 2, "mlp_dim": 32}


def make_model(**options: Any) -> vitkit.ViT:
    options = {"image_size": 16, "patch_size": 8, "num_classes": 3, "settings": SETTINGS} | options
    model = vitkit.create("Ti/16", **options)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return model


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    vitkit.save(make_model(), "model", labels=["cat", "dog", "owl"])
    photos(tmp_path / "photos", each=2)
    return Shell(capsys)


# benchmark


def test_benchmark_measures_a_model_built_from_its_class() -> None:
    model, options = vitkit.ViT(make_model().config), {"seconds": 0, "device": "cpu", "progress": False}
    result = vitkit.benchmark(model, batch_size=[1], precision=["fp32"], **options)  # type: ignore[arg-type]
    assert result.model.startswith("ViT 32 wide")


def test_benchmark_measures_a_model_in_memory() -> None:
    pairs = [(np.full((9, 9, 3), value, dtype=np.uint8), "any") for value in range(4)]
    options: Any = {"batch_size": (1, 2), "precision": ["fp32"], "merge": 1, "seconds": 0, "device": "cpu"}
    result = vitkit.benchmark(make_model(), images=pairs, progress=False, **options)
    assert {row.batch_size for row in result.rows} == {1, 2}
    assert {row.merge for row in result.rows} == {0, 1}
    first = result.rows[0]
    assert (first.precision, first.agreement.images) == ("fp32", 4)  # type: ignore[union-attr]
    assert first.images_per_second == pytest.approx(first.batch_size / first.latency_p50)
    assert first.memory_bytes >= 0
    assert "fp32" in result.recommendation
    assert repr(result).startswith("BenchmarkResult(model=ViT 32 wide")
    assert result.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_name_of_the_zoo_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(deployment, "benchmark_model", lambda model, **_: seen.append(model))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    vitkit.benchmark("B/16", progress=False)
    assert seen == ["B/16"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 8}, ConfigError, r"use batch_size=\[8\]"),
        ({"precision": "fp32"}, ConfigError, r"use precision=\['fp32'\]"),
        ({"batch_size": []}, ConfigError, "no values to measure"),
        ({"batch_size": [0]}, ConfigError, "must be positive"),
        ({"precision": ["fp16"]}, ConfigError, "fp16"),
        ({"images": "nowhere"}, DataError, "nowhere"),
        ({"batch": [1]}, ArgumentError, "use batch_size="),
    ],
)
def test_wrong_benchmark_arguments_are_an_error(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        vitkit.benchmark(make_model(), progress=False, **options)


# export


@pytest.mark.usefixtures("forked_examples")
def test_repeated_export_changes_nothing(shell: Shell) -> None:
    result = vitkit.export("model", "out", to="google", images="photos", progress=False)
    assert result.files == tuple(sorted(path.name for path in Path("out").iterdir()))
    assert (result.path, result.format, result.already_existed) == (Path("out"), "google", False)
    again = vitkit.export("model", "out", to="google", images="photos", progress=False)
    assert again.to_dict() == {**result.to_dict(), "already_existed": True}
    assert repr(result).startswith("ExportResult(path=out, format=google")
    assert "\n" not in repr(result)


@pytest.mark.usefixtures("forked_examples")
def test_model_in_memory_is_exported(tmp_path: Path) -> None:
    model, images = make_model(), [(np.zeros((9, 9, 3), dtype=np.uint8), "any")]
    result = vitkit.export(model, tmp_path / "weights.npz", to="google", images=images, progress=False)
    assert result.files == ("weights.npz", "weights.npz.verification.json")
    assert eval(result.load_command, {"vitkit": vitkit}).num_classes == 3
    assert vitkit.export(model, tmp_path / "weights.npz", to="google", images=images, progress=False).already_existed


def test_export_that_disagrees_leaves_nothing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def disagree(*_: object, **__: object) -> None:
        raise WeightsError("the outputs differ")

    monkeypatch.setattr(exporter, "verify_weights", disagree)
    before = sorted(Path().iterdir())
    with pytest.raises(WeightsError, match="differ"):
        vitkit.export("model", "out", to="google", progress=False)
    assert sorted(Path().iterdir()) == before


def test_wrong_export_arguments_are_an_error(shell: Shell) -> None:
    with pytest.raises(UnknownNameError, match="did you mean onnx"):
        vitkit.export("model", "out", to="onx")
    with pytest.raises(ArgumentError, match="use to='onnx'"):
        vitkit.export("model", "out", format="onnx")  # type: ignore[call-arg]
    Path("out").mkdir()
    Path("out/file").touch()
    with pytest.raises(WeightsError, match="out"):
        vitkit.export("model", "out", to="google", progress=False)


# serve


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("VITKIT_TOKEN", raising=False)


@pytest.mark.usefixtures("quick")
def test_server_in_a_child_process_answers_and_stops(shell: Shell) -> None:
    models = {"memory": make_model(), "file": "model"}
    with vitkit.serve(models, port=0, settings={"limits": {"images": 2}}, block=False) as server:
        process = server.process
        assert server.is_running
        names = [each["name"] for each in request(f"{server.url}/v1/models").json["models"]]
        assert names == ["memory", "file"]
        found = request(f"{server.url}/v1/predict?model=file", body=encode_image()).json["predictions"]
        expected = vitkit.predict("model", encode_image(), device="cpu", progress=False)[0]
        assert found[0]["label"] == expected.label
        assert found[0]["probability"] == pytest.approx(expected.probability, abs=1e-5)
    assert not server.is_running
    assert process is not None
    assert process.returncode == 0
    server.stop()
    assert repr(server) == f"Server(url='{server.url}', is_running=False)"


@pytest.mark.usefixtures("quick")
def test_server_ends_with_its_parent(shell: Shell) -> None:
    """Kill the program that has started a server: its stdin closes, and it stops."""
    code = (
        "import os, signal, vitkit; server = vitkit.serve(runs='.', port=0, block=False); "
        "print(server.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    assert parent.returncode == -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        descriptor = os.pidfd_open(int(parent.stdout))
        ended, _, _ = select.select([descriptor], [], [], TIMEOUT)
        os.close(descriptor)
        assert ended


@pytest.mark.usefixtures("quick")
def test_error_of_the_child_is_raised(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=str(tmp_path)):
        vitkit.serve(tmp_path, port=0, block=False)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("block", [True, False])
def test_other_addresses_need_a_token(block: bool) -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(ConfigError, match="needs a token"):
            vitkit.serve(runs=".", host=host, block=block)
    with pytest.raises(ConfigError, match="token is not valid"):
        vitkit.serve(runs=".", token="two\nlines", block=block)


def test_model_in_memory_is_removed_if_no_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("out of processes")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("vitkit.server.background.subprocess.Popen", refuse)
    with pytest.raises(OSError, match="out of processes"):
        vitkit.serve(make_model(), port=0, block=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to serve"),
        ({"models": {"a b": "model"}}, "letters"),
        ({"models": "model", "precision": "int8"}, r"precision=\['int8'\]"),
        ({"models": "model", "precision": ["fp8"]}, "no such precision"),
        ({"models": "model", "settings": {"limits.batc": 3}}, "batch"),
        ({"models": "model", "port": 70000}, "cannot listen"),
    ],
)
def test_wrong_serve_arguments_are_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(VitkitError, match=message):
        vitkit.serve(**options, block=False)


def test_blocking_server_needs_its_own_event_loop() -> None:
    async def serve() -> Server:
        return vitkit.serve(runs=".", port=0)

    with pytest.raises(ConfigError, match="block=False"):
        asyncio.run(serve())
    errors: list[BaseException] = []

    def work() -> None:
        try:
            vitkit.serve(runs=".", port=0)
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
