"""A run within a time budget: probe, trials on held-out photos, then the final run with the best settings.

Each trial is a run of its own below `trials/`. `trials.json` has the request and the finished trials, which are not
repeated after an interruption. The best model so far is always in the run directory, so it can be used at any time.
The settings of the final run are fixed in its config.toml; from there on a resumed run is exact.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vitkit.core.errors import ConfigError
from vitkit.core.lock import lock_directory
from vitkit.core.metrics_log import last_evaluation
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.data.dataset import Dataset
from vitkit.data.layouts.registry import open_dataset
from vitkit.data.verify import exclude_files, read_bad_files
from vitkit.training.auto_state import (
    AutoRequest,
    AutoState,
    check_same_request,
    read_state,
    rollback,
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
from vitkit.training.build import fit_channels, resolve_workers
from vitkit.training.callbacks import Callback
from vitkit.training.checkpoint import Checkpoints
from vitkit.training.config import RunConfig
from vitkit.training.data import RunData, check_finished_data, check_trainable, open_run_data
from vitkit.training.distributed import Ranks, join_ranks, run_on_main
from vitkit.training.probe import Probe, Prober, choose_probe, probe_sizes, resize_bundle
from vitkit.training.run import RunResult, run_training
from vitkit.training.run_dir import (
    PROBE_DIR,
    TRIALS_DIR,
    RunContext,
    RunDir,
    explain_io_errors,
    missing_dirs,
    read_metrics,
    remove_empty_dirs,
)
from vitkit.training.time_limit import StepTimer, TimeLimit
from vitkit.weights.artifact import read_artifact, write_artifact
from vitkit.weights.load import load_stored_bundle


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
    new_dirs = missing_dirs(run_dir.path)
    with explain_io_errors(run_dir), join_ranks(request.tuned.parallel) as ranks:
        callback = callback if callback and ranks.is_main else Callback()
        state = read_state(run_dir)
        check_same_request(run_dir, state, request)
        if (summary := run_dir.read_summary()) is not None:
            check_finished_data(run_dir, ranks=ranks, dataset=dataset)
            return RunResult(run_dir, summary, already_finished=True)
        budget = TimeBudget(seconds=60 * request.minutes, clock=clock, spent=state.seconds if state else 0.0)
        budget.started = budget.started if started is None else started
        auto = AutoRun(request, run_dir, ranks, budget, callback, stop, dataset)
        try:
            return auto.run(state or AutoState(request=request.key(), sources=list(request.sources)), decisions)
        except StopRequested:
            return RunResult(run_dir, None)
        except Exception:
            if ranks.is_main and state is None and not any((run_dir.path / TRIALS_DIR).glob("*/metrics.jsonl")):
                rollback(run_dir)
                remove_empty_dirs(new_dirs)
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

    def run(self, state: AutoState, decisions: Sequence[str]) -> RunResult:
        """Probe, try, and train; a run whose settings are fixed already only trains."""
        if self.run_dir.config.exists():
            return self.train(self.run_dir.read_config(), state, decisions=(), seconds=None)
        self.request = replace(self.request, sources=tuple(state.sources))
        self.callback.on_message(f"time budget: {self.request.minutes:g} minutes (--minutes)")
        with ExitStack() as locked:

            def claim(_: object) -> None:
                self.run_dir.create()
                locked.enter_context(lock_directory(self.run_dir.path))
                write_state(self.run_dir, state)

            run_on_main(self.ranks, claim)
            dataset = self.dataset or open_dataset(self.request.tuned.data.path, layout=self.request.tuned.data.layout)
            tuned, scratch = self.fix_data(dataset)
            data = open_run_data(self.context(tuned, dataset))
            check_trainable(data, self.callback)
            if not state.settings and state.sources:
                run_on_main(self.ranks, lambda heartbeat: self.probe(state, data, tuned, heartbeat=heartbeat))
                state = read_state(self.run_dir) or state
            tuned = tuned.override(state.settings) if state.sources else tuned
            if scratch is not None and "augment.flip" in state.settings:
                scratch = scratch.override({"augment.flip": state.settings["augment.flip"]})
            readable = exclude_bad_files(dataset, self.run_dir)
            self.try_all(state, data, tuned=tuned, scratch=scratch, dataset=readable)
        choice, config = self.choose(state, data, tuned=tuned, scratch=scratch)
        self.callback.on_message(choice)
        seconds = max(self.remaining(state, data), 0.0)
        return self.train(config, state, decisions=(*decisions, choice), seconds=seconds)

    def remaining(self, state: AutoState, data: RunData) -> float:
        """Return the seconds left for training, the same on every rank; collective over all ranks."""
        return self.share(self.budget.remaining() - self.reserve(state, data))

    def share(self, seconds: float) -> float:
        """Return the main rank's value on every rank, to a microsecond; collective over all ranks."""
        return seconds if self.ranks.world_size == 1 else self.ranks.broadcast_int(round(1e6 * seconds)) / 1e6

    def fix_data(self, dataset: Dataset) -> tuple[RunConfig, RunConfig | None]:
        """Return the configurations with the held-out fraction and the batch size for the number of photos."""
        train = dataset.splits.get("train") or dataset.splits.get("all") or dataset.first_split
        settings: dict[str, object] = {}
        if "data.val_fraction" not in self.request.fixed and "val" not in dataset.splits:
            settings["data.val_fraction"] = held_out_fraction(len(train))
        if "schedule.batch_size" not in self.request.fixed:
            largest = self.request.tuned.schedule.batch_size
            batch_size = choose_batch_size(len(train), largest=largest, ranks=self.ranks.world_size)
            settings["schedule.batch_size"] = batch_size
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
        """Fit probes for each source and image size, and keep the best: the model that everything else must beat.

        This runs on the main rank alone.
        """

        def on_progress(_: int) -> None:
            heartbeat()
            self.stop.raise_if_requested()

        prober = Prober(data=data, workers=resolve_workers(config), device=self.ranks.device, progress=on_progress)
        probes: list[tuple[str, Probe]] = []
        for source in state.sources:
            self.probe_source(source, state, prober, config, probes)
        state.probe, best = choose_probe(probes)
        state.best = state.probe
        write_artifact(self.run_dir.path, best.bundle)
        write_artifact(self.run_dir.path / PROBE_DIR, best.bundle)
        state.settings = {"model.init": str(self.run_dir.path / PROBE_DIR)}
        state.settings |= {"model.new_head": False, "model.image_size": None}
        if "augment.flip" not in self.request.fixed and not prober.recognizes_mirrored(best):
            self.callback.on_message("mirrored images are not recognized: training does not flip them")
            state.settings["augment.flip"] = False
        self.save(state)

    def probe_source(
        self, source: str, state: AutoState, prober: Prober, config: RunConfig, probes: list[tuple[str, Probe]]
    ) -> None:
        """Append the probes of one source of initial weights, at the image sizes for which there is time."""
        data = prober.data
        bundle = fit_channels(load_stored_bundle(source), config.data.channels, callback=self.callback)
        sizes = probe_sizes(source, bundle.config, config.model.image_size)
        started = self.budget.elapsed()
        prober.features(resize_bundle(bundle, sizes[0]), prober.held_out())
        per_image = (self.budget.elapsed() - started) / len(prober.held_out())
        needed = per_image * min(len(data.train), 2 * len(data.classes))
        if needed > self.budget.remaining() - REPORT_SECONDS and not probes:
            minutes = (self.budget.elapsed() + 4 * needed + REPORT_SECONDS) / 60 + 0.1
            raise ConfigError(
                f"a time budget of {self.request.minutes:g} minutes is too short for these images",
                hint=f"--minutes {minutes:.1f} or more",
            )
        seconds = PROBE_FRACTION * self.budget.seconds / len(state.sources)
        sizes, images = plan_probes(
            sizes,
            seconds_per_image=per_image,
            images=len(data.train),
            seconds=min(seconds, 0.5 * self.budget.remaining()),
            num_classes=len(data.classes),
        )
        for size in sizes:
            started = self.budget.elapsed()
            probe = prober.fit(resize_bundle(bundle, size), images=images)
            record = TrialRecord(
                name=f"probe-{Path(source).name}-{size}",
                top1=probe.top1,
                loss=probe.loss,
                seconds=self.budget.elapsed() - started,
            )
            self.report(record)
            state.records.append(record)
            probes.append((record.name, probe))
            if len(probes) == 1:  # usable from now on
                write_artifact(self.run_dir.path, probe.bundle)

    def try_all(
        self, state: AutoState, data: RunData, *, tuned: RunConfig, scratch: RunConfig | None, dataset: Dataset
    ) -> None:
        """Run the trials for which there is time."""
        plans = self.plan(tuned, scratch)
        count, seconds = count_trials(
            min(TRIALS_FRACTION * self.budget.seconds, 0.6 * self.remaining(state, data)),
        )
        if len(plans) == 1:  # nothing to choose, only a speed to measure
            seconds = min(seconds, MIN_TRIAL_SECONDS)
        for plan in plans[:count]:
            if state.find(plan.name) is not None:
                continue
            if self.remaining(state, data) < 0.5 * seconds:
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
        path = self.run_dir.path / TRIALS_DIR / plan.name
        start = partial(run_training, out=path, dataset=dataset, callback=timer, is_trial=True)
        result = self.run_limited(start, config, seconds=seconds)
        if result.summary is None:
            raise StopRequested
        if (last := last_evaluation(read_metrics(result.run_dir))) is None:
            return
        record = TrialRecord(
            name=plan.name,
            top1=float(str(last["val_top1"])),
            loss=float(str(last["val_loss"])),
            seconds=self.share(self.budget.elapsed() - started),
            steps=int(str(last["step"])),
            seconds_per_step=self.share(timer.seconds_per_step),
        )
        self.report(record)
        state.records.append(record)
        candidates = state.candidates()
        is_best = record in candidates and best_record(candidates, images=len(data.val or ())) is record
        state.best = record.name if is_best else state.best

        def save(_: object) -> None:
            if is_best:
                write_artifact(self.run_dir.path, read_artifact(path))
            self.save(state)

        run_on_main(self.ranks, save)

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

    def choose(
        self, state: AutoState, data: RunData, *, tuned: RunConfig, scratch: RunConfig | None
    ) -> tuple[str, RunConfig]:
        """Return the explanation and the configuration of the final run: the best trial, with the time that is left."""
        trials = [record for record in state.records if record.steps]
        plans = self.plan(tuned, scratch)
        best = best_record(trials, images=len(data.val or ())) if trials else None
        plan = next((plan for plan in plans if best is not None and plan.name == best.name), plans[0])
        base = (scratch or tuned) if plan.is_scratch else tuned
        seconds = SAFETY * self.remaining(state, data)
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
        self, config: RunConfig, state: AutoState, *, decisions: Sequence[str], seconds: float | None
    ) -> RunResult:
        """Make the final run; without a limit if it is resumed, so that it ends exactly as it would have."""
        best, selection = state.find(state.best or ""), None
        if best is not None:
            records, minutes, advice = tuple(state.records), self.request.minutes, self.request.advice
            selection = Selection(records=records, best=best, minutes=minutes, advice=advice)
        start = partial(
            run_training,
            out=self.run_dir.path,
            dataset=self.dataset,
            decisions=decisions,
            callback=self.callback,
            selection=selection,
        )
        return start(config, stop=self.stop) if seconds is None else self.run_limited(start, config, seconds=seconds)

    def run_limited(self, start: Callable[..., RunResult], config: RunConfig, *, seconds: float) -> RunResult:
        """Train until the last step or until the time is over; in that case the steps so far are all steps.

        The shorter length is written to config.toml, so that the files of the run agree.
        """
        end = self.budget.elapsed() + seconds
        result = start(config, stop=TimeLimit(self.stop, lambda: self.budget.elapsed() > end))
        if result.summary is not None or self.ranks.all_reduce_sum([self.stop.requested])[0]:
            return result
        steps = Checkpoints(result.run_dir.checkpoints).steps()
        stored = result.run_dir.read_config()  # with the precision that was chosen
        shorter = replace(stored, schedule=replace(stored.schedule, steps=max([1, *steps]), epochs=None))
        run_on_main(self.ranks, lambda _: result.run_dir.write_config(shorter))
        return start(shorter, stop=self.stop)

    def report(self, record: TrialRecord) -> None:
        """Print the result of a probe or a trial."""
        steps = f", {record.steps} steps" if record.steps else ""
        accuracy = f"{record.top1:.1%} of held-out photos, loss {record.loss:.3f}"
        self.callback.on_message(f"{record.name}: {accuracy}{steps}, {record.seconds:.0f} s")

    def save(self, state: AutoState) -> None:
        """Write the state with the time so far."""
        state.seconds = self.budget.elapsed()
        write_state(self.run_dir, state)


def exclude_bad_files(dataset: Dataset, run_dir: RunDir) -> Dataset:
    """Return the dataset without the unreadable images that were found before."""
    bad = read_bad_files(run_dir.bad_files) if run_dir.bad_files.exists() else []
    return Dataset(dataset.path, {name: exclude_files(source, bad) for name, source in dataset.splits.items()})
