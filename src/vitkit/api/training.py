"""Training, fine-tuning, recipes, suites and the demo.

This module imports no torch: a signal that arrives while torch is imported must stop a run gracefully, too.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Literal

from vitkit.api.plans import (
    RUNS,
    RunPlan,
    choose_out,
    get_setting,
    load_recipe,
    make_request,
    merge_settings,
    model_path,
    plan_finetuning,
    plan_training,
    store_models,
)
from vitkit.api.progress import RunDisplay
from vitkit.api.public import public
from vitkit.api.run import Run
from vitkit.core.environment import prepare_for_training
from vitkit.core.errors import ConfigError, VitkitWarning
from vitkit.core.formatting import is_logging_configured
from vitkit.core.signals import Interrupted, StopFlag, StopRequested, catch_stop_signals
from vitkit.training.callbacks import Callback, CallbackList
from vitkit.training.config import RunConfig
from vitkit.typing import DataSource, ModelSource, Path, Settings, Size

DEMO_MINUTES = 3.0
budget_clock = time.monotonic
"""Clock of time budgets; a test replaces it."""

if TYPE_CHECKING:
    import torch

    from vitkit.evaluation.comparison import ComparisonResult
    from vitkit.evaluation.leaderboard import Leaderboard


@public
def train(  # noqa: PLR0913  the options of `vitkit train`
    data: DataSource | RunConfig | None = None,
    *,
    out: Path | None = None,
    init: Literal["auto", "embedded", "scratch"] | ModelSource = "auto",
    minutes: float | None = None,
    recipe: str | Path | None = None,
    model: str | None = None,
    image_size: Size | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    channels: int | None = None,
    teacher: ModelSource | None = None,
    trainable: Literal["all", "head", "lora"] | None = None,
    seed: int | None = None,
    settings: Settings | None = None,
    callbacks: Sequence[Callback] = (),
    device: "str | torch.device" = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> Run:
    """Train the best classifier that images, machine and time allow, or run a recipe.

    Within the time, a closed-form probe and short trials on held-out images choose initial weights, image size,
    trainable layers and learning rate; the final run is kept if it beats them. The best model so far is always in the
    run directory. With epochs, steps or a recipe there are no trials.

    The same call again resumes an interrupted run and returns a finished one. Ctrl-C and SIGTERM finish the step, save,
    and raise `Interrupted`; a second Ctrl-C ends the run at once.

    Args:
        data: Images in any layout, the name of a recipe, a TOML file, pairs of image and label, or a `RunConfig`.
        out: Run directory; None is runs/NAME-OF-DATA, or another number if that holds a run with other settings.
        init: Initial weights, which also decide the model. "auto" is the default weights of the hub if they are cached
            or can be downloaded, else "embedded", those of the package; a recipe decides for itself.
        minutes: Time of the whole call; 10 unless epochs, steps or a recipe decide the length.
        recipe: Recipe or TOML file to run on `data`.
        model: Name of the model.
        image_size: Height and width of the model's input.
        epochs: Length in passes over the training images.
        steps: Length in updates, instead of epochs.
        lr: Peak learning rate.
        batch_size: Images per update.
        channels: Channels of the images: 1 for gray, 3 for color.
        teacher: Model to distill from.
        trainable: All parameters, the head, or the head and low-rank updates.
        seed: Seed of every random number of the run.
        settings: Any other settings, such as {"optimizer.weight_decay": 0.1}.
        callbacks: Observers of the run.
        device: Such as "cpu" or "cuda"; "auto" is the best that there is.
        workers: Processes that read images; None is one less than the usable cores.
        progress: False shows no progress.

    >>> import tempfile, vitkit
    >>> shape = {"model.patch_size": 8, "model.settings": ["width=16", "heads=2", "depth=1", "mlp_dim=16"]}
    >>> with tempfile.TemporaryDirectory() as out:
    ...     run = vitkit.train(
    ...         "digits", out=f"{out}/run", image_size=8, steps=2, workers=0, settings=shape, progress=False
    ...     )
    ...     run.status, run.metrics.count
    ('finished', 359)
    """
    if model is not None and not isinstance(model, str):
        raise ConfigError("model is a name", got=type(model).__name__, hint="init=model starts from its weights")
    keywords = {
        "model": model,
        "image_size": image_size,
        "epochs": epochs,
        "steps": steps,
        "lr": lr,
        "batch_size": batch_size,
        "channels": channels,
        "trainable": trainable,
        "seed": seed,
        "device": None if str(device) == "auto" else str(device),
        "workers": workers,
    }

    def make_plan(stop: StopFlag) -> RunPlan:
        chosen = merge_settings(keywords, settings)
        return plan_training(
            data, init=init, minutes=minutes, recipe=recipe, teacher=teacher, settings=chosen, stop=stop
        )

    return run_plan(make_plan, out=out, callbacks=callbacks, progress=progress)


@public
def finetune(  # noqa: PLR0913  the options of `vitkit finetune`
    model: ModelSource,
    data: DataSource,
    *,
    out: Path | None = None,
    recipe: str = "finetune-folder",
    sweep: bool | Sequence[float] = False,
    image_size: Size | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    channels: int | None = None,
    trainable: Literal["all", "head", "lora"] | None = None,
    seed: int | None = None,
    settings: Settings | None = None,
    callbacks: Sequence[Callback] = (),
    device: "str | torch.device" = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> Run:
    """Fine-tune a model with a new head by the paper's protocol; positions are interpolated to a new image size.

    Resumes and stops like `train`.

    Args:
        model: Initial weights.
        data: Images in any layout, or pairs of image and label.
        out: Run directory; None is runs/NAME-OF-DATA, or another number if that holds a run with other settings.
        recipe: Fine-tuning recipe.
        sweep: Choose the learning rate on held-out images, among the recipe's or these, then train on all images.
        image_size: Height and width of the model's input.
        epochs: Length in passes over the training images.
        steps: Length in updates, instead of epochs.
        lr: Peak learning rate.
        batch_size: Images per update.
        channels: Channels of the images: 1 for gray, 3 for color.
        trainable: All parameters, the head, or the head and low-rank updates.
        seed: Seed of every random number of the run.
        settings: Any other settings, such as {"optimizer.weight_decay": 0.1}.
        callbacks: Observers of the run.
        device: Such as "cpu" or "cuda"; "auto" is the best that there is.
        workers: Processes that read images; None is one less than the usable cores.
        progress: False shows no progress.

    >>> import tempfile, vitkit
    >>> model = vitkit.create("Ti/16", image_size=16, num_classes=2, settings={"depth": 1})
    >>> with tempfile.TemporaryDirectory() as out:
    ...     run = vitkit.finetune(
    ...         model, "digits", out=f"{out}/run", steps=1, batch_size=8, workers=0, progress=False
    ...     )
    ...     len(run.labels)
    10
    """
    keywords = {
        "image_size": image_size,
        "epochs": epochs,
        "steps": steps,
        "lr": lr,
        "batch_size": batch_size,
        "channels": channels,
        "trainable": trainable,
        "seed": seed,
        "device": None if str(device) == "auto" else str(device),
        "workers": workers,
    }

    def make_plan(_: StopFlag) -> RunPlan:
        return plan_finetuning(model, data, recipe=recipe, sweep=sweep, settings=merge_settings(keywords, settings))

    return run_plan(make_plan, out=out, callbacks=callbacks, progress=progress)


@public
def recipe(name: str | Path) -> RunConfig:
    """Return the configuration of a recipe or a TOML file.

    >>> import vitkit
    >>> vitkit.recipe("digits").override({"schedule.steps": 5}).schedule.steps
    5
    """
    return load_recipe(name)


@public
def suite(  # noqa: PLR0913  the options of `vitkit suite`
    name: str | Path,
    *,
    out: Path,
    models: Sequence[ModelSource] = (),
    data: Path | None = None,
    only: Sequence[str] | None = None,
    rates: Sequence[float] | None = None,
    skip_missing: bool = False,
    settings: Settings | None = None,
    device: "str | torch.device" = "auto",
    workers: int | None = None,
    progress: bool | None = None,
) -> "Leaderboard":
    """Fine-tune and evaluate models on the datasets of a suite, and write a leaderboard to `out`; or resume.

    Args:
        name: vtab-1k, table2 (the paper's Table 2), or a TOML file.
        out: Output directory.
        models: Models to fine-tune, instead of those of the file.
        data: Directory of the datasets.
        only: Datasets to run; finished results of the others are in the leaderboard too.
        rates: Learning rates to try on every dataset, instead of the recipes'.
        skip_missing: Skip datasets that do not exist.
        settings: Settings of every run.
        device: Such as "cpu" or "cuda"; "auto" is the best that there is.
        workers: Processes that read images; None is one less than the usable cores.
        progress: False shows no progress.

    >>> import vitkit
    >>> vitkit.suite("vtab", out="runs/suite")
    Traceback (most recent call last):
    vitkit.core.errors.UnknownNameError: no suite is called vtab
    hint: did you mean vtab-1k?
    """
    path = FilePath(out)
    keywords = {"device": None if str(device) == "auto" else str(device), "workers": workers}
    with training_session((), progress=progress) as (_, callback, stop):
        from vitkit.recipes import suites

        names = [model_path(source, path, name=f"model-{number}") for number, source in enumerate(models, start=1)]
        try:
            with store_models(dict(zip(names, models, strict=True)), path):
                leaderboard = suites.suite(
                    os.fspath(name),
                    out=path,
                    models=names,
                    data=None if data is None else os.fspath(data),
                    only=only,
                    rates=rates,
                    skip_missing=skip_missing,
                    settings=merge_settings(keywords, settings),
                    callback=callback,
                    stop=stop,
                )
        except StopRequested:
            raise interruption(path, stop) from None
    return replace(leaderboard, report_path=path / "report.html")


@public
def demo(*, out: Path = "runs/demo", quick: bool = False, progress: bool | None = None) -> "ComparisonResult":
    """Train on the built-in digits with the plain command, and compare with the trial from scratch of the same run.

    Takes about four minutes and downloads nothing but initial weights. The same call resumes after an interruption.

    Args:
        out: Directory of the run.
        quick: Train for a few steps only.
        progress: False shows no progress.

    >>> import tempfile, vitkit
    >>> with tempfile.TemporaryDirectory() as out:
    ...     [model.label for model in vitkit.demo(out=out, quick=True, progress=False).models]
    ['scratch', 'digits']
    """
    path = FilePath(out)
    if quick:
        config = load_recipe("digits").override({"steps": 4, "workers": 0})
        run = train(config, out=path / "digits", progress=progress)
        others = [train(config.override({"seed": 1}), out=path / "scratch", progress=progress).path]
    else:
        run = train("digits", minutes=DEMO_MINUTES, out=path / "digits", progress=progress)
        paths = (run.path / "trials" / "scratch", run.path / "probe")  # there may have been no time for trials
        others = [each for each in paths if (each / "model.safetensors").exists()][:1]
    from vitkit.api.comparison import compare

    comparison = compare([*others, run], data="digits", workers=0, progress=progress)
    return replace(comparison, report_path=run.report_path)


# Sessions


@contextmanager
def training_session(
    callbacks: Sequence[Callback], *, progress: bool | None
) -> Iterator[tuple[RunDisplay, CallbackList, StopFlag]]:
    """Turn signals into a request to stop, show progress, and configure threads and memory before torch is imported."""
    with catch_stop_signals() as stop:
        prepare_for_training()
        with RunDisplay(progress) as display:
            yield display, CallbackList([display, *callbacks], stop), stop


def interruption(out: FilePath, stop: StopFlag) -> Interrupted:
    """Return the exception of work that was stopped and is saved."""
    message = f"stopped by {stop.signal or 'another rank'}; run the same command again to resume"
    return Interrupted(message, path=out, run=Run(out) if Run.exists(out) else None)


@contextmanager
def explain_stop(out: Path | None, stop: StopFlag) -> Iterator[None]:
    """Turn a stop before the run has begun into the exception of the public functions."""
    try:
        yield
    except StopRequested:
        raise interruption(FilePath(RUNS if out is None else out), stop) from None


def run_plan(
    make_plan: Callable[[StopFlag], RunPlan], *, out: Path | None, callbacks: Sequence[Callback], progress: bool | None
) -> Run:
    """Plan a run, choose its directory, and start, resume or return it."""
    started = budget_clock()
    with training_session(callbacks, progress=progress) as (display, callback, stop), explain_stop(out, stop):
        from vitkit.training.auto import run_within_budget
        from vitkit.training.run import run_sweep, run_training

        plan = make_plan(stop)
        path = choose_out(plan) if out is None else FilePath(out)
        if out is None:
            callback.on_message(f"run directory: {path}")
        config = plan.configure(path)
        models = {get_setting(config, key): source for key, source in plan.models.items()}
        explanation = plan.describe_init(path)
        for line in explanation:
            callback.on_message(line)
        models_in_use = (f"{key}: {get_setting(config, key)}" for key in plan.models)
        decisions = (*plan.decisions, *explanation[:1], *models_in_use)
        with store_models(models, path):
            start = partial(run_sweep, config, plan.rates) if plan.rates else partial(run_training, config)
            if plan.minutes is not None:
                request = make_request(plan, path)
                start = partial(run_within_budget, request, clock=budget_clock, started=started)
            result = start(path, dataset=plan.dataset, decisions=decisions, callback=callback, stop=stop)
        if result.summary is None:
            raise interruption(path, stop)
    messages = tuple(display.warnings)
    if not is_logging_configured():  # the command line has printed them
        for message in messages:
            warnings.warn(message, VitkitWarning, stacklevel=4)
    return Run(path, warnings=messages, already_finished=result.already_finished)
