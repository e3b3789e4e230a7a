"""The compiled engine answers at once, compiles for those who go on asking, and does without a compiler if it must.

There is no GPU here: what is tested is what does not need one.
"""

import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import images_for, random_vit, small

from vitkit.inference import benchmark
from vitkit.inference import engine as module
from vitkit.inference.benchmark import measure_startup, time_engines
from vitkit.inference.engine import compile_now, compiled_engine, half_dtype
from vitkit.inference.select import apply_merging

CPU = torch.device("cpu")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """Record compilations and runs instead of compiling, which takes half a minute and fails under shape checks."""
    calls: list[object] = []

    def remember(function: Any) -> Any:
        calls.append(function)
        return lambda images: (calls.append("run"), function(images))[1]

    monkeypatch.setattr(module.torch, "compile", remember)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "to be taken away again after the test")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return calls


def test_first_batches_run_eagerly(compilations: list[object]) -> None:
    model, images = random_vit(small()), images_for(small(), batch=3)
    engine = compiled_engine(model, device=CPU, warmup_batches=2)
    with torch.no_grad():
        expected = model(images)
    for _ in range(2):
        assert torch.equal(engine.forward(images)[1], expected)
    assert not compilations
    for batch in (3, 2, 3):
        torch.testing.assert_close(engine.forward(images[:batch])[1], expected[:batch], atol=1e-4, rtol=0)
    assert compilations[1:] == ["run"] * 4  # once to see whether it works
    torch.testing.assert_close(engine.features(images), model.features(images), atol=1e-4, rtol=0)


def test_inductor_uses_the_cache_directory(compilations: list[object], tmp_path: Path) -> None:
    compiled_engine(random_vit(small()), device=CPU, warmup_batches=0).forward(images_for(small()))
    assert compilations
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_shared_cache_uses_a_private_subdirectory(compilations: list[object], tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "inductor").mkdir()  # may hold code of another user
    compiled_engine(random_vit(small()), device=CPU, warmup_batches=0).forward(images_for(small()))
    own = tmp_path / f"of-{os.geteuid()}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own / "inductor")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (own, own / "inductor")} == {0o700}


@pytest.mark.parametrize("directory", ["of-{}", "of-{}/inductor"])
def test_writable_inductor_cache_is_not_used(compilations: list[object], tmp_path: Path, directory: str) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / f"of-{os.geteuid()}").mkdir(mode=0o700)
    (tmp_path / directory.format(os.geteuid())).mkdir(exist_ok=True)
    (tmp_path / directory.format(os.geteuid())).chmod(0o777)
    engine = compiled_engine(random_vit(small()), device=CPU, warmup_batches=0)
    with pytest.warns(UserWarning, match="without it: other users can write to"):
        engine.forward(images_for(small()))
    assert not compilations
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_configured_inductor_cache_is_kept(
    compilations: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    compiled_engine(random_vit(small()), device=CPU, warmup_batches=0).forward(images_for(small()))
    assert compilations
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "theirs")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("batches_before", [0, 1])
def test_compile_now_ends_the_warmup(compilations: list[object], batches_before: int) -> None:
    engine, images = compiled_engine(random_vit(small()), device=CPU), images_for(small())
    for _ in range(batches_before):
        engine.forward(images)
    assert compile_now(engine) is engine
    assert not compilations
    engine.forward(images)
    assert compilations[1:] == ["run"] * 2
    compile_now(engine).forward(images)
    assert compilations[1:] == ["run"] * 3  # compiled only once


def test_compilation_for_a_batch_size_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, known = [0.0], set()

    def compile_slowly(function: Any) -> Any:
        def forward(images: torch.Tensor) -> Any:
            clock[0] += 0.5 if len(images) in known else 60.0
            known.add(len(images))
            return function(images)

        return forward

    monkeypatch.setattr(module.torch, "compile", compile_slowly)
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: clock[0])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    make = partial(compiled_engine, random_vit(small()), device=CPU, warmup_batches=0)
    engine, seconds, _ = measure_startup(make, images_for(small(), batch=1))
    assert seconds == 60.5
    assert time_engines([engine], images_for(small(), batch=2), seconds=2.0) == [[0.5] * 4]


def test_failed_compilation_falls_back_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Any) -> Any:
        raise RuntimeError("Cannot find a working triton installation")

    monkeypatch.setattr(module.torch, "compile", fail)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    model, images = random_vit(small()), images_for(small())
    engine = compiled_engine(model, device=CPU, warmup_batches=0)
    with pytest.warns(UserWarning, match="without it: Cannot find a working triton"):
        found = engine.forward(images)[1]
    assert engine.name == "torch, eager, on cpu in float32"
    assert not found.is_inference()
    with torch.no_grad():
        assert torch.equal(found, model(images))
    engine.forward(images)  # and is not tried again


def test_half_precision_returns_float32(compilations: list[object]) -> None:
    model, images = random_vit(small()), images_for(small())
    engine = compiled_engine(model, precision="bf16", device=CPU)
    features, logits = engine.forward(images)
    assert {features.dtype, logits.dtype} == {torch.float32}
    with torch.no_grad():
        expected = model(images)
    # Activations of 8 bits at every step of two layers.
    assert (logits - expected).norm() < 0.1 * expected.norm()


def test_tokens_are_merged_on_a_gpu(compilations: list[object]) -> None:
    model, images = random_vit(small()), images_for(small())
    engine = apply_merging(compiled_engine(model, device=CPU), 4)
    with torch.no_grad():
        assert not torch.allclose(engine.forward(images)[1], model(images), atol=1e-3)


@pytest.mark.parametrize(
    ("name", "has_bf16", "expected"), [("cuda", True, "bf16"), ("cuda", False, "fp16"), ("mps", None, "fp16")]
)
def test_half_dtype_depends_on_the_device(
    name: str, has_bf16: bool | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", partial(lambda answer, **_: answer, has_bf16))
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    assert half_dtype(torch.device(name)) == types[expected]
