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

from vitkit.engine import compiled as module
from vitkit.engine import timing
from vitkit.engine.choose import with_merging
from vitkit.engine.compiled import compiled, half_type, impatient
from vitkit.engine.timing import speeds, started

CPU = torch.device("cpu")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """What was compiled, or would have been: compiling takes half a minute, and sees through no checks of shapes."""
    made: list[object] = []

    def remember(function: Any) -> Any:
        made.append(function)
        return lambda images: (made.append("asked"), function(images))[1]

    monkeypatch.setattr(module.torch, "compile", remember)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "to be taken away again after the test")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return made


def test_a_few_batches_are_answered_without_compiling(compilations: list[object]) -> None:
    model, images = random_vit(small()), images_for(small(), batch=3)
    engine = compiled(model, device=CPU, patience=2)
    with torch.no_grad():
        expected = model(images)
    for _ in range(2):
        assert torch.equal(engine.answer(images)[1], expected)
    assert not compilations
    for batch in (3, 2, 3):
        torch.testing.assert_close(engine.answer(images[:batch])[1], expected[:batch], atol=1e-4, rtol=0)
    assert compilations[1:] == ["asked"] * 4  # once to see whether it works
    torch.testing.assert_close(engine.features(images), model.features(images), atol=1e-4, rtol=0)


def test_what_is_compiled_is_kept_in_the_cache_folder(compilations: list[object], tmp_path: Path) -> None:
    compiled(random_vit(small()), device=CPU, patience=0).answer(images_for(small()))
    assert compilations
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_it_is_kept_in_a_folder_of_ones_own_where_others_can_write(compilations: list[object], tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "inductor").mkdir()  # perhaps with something in it that somebody else would like to be run
    compiled(random_vit(small()), device=CPU, patience=0).answer(images_for(small()))
    own = tmp_path / f"of-{os.geteuid()}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own / "inductor")
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (own, own / "inductor")} == {0o700}


@pytest.mark.parametrize("folder", ["of-{}", "of-{}/inductor"])
def test_what_others_could_have_put_there_is_not_run(compilations: list[object], tmp_path: Path, folder: str) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / f"of-{os.geteuid()}").mkdir(mode=0o700)
    (tmp_path / folder.format(os.geteuid())).mkdir(exist_ok=True)
    (tmp_path / folder.format(os.geteuid())).chmod(0o777)
    engine = compiled(random_vit(small()), device=CPU, patience=0)
    with pytest.warns(UserWarning, match="goes on without: others can write to"):
        engine.answer(images_for(small()))
    assert not compilations
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_place_that_the_user_names_is_left_alone(
    compilations: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    compiled(random_vit(small()), device=CPU, patience=0).answer(images_for(small()))
    assert compilations
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "theirs")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asked_before", [0, 1])
def test_who_will_ask_often_need_not_wait_for_it_to_compile(compilations: list[object], asked_before: int) -> None:
    engine, images = compiled(random_vit(small()), device=CPU), images_for(small())
    for _ in range(asked_before):
        engine.answer(images)
    assert impatient(engine) is engine
    assert not compilations
    engine.answer(images)
    assert compilations[1:] == ["asked"] * 2
    impatient(engine).answer(images)
    assert compilations[1:] == ["asked"] * 3  # and compiles no second time


def test_compiling_for_a_new_size_of_batch_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, known = [0.0], set()

    def compile_slowly(function: Any) -> Any:
        def answer(images: torch.Tensor) -> Any:
            clock[0] += 0.5 if len(images) in known else 60.0
            known.add(len(images))
            return function(images)

        return answer

    monkeypatch.setattr(module.torch, "compile", compile_slowly)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    make = partial(compiled, random_vit(small()), device=CPU, patience=0)
    engine, start = started(make, images_for(small(), batch=1))
    assert start.seconds == 60.5
    (speed,) = speeds([engine], images_for(small(), batch=2), seconds=2.0)
    assert (speed.latency_p50, speed.runs) == (0.5, 4)


def test_a_compiler_that_fails_costs_a_warning_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Any) -> Any:
        raise RuntimeError("Cannot find a working triton installation")

    monkeypatch.setattr(module.torch, "compile", fail)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    model, images = random_vit(small()), images_for(small())
    engine = compiled(model, device=CPU, patience=0)
    with pytest.warns(UserWarning, match="goes on without: Cannot find a working triton"):
        found = engine.answer(images)[1]
    assert engine.name == "torch, as written, on cpu in float32"
    assert not found.is_inference()
    with torch.no_grad():
        assert torch.equal(found, model(images))
    engine.answer(images)  # and is not tried again


def test_half_precision_answers_in_float32(compilations: list[object]) -> None:
    model, images = random_vit(small()), images_for(small())
    engine = compiled(model, precision="bf16", device=CPU)
    features, logits = engine.answer(images)
    assert {features.dtype, logits.dtype} == {torch.float32}
    with torch.no_grad():
        expected = model(images)
    # Activations of 8 bits at every step of two layers.
    assert (logits - expected).norm() < 0.1 * expected.norm()


def test_tokens_are_merged_on_a_gpu_too(compilations: list[object]) -> None:
    model, images = random_vit(small()), images_for(small())
    engine = with_merging(compiled(model, device=CPU), 4)
    with torch.no_grad():
        assert not torch.allclose(engine.answer(images)[1], model(images), atol=1e-3)


@pytest.mark.parametrize(
    ("name", "has_bf16", "expected"), [("cuda", True, "bf16"), ("cuda", False, "fp16"), ("mps", None, "fp16")]
)
def test_the_half_type_is_what_the_device_multiplies(
    name: str, has_bf16: bool | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", partial(lambda answer, **_: answer, has_bf16))
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    assert half_type(torch.device(name)) == types[expected]
