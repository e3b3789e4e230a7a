"""A complete run: claim the directory, open the data, build the model, resume, train, finalize. Read this first.

An interrupted run is resumed by the same call; a finished one is returned unchanged. A learning-rate sweep (Table 4)
tries rates on a part of the training images and trains with the best one on all; every trial is a run of its own.
"""

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from vitkit.core import metrics_log
from vitkit.core.errors import ConfigError, TrainingError
from vitkit.core.files import write_json
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.core.sizes import format_size
from vitkit.data.config import check_augment
from vitkit.data.dataset import Dataset, ImageSource
from vitkit.data.loader import BatchLoader, BatchShard, SamplerState, make_training_loader
from vitkit.objectives.config import get_builder
from vitkit.objectives.teacher import Teacher
from vitkit.training.budget import Selection
from vitkit.training.build import (
    build_model,
    build_trainer,
    final_weights,
    load_pretrained,
    load_teacher,
    model_name,
    resolve_model_config,
    resolve_preprocessing,
    resolve_workers,
)
from vitkit.training.callbacks import Callback
from vitkit.training.checkpoint import Checkpoints, TrainState
from vitkit.training.config import RunConfig, ScheduleConfig
from vitkit.training.data import RunData, check_finished_data, open_run_data
from vitkit.training.distributed import Ranks, join_ranks, run_on_main
from vitkit.training.evaluation import make_evaluator
from vitkit.training.finalize import finalize_run
from vitkit.training.fit import explain_out_of_memory, resolve_accumulate, resolve_precision, tf32_products
from vitkit.training.loop import Intervals, TrainingLoop
from vitkit.training.run_dir import (
    TRIALS_DIR,
    RunContext,
    RunDir,
    RunLogs,
    claim_run_dir,
    explain_io_errors,
    read_metrics,
    was_evaluated,
)
from vitkit.training.trainer import Trainer
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.run_checkpoint import write_description
from vitkit.zoo.registry import create
from vitkit.zoo.variants import ModelConfig

MAX_EVALUATIONS = 20
"""Maximal number of evaluations of a run that does not set evaluation.every."""
SWEEP_FILE = "sweep.json"
"""Result of a sweep, written last into the directory of the final run."""


class Trial(NamedTuple):
    """A learning rate of a sweep, with its metrics on the held-out images."""

    lr: float
    val_top1: float
    val_loss: float


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    `summary` is None if the run was stopped, and empty on ranks other than the main one.
    """

    run_dir: RunDir
    summary: dict[str, object] | None
    already_finished: bool = False
    trials: tuple[Trial, ...] = ()


def run_training(
    config: RunConfig,
    out: Path | str,
    *,
    dataset: Dataset | None = None,
    decisions: Sequence[str] = (),
    callback: Callback | None = None,
    stop: StopFlag | None = None,
    is_trial: bool = False,
    selection: Selection | None = None,
) -> RunResult:
    """Start a run in directory `out`, resume it, or return its result if it is finished.

    `dataset` is the one that the configuration names, if it is in memory. `decisions` are stored with a new run. A
    trial has no report; `selection` is what was tried before, and its best model is kept if this run is not better.
    """
    run_dir = RunDir(Path(out))
    with ExitStack() as stack:
        stack.enter_context(explain_io_errors(run_dir))
        ranks = stack.enter_context(join_ranks(config.parallel))
        config = resolve_precision(config, run_dir, ranks)
        stack.enter_context(claim_run_dir(run_dir, config, ranks=ranks, decisions=decisions))
        if (summary := run_dir.read_summary()) is not None:
            check_finished_data(run_dir, ranks=ranks, dataset=dataset)
            return RunResult(run_dir, summary, already_finished=True)
        context = RunContext(
            config=config,
            run_dir=run_dir,
            ranks=ranks,
            workers=resolve_workers(config),
            dataset=dataset,
            callback=callback if callback and ranks.is_main else Callback(),
            stop=stop or StopFlag(),
            is_trial=is_trial,
            selection=selection,
        )
        try:
            return RunResult(run_dir, complete_run(context))
        except StopRequested:
            return RunResult(run_dir, None)


def complete_run(context: RunContext) -> dict[str, object]:
    """Train to the end and return the summary, which is empty on ranks other than the main one.

    Raises `StopRequested` if a stop was requested and everything is saved.
    """
    config, ranks, callback = context.config, context.ranks, context.callback
    pretrained = load_pretrained(config, callback=callback) if config.model.init else None
    teacher = load_teacher(config, ranks=ranks, callback=callback)
    check_config(config, pretrained=pretrained, teacher=teacher, ranks=ranks)
    data = open_run_data(context)
    intervals = plan_intervals(config, images=len(data.train))

    labels = data.classes if config.objective.needs_labels else ()
    model_config = resolve_model_config(config, num_classes=len(labels), pretrained=pretrained)
    context = with_accumulate(context, model_config)
    config = context.config
    preprocessing = resolve_preprocessing(config, model_config, pretrained)
    name, size = model_name(config, model_config, pretrained), format_size(model_config.image_size)
    bundle = ModelBundle(name=name, config=model_config, state={}, preprocessing=preprocessing, labels=labels)
    with explain_out_of_memory(config, ranks), tf32_products(config, ranks):
        model = build_model(config, model_config, pretrained=pretrained, ranks=ranks, callback=callback)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        callback.on_message(
            f"{name}: {parameters:,} parameters, images of {size} pixels, {intervals.total_steps:,} steps"
        )
        trainer = build_trainer(
            config,
            model,
            preprocessing=preprocessing,
            num_classes=len(labels),
            total_steps=intervals.total_steps,
            ranks=ranks,
            teacher=teacher.select_classes(labels) if teacher else None,
        )
        run_on_main(ranks, lambda _: write_description(context.run_dir.path, bundle))
        run_loop(context, trainer, data, intervals)

    weights, wrapper = final_weights(trainer, model)
    bundle = replace(bundle, state=weights)
    summary = run_on_main(
        ranks, lambda heartbeat: finalize_run(context, bundle, data, wrapper=wrapper, heartbeat=heartbeat)
    )
    return summary or {}


def with_accumulate(context: RunContext, model: ModelConfig) -> RunContext:
    """Determine the number of micro-batches and write it to config.toml, so that a resumed run keeps it."""
    config, reason = resolve_accumulate(context.config, model, context.ranks)
    if config != context.config:
        run_on_main(context.ranks, lambda _: context.run_dir.write_config(config))
    if reason:
        context.callback.on_message(reason)
    return replace(context, config=config)


def run_loop(context: RunContext, trainer: Trainer, data: RunData, intervals: Intervals) -> None:
    """Resume from the last checkpoint and train until the last step, or raise `StopRequested`."""
    config, ranks, run_dir = context.config, context.ranks, context.run_dir
    checkpoints = Checkpoints(run_dir.checkpoints, last=config.checkpoint.last)
    resume(trainer.state, checkpoints, context)
    step = trainer.state.progress.step
    evaluate_first = bool(data.val) and intervals.is_due("evaluate", step) and not was_evaluated(run_dir, step)
    with (
        open_training_batches(trainer, data.train, workers=context.workers) as batches,
        RunLogs.open(run_dir, config.logging, step=step) if ranks.is_main else nullcontext() as logs,
    ):
        loop = TrainingLoop(
            trainer,
            batches,
            intervals,
            checkpoints,
            stop=context.stop,
            callback=context.callback,
            logs=logs,
            evaluator=make_evaluator(trainer, data.val, context) if data.val else None,
            best=metrics_log.find_best(run_dir.metrics),
        )
        if not loop.run(evaluate_first=bool(ranks.broadcast_int(int(evaluate_first)))):
            raise StopRequested
        if config.evaluation.patience is not None and loop.best:
            restore_best(trainer.state, checkpoints, step=loop.best[1], callback=context.callback)


def restore_best(state: TrainState, checkpoints: Checkpoints, *, step: int, callback: Callback) -> None:
    """Load the weights of the best evaluation, which is earlier than the last one if training stopped early."""
    if step < state.progress.step:
        callback.on_message(f"no better evaluation since step {step}; using its weights")
        loaded = checkpoints.load(step)
        state.restore(loaded.tensors, loaded.progress)


def resume(state: TrainState, checkpoints: Checkpoints, context: RunContext) -> None:
    """Load the newest intact checkpoint, if there is one, and remove what was logged or saved after it."""
    ranks, callback = context.ranks, context.callback
    loaded = checkpoints.load_newest()
    own_step = loaded.step if loaded else -1
    step = ranks.broadcast_int(own_step)
    if ranks.all_reduce_sum([own_step != step])[0]:
        raise TrainingError(
            "the ranks find different checkpoints",
            expected=f"step {step} on every rank",
            got=f"step {own_step} on rank {ranks.rank}",
            hint="--out must be a directory that all nodes share",
        )
    if loaded:
        for error in loaded.damaged:
            callback.on_warning(f"{error}; using an earlier checkpoint")
        if step >= 0:
            state.restore(loaded.tensors, loaded.progress)
            callback.on_message(f"resuming from step {step}")
    ranks.barrier()
    if ranks.is_main:
        checkpoints.remove_after(step)
        for log in (context.run_dir.metrics, context.run_dir.speed):
            if log.exists():
                metrics_log.truncate_metrics(log, max(step, 0))


def check_config(config: RunConfig, *, pretrained: ModelBundle | None, teacher: Teacher | None, ranks: Ranks) -> None:
    """Raise errors of the configuration before time is spent on the images."""
    schedule = config.schedule
    check_augment(config.augment, channels=config.data.channels)
    if pretrained is None and config.model.shrink < 1:
        raise ConfigError(
            "model.shrink needs initial weights", expected="model.init, or model.shrink=1", got=config.model.shrink
        )
    make_shard(schedule, ranks)
    num_classes = 0 if not config.objective.needs_labels else pretrained.config.num_classes if pretrained else 2
    model_config = resolve_model_config(config, num_classes=num_classes, pretrained=pretrained)
    preprocessing = resolve_preprocessing(config, model_config, pretrained)
    builder = get_builder(config.objective)
    with torch.device("meta"):
        model = builder.wrap(create(model_config, device="meta"))
        builder.build(model, preprocessing=preprocessing, teacher=teacher)


def plan_intervals(config: RunConfig, *, images: int) -> Intervals:
    """Return the number of steps and the intervals for a training set of this size."""
    schedule, checkpoint = config.schedule, config.checkpoint
    steps_per_epoch = images / schedule.batch_size
    total_steps = schedule.steps or max(1, math.ceil(steps_per_epoch * (schedule.epochs or 0)))
    evaluate = config.evaluation.every or max(1, math.ceil(steps_per_epoch), math.ceil(total_steps / MAX_EVALUATIONS))
    return Intervals(
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        log=config.logging.log_every,
        evaluate=evaluate,
        save=checkpoint.save_every or evaluate,
        save_seconds=60 * checkpoint.save_minutes,
    )


def make_shard(schedule: ScheduleConfig, ranks: Ranks) -> BatchShard:
    """Return this rank's part of the batches; raise if they cannot be divided equally."""
    accumulate = schedule.micro_batches
    return BatchShard(
        batch_size=schedule.batch_size, rank=ranks.rank, world_size=ranks.world_size, accumulate=accumulate
    )


def open_training_batches(trainer: Trainer, source: ImageSource, *, workers: int) -> BatchLoader:
    """Open this rank's batches, from the current step on."""
    schedule, ranks = trainer.config.schedule, trainer.ranks
    images = trainer.state.progress.step * schedule.batch_size
    return make_training_loader(
        source,
        start=SamplerState(trainer.config.seed, 0, 0).advance(images, size=len(source)),
        shard=make_shard(schedule, ranks),
        preprocessing=trainer.preprocessing,
        augment=trainer.config.augment,
        workers=workers,
        device=ranks.device,
        targets=get_builder(trainer.config.objective).stored_targets(source),
    )


def run_sweep(
    config: RunConfig,
    rates: Sequence[float],
    out: Path | str,
    *,
    dataset: Dataset | None = None,
    decisions: Sequence[str] = (),
    callback: Callback | None = None,
    stop: StopFlag | None = None,
) -> RunResult:
    """Try the learning rates, then train on all images with the best one, in directory `out`.

    The result has the trials; its summary is None if the sweep was stopped.
    """
    if not config.data.val_fraction:
        raise ConfigError(
            "a sweep chooses the learning rate on held-out images, and data.val_fraction is 0",
            hint="set data.val_fraction=0.1",
        )
    if not config.objective.needs_labels:
        raise ConfigError(
            f"a sweep compares accuracies, and objective.name={config.objective.name} uses no labels",
            expected="an objective with labels, such as supervised",
            got=config.objective.name,
            hint="set schedule.lr instead of sweeping",
        )
    out, trials = Path(out), list[Trial]()
    with join_ranks(config.parallel) as ranks:
        callback = callback if callback and ranks.is_main else Callback()
        for rate in rates:
            callback.on_message(f"trying lr {rate:g}")
            trial_dir = out / TRIALS_DIR / f"lr-{rate:g}"
            result = run_training(with_lr(config, rate), trial_dir, dataset=dataset, callback=callback, stop=stop)
            if result.summary is None:
                return RunResult(RunDir(out), None, trials=tuple(trials))
            trials.append(read_trial(rate, result))
        best = best_trial(trials)
        choice = f"lr {best.lr:g} is best on held-out images ({best.val_top1:.2%}); training on all images"
        callback.on_message(choice)
        final = replace(with_lr(config, best.lr), data=replace(config.data, train_on="all"))
        decisions = (*decisions, choice)
        result = run_training(final, out, dataset=dataset, decisions=decisions, callback=callback, stop=stop)
        if result.summary is not None:  # all ranks wait until the file exists
            record = {"chosen": best.lr, "trials": [trial._asdict() for trial in trials]}
            run_on_main(ranks, lambda _: write_json(out / SWEEP_FILE, record))
    return replace(result, trials=tuple(trials))


def read_trials(out: Path) -> tuple[Trial, ...]:
    """Return the trials of a finished sweep; none if there was no sweep."""
    file = out / SWEEP_FILE
    return tuple(Trial(**trial) for trial in json.loads(file.read_bytes())["trials"]) if file.exists() else ()


def best_trial(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the highest accuracy, and of equal ones with the lowest loss."""
    return max(trials, key=lambda trial: (trial.val_top1, -trial.val_loss))


def with_lr(config: RunConfig, lr: float) -> RunConfig:
    """Return the configuration with another learning rate."""
    return replace(config, schedule=replace(config.schedule, lr=lr))


def read_trial(lr: float, result: RunResult) -> Trial:
    """Return the last evaluation of a finished run."""
    last = next((record for record in reversed(read_metrics(result.run_dir)) if "val_top1" in record), None)
    if last is None or metrics_log.find_best(result.run_dir.metrics) is None:
        raise ConfigError("the trial was not evaluated: there are too few images to hold any out")
    return Trial(lr=lr, val_top1=float(str(last["val_top1"])), val_loss=float(str(last["val_loss"])))
