"""A run within a time budget: probe, trials on held-out images, then the final run with the best settings.

Each trial is a run of its own below `trials/`. `trials.json` has the request and the finished trials, which are not
repeated after an interruption. The best model so far is always in the run directory, so it can be used at any time.
The settings of the final run are fixed in its config.toml; from there on a resumed run is exact.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from vitkit.core.config import to_mapping
from vitkit.core.errors import ConfigError
from vitkit.core.files import remove_empty_directories
from vitkit.core.formatting import format_plural
from vitkit.core.lock import lock_directory
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.data.dataset import Dataset
from vitkit.data.verify import exclude_files, read_bad_files
from vitkit.inference.packed import has_bf16_instructions
from vitkit.training.auto_state import (
    PROBE,
    AutoRequest,
    AutoState,
    adopt_trial,
    check_same_request,
    keep_better_checkpoint,
    read_state,
    remove_unstarted,
    write_state,
)
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
from vitkit.training.build import fit_channels, resolve_model_config, resolve_workers
from vitkit.training.callbacks import Callback
from vitkit.training.config import RunConfig
from vitkit.training.data import RunData, check_finished_data, check_run_images, open_config_dataset, open_run_data
from vitkit.training.distributed import Ranks, join_ranks, run_on_main
from vitkit.training.loop import DivergedError
from vitkit.training.probe import Probe, Prober, choose_probe, probe_sizes, resize_bundle
from vitkit.training.run import RunResult, run_training
from vitkit.training.run_dir import AUTO_DIR, RunContext, RunDir, explain_io_errors, read_metrics
from vitkit.training.time_limit import StepTimer, run_limited
from vitkit.weights.artifact import read_artifact, write_artifact
from vitkit.weights.load import load_stored_bundle

INIT = "model.init"


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
        started, spent = clock() if started is None else started, state.seconds if state else 0.0
        budget = TimeBudget(seconds=60 * request.minutes, clock=clock, started=started, spent=spent)
        initial = AutoState(request=request.key(), sources=list(request.sources), advice=request.advice)
        auto = AutoRun(request, run_dir, ranks, budget, callback, stop, dataset, state or initial)
        try:
            return auto.run(decisions)
        except StopRequested:
            return RunResult(run_dir, None)
        except Exception:
            is_new = state is None and not any((run_dir.path / AUTO_DIR).glob("*/metrics.jsonl"))
            if ranks.is_main and is_new:
                if auto.owns_files:
                    remove_unstarted(run_dir)
                remove_empty_directories(new_dirs)
            raise


@dataclass
class AutoRun:
    """The stages of a run within a time budget.

    Every rank has a clock of its own. What the ranks must decide alike depends on that of the main rank (`remaining`);
    a time limit may end on any of them, as the training loop combines requests to stop.
    """

    request: AutoRequest
    run_dir: RunDir
    ranks: Ranks
    budget: TimeBudget
    callback: Callback
    stop: StopFlag
    dataset: Dataset | None
    state: AutoState
    owns_files: bool = False
    """Whether this process has held the lock of the directory and written the first file."""
    data: RunData = field(init=False)
    tuned: RunConfig = field(init=False)
    scratch: RunConfig | None = field(init=False)
    """The configurations of the request, with what was decided since."""

    def run(self, decisions: Sequence[str]) -> RunResult:
        """Probe, try, and train; a run whose settings are fixed already only trains."""
        if self.run_dir.config.exists():
            return self.train_final(self.run_dir.read_config())
        self.request = replace(self.request, sources=tuple(self.state.sources))
        self.callback.on_message(f"time budget: {self.request.minutes:g} minutes (--minutes)")
        self.run_dir.create()
        with lock_directory(self.run_dir.path) if self.ranks.is_main else nullcontext():
            run_on_main(self.ranks, lambda _: write_state(self.run_dir, self.state))
            self.owns_files = True
            dataset = self.dataset or open_config_dataset(self.request.tuned.data)
            self.tuned, self.scratch = self.fix_data(dataset)
            self.data = self.open_data(dataset)
            check_run_images(self.data, self.callback)
            self.check_scratch()
            self.state.data = to_mapping(self.tuned.data)
            run_on_main(self.ranks, lambda _: write_state(self.run_dir, self.state))
            if not self.state.settings and self.state.sources:
                run_on_main(self.ranks, lambda beat: self.probe(heartbeat=beat))
                self.state = read_state(self.run_dir) or self.state
            settings = self.state.settings
            self.tuned = self.tuned.override(settings) if self.state.sources else self.tuned
            if self.scratch is not None and "augment.flip" in settings:
                self.scratch = self.scratch.override({"augment.flip": settings["augment.flip"]})
            self.try_all(exclude_bad_files(dataset, self.run_dir))
        choice, config, trial = self.choose()
        self.callback.on_message(choice)
        decisions = (*decisions, choice)
        if trial is not None:
            run_on_main(self.ranks, lambda _: adopt_trial(self.run_dir, trial, config, decisions=decisions))
            return self.train_final(self.run_dir.read_config())
        return self.train_final(config, decisions=decisions, seconds=max(self.remaining(), 0.0))

    def remaining(self) -> float:
        """Return the seconds left for training, the same on every rank; collective over all ranks."""
        return self.broadcast(self.budget.remaining() - self.reserve())

    def broadcast(self, seconds: float) -> float:
        """Return the main rank's value on every rank, to a microsecond; collective over all ranks."""
        return seconds if self.ranks.world_size == 1 else self.ranks.broadcast_int(round(1e6 * seconds)) / 1e6

    def fix_data(self, dataset: Dataset) -> tuple[RunConfig, RunConfig | None]:
        """Return the configurations with the held-out fraction, the batch size and the precision."""
        train = dataset.splits.get("train") or dataset.splits.get("all") or dataset.first_split
        settings: dict[str, object] = {}
        if "data.val_fraction" not in self.request.fixed and "val" not in dataset.splits:
            settings["data.val_fraction"] = held_out_fraction(len(train))
        if "schedule.batch_size" not in self.request.fixed:
            largest, ranks = self.request.tuned.schedule.batch_size, self.ranks.world_size
            settings["schedule.batch_size"] = choose_batch_size(len(train), largest=largest, ranks=ranks)
        if self.request.tuned.parallel.precision == "auto" and self.all_cpus_have_bf16():
            settings["parallel.precision"] = "bf16"
        scratch = self.request.scratch
        return self.request.tuned.override(settings), None if scratch is None else scratch.override(settings)

    def all_cpus_have_bf16(self) -> bool:
        """Return whether every rank trains on a CPU that is faster in bf16; collective over all ranks."""
        is_fast = self.ranks.device.type == "cpu" and has_bf16_instructions()
        return self.ranks.all_reduce_sum([is_fast])[0] == self.ranks.world_size

    def check_scratch(self) -> None:
        """Drop the model from scratch if settings for the initial weights, such as an image size, do not fit it."""
        if self.scratch is None or not self.request.sources:
            return
        try:
            resolve_model_config(self.scratch, num_classes=len(self.data.classes), pretrained=None)
        except ConfigError as error:
            self.callback.on_message(f"no trial from scratch: {error.summary}")
            self.scratch = None

    def open_data(self, dataset: Dataset) -> RunData:
        """Divide the images as the final run will, and record them in its directory."""
        context = RunContext(
            config=self.tuned,
            run_dir=self.run_dir,
            ranks=self.ranks,
            workers=resolve_workers(self.tuned),
            dataset=dataset,
            callback=self.callback,
            stop=self.stop,
        )
        return open_run_data(context)

    def probe(self, *, heartbeat: Callable[[], None]) -> None:
        """Fit probes for each source and image size, and keep the best: the model that everything else must beat.

        This runs on the main rank alone.
        """

        def on_progress(_: int) -> None:
            heartbeat()
            self.stop.raise_if_requested()

        state, data, config, workers = self.state, self.data, self.tuned, resolve_workers(self.tuned)
        prober = Prober(data=data, workers=workers, device=self.ranks.device, progress=on_progress)
        probes: list[tuple[str, Probe]] = []
        seconds = PROBE_FRACTION * self.budget.seconds / len(state.sources)
        for source in state.sources:
            bundle = fit_channels(load_stored_bundle(source), config.data.channels, callback=self.callback)
            sizes = probe_sizes(source, bundle.config, config.model.image_size)
            started = self.budget.elapsed()
            prober.features(resize_bundle(bundle, sizes[0]), prober.held_out())
            per_image = (self.budget.elapsed() - started) / len(prober.held_out())
            if not probes:
                duration = per_image * min(len(data.train), 2 * len(data.classes))
                self.check_time(duration, remaining=self.budget.remaining())
            limit = min(seconds, 0.5 * self.budget.remaining())
            sizes, images = plan_probes(
                sizes,
                seconds_per_image=per_image,
                images=len(data.train),
                seconds=limit,
                num_classes=len(data.classes),
            )
            limit += self.budget.elapsed()
            for before, size in zip((None, *sizes), sizes, strict=False):
                started = self.budget.elapsed()
                if before and started + state.records[-1].seconds * (size / before) ** 2 > limit:
                    break  # the machine has become slower since the first measurement
                probe = prober.fit(resize_bundle(bundle, size), images=images)
                record = TrialRecord(
                    name=f"{PROBE}-{Path(source).name}-{size}",
                    top1=probe.top1,
                    loss=probe.loss,
                    seconds=self.budget.elapsed() - started,
                )
                self.record(record)
                probes.append((record.name, probe))
                if len(probes) == 1:  # usable from now on
                    write_artifact(self.run_dir.path, probe.bundle)
        state.probe, best = choose_probe(probes)
        state.best = state.probe
        write_artifact(self.run_dir.path, best.bundle)
        write_artifact(self.run_dir.path / PROBE, best.bundle)
        state.settings = {INIT: str(self.run_dir.path / PROBE), "model.new_head": False, "model.image_size": None}
        if "augment.flip" not in self.request.fixed and not prober.recognizes_flipped_images(best):
            self.callback.on_message("flipped images are not recognized: training does not flip them")
            state.settings["augment.flip"] = False
        self.save()

    def check_time(self, seconds: float, *, remaining: float) -> None:
        """Raise an error if the remaining seconds do not suffice for these and the report."""
        if seconds > remaining - REPORT_SECONDS:
            minutes = (self.budget.elapsed() + 4 * seconds + REPORT_SECONDS) / 60 + 0.1
            raise ConfigError(
                f"a time budget of {self.request.minutes:g} minutes is too short for these images",
                hint=f"--minutes {minutes:.1f} or more",
            )

    def try_all(self, dataset: Dataset) -> None:
        """Run the trials for which there is time."""
        if not self.state.records:
            self.check_time(0.0, remaining=self.broadcast(self.budget.remaining()))
        plans = self.plan()
        count, seconds = count_trials(min(TRIALS_FRACTION * self.budget.seconds, 0.6 * self.remaining()))
        if len(plans) == 1:  # nothing to choose, only a speed to measure
            seconds = min(seconds, MIN_TRIAL_SECONDS)
        for plan in plans[:count]:
            if self.state.find(plan.name) is not None:
                continue
            similar = [each.seconds for each in self.state.similar_trials(plan)]
            if self.remaining() < max((0.5 * seconds, *similar)):
                continue
            self.try_one(plan, seconds=seconds, dataset=dataset)

    def plan(self) -> list[TrialPlan]:
        """Return the trials, the most promising first."""
        is_pretrained, with_scratch = bool(self.request.sources), self.scratch is not None
        fixed = self.request.fixed
        return plan_trials(self.tuned, fixed=fixed, is_pretrained=is_pretrained, with_scratch=with_scratch)

    def get_base(self, plan: TrialPlan) -> RunConfig:
        """Return the configuration that the settings of a trial change."""
        return (self.scratch or self.tuned) if plan.is_scratch else self.tuned

    def try_one(self, plan: TrialPlan, *, seconds: float, dataset: Dataset) -> None:
        """Train for some seconds and record the result; a trial that diverges is not recorded."""
        steps = self.estimate_steps(plan, seconds=SAFETY * seconds)
        settings = {**plan.settings, **schedule_settings(steps), "evaluation.every": steps}
        settings |= {"data.verify": False, "checkpoint.best": False, "checkpoint.last": 1}
        config = self.get_base(plan).override(settings)
        self.callback.on_message(f"trying {plan.name}")
        try:
            record = self.run_trial(plan.name, config, seconds=seconds, dataset=dataset)
        except DivergedError as error:
            self.callback.on_warning(f"{plan.name}: {error.message}")
            return
        self.record(record)
        candidates = self.state.candidates()
        if record in candidates and self.find_best(candidates) is record:
            self.state.best = record.name
            path = self.trial_path(plan.name)
            run_on_main(self.ranks, lambda _: write_artifact(self.run_dir.path, read_artifact(path)))
        run_on_main(self.ranks, lambda _: self.save())

    def run_trial(self, name: str, config: RunConfig, *, seconds: float, dataset: Dataset) -> TrialRecord:
        """Start or resume a trial and return its result; an interrupted one keeps its steps."""
        run_dir = RunDir(self.trial_path(name))
        config = run_dir.read_config() if run_dir.config.exists() else config
        started = self.budget.elapsed()
        timer = StepTimer(self.callback, self.budget.elapsed)
        start = partial(run_training, out=run_dir.path, dataset=dataset, callback=timer, is_trial=True)
        result = self.run_limited(start, config, seconds=seconds)
        if result.summary is None:
            raise StopRequested
        last = next((each for each in reversed(read_metrics(run_dir)) if "val_top1" in each), None)
        if last is None or not math.isfinite(loss := float(str(last["val_loss"]))):
            raise DivergedError("the loss on held-out images is not finite")
        return TrialRecord(
            name=name,
            top1=float(str(last["val_top1"])),
            loss=loss,
            seconds=self.broadcast(self.budget.elapsed() - started),
            steps=int(str(last["step"])),
            seconds_per_step=self.broadcast(timer.seconds_per_step),
        )

    def find_best(self, records: Sequence[TrialRecord]) -> TrialRecord:
        """Return the best of several results on the held-out images."""
        return best_record(records, images=len(self.data.val or ()))

    def estimate_steps(self, plan: TrialPlan, *, seconds: float) -> int:
        """Return the steps of a trial: from the speed of an earlier one, or a number that the time limit ends."""
        earlier = [each for each in self.state.similar_trials(plan) if each.seconds_per_step]
        per_step = earlier[0].seconds_per_step if earlier else seconds / 60
        return self.plan_steps(plan, seconds, seconds_per_step=per_step)

    def plan_steps(
        self, plan: TrialPlan, seconds: float, *, seconds_per_step: float, max_epochs: float = MAX_EPOCHS
    ) -> int:
        """Return the number of steps that fit into some seconds."""
        images, batch_size = len(self.data.train), self.get_base(plan).schedule.batch_size
        return plan_steps(
            seconds, seconds_per_step=seconds_per_step, images=images, batch_size=batch_size, max_epochs=max_epochs
        )

    def choose(self) -> tuple[str, RunConfig, Path | None]:
        """Return the explanation and the configuration of the final run: the best trial, with the time that is left.

        If that is not enough for more steps than the trial had, the trial is the final run; its directory is returned.
        """
        trials = [record for record in self.state.records if record.steps]
        plans = self.plan()
        best = self.find_best(trials) if trials else None
        plan = next((plan for plan in plans if best is not None and plan.name == best.name), plans[0])
        base = self.get_base(plan)
        seconds = SAFETY * self.remaining()
        per_step = best.seconds_per_step if best and best.seconds_per_step else max(seconds, 1.0)
        max_epochs = 10 * MAX_EPOCHS if plan.is_scratch else MAX_EPOCHS
        steps = self.plan_steps(plan, seconds, seconds_per_step=per_step, max_epochs=max_epochs)
        reason = (
            f"best of {format_plural(len(trials), 'trial')} on held-out images"
            if trials
            else "there was no time for trials"
        )
        if best is not None and steps <= best.steps:
            choice = f"final run: the trial {best.name}, {best.steps} steps ({reason}; more steps would not fit)"
            return choice, base.override(plan.settings), self.trial_path(best.name)
        choice = f"final run: {plan.name}, {steps} steps ({reason})"
        return choice, base.override({**plan.settings, **schedule_settings(steps)}), None

    def reserve(self) -> float:
        """Return the seconds for the evaluation and the report at the end, by the speed of probes and trials."""
        split, records = self.data.evaluation_split, self.state.records
        images = max(len(self.data.train), 1)
        probes = [record.seconds / images for record in records if not record.steps]
        trials = [record.seconds_per_step / self.request.tuned.schedule.batch_size for record in records]
        return REPORT_SECONDS + 2 * max((*probes, *trials), default=0.0) * (len(split[1]) if split else 0)

    def train_final(
        self, config: RunConfig, *, decisions: Sequence[str] = (), seconds: float | None = None
    ) -> RunResult:
        """Make the final run; without a limit if it is resumed, so that it ends exactly as it would have."""
        best, records = self.state.find(self.state.best or ""), tuple(self.state.records)
        selection = None
        if best is not None:
            minutes, advice = self.request.minutes, self.state.advice
            path = self.trial_path(best.name) if best.steps else self.run_dir.path / PROBE
            selection = Selection(records=records, best=best, path=path, minutes=minutes, advice=advice)
        start = partial(
            run_training,
            out=self.run_dir.path,
            dataset=self.dataset,
            decisions=decisions,
            callback=self.callback,
            selection=selection,
        )
        result = start(config, stop=self.stop) if seconds is None else self.run_limited(start, config, seconds=seconds)
        if result.summary is None and self.ranks.is_main:
            keep_better_checkpoint(self.run_dir, best)
        return result

    def run_limited(self, start: Callable[..., RunResult], config: RunConfig, *, seconds: float) -> RunResult:
        """Train until the last step or until the time is over."""
        end = self.budget.elapsed() + seconds
        return run_limited(start, config, stop=self.stop, is_over=lambda: self.budget.elapsed() > end, ranks=self.ranks)

    def trial_path(self, name: str) -> Path:
        """Return the directory of a trial."""
        return self.run_dir.path / AUTO_DIR / name

    def record(self, record: TrialRecord) -> None:
        """Print and keep the result of a probe or a trial."""
        steps = f", {record.steps} steps" if record.steps else ""
        accuracy = f"{record.top1:.1%} of held-out images, loss {record.loss:.3f}"
        self.callback.on_message(f"{record.name}: {accuracy}{steps}, {record.seconds:.0f} s")
        self.state.records.append(record)

    def save(self) -> None:
        """Write the state with the time so far."""
        self.state.seconds = self.budget.elapsed()
        write_state(self.run_dir, self.state)


def exclude_bad_files(dataset: Dataset, run_dir: RunDir) -> Dataset:
    """Return the dataset without the unreadable images that were found before."""
    bad = read_bad_files(run_dir.bad_files) if run_dir.bad_files.exists() else []
    return Dataset(dataset.path, {name: exclude_files(source, bad) for name, source in dataset.splits.items()})
