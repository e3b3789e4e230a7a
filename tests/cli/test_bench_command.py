"""`vitkit bench`: every engine in every precision, timed by turns; and a recommendation that its numbers bear out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.tiny_runs import Shell, photos

import vitkit
from vitkit.cli.bench import Row, makers_of, recommend
from vitkit.engine import choose, compiled, timing
from vitkit.engine.agreement import Agreement
from vitkit.engine.engine import CPU
from vitkit.engine.timing import Speed, Start, by_turns, resident_bytes, started

SETTINGS = ("width=32", "depth=1", "heads=2", "mlp_dim=32")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timed")
    model = vitkit.create("Ti/16", image_size=16, patch_size=8, classes=3, settings=SETTINGS)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    vitkit.save(model, folder / "model", labels=["cat", "dog", "owl"])
    rotary = vitkit.create("Ti/16", image_size=16, settings=(*SETTINGS, "positions.kind=rotary"))
    vitkit.save(rotary, folder / "rotary")
    photos(folder / "photos", each=10)
    return folder


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(capsys)


def test_json_has_every_engine_in_every_precision(shell: Shell) -> None:
    said = shell("bench", "model", "--images", "photos", "--batch", "1,4", "--seconds", 0, "--device", "cpu", "--json")
    assert said.code == 0
    found = said.json
    assert found.keys() == {"model", "device", "threads", "agreement", "results", "recommendation"}
    assert found["agreement"]["images"] == 20
    ways = [(row["precision"], row["kind"]) for row in found["results"]]
    assert ways[0] == ("fp32", "written")
    assert {"fp32", "bf16", "int8"} == {precision for precision, _ in ways}
    for row in found["results"]:
        assert [speed["batch"] for speed in row["speeds"]] == [1, 4]
        for speed in row["speeds"]:
            assert speed["runs"] >= 2
            assert speed["images_per_second"] == pytest.approx(speed["batch"] / speed["latency_p50"])
        assert row["start_seconds"] > 0
        assert row["agreement"]["images"] == 20
        if row["precision"] == "fp32":
            assert row["agreement"]["largest_difference"] < 1e-4
    assert found["results"][0]["agreement"]["largest_difference"] == 0
    assert found["recommendation"]


def test_merged_tokens_are_timed_beside_the_others(shell: Shell) -> None:
    options = ("--batch", "2", "--precision", "int8", "--merge", 1, "--seconds", 0, "--device", "cpu", "--json")
    found = shell("bench", "model", *options).json
    (merging,) = [row for row in found["results"] if row["merge"] == 1]
    assert (merging["precision"], merging["kind"]) == ("int8", "merging")
    assert "1 token merged a layer" in merging["engine"]
    assert {row["merge"] for row in found["results"]} == {0, 1}


def test_on_a_gpu_merging_is_compiled_before_it_is_compared_or_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here, so the engine for it stands on the CPU, and remembers instead of compiling."""
    made: list[object] = []
    on_cpu = compiled.compiled
    monkeypatch.setattr(choose, "compiled", lambda model, *, precision, device: on_cpu(model, device=CPU))
    monkeypatch.setattr(compiled.torch, "compile", lambda function: made.append(function) or function)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of no use here")
    model = vitkit.create("Ti/16", image_size=16, patch_size=8, settings=SETTINGS)
    *_, merging = makers_of(model, device=torch.device("cuda"), precisions=["fp32"], merge=1)
    assert merging.kind == "merging"
    engine = merging.make()
    assert "1 token merged a layer" in engine.name
    engine.answer(torch.zeros(1, 3, 16, 16))
    assert made


def test_people_get_a_table_and_a_sentence(shell: Shell) -> None:
    said = shell("bench", "model", "--batch", "2", "--precision", "fp32", "--seconds", 0, "--device", "cpu")
    assert said.code == 0
    first, head, *rest = said.out.splitlines()
    assert first.startswith("ViT 32 wide, 1 deep, patches of 8, 16×16 pixels, cpu, ")
    assert head.split()[:3] == ["precision", "engine", "batch"]
    assert rest[0].split()[:2] == ["fp32", "written"]
    assert "Agreement is that on one drawn image" in said.out
    assert "Use fp32" in said.out


def test_a_name_is_timed_with_random_weights(shell: Shell) -> None:
    options = ("--batch", "1", "--precision", "int8", "--seconds", 0, "--device", "cpu", "--json")
    found = shell("bench", "Ti/16", *options).json
    assert found["model"] == "Ti/16"
    assert all(row["agreement"] is None for row in found["results"])
    assert "random" in found["agreement"]["note"]
    assert "fp32 was not tried" in found["recommendation"]


def test_a_model_that_the_native_engine_does_not_run_is_timed_without_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "reason_against", lambda model, precision: "it does not run this one")
    options = ("--batch", "1", "--precision", "fp32", "--seconds", 0, "--device", "cpu", "--json")
    said = shell("bench", "model", *options)
    assert [row["kind"] for row in said.json["results"]] == ["written", "prepacked"]
    assert said.talk.startswith("without the native engine: it does not run this one")


MISTAKES = [
    (["model", "--batch", "1,zero"], 2, "'zero' is no number of images"),
    (["model", "--batch", ","], 2, "the list is empty"),
    (["model", "--precision", "fp16"], 2, "'fp16' is none of fp32, bf16, int8"),
    (["nowhere"], 1, "nowhere"),
    (["rotary", "--merge", "4"], 1, "tokens can be merged only where all positions are added at the stem"),
    (["model", "--images", "nowhere"], 1, "nowhere"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES)
def test_a_mistake_has_one_clear_message(shell: Shell, arguments: list[str], code: int, message: str) -> None:
    said = shell("bench", *arguments)
    assert (said.code, len(said.errors)) == (code, 1)
    assert message in said.errors[0]


def row(precision: str, rate: float, same: float | None, *, images: int = 64, merge: int = 0) -> Row:
    agrees = None
    if same is not None:
        agrees = Agreement(images=images, same_top1=same, largest_difference=0.1, mean_difference=0.01)
    return Row(
        kind="native",
        precision=precision,
        merge=merge,
        engine="native, with everything",
        start=Start(seconds=0.1, memory_bytes=None),
        agreement=agrees,
        speeds=(Speed(batch=8, latency_p50=8 / rate, runs=3),),
    )


def test_the_fastest_that_says_the_same_is_recommended() -> None:
    exact = row("fp32", 100, 1.0)
    advice = recommend([exact, row("bf16", 180, 1.0), row("int8", 300, 1.0)])
    assert advice.startswith("Use --precision int8: it is 3.0 × as fast as fp32 with batches of 8, and 64 of 64 images")
    assert recommend([exact, row("bf16", 180, 1.0), row("int8", 300, 0.9)]).startswith("Use --precision bf16")
    assert recommend([exact, row("bf16", 110, 1.0), row("int8", 300, 0.9)]).startswith("Use fp32: nothing else")
    assert recommend([exact, row("int8", 90, 1.0)]).startswith("Use fp32, which nothing here outruns")
    merging = row("fp32", 150, 1.0, merge=8)
    assert recommend([exact, merging]).startswith("Use --precision fp32 --merge 8: it is 1.5 × as fast as fp32")
    features = Agreement(images=64, same_top1=1.0, largest_difference=0.1, mean_difference=0.01, of_logits=False)
    advice = recommend([exact, replace(row("int8", 300, 1.0), agreement=features)])
    assert advice.endswith("and the features of 64 of 64 images kept their direction.")
    assert "see what it changes with --images" in recommend([exact, row("int8", 300, 1.0, images=1)])
    assert "your own model and --images tell" in recommend([row("fp32", 100, None), row("int8", 300, None)])


def test_engines_take_turns_until_each_has_had_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def action(name: str, seconds: float) -> None:
        order.append(name)
        clock[0] += seconds

    quick, slow = (lambda: action("quick", 1.0)), (lambda: action("slow", 5.0))
    times = by_turns([quick, slow], seconds=4.0)
    assert times == [[1.0] * 4, [5.0]]
    assert order == ["quick"] + ["slow"] + ["quick"] * 4  # one each to warm up; once is enough of what takes so long
    order.clear()
    assert by_turns([quick, lambda: action("other", 2.0)], seconds=4.0) == [[1.0] * 4, [2.0] * 2]
    assert order == ["quick", "other"] * 3 + ["quick"] * 2


def test_memory_that_an_engine_holds_is_seen() -> None:
    if resident_bytes() is None:
        pytest.skip("this system does not say how much memory a process holds")

    class Held:
        """An engine with 64 MB of its own."""

        name, precision = "held", "fp32"

        def __init__(self) -> None:
            self.numbers = np.ones(8_000_000)

        def features(self, images: object) -> object:
            return images

        def answer(self, images: object) -> object:
            return images

    _, start = started(Held, vitkit.create("Ti/16", settings=SETTINGS).cls_token.detach())
    assert start.memory_bytes is not None
    assert 50e6 < start.memory_bytes < 120e6  # beside whatever else the process does
