"""A run within a time budget: probe, trials on held-out photos, then the final run with the best settings.

Each trial is a run of its own below `trials/`. `trials.json` has the request and the finished trials, which are not
repeated after an interruption. The best model so far is always in the run directory, so it can be used at any time.
The settings of the final run are fixed in its config.toml; from there on a resumed run is exact.
"""

import json
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from vitkit.core.config import flatten_settings, to_mapping
from vitkit.core.errors import ConfigError, DataError
from vitkit.core.files import write_text
from vitkit.core.lock import lock_directory
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.core.sizes import pair
from vitkit.data.dataset import Dataset, ImageSource, count_labels
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import exclude_files, read_bad_files
from vitkit.model.config import ViTConfig
from vitkit.training.budget import (
    MAX_EPOCHS,
    MIN_TRIAL_SECONDS,
    PROBE_FRACTION,
    REPORT_SECONDS,
    SAFETY,
    TRIALS_FRACTION,
    Selection,
    TimeBudget,
    TrialPlan,
    TrialRecord,
    best_record,
    choose_batch_size,
    count_trials,
    held_out_fraction,
    plan_probes,
    plan_steps,
    plan_trials,
    schedule_settings,
)
from vitkit.training.build import fit_channels, load_pretrained, resolve_model_config, resolve_workers
from vitkit.training.callbacks import Callback, StepMetrics
from vitkit.training.config import RunConfig
from vitkit.training.data import RunData, check_finished_data, open_run_data
from vitkit.training.distributed import Ranks, join_ranks, run_on_main
from vitkit.training.probe import Probe, Prober, resize_bundle
from vitkit.training.run import RunResult, run_training
from vitkit.training.run_dir import AUTO_DIR, FINGERPRINT_PREFIX, RunContext, RunDir, explain_io_errors, read_metrics
from vitkit.weights.artifact import ALL_FILES, read_artifact, write_artifact
from vitkit.weights.load import EMBEDDED, load_stored_bundle
from vitkit.zoo.registry import create

EMBEDDED_SIZES = (64, 96, 128)
"""Image sizes to try with the embedded weights."""
SMALL_SIZE = 4 / 7
"""Part of the image size of other weights to try as well: three times as fast."""
PROBE = "probe"
INIT = "model.init"


@dataclass(frozen=True, kw_only=True)
class AutoRequest:
    """A run whose settings are to be chosen: configurations from random and from pretrained weights, and the time.

    `sources` are the initial weights to try; `fixed` the settings that were given and are not varied.
    """

    minutes: float
    scratch: RunConfig | None
    tuned: RunConfig
    sources: tuple[str, ...]
    fixed: tuple[str, ...] = ()
    advice: str | None = None

    def key(self) -> dict[str, object]:
        """Return what must be equal for a run to be resumed."""
        settings = flatten_settings(to_mapping(self.tuned))
        chosen = {name: settings.get(name) for name in (*self.fixed, "data.path", "seed") if name != "data.workers"}
        return {"minutes": self.minutes, "settings": chosen, "scratch": self.scratch is not None}


@dataclass(kw_only=True)
class AutoState:
    """Contents of trials.json: the request, the seconds of earlier calls, and what was found so far."""

    request: dict[str, object]
    seconds: float = 0.0
    sources: list[str] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)
    """Settings that the probe has decided."""
    records: list[TrialRecord] = field(default_factory=list)
    probe: str | None = None
    """Name of the chosen probe, from which trials start."""
    best: str | None = None

    def candidates(self) -> list[TrialRecord]:
        """Return the chosen probe, and the trials that are at least as accurate."""
        probe = self.find(self.probe or "")
        trials = [each for each in self.records if each.steps and (probe is None or each.top1 >= probe.top1)]
        return trials if probe is None else [probe, *trials]

    def find(self, name: str) -> TrialRecord | None:
        """Return the record of a finished trial."""
        return next((record for record in self.records if record.name == name), None)


def read_state(run_dir: RunDir) -> AutoState | None:
    """Return the state of a run with a time budget; None if it has none."""
    if not run_dir.trials.exists():
        return None
    stored = json.loads(run_dir.trials.read_bytes())
    return AutoState(**stored | {"records": [TrialRecord(**record) for record in stored["records"]]})


def write_state(run_dir: RunDir, state: AutoState) -> None:
    """Write the state."""
    write_text(run_dir.trials, json.dumps(asdict(state), indent=2) + "\n")


def run_within_budget(
    request: AutoRequest,
    out: Path | str,
    *,
    clock: Callable[[], float],
    started: float | None = None,
    dataset: Dataset | None = None,
    decisions: Sequence[str] = (),
    callback: Callback | None = None,
    stop: StopFlag | None = None,
) -> RunResult:
    """Choose settings and train within the time, resume, or return the result if the run is finished."""
    run_dir, stop = RunDir(Path(out)), stop or StopFlag()
    new_dirs = [path for path in (run_dir.path, *run_dir.path.parents) if not path.exists()]
    with explain_io_errors(run_dir), join_ranks(request.tuned.parallel) as ranks:
        callback = callback if callback and ranks.is_main else Callback()
        state = read_state(run_dir)
        check_same_request(run_dir, state, request)
        if (summary := run_dir.read_summary()) is not None:
            check_finished_data(run_dir, ranks=ranks, dataset=dataset)
            return RunResult(run_dir, summary, already_finished=True)
        shared = clock if ranks.world_size == 1 else lambda: ranks.broadcast_int(int(1000 * clock())) / 1000
        budget = TimeBudget(seconds=60 * request.minutes, clock=shared, spent=state.seconds if state else 0.0)
        budget.started = budget.started if started is None else started
        auto = AutoRun(request, run_dir, ranks, budget, callback, stop, dataset)
        try:
            return auto.run(state or AutoState(request=request.key(), sources=list(request.sources)), decisions)
        except StopRequested:
            return RunResult(run_dir, None)
        except Exception:
            if ranks.is_main and state is None and not any((run_dir.path / AUTO_DIR).glob("*/metrics.jsonl")):
                rollback(run_dir, new_dirs)
            raise


def check_same_request(run_dir: RunDir, state: AutoState | None, request: AutoRequest) -> None:
    """Raise an error if the directory holds another run."""
    hint = "choose another out (--out), or repeat the settings to resume"
    if state is None:
        if run_dir.config.exists():
            raise ConfigError(f"{run_dir.path} holds a run without a time budget", hint=hint)
        return
    old, new = (flatten_settings(each) for each in (state.request, json.loads(json.dumps(request.key()))))
    for key in old | new:
        if old.get(key) != new.get(key):
            name = key.removeprefix("settings.")
            raise ConfigError(f"{run_dir.path} holds a run with {name}={old.get(key)}, not {new.get(key)}", hint=hint)


def rollback(run_dir: RunDir, new_dirs: Sequence[Path]) -> None:
    """Remove what a run has written before its first trial."""
    for name in (AUTO_DIR, PROBE):
        shutil.rmtree(run_dir.path / name, ignore_errors=True)
    for file in (
        *(run_dir.path / name for name in ALL_FILES),
        run_dir.data,
        run_dir.bad_files,
        run_dir.trials,
        *run_dir.path.glob(f"{FINGERPRINT_PREFIX}*.npz"),
    ):
        file.unlink(missing_ok=True)
    for file in run_dir.path.glob(".lock*"):
        file.unlink(missing_ok=True)
    for path in new_dirs:
        with suppress(OSError):  # not empty: something else uses it
            path.rmdir()


class TimeLimit(StopFlag):
    """Stop flag that is also set when the time of a trial is over."""

    def __init__(self, stop: StopFlag, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self.stop, self.is_over = stop, is_over

    @property
    def requested(self) -> bool:
        """Whether to stop, by request or because the time is over."""
        return self.stop.requested or self.is_over()


class StepTimer(Callback):
    """Measures the seconds per step, and passes everything on to another callback."""

    def __init__(self, callback: Callback, clock: Callable[[], float]) -> None:
        self.clock, self.times = clock, list[float]()
        for name in (name for name in vars(Callback) if name.startswith("on_") and name != "on_step"):
            setattr(self, name, getattr(callback, name))
        self.pass_on = callback.on_step

    def on_step(self, metrics: StepMetrics) -> None:
        """Note the time of a step."""
        self.times.append(self.clock())
        self.pass_on(metrics)

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return len(self.times)

    @property
    def seconds_per_step(self) -> float:
        """Return the median time between two steps; 0 if there were not two."""
        pauses = sorted(after - before for before, after in zip(self.times, self.times[1:], strict=False))
        return pauses[len(pauses) // 2] if pauses else 0.0


@dataclass
class AutoRun:
    """The stages of a run within a time budget."""

    request: AutoRequest
    run_dir: RunDir
    ranks: Ranks
    budget: TimeBudget
    callback: Callback
    stop: StopFlag
    dataset: Dataset | None

    def run(self, state: AutoState, decisions: Sequence[str]) -> RunResult:
        """Probe, try, and train; a run whose settings are fixed already only trains."""
        if self.run_dir.config.exists():
            return self.train(self.run_dir.read_config(), state, dataset=self.dataset, decisions=(), seconds=None)
        self.request = replace(self.request, sources=tuple(state.sources))
        self.callback.on_message(f"time budget: {self.request.minutes:g} minutes (--minutes)")
        self.run_dir.create()
        with lock_directory(self.run_dir.path) if self.ranks.is_main else nullcontext():
            run_on_main(self.ranks, lambda _: write_state(self.run_dir, state))
            dataset = self.dataset or open_dataset(self.request.tuned.data.path, layout=self.request.tuned.data.layout)
            tuned, scratch = self.fix_data(dataset)
            data = open_run_data(self.context(tuned, dataset))
            check_photos(data, self.callback)
            if not state.settings and state.sources:
                run_on_main(self.ranks, lambda beat: self.probe(state, data, tuned, heartbeat=beat))
                state = read_state(self.run_dir) or state
            tuned = tuned.override(state.settings) if state.sources else tuned
            if scratch is not None and "augment.flip" in state.settings:
                scratch = scratch.override({"augment.flip": state.settings["augment.flip"]})
            readable = exclude_bad_files(dataset, self.run_dir)
            self.try_all(state, data, tuned=tuned, scratch=scratch, dataset=readable)
        choice, config = self.choose(state, data, tuned=tuned, scratch=scratch)
        self.callback.on_message(choice)
        seconds = max(self.budget.remaining() - self.reserve(state, data), 0.0)
        return self.train(config, state, dataset=self.dataset, decisions=(*decisions, choice), seconds=seconds)

    def fix_data(self, dataset: Dataset) -> tuple[RunConfig, RunConfig | None]:
        """Return the configurations with the held-out fraction and the batch size for the number of photos."""
        train = dataset.splits.get("train") or dataset.splits.get("all") or dataset.first_split
        settings: dict[str, object] = {}
        if "data.val_fraction" not in self.request.fixed and "val" not in dataset.splits:
            settings["data.val_fraction"] = held_out_fraction(len(train))
        if "schedule.batch_size" not in self.request.fixed:
            largest = self.request.tuned.schedule.batch_size
            settings["schedule.batch_size"] = choose_batch_size(len(train), largest=largest)
        scratch = self.request.scratch
        return self.request.tuned.override(settings), None if scratch is None else scratch.override(settings)

    def context(self, config: RunConfig, dataset: Dataset) -> RunContext:
        """Return the context for reading the images in the run directory."""
        return RunContext(
            config=config,
            run_dir=self.run_dir,
            ranks=self.ranks,
            workers=resolve_workers(config),
            dataset=dataset,
            callback=self.callback,
            stop=self.stop,
        )

    def probe(self, state: AutoState, data: RunData, config: RunConfig, *, heartbeat: Callable[[], None]) -> None:
        """Fit probes for each source and image size, and keep the best: the model that everything else must beat."""

        def on_progress(_: int) -> None:
            heartbeat()
            self.stop.raise_if_requested()

        prober = Prober(data=data, workers=resolve_workers(config), device=self.ranks.device, progress=on_progress)
        fitted: list[tuple[str, Probe]] = []
        seconds = PROBE_FRACTION * self.budget.seconds / len(state.sources)
        for source in state.sources:
            bundle = fit_channels(load_stored_bundle(source), config.data.channels, callback=self.callback)
            sizes = probe_sizes(source, bundle.config, config.model.image_size)
            started = self.budget.elapsed()
            prober.features(resize_bundle(bundle, sizes[0]), prober.held_out())
            per_image = (self.budget.elapsed() - started) / len(prober.held_out())
            needed = per_image * min(len(data.train), 2 * len(data.classes))
            if needed > self.budget.remaining() - REPORT_SECONDS and not fitted:
                minutes = (self.budget.elapsed() + 4 * needed + REPORT_SECONDS) / 60 + 0.1
                raise ConfigError(
                    f"a time budget of {self.request.minutes:g} minutes is too short for these images",
                    hint=f"--minutes {minutes:.1f} or more",
                )
            chosen, images = plan_probes(
                sizes,
                seconds_per_image=per_image,
                images=len(data.train),
                seconds=min(seconds, 0.5 * self.budget.remaining()),
                num_classes=len(data.classes),
            )
            for size in chosen:
                started = self.budget.elapsed()
                probe = prober.fit(resize_bundle(bundle, size), images=images)
                record = TrialRecord(
                    name=f"{PROBE}-{Path(source).name}-{size}",
                    top1=probe.top1,
                    loss=probe.loss,
                    seconds=self.budget.elapsed() - started,
                )
                self.report(record)
                state.records.append(record)
                fitted.append((record.name, probe))
                if len(fitted) == 1:  # usable from now on
                    write_artifact(self.run_dir.path, probe.bundle)
        state.probe, best = choose_probe(fitted)
        state.best = state.probe
        write_artifact(self.run_dir.path, best.bundle)
        write_artifact(self.run_dir.path / PROBE, best.bundle)
        state.settings = {INIT: str(self.run_dir.path / PROBE), "model.new_head": False, "model.image_size": None}
        if "augment.flip" not in self.request.fixed and not prober.sees_mirror_images_alike(best):
            self.callback.on_message("mirrored images are not recognized: training does not flip them")
            state.settings["augment.flip"] = False
        self.save(state)

    def try_all(
        self, state: AutoState, data: RunData, *, tuned: RunConfig, scratch: RunConfig | None, dataset: Dataset
    ) -> None:
        """Run the trials for which there is time."""
        plans = self.plan(tuned, scratch)
        count, seconds = count_trials(
            min(TRIALS_FRACTION * self.budget.seconds, 0.6 * (self.budget.remaining() - self.reserve(state, data)))
        )
        if len(plans) == 1:  # nothing to choose, only a speed to measure
            seconds = min(seconds, MIN_TRIAL_SECONDS)
        for plan in plans[:count]:
            if state.find(plan.name) is not None:
                continue
            if self.budget.remaining() - self.reserve(state, data) < 0.5 * seconds:
                break
            base = (scratch or tuned) if plan.is_scratch else tuned
            self.try_one(state, plan, data, base, seconds=seconds, dataset=dataset)

    def plan(self, tuned: RunConfig, scratch: RunConfig | None) -> list[TrialPlan]:
        """Return the trials, the most promising first."""
        is_pretrained = bool(self.request.sources)
        fixed = self.request.fixed
        return plan_trials(tuned, fixed=fixed, is_pretrained=is_pretrained, with_scratch=scratch is not None)

    def try_one(
        self, state: AutoState, plan: TrialPlan, data: RunData, base: RunConfig, *, seconds: float, dataset: Dataset
    ) -> None:
        """Train for some seconds and record the result; one that completes no step is not recorded."""
        steps = self.estimate_steps(state, plan, data, base, seconds=SAFETY * seconds)
        machine = {"data.verify": False, "checkpoint.best": False, "checkpoint.last": 1}
        config = base.override({**plan.settings, **schedule_settings(steps), "evaluation.every": steps, **machine})
        self.callback.on_message(f"trying {plan.name}")
        started = self.budget.elapsed()
        timer = StepTimer(self.callback, self.budget.elapsed)
        path = self.run_dir.path / AUTO_DIR / plan.name
        result = run_limited(
            partial(run_training, out=path, dataset=dataset, callback=timer, is_trial=True),
            config,
            stop=self.stop,
            is_over=lambda: self.budget.elapsed() > started + seconds,
        )
        if result.summary is None:
            raise StopRequested
        last = next((each for each in reversed(read_metrics(result.run_dir)) if "val_top1" in each), None)
        if last is None:
            return
        record = TrialRecord(
            name=plan.name,
            top1=float(str(last["val_top1"])),
            loss=float(str(last["val_loss"])),
            seconds=self.budget.elapsed() - started,
            steps=int(str(last["step"])),
            seconds_per_step=timer.seconds_per_step,
        )
        self.report(record)
        state.records.append(record)
        candidates = state.candidates()
        if record in candidates and best_record(candidates, images=len(data.val or ())) is record:
            state.best = record.name
            run_on_main(self.ranks, lambda _: copy_artifact(path, self.run_dir.path))
        run_on_main(self.ranks, lambda _: self.save(state))

    def estimate_steps(
        self, state: AutoState, plan: TrialPlan, data: RunData, base: RunConfig, *, seconds: float
    ) -> int:
        """Return the steps of a trial: from the speed of an earlier one, or a number that the time limit ends."""
        earlier = [
            each for each in state.records if each.seconds_per_step and (each.name == "scratch") == plan.is_scratch
        ]
        per_step = earlier[0].seconds_per_step if earlier else seconds / 60
        return plan_steps(
            seconds,
            seconds_per_step=per_step,
            images=len(data.train),
            batch_size=base.schedule.batch_size,
            max_epochs=MAX_EPOCHS,
        )

    def measure_step(self, config: RunConfig, num_classes: int) -> float:
        """Return the seconds of an update of all parameters, on random pixels."""
        pretrained = load_pretrained(config, callback=Callback()) if config.model.init else None
        model = create(resolve_model_config(config, num_classes=num_classes, pretrained=pretrained))
        model.to(self.ranks.device).train()
        batch = max(1, config.schedule.batch_size // self.ranks.world_size)
        pixels = torch.rand(batch, config.data.channels, *pair(model.config.image_size), device=self.ranks.device)
        started = 0.0
        for _ in range(2):  # the first is slower
            started = self.budget.elapsed()
            model(pixels).sum().backward()
        return max(self.budget.elapsed() - started, 1e-3)

    def choose(
        self, state: AutoState, data: RunData, *, tuned: RunConfig, scratch: RunConfig | None
    ) -> tuple[str, RunConfig]:
        """Return the explanation and the configuration of the final run: the best trial, with the time that is left."""
        trials = [record for record in state.records if record.steps]
        plans = self.plan(tuned, scratch)
        best = best_record(trials, images=len(data.val or ())) if trials else None
        plan = next((plan for plan in plans if best is not None and plan.name == best.name), plans[0])
        base = (scratch or tuned) if plan.is_scratch else tuned
        seconds = SAFETY * (self.budget.remaining() - self.reserve(state, data))
        steps = plan_steps(
            seconds,
            seconds_per_step=best.seconds_per_step if best and best.seconds_per_step else max(seconds, 1.0),
            images=len(data.train),
            batch_size=base.schedule.batch_size,
            max_epochs=10 * MAX_EPOCHS if plan.is_scratch else MAX_EPOCHS,
        )
        reason = f"best of {len(trials)} trials on held-out photos" if trials else "there was no time for trials"
        choice = f"final run: {plan.name}, {steps} steps ({reason})"
        return choice, base.override({**plan.settings, **schedule_settings(steps)})

    def reserve(self, state: AutoState, data: RunData) -> float:
        """Return the seconds for the evaluation and the report at the end, by the speed of the probes."""
        split = data.evaluation_split
        probes = [record for record in state.records if not record.steps]
        per_image = probes[-1].seconds / max(len(data.train), 1) if probes else 0.0
        return REPORT_SECONDS + 2 * per_image * (len(split[1]) if split else 0)

    def train(
        self,
        config: RunConfig,
        state: AutoState,
        *,
        dataset: Dataset | None,
        decisions: Sequence[str],
        seconds: float | None,
    ) -> RunResult:
        """Make the final run; without a limit if it is resumed, so that it ends exactly as it would have."""
        best = state.find(state.best or "")
        selection = None
        if best is not None:
            advice = self.request.advice
            minutes = self.request.minutes
            selection = Selection(records=tuple(state.records), best=best, minutes=minutes, advice=advice)
        start = partial(
            run_training,
            out=self.run_dir.path,
            dataset=dataset,
            decisions=decisions,
            callback=self.callback,
            selection=selection,
        )
        if seconds is None:
            return start(config, stop=self.stop)
        started = self.budget.elapsed()
        limit = started + seconds
        return run_limited(start, config, stop=self.stop, is_over=lambda: self.budget.elapsed() > limit)

    def report(self, record: TrialRecord) -> None:
        """Print the result of a probe or a trial."""
        steps = f", {record.steps} steps" if record.steps else ""
        accuracy = f"{record.top1:.1%} of held-out photos, loss {record.loss:.3f}"
        self.callback.on_message(f"{record.name}: {accuracy}{steps}, {record.seconds:.0f} s")

    def save(self, state: AutoState) -> None:
        """Write the state with the time so far."""
        state.seconds = self.budget.spent + self.budget.clock() - self.budget.started
        write_state(self.run_dir, state)


def run_limited(
    start: Callable[..., RunResult], config: RunConfig, *, stop: StopFlag, is_over: Callable[[], bool]
) -> RunResult:
    """Train until the last step or until the time is over; in that case the steps so far are all steps.

    The shorter length is written to config.toml, so that the files of the run agree.
    """
    result = start(config, stop=TimeLimit(stop, is_over))
    if result.summary is not None or stop.requested:
        return result
    steps = sorted((result.run_dir.checkpoints).glob("step-*"))
    done = max(1, int(steps[-1].name.removeprefix("step-"))) if steps else 1
    stored = result.run_dir.read_config()  # with the precision that was chosen
    shorter = replace(stored, schedule=replace(stored.schedule, steps=done, epochs=None))
    result.run_dir.write_config(shorter)
    return start(shorter, stop=stop)


def choose_probe(fitted: Sequence[tuple[str, Probe]]) -> tuple[str, Probe]:
    """Return the first probe within a standard error of the best: the first is the fastest to train."""
    best = max((probe for _, probe in fitted), key=lambda probe: probe.loo_top1)
    return next(each for each in fitted if each[1].loo_top1 >= best.loo_top1 - best.loo_error)


def probe_sizes(source: str, model: object, image_size: object) -> tuple[int, ...]:
    """Return the image sizes to try: those of the settings, of the embedded weights, or two of other weights."""
    if image_size is not None:
        return (max(pair(image_size)),)  # type: ignore[arg-type]
    if source == EMBEDDED:
        return EMBEDDED_SIZES
    native = max(pair(model.image_size))  # type: ignore[attr-defined]
    if not isinstance(model, ViTConfig) or model.backbone is not None:
        return (native,)
    patch = max(pair(model.patch_size))
    small = max(patch, round(SMALL_SIZE * native / patch) * patch)
    return (native,) if small == native else (small, native)


def exclude_bad_files(dataset: Dataset, run_dir: RunDir) -> Dataset:
    """Return the dataset without the unreadable images that were found before."""
    bad = read_bad_files(run_dir.bad_files) if run_dir.bad_files.exists() else []
    return Dataset(dataset.path, {name: exclude_files(source, bad) for name, source in dataset.splits.items()})


def copy_artifact(source: Path, out: Path) -> None:
    """Put the model of a trial into the run directory; its checksums last, as they mark a whole model."""
    write_artifact(out, read_artifact(source))


def check_photos(data: RunData, callback: Callback) -> None:
    """Raise an error for images from which nothing can be learned or judged; warn of classes that cannot be judged."""
    if data.val is None or len(data.val) == 0:
        raise DataError(
            "no class has two images, so none can be held out to judge by",
            hint="add images, at least ten of each class",
        )
    if are_identical(data.train):
        raise DataError(f"all {len(data.train)} training images are identical", hint="check how they were copied")
    counts = count_labels(data.val)
    if missing := [name for name, count in zip(data.classes, counts, strict=True) if count == 0]:
        callback.on_warning(
            f"{list_names(missing)}: too few images to hold any out; the accuracy is that of the others"
        )


def list_names(names: Collection[str]) -> str:
    """Return some names, and how many more there are."""
    first = list(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def are_identical(source: ImageSource) -> bool:
    """Return whether all of several images have the same content."""
    first = source.checksum(0)
    return len(source) > 1 and all(source.checksum(index) == first for index in range(1, len(source)))
