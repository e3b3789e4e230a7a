"""Runs within a time budget, with a clock that advances at each reading."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit.core.errors import ConfigError, DataError, TrainingError
from vitkit.core.lock import lock_directory
from vitkit.core.signals import StopFlag
from vitkit.data.layouts.registry import open_dataset
from vitkit.training.auto import AutoRun, run_within_budget
from vitkit.training.auto_state import AutoRequest, read_state, write_state
from vitkit.training.callbacks import Callback
from vitkit.training.config import RunConfig
from vitkit.training.probe import Probe, Prober, choose_probe
from vitkit.training.run import RunResult, run_training
from vitkit.training.run_dir import RunDir

SHAPE = {"width": 16, "depth": 1, "heads": 2, "mlp_dim": 16}
SCRATCH = {
    "model.name": "Ti/16",
    "model.image_size": 16,
    "model.patch_size": 8,
    "model.settings": [f"{key}={value}" for key, value in SHAPE.items()],
    "data.workers": 0,
    "data.path": "pairs",
}


class Ticker:
    """Clock that advances by a fixed time at each reading."""

    def __init__(self, tick: float = 0.2) -> None:
        self.tick, self.now = tick, 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Messages(Callback):
    """Callback that collects messages, and may stop the run at one that contains a text or at a step."""

    def __init__(self, stop: StopFlag | None = None, at: str = "", step: int = 0) -> None:
        self.lines, self.stop, self.at, self.step, self.is_final = list[str](), stop, at, step, False

    def on_message(self, text: str) -> None:
        self.lines.append(text)
        self.is_final |= text.startswith("final run")
        if self.stop and self.at and self.at in text:
            self.stop.signal = "test"

    def on_step(self, metrics) -> None:
        if self.stop and self.step and self.is_final and metrics.step == self.step:
            self.stop.signal = "test"


def make_pairs(each: int = 12, classes: tuple[str, ...] = ("ants", "bees"), seed: int = 0):
    rng = np.random.default_rng(seed)
    pairs = []
    for number, label in enumerate(classes):
        for _ in range(each):
            pixels = rng.integers(0, 150, (16, 16, 3), dtype=np.uint8)
            pixels[..., number % 3] += 60
            pairs.append((pixels, label))
    return pairs


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny"
    generator = torch.Generator().manual_seed(0)
    model = vitkit.create("Ti/16", image_size=16, patch_size=8, num_classes=3, settings=SHAPE, generator=generator)
    vitkit.save(model, path)
    return str(path)


def start(weights: str | None, out: Path, data=None, *, minutes: float = 0.5, clock=None, **options) -> RunResult:
    settings = options.pop("settings", {})
    dataset = open_dataset(make_pairs() if data is None else data)
    scratch = RunConfig().override({**SCRATCH, "data.path": dataset.path, **settings})
    tuned = RunConfig().override({"data.workers": 0, "data.path": dataset.path, "model.new_head": True, **settings})
    fixed, sources = tuple({"image_size": 1, **settings}), (weights,) if weights else ()
    advice = options.pop("advice", None)
    request = AutoRequest(minutes=minutes, scratch=scratch, tuned=tuned, sources=sources, fixed=fixed, advice=advice)
    return run_within_budget(request, out, clock=clock or Ticker(), dataset=dataset, **options)


def weights_of(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def test_run_probes_tries_and_trains_within_the_time(weights, tmp_path):
    clock, messages = Ticker(), Messages()
    result = start(weights, tmp_path / "run", clock=clock, callback=messages)
    assert clock.now <= 30.0
    selection = result.summary["selection"]
    names = [each["name"] for each in selection["tried"]]
    assert names[:2] == ["probe-tiny-8", "probe-tiny-16"]
    assert names[2].startswith("all-lr")
    run = vitkit.Run(tmp_path / "run")
    assert run.status == "finished"
    assert run.config.schedule.steps
    assert run.config.data.val_fraction == 0.3
    assert any(line.startswith("final run: ") for line in messages.lines)
    assert "Trials" in run.report_path.read_text()
    assert start(weights, tmp_path / "run").already_finished
    assert vitkit.load(tmp_path / "run" / "probe").labels == ("ants", "bees")


def test_few_images_do_not_make_the_probe_too_sure(weights, tmp_path):
    settings = {"data.val_fraction": 0.3}
    result = start(weights, tmp_path / "run", make_pairs(each=6), minutes=0.3, settings=settings)
    probes = [each for each in result.summary["selection"]["tried"] if not each["steps"]]
    assert max(each["loss"] for each in probes) < 5.0  # of 8 images all may be recognized by chance
    images = [image for image, _ in make_pairs(each=6)]
    confidences = [each.probability for each in vitkit.predict(tmp_path / "run" / "probe", images, workers=0)]
    assert max(confidences) < 0.999


def test_probe_is_chosen_by_all_images():
    def probe(top1: float, error: float = 0.01) -> Probe:
        return Probe(bundle=None, top1=0.5, loss=1.0, all_top1=top1, all_error=error)

    assert choose_probe([("64", probe(0.70)), ("96", probe(0.80)), ("128", probe(0.805))])[0] == "96"
    assert choose_probe([("64", probe(0.70, 0.2)), ("96", probe(0.80, 0.2))])[0] == "64"


def test_interrupted_run_is_evaluated_on_held_out_images(weights, tmp_path):
    for number, (pixels, label) in enumerate(make_pairs()):
        file = tmp_path / "photos" / label / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    stop = StopFlag()
    dataset = str(tmp_path / "photos")
    callback = Messages(stop, at="trying all")
    assert start(weights, tmp_path / "run", dataset, callback=callback, stop=stop).summary is None
    assert not RunDir(tmp_path / "run").config.exists()
    assert vitkit.evaluate(tmp_path / "run", dataset, workers=0, progress=False).count == 8


def test_resumed_run_repeats_the_advice(weights, tmp_path, monkeypatch):
    monkeypatch.setattr("vitkit.training.finalize.advise", lambda selection, **_: [selection.advice])
    stop, options = StopFlag(), {"minutes": 3.0, "clock": Ticker(2.0)}
    first = Messages(stop, at="trying scratch")
    start(weights, tmp_path / "run", callback=first, stop=stop, advice="use other weights", **options)
    summary = start(weights, tmp_path / "run", **options).summary
    assert summary["selection"]["advice"] == ["use other weights"]


@pytest.mark.parametrize(
    ("is_native", "setting", "expected"), [(True, "auto", "bf16"), (True, "fp32", "fp32"), (False, "auto", "fp32")]
)
def test_cpu_with_bf16_instructions_trains_in_bf16(weights, tmp_path, monkeypatch, is_native, setting, expected):
    monkeypatch.setattr("vitkit.training.auto.has_bf16_instructions", lambda: is_native)
    start(weights, tmp_path / "run", minutes=0.3, settings={"parallel.precision": setting})
    assert vitkit.Run(tmp_path / "run").config.parallel.precision == expected


def test_ranks_with_different_clocks_decide_alike(weights, tmp_path, launcher):
    script = Path(__file__).with_name("budget_ranks.py")
    launcher.run_ranks(script, weights, str(tmp_path / "run"), ranks=2, log=tmp_path / "log")
    run = vitkit.Run(tmp_path / "run")
    assert run.status == "finished"
    names = [record.name for record in read_state(RunDir(run.path)).records]
    assert names[:2] == ["probe-tiny-8", "probe-tiny-16"]
    assert len(names) > 2


def test_other_request_in_the_same_directory_is_refused(weights, tmp_path):
    start(weights, tmp_path / "run", minutes=0.3)
    with pytest.raises(ConfigError, match=r"holds a run with minutes=0\.3, not 0\.5"):
        start(weights, tmp_path / "run")


def test_process_that_is_refused_removes_no_files(weights, tmp_path, monkeypatch):
    path = tmp_path / "run"
    path.mkdir()
    with lock_directory(path):
        (path / "trials.json").write_text("{}")
        monkeypatch.setattr("vitkit.training.auto.read_state", lambda _: None)  # both started at the same time
        with pytest.raises(TrainingError, match="run is in use by process"):
            start(weights, path)
        assert (path / "trials.json").exists()


def test_interrupted_trials_keep_the_best_model_and_are_not_repeated(weights, tmp_path):
    stop = StopFlag()
    options = {"minutes": 3.0, "clock": Ticker(2.0)}
    first = Messages(stop, at="trying scratch")
    assert start(weights, tmp_path / "run", callback=first, stop=stop, **options).summary is None
    assert vitkit.load(tmp_path / "run").labels == ("ants", "bees")
    finished = {record.name for record in read_state(RunDir(tmp_path / "run")).records}
    second = Messages()
    assert start(weights, tmp_path / "run", callback=second, **options).summary is not None
    names = {line.removeprefix("trying ") for line in second.lines if line.startswith("trying ")}
    assert "scratch" in names
    assert not names & finished
    assert not any(line.startswith("probe-") for line in second.lines)


def test_resumed_final_run_is_exact(weights, tmp_path):
    stop = StopFlag()
    callback = Messages(stop, step=3)
    path, options = tmp_path / "run", {"settings": {"schedule.lr": 0.01, "optimizer.trainable": "all"}, "minutes": 3.0}
    assert start(weights, path, callback=callback, stop=stop, **options).summary is None
    config = RunDir(path).read_config()
    assert start(weights, path, **options).summary["selection"]["kept"]
    straight = run_training(config, tmp_path / "straight", dataset=open_dataset(make_pairs()))
    logs = [(each / "metrics.jsonl").read_text() for each in (path, straight.run_dir.path)]
    assert logs[0] == logs[1]


def test_worse_final_run_is_not_kept(weights, tmp_path):
    settings = {"schedule.lr": 50.0, "optimizer.trainable": "all", "optimizer.clip": None}
    result = start(weights, tmp_path / "run", make_pairs(each=20), settings=settings)
    assert result.summary["selection"]["kept"] != "final run"
    scores = {each["name"]: each["top1"] for each in result.summary["selection"]["tried"]}
    assert result.summary["result"]["top1"] >= min(scores["probe-tiny-8"], scores["probe-tiny-16"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make_pairs(each=1), "no class has two images"),
        ([(np.zeros((16, 16, 3), np.uint8), label) for label in ("a", "b") for _ in range(5)], "are identical"),
        ({"train": make_pairs(classes=("ants",)), "val": make_pairs()}, "has classes that train lacks: bees"),
        (make_pairs(classes=("ants",)), "has only one class: ants"),
    ],
)
def test_images_from_which_nothing_can_be_learned(weights, tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        start(weights, tmp_path / "new" / "run", data)
    assert not list(tmp_path.iterdir())


def test_class_with_one_image_is_a_warning(weights, tmp_path):
    warnings: list[str] = []

    class Warnings(Callback):
        def on_warning(self, text: str) -> None:
            warnings.append(text)

    data = [*make_pairs(), (np.zeros((16, 16, 3), np.uint8), "wasp")]
    assert start(weights, tmp_path / "run", data, minutes=0.3, callback=Warnings()).summary
    assert "wasp: too few images to hold any out" in warnings[0]


@pytest.mark.parametrize("is_scratch", [False, True])
def test_budget_too_small_for_one_step(weights, tmp_path, is_scratch):
    with pytest.raises(ConfigError, match=r"0\.01 minutes is too short") as error:
        start(None if is_scratch else weights, tmp_path / "run", minutes=0.01)
    assert "--minutes" in error.value.hint
    assert not list(tmp_path.iterdir())


def test_interrupted_trial_keeps_its_steps(weights, tmp_path):
    stop, path = StopFlag(), tmp_path / "run"
    first = Messages(stop, at="trying scratch")
    clock = Ticker(2.0)
    assert start(weights, path, minutes=3.0, clock=clock, callback=first, stop=stop).summary is None
    trial = RunDir(path / "trials" / "scratch")
    steps = trial.read_config().schedule.steps
    state = read_state(RunDir(path))
    write_state(RunDir(path), replace(state, seconds=state.seconds + 60.0))  # less time is left than was planned with
    assert start(weights, path, minutes=3.0, clock=Ticker(0.01)).summary is not None
    assert trial.read_config().schedule.steps == steps


def test_interrupted_final_run_keeps_its_better_model(weights, tmp_path, monkeypatch):
    stop, path = StopFlag(), tmp_path / "run"
    monkeypatch.setattr("vitkit.core.metrics_log.validation_score", lambda metrics: 2.0)  # better than any other
    callback = Messages(stop, step=40)
    options = {"settings": {"schedule.lr": 0.01, "optimizer.trainable": "all"}, "minutes": 3.0}
    assert start(weights, path, callback=callback, stop=stop, **options).summary is None
    assert RunDir(path).read_config().evaluation.every < 40
    before = read_state(RunDir(path)).best
    source = path / "probe" if before.startswith("probe") else path / "trials" / before
    assert weights_of(path) != weights_of(source)
    assert vitkit.load(path).labels == ("ants", "bees")


def test_diverged_trial_is_left_out(weights, tmp_path):
    warnings: list[str] = []

    class Warnings(Callback):
        def on_warning(self, text: str) -> None:
            warnings.append(text)

    settings = {"schedule.lr": 1e30, "optimizer.trainable": "all", "optimizer.clip": None}
    selection = start(weights, tmp_path / "run", settings=settings, callback=Warnings()).summary["selection"]
    assert any(text.startswith("all-lr-1e+30: ") for text in warnings)
    assert not any(each["steps"] for each in selection["tried"])
    assert selection["kept"] != "final run"


def test_slow_machine_probes_fewer_sizes(weights, tmp_path, monkeypatch):
    clock, messages, fit = Ticker(0.01), Messages(), Prober.fit

    def fit_slowly(*arguments, **options):
        clock.now += 6.0
        return fit(*arguments, **options)

    monkeypatch.setattr(Prober, "fit", fit_slowly)
    start(weights, tmp_path / "run", clock=clock, callback=messages)
    assert [line.partition(":")[0] for line in messages.lines if line.startswith("probe-")] == ["probe-tiny-8"]


def test_trial_is_the_final_run_if_no_more_steps_fit(weights, tmp_path):
    messages, path = Messages(), tmp_path / "run"
    result = start(weights, path, minutes=0.3, callback=messages, settings={"schedule.lr": 0.01})
    assert any(line.startswith("final run: the trial all-lr-0.01") for line in messages.lines)
    trial = RunDir(path / "trials" / "all-lr-0.01")
    assert RunDir(path).read_config().schedule == trial.read_config().schedule
    assert RunDir(path).metrics.read_text() == trial.metrics.read_text()
    assert result.summary["selection"]["tried"][-1]["top1"] == result.summary["validation"]["val_top1"]
    assert vitkit.Run(path).decisions[-1].startswith("final run: the trial")


def test_image_size_that_does_not_fit_scratch_leaves_it_out(weights, tmp_path, monkeypatch):
    messages = Messages()
    monkeypatch.setitem(SCRATCH, "model.patch_size", 6)
    start(weights, tmp_path / "run", minutes=3.0, settings={"model.image_size": 16}, callback=messages)
    assert any(line.startswith("no trial from scratch: the patch does not divide") for line in messages.lines)
    assert "trying scratch" not in messages.lines
    assert vitkit.Run(tmp_path / "run").status == "finished"
    with pytest.raises(ConfigError, match="the patch does not divide the image"):
        start(None, tmp_path / "other", settings={"model.image_size": 16})


def test_trial_that_would_take_too_long_is_not_started(weights, tmp_path, monkeypatch):
    clock, messages, run = Ticker(0.01), Messages(), AutoRun.run_trial

    def run_slowly(*arguments, **options):
        clock.now += 70.0
        return replace(run(*arguments, **options), seconds=70.0)

    monkeypatch.setattr(AutoRun, "run_trial", run_slowly)
    start(weights, tmp_path / "run", minutes=3.0, clock=clock, callback=messages)
    assert [line for line in messages.lines if line.startswith("trying ")] == ["trying all-lr-0.0001", "trying scratch"]
