"""`vitkit bench`: measurements of every engine and precision, and the recommendation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.tiny_runs import Shell, photos

import vitkit
from vitkit.inference import benchmark, engine, select
from vitkit.inference.agreement import Agreement
from vitkit.inference.benchmark import (
    BenchmarkRow,
    list_engines,
    measure_startup,
    recommend,
    time_interleaved,
)
from vitkit.inference.engine import CPU

SETTINGS = {"width": 32, "depth": 1, "heads": 2, "mlp_dim": 32}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    model = vitkit.create("Ti/16", image_size=16, patch_size=8, num_classes=3, settings=SETTINGS)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    vitkit.save(model, folder / "model", labels=["cat", "dog", "owl"])
    rotary = vitkit.create("Ti/16", image_size=16, settings={**SETTINGS, "positions.kind": "rotary"})
    vitkit.save(rotary, folder / "rotary")
    photos(folder / "photos", each=10)
    return folder


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(capsys)


def test_json_has_every_engine_in_every_precision(shell: Shell) -> None:
    result = shell(
        "bench", "model", "--images", "photos", "--batch-size", "1,4", "--seconds", 0, "--device", "cpu", "--json"
    )
    assert result.code == 0
    actual = result.json
    assert actual.keys() == {"model", "device", "threads", "agreement", "rows", "recommendation"}
    assert actual["agreement"]["images"] == 20
    ways = [(row["precision"], row["kind"]) for row in actual["rows"]]
    assert ways[0] == ("fp32", "eager")
    assert {"fp32", "bf16", "int8"} == {precision for precision, _ in ways}
    assert [row["batch_size"] for row in actual["rows"]] == [1, 4] * (len(actual["rows"]) // 2)
    for row in actual["rows"]:
        assert row["runs"] >= 2
        assert row["images_per_second"] == pytest.approx(row["batch_size"] / row["latency_p50"])
        assert row["start_seconds"] > 0
        assert row["agreement"]["images"] == 20
        if row["precision"] == "fp32":
            assert row["agreement"]["largest_difference"] < 1e-4
    assert actual["rows"][0]["agreement"]["largest_difference"] == 0
    assert actual["recommendation"]


def test_token_merging_is_measured_too(shell: Shell) -> None:
    options = ("--batch-size", "2", "--precision", "int8", "--merge", 1, "--seconds", 0, "--device", "cpu", "--json")
    result = shell("bench", "model", *options).json
    (merging,) = [row for row in result["rows"] if row["merge"] == 1]
    assert (merging["precision"], merging["kind"]) == ("int8", "merging")
    assert "merging 1 token per layer" in merging["engine"]
    assert {row["merge"] for row in result["rows"]} == {0, 1}


def test_merging_on_a_gpu_is_compiled_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs on the CPU here, and records the call of torch.compile."""
    compilations: list[object] = []
    on_cpu = engine.compiled_engine
    monkeypatch.setattr(select, "compiled_engine", lambda model, *, precision, device: on_cpu(model, device=CPU))
    monkeypatch.setattr(engine.torch, "compile", lambda function: compilations.append(function) or function)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")
    model = vitkit.create("Ti/16", image_size=16, patch_size=8, settings=SETTINGS)
    *_, merging = list_engines(model, device=torch.device("cuda"), precisions=["fp32"], merge=1)
    assert merging.kind == "merging"
    merging_engine = merging.create()
    assert "merging 1 token per layer" in merging_engine.name
    merging_engine.forward(torch.zeros(1, 3, 16, 16))
    assert compilations


def test_text_output_has_a_table_and_a_recommendation(shell: Shell) -> None:
    result = shell("bench", "model", "--batch-size", "2", "--precision", "fp32", "--seconds", 0, "--device", "cpu")
    assert result.code == 0
    first, head, *rest = result.out.splitlines()
    assert first.startswith("ViT 32 wide, 1 deep, patches of 8, 16×16 pixels, cpu, ")
    assert head.split()[:3] == ["precision", "engine", "batch"]
    assert rest[0].split()[:2] == ["fp32", "eager"]
    assert "Agreement was measured on one synthetic image" in result.out
    assert "Use fp32" in result.out


def test_model_name_is_measured_with_random_weights(shell: Shell) -> None:
    options = ("--batch-size", "1", "--precision", "int8", "--seconds", 0, "--device", "cpu", "--json")
    result = shell("bench", "Ti/16", *options).json
    assert result["model"] == "Ti/16"
    assert all(row["agreement"] is None for row in result["rows"])
    assert "random" in result["agreement"]["note"]
    assert "fp32 was not measured" in result["recommendation"]


def test_unsupported_model_is_measured_without_native_engine(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "unsupported_reason", lambda model, precision: "not supported")
    options = ("--batch-size", "1", "--precision", "fp32", "--seconds", 0, "--device", "cpu", "--json")
    result = shell("bench", "model", *options)
    assert [row["kind"] for row in result.json["rows"]] == ["eager", "packed"]
    assert result.stderr.startswith("without the native engine: not supported")


MISTAKES = [
    (["model", "--batch-size", "1,zero"], 2, "'zero' is not a valid integer range"),
    (["model", "--batch-size", ","], 2, "the list is empty"),
    (["model", "--precision", "fp16"], 2, "'fp16' is not one of 'fp32', 'bf16', 'int8'"),
    (["nowhere"], 1, "nowhere"),
    (["rotary", "--merge", "4"], 1, "tokens can be merged only if positions are added at the stem"),
    (["model", "--images", "nowhere"], 1, "nowhere"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES)
def test_invalid_arguments_have_one_error_line(shell: Shell, arguments: list[str], code: int, message: str) -> None:
    result = shell("bench", *arguments)
    assert (result.code, len(result.errors)) == (code, 1)
    assert message in result.errors[0]


def row(precision: str, rate: float, same: float | None, *, images: int = 64, merge: int = 0) -> BenchmarkRow:
    agrees = None
    if same is not None:
        agrees = Agreement(images=images, same_top1=same, largest_difference=0.1, mean_difference=0.01)
    return BenchmarkRow(
        kind="native",
        precision=precision,
        merge=merge,
        engine="native, avx2",
        start_seconds=0.1,
        memory_bytes=0,
        agreement=agrees,
        batch_size=8,
        images_per_second=rate,
        latency_p50=8 / rate,
        runs=3,
    )


def test_fastest_engine_that_agrees_is_recommended() -> None:
    exact = row("fp32", 100, 1.0)
    advice = recommend([exact, row("bf16", 180, 1.0), row("int8", 300, 1.0)])
    assert advice.startswith("Use --precision int8: it is 3.0× as fast as fp32 with batches of 8, and 64 of 64 images")
    assert recommend([exact, row("bf16", 180, 1.0), row("int8", 300, 0.9)]).startswith("Use --precision bf16")
    assert recommend([exact, row("bf16", 110, 1.0), row("int8", 300, 0.9)]).startswith("Use fp32: nothing else")
    assert recommend([exact, row("int8", 90, 1.0)]).startswith("Use fp32, the fastest on this machine")
    merging = row("fp32", 150, 1.0, merge=8)
    assert recommend([exact, merging]).startswith("Use --precision fp32 --merge 8: it is 1.5× as fast as fp32")
    features = Agreement(images=64, same_top1=1.0, largest_difference=0.1, mean_difference=0.01, of_logits=False)
    advice = recommend([exact, replace(row("int8", 300, 1.0), agreement=features)])
    assert advice.endswith("and the features of 64 of 64 images keep their direction.")
    assert "agreement with --images before you use it" in recommend([exact, row("int8", 300, 1.0, images=1)])
    assert "with your model and --images" in recommend([row("fp32", 100, None), row("int8", 300, None)])


def test_recommendation_is_for_the_largest_batches_in_any_order() -> None:
    large = [row("fp32", 100, 1.0), row("int8", 300, 1.0)]
    small = [replace(row(each.precision, 100, 1.0), batch_size=1) for each in large]
    assert recommend([*large, *small]) == recommend([*small, *large])
    assert "3.0× as fast as fp32 with batches of 8" in recommend([*large, *small])


def test_actions_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], []
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: clock[0])

    def action(name: str, seconds: float) -> None:
        order.append(name)
        clock[0] += seconds

    quick, slow = (lambda: action("quick", 1.0)), (lambda: action("slow", 5.0))
    times = time_interleaved([quick, slow], seconds=4.0)
    assert times == [[1.0] * 4, [5.0]]
    assert order == ["quick"] + ["slow"] + ["quick"] * 4  # one warm-up each; the slow action is not repeated
    order.clear()
    assert time_interleaved([quick, lambda: action("other", 2.0)], seconds=4.0) == [[1.0] * 4, [2.0] * 2]
    assert order == ["quick", "other"] * 3 + ["quick"] * 2


def test_startup_measures_the_memory_of_an_engine() -> None:
    class LargeEngine:
        """An engine of 64 MB."""

        name, precision = "large", "fp32"

        def __init__(self) -> None:
            self.numbers = np.ones(8_000_000)

        def features(self, images: object) -> object:
            return images

        def forward(self, images: object) -> object:
            return images

    _, _, memory_bytes = measure_startup(LargeEngine, vitkit.create("Ti/16", settings=SETTINGS).cls_token.detach())
    assert 50e6 < memory_bytes < 120e6  # with other allocations of the process
