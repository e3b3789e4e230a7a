"""Training, fine-tuning, recipes, suites and the demo.

This module imports no torch: signals that arrive while torch is imported must stop a run in order, too.
"""

import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Literal, cast

from vitkit.api.progress import RunDisplay
from vitkit.api.public import public
from vitkit.api.run import Run
from vitkit.core.config import flatten_settings
from vitkit.core.environment import is_main_rank, prepare_for_training
from vitkit.core.errors import ConfigError, UnknownNameError, VitkitWarning, did_you_mean
from vitkit.core.formatting import is_logging_configured
from vitkit.core.signals import Interrupted, StopFlag, StopRequested, catch_stop_signals
from vitkit.recipes.registry import RECIPES, find_recipe
from vitkit.training.callbacks import Callback, CallbackList
from vitkit.training.config import SHORT_KEYS, RunConfig
from vitkit.typing import DataSource, ModelSource, Path, Settings, Size

if TYPE_CHECKING:
    import torch

    from vitkit.data.dataset import Dataset
    from vitkit.evaluation.comparison import ComparisonResult
    from vitkit.evaluation.leaderboard import Leaderboard

RUNS = FilePath("runs")
"""Directory of runs that are given none."""
INIT, TEACHER = "model.init", "objective.distillation.teacher"
DEFAULT_RECIPE = "folder"
"""Recipe of a dataset that is given none."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run before its directory is known: configuration, name, dataset in memory, and what was decided."""

    config: RunConfig
    name: str
    dataset: "Dataset | None" = None
    decisions: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()
    """Keys that the arguments have set."""
    models: Mapping[str, ModelSource] = field(default_factory=dict)
    """Models by key, such as `model.init`."""
    rates: tuple[float, ...] = ()
    """Learning rates of a sweep."""

    def configure(self, out: FilePath) -> RunConfig:
        """Return the configuration of the run in a directory, in which models that are in memory will be stored."""
        paths = {key: model_path(source, out, name=key.rpartition(".")[2]) for key, source in self.models.items()}
        return self.config.override(paths)


@public
def train(  # noqa: PLR0913  the options of `vitkit train`
    data: DataSource | RunConfig | None = None,
    *,
    out: Path | None = None,
    init: Literal["scratch"] | ModelSource = "scratch",
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
    """Train a classifier on images, or run a recipe.

    The same call again resumes an interrupted run and returns a finished one. Ctrl-C and SIGTERM finish the step, save,
    and raise `Interrupted`; a second Ctrl-C ends the run at once.

    Args:
        data: Images in any layout, the name of a recipe, a TOML file, pairs of image and label, or a `RunConfig`.
        out: Run directory; None is runs/NAME-OF-DATA, or another number if that holds a run with other settings.
        init: Initial weights, which also decide the model.
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
        workers: Processes that read images; None is one for each core, and at most eight.
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

    def make_plan() -> RunPlan:
        chosen = merge_settings(keywords, settings)
        return plan_training(data, init=init, recipe=recipe, teacher=teacher, settings=chosen)

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
        workers: Processes that read images; None is one for each core, and at most eight.
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

    def make_plan() -> RunPlan:
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
        workers: Processes that read images; None is one for each core, and at most eight.
        progress: False shows no progress.

    >>> import vitkit
    >>> vitkit.suite("vtab", out="runs/suite")
    Traceback (most recent call last):
    vitkit.core.errors.UnknownNameError: no suite is called vtab
    hint: did you mean vtab-1k?
    """
    path = FilePath(out)
    keywords = {"device": None if str(device) == "auto" else str(device), "workers": workers}
    with training_session((), progress=progress) as (callback, stop):
        from vitkit.recipes import suites

        names = [model_path(source, path, name=f"model-{number}") for number, source in enumerate(models, start=1)]
        for source, name_ in zip(models, names, strict=True):
            store_model(source, FilePath(name_))
        try:
            return suites.suite(
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


@public
def demo(*, out: Path = "runs/demo", quick: bool = False, progress: bool | None = None) -> "ComparisonResult":
    """Pre-train on fractals, fine-tune on digits at a higher resolution, and compare with training from scratch.

    Takes a few minutes on two cores and downloads nothing. The same call resumes after an interruption.

    Args:
        out: Directory of the three runs.
        quick: Train for a few steps only.
        progress: False shows no progress.

    >>> import tempfile, vitkit
    >>> with tempfile.TemporaryDirectory() as out:
    ...     [model.label for model in vitkit.demo(out=out, quick=True, progress=False).models]
    ['from-scratch', 'fractals-then-digits']
    """
    path = FilePath(out)
    with training_session((), progress=progress) as (callback, stop):
        from vitkit.recipes.demo import demo_runs
        from vitkit.training.run import run_training

        runs = demo_runs(path, quick=quick)
        for number, (name, (title, config)) in enumerate(runs.items(), start=1):
            callback.on_message(f"{number}/{len(runs)} · {title}")
            if run_training(config, path / name, callback=callback, stop=stop).summary is None:
                raise interruption(path, stop)
    from vitkit.api.comparison import compare

    scratch, tuned = path / "from-scratch", path / "fractals-then-digits"
    comparison = compare([scratch, tuned], data="digits", workers=0, progress=progress)
    return replace(comparison, report_path=tuned / "report.html")


# Sessions


@contextmanager
def training_session(
    callbacks: Sequence[Callback], *, progress: bool | None
) -> Iterator[tuple[CallbackList, StopFlag]]:
    """Turn signals into a request to stop, show progress, and configure threads and memory before torch is imported."""
    with catch_stop_signals() as stop:
        prepare_for_training()
        with RunDisplay(progress) as display:
            yield CallbackList([display, *callbacks], stop), stop


def interruption(out: FilePath, stop: StopFlag) -> Interrupted:
    """Return the exception of work that was stopped and is saved."""
    message = f"stopped by {stop.signal or 'another rank'}; run the same command again to resume"
    return Interrupted(message, path=out, run=Run(out) if Run.exists(out) else None)


def run_plan(
    make_plan: Callable[[], RunPlan], *, out: Path | None, callbacks: Sequence[Callback], progress: bool | None
) -> Run:
    """Plan a run, choose its directory, and start, resume or return it."""
    with training_session(callbacks, progress=progress) as (callback, stop):
        from vitkit.training.run import run_sweep, run_training

        plan = make_plan()
        path = choose_out(plan) if out is None else FilePath(out)
        if out is None:
            callback.on_message(f"run directory: {path}")
        config = plan.configure(path)
        for key, source in plan.models.items():
            store_model(source, FilePath(get_setting(config, key)))
        collected = callback.callbacks[0]
        decisions = (*plan.decisions, *(f"{key}: {get_setting(config, key)}" for key in plan.models))
        if plan.rates:
            result = run_sweep(
                config, plan.rates, path, dataset=plan.dataset, decisions=decisions, callback=callback, stop=stop
            )
        else:
            result = run_training(config, path, dataset=plan.dataset, decisions=decisions, callback=callback, stop=stop)
        if result.summary is None:
            raise interruption(path, stop)
    messages = tuple(collected.warnings) if isinstance(collected, RunDisplay) else ()
    if not is_logging_configured():  # the command line has printed them
        for message in messages:
            warnings.warn(message, VitkitWarning, stacklevel=4)
    return Run(path, warnings=messages, already_finished=result.already_finished)


# Plans


def plan_training(
    data: DataSource | RunConfig | None = None,
    *,
    init: Literal["scratch"] | ModelSource = "scratch",
    recipe: str | Path | None = None,
    teacher: ModelSource | None = None,
    settings: Settings | None = None,
) -> RunPlan:
    """Return the run of `train` with these arguments."""
    plan = plan_data(data, recipe=recipe)
    models: dict[str, ModelSource] = {} if teacher is None else {TEACHER: teacher}
    config, decisions = plan.config, plan.decisions
    if isinstance(init, str) and init == "scratch":
        decisions += (f"initial weights: {config.model.init or 'random'}",)
    else:  # the initial weights decide the model
        config = replace(config, model=replace(config.model, name=None, patch_size=None, settings=()))
        models = {INIT: init} | models
    config = config.override(check_reserved(settings, (*plan.reserved, *models)))
    return replace(plan, config=config, models=models, decisions=decisions)


def plan_finetuning(
    model: ModelSource,
    data: DataSource,
    *,
    recipe: str = "finetune-folder",
    sweep: bool | Sequence[float] = False,
    settings: Settings | None = None,
) -> RunPlan:
    """Return the run of `finetune` with these arguments."""
    entry = find_recipe(recipe)
    if entry.kind != "finetune":
        raise ConfigError(
            f"the recipe {recipe} does not fine-tune",
            hint="vitkit recipes lists the recipes that do; the default is finetune-folder",
        )
    rates = () if sweep is False else entry.rates if sweep is True else tuple(sweep)
    if sweep is not False and not rates:
        raise ConfigError("the sweep has no learning rates", hint="sweep=[0.001, 0.003], or sweep=True")
    plan = plan_data(data, recipe=recipe)
    # A model name in the settings is then reported as a conflict with the initial weights.
    choice = replace(plan.config.model, name=None, init="initial weights", new_head=True)
    config = replace(plan.config, model=choice).override(check_reserved(settings, (INIT, *plan.reserved)))
    return replace(plan, config=config, models={INIT: model}, rates=rates)


def plan_data(data: DataSource | RunConfig | None, *, recipe: str | Path | None) -> RunPlan:
    """Return the run that `data` and `recipe` mean together."""
    hint = "train(data), train(recipe=name), or train(config)"
    if isinstance(data, RunConfig):
        if recipe is not None:
            raise ConfigError("a RunConfig is a whole run, and a recipe is another one", hint=hint)
        return RunPlan(config=data, name=clean_name(data.data.path))
    if data is None:
        if recipe is None:
            raise ConfigError("neither data nor a recipe is given", hint=hint)
        return RunPlan(config=load_recipe(recipe), name=clean_name(recipe), decisions=(f"recipe: {recipe}",))
    if isinstance(data, str | os.PathLike):
        return plan_path(os.fspath(data), recipe=recipe)
    from vitkit.data.layouts.registry import open_dataset

    dataset = open_dataset(data)
    config, decision = base_recipe(recipe)
    config = config.override({"data.path": dataset.path, "data.layout": None})
    return RunPlan(config=config, name="pairs", dataset=dataset, decisions=(decision,), reserved=("data.path",))


def plan_path(data: str, *, recipe: str | Path | None) -> RunPlan:
    """Return the run of a path, of a recipe or of a TOML file."""
    if recipe is None and is_toml(data):
        return RunPlan(config=RunConfig.from_toml(data), name=clean_name(data), decisions=(f"settings of {data}",))
    from vitkit.data.layouts.files import is_pattern
    from vitkit.data.layouts.registry import EMBEDDED

    path = FilePath(data).expanduser()
    if recipe is not None or path.exists() or is_pattern(path):
        config, decision = base_recipe(recipe)
        is_directory = recipe is None and data in EMBEDDED  # a directory with the name of embedded images
        config = config.override({"data.path": f"./{data}" if is_directory else data})
        return RunPlan(config=config, name=clean_name(data), decisions=(decision,), reserved=("data.path",))
    if data.lower() not in RECIPES:
        raise explain_unknown(data)
    return RunPlan(config=find_recipe(data).make(), name=data.lower(), decisions=(f"recipe: {data.lower()}",))


def base_recipe(name: str | Path | None) -> tuple[RunConfig, str]:
    """Return the configuration of a recipe, or of the default one, and the decision for it."""
    if name is None:
        return find_recipe(DEFAULT_RECIPE).make(), f"recipe: {DEFAULT_RECIPE}, the default for images"
    return load_recipe(name), f"recipe: {name}"


def load_recipe(name: str | Path) -> RunConfig:
    """Return the configuration of a recipe or a TOML file."""
    return RunConfig.from_toml(name) if is_toml(name) else find_recipe(os.fspath(name)).make()


def is_toml(name: object) -> bool:
    """Return whether a name is that of a TOML file."""
    return str(name).endswith(".toml")


def clean_name(path: str | Path) -> str:
    """Return a name for the run of a dataset, a recipe or a file.

    >>> clean_name("images/My photos/"), clean_name("shards/train-{000..009}.tar"), clean_name("/")
    ('My-photos', 'train-000..009', 'run')
    """
    name = os.path.basename(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111, PTH119
    if not os.path.isdir(path):  # noqa: PTH112
        name = os.path.splitext(name)[0]  # noqa: PTH122
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def explain_unknown(text: str) -> UnknownNameError:
    """Return the error for a name that is neither a recipe nor a path, with the nearest that is.

    >>> print(explain_unknown("digit").hint)
    did you mean digits?
    """
    directory, name = FilePath(text).parent, FilePath(text).name
    neighbors = [str(directory / entry.name) for entry in directory.iterdir()] if directory.is_dir() else []
    if name != text:
        hint = did_you_mean(text, neighbors) or "give a directory of images, or a recipe"
        return UnknownNameError(f"{text} does not exist", hint=hint)
    hint = did_you_mean(text, [*RECIPES, *neighbors]) or "vitkit recipes lists the recipes"
    return UnknownNameError(f"{text} is neither a recipe nor a directory here", hint=hint)


def merge_settings(keywords: Mapping[str, object], settings: Settings | None) -> dict[str, object]:
    """Return the keywords that are set with the other settings; a key that is set twice is an error."""
    arguments = {SHORT_KEYS.get(key, key): value for key, value in keywords.items() if value is not None}
    return arguments | check_reserved(settings, arguments)


def check_reserved(settings: Settings | None, reserved: Collection[str]) -> dict[str, object]:
    """Return settings by full keys; one that an argument has set already is an error."""
    checked: dict[str, object] = {}
    for name, value in flatten_settings(settings or {}).items():
        key = SHORT_KEYS.get(name, name)
        if key in reserved or key in checked:
            raise ConfigError(f"{key} is assigned twice", got=f"{checked.get(key, 'an argument')} and {name}={value}")
        checked[key] = value
    return checked


def get_setting(config: RunConfig, key: str) -> str:
    """Return the text of a dotted key.

    >>> get_setting(RunConfig(), "data.path")
    'digits'
    """
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return str(value)


# Directories


def choose_out(plan: RunPlan) -> FilePath:
    """Return the first of runs/NAME, runs/NAME-2, … that holds nothing, or this run."""
    for number in count(1):
        path = RUNS / (plan.name if number == 1 else f"{plan.name}-{number}")
        if not holds_other_run(path, plan):
            return path
    raise AssertionError("there is no last number")


def holds_other_run(path: FilePath, plan: RunPlan) -> bool:
    """Return whether a directory holds something other than this run, new, interrupted or finished."""
    from vitkit.training.run import with_lr
    from vitkit.training.run_dir import TRIALS_DIR, RunDir, find_difference

    run_dir, config = RunDir(path), plan.configure(path)
    if not path.is_dir():
        return path.exists()
    trials = {trial.name: RunDir(trial) for trial in (path / TRIALS_DIR).glob("lr-*")}
    if not run_dir.config.exists() and (not trials or not plan.rates):
        return bool(run_dir.find_other_files() or trials)
    if not plan.rates:
        return bool(trials) or find_difference(run_dir.read_config(), config) is not None
    expected = {f"lr-{rate:g}": with_lr(config, rate) for rate in plan.rates}
    return not trials or any(
        name not in expected or find_difference(trial.read_config(), expected[name]) is not None
        for name, trial in trials.items()
        if trial.config.exists()
    )


def model_path(source: ModelSource, out: FilePath, *, name: str) -> str:
    """Return the path or name of a model; one in memory has a path below `out` that depends on its weights."""
    if isinstance(source, str | os.PathLike):  # a run is a path, too
        return os.fspath(source)
    from vitkit.weights.load import load_bundle

    return str(out / f"{name}-{load_bundle(cast('Any', source)).fingerprint()[:12]}")


def store_model(source: ModelSource, path: FilePath) -> None:
    """Write a model that is in memory to the path that `model_path` has given it."""
    if isinstance(source, str | os.PathLike) or path.exists() or not is_main_rank():
        return
    from vitkit.weights.artifact import write_artifact
    from vitkit.weights.load import load_bundle

    write_artifact(path, load_bundle(cast("Any", source)))
