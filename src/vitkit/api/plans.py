"""Plans of runs: from the arguments of `train` and `finetune` to a configuration and a directory.

This module imports no torch: a signal that arrives while torch is imported must stop a run gracefully, too.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Literal

from vitkit.core.config import flatten_settings
from vitkit.core.environment import is_main_rank
from vitkit.core.errors import ConfigError, UnknownNameError, check_positive, did_you_mean
from vitkit.core.files import remove_empty_directories
from vitkit.core.signals import StopFlag
from vitkit.recipes.registry import RECIPES, find_recipe
from vitkit.training.budget import DEFAULT_MINUTES
from vitkit.training.config import SHORT_KEYS, RunConfig
from vitkit.typing import DataSource, ModelSource, Path, Settings

if TYPE_CHECKING:
    from vitkit.data.dataset import Dataset
    from vitkit.training.auto_state import AutoRequest
    from vitkit.training.run_dir import RunDir
    from vitkit.weights.initial import InitialWeights

RUNS = FilePath("runs")
"""Directory of runs that are given none."""
INIT, TEACHER = "model.init", "objective.distillation.teacher"
SCRATCH_RECIPE, TUNING_RECIPE = "folder", "finetune-folder"
"""Recipes of a dataset that is given none: from random and from pretrained weights."""
REQUESTED = "as requested"
OWN_MODEL_KEYS = ("model.patch_size", "model.settings", "model.shrink", "objective.name", TEACHER)
"""Settings for which no default weights are looked up: they describe a model or objective of their own."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run before its directory is known: configuration, name, dataset in memory, and what was decided."""

    config: RunConfig
    name: str
    dataset: "Dataset | None" = None
    decisions: tuple[str, ...] = ()
    reserved_keys: tuple[str, ...] = ()
    """Keys that the arguments have set."""
    is_default: bool = False
    """Whether no recipe, file or configuration was named, so that initial weights and length may be chosen."""
    minutes: float | None = None
    """Time budget, within which the settings are chosen; None if the configuration decides the length."""
    fixed_keys: tuple[str, ...] = ()
    """Settings that were given, which a time budget does not vary."""
    tuned_config: RunConfig | None = None
    """Configuration from pretrained weights, if these may be chosen."""
    choose_init: "Callable[[], InitialWeights] | None" = None
    """Chooses the initial weights, once."""
    init_reason: str | None = None
    """Reason for initial weights that are not chosen; None if a recipe decides."""
    models: Mapping[str, ModelSource] = field(default_factory=dict)
    """Models by key, such as `model.init`."""
    rates: tuple[float, ...] = ()
    """Learning rates of a sweep."""

    def configure(self, out: FilePath) -> RunConfig:
        """Return the configuration of the run in a directory, in which models that are in memory will be stored."""
        paths = {key: model_path(source, out, name=key.rpartition(".")[2]) for key, source in self.models.items()}
        config = self.config
        if self.tuned_config is not None and (source := self.find_init(out)) is not None:
            config, paths = self.tuned_config, {INIT: source} | paths
        return config.override(paths)

    def find_init(self, out: FilePath) -> str | None:
        """Return the chosen initial weights: those of the run in the directory, so that it is resumed with them."""
        from vitkit.training.run_dir import RunDir

        run_dir = RunDir(out)
        if run_dir.config.exists():
            return run_dir.read_config().model.init
        return None if self.choose_init is None or run_dir.trials.exists() else self.choose_init().source

    def describe_init(self, out: FilePath) -> tuple[str, ...]:
        """Return the lines that explain the chosen initial weights of a new run."""
        if any(FilePath(out, name).exists() for name in ("config.toml", "trials.json")):
            return ()
        if self.choose_init is not None:
            return self.choose_init().messages()
        source = self.configure(out).model.init or "random"
        return () if self.init_reason is None else (f"initial weights: {source} ({self.init_reason})",)


def plan_training(
    data: DataSource | RunConfig | None = None,
    *,
    init: Literal["auto", "scratch"] | ModelSource = "auto",
    minutes: float | None = None,
    recipe: str | Path | None = None,
    teacher: ModelSource | None = None,
    settings: Settings | None = None,
    stop: StopFlag | None = None,
) -> RunPlan:
    """Return the run of `train` with these arguments; `stop` ends the wait for a download."""
    keys = tuple({SHORT_KEYS.get(key, key) for key in flatten_settings(settings or {})})
    plan = plan_data(data, recipe=recipe, has_budget=minutes is not None)
    plan = replace(plan, minutes=choose_minutes(minutes, plan, keys, teacher=teacher), fixed_keys=keys)
    models: dict[str, ModelSource] = {} if teacher is None else {TEACHER: teacher}
    is_auto, is_scratch = (isinstance(init, str) and init == name for name in ("auto", "scratch"))
    if not is_auto and not is_scratch:
        return plan_init(plan, init, models=models, settings=settings)
    checked = check_reserved(settings, (*plan.reserved_keys, *models))
    chosen = {SHORT_KEYS.get(key, key) for key in checked} | models.keys()
    if is_auto and plan.is_default and INIT in chosen:
        return replace(plan, config=tuning_config(plan).override(checked), models=models, init_reason=REQUESTED)
    config = plan.config.override(checked)
    if is_auto and plan.is_default and not chosen.intersection(OWN_MODEL_KEYS):
        return plan_auto(replace(plan, config=config, models=models), checked, stop=stop)
    if plan.is_default:
        reason = REQUESTED if is_scratch else "the settings describe a model or an objective of their own"
        return replace(plan, config=config, models=models, init_reason=reason)
    decision = f"initial weights: {config.model.init or 'random'}"
    return replace(plan, config=config, models=models, decisions=(*plan.decisions, decision))


def choose_minutes(
    minutes: float | None, plan: RunPlan, keys: Collection[str], *, teacher: ModelSource | None
) -> float | None:
    """Return the time budget of a plan: the default unless something else decides the length."""
    length = next((key for key in keys if key in ("schedule.epochs", "schedule.steps")), None)
    if minutes is None:
        others = length or teacher is not None or set(keys) & {"objective.name", TEACHER, "data.train_on"}
        return DEFAULT_MINUTES if plan.is_default and not others else None
    check_positive("minutes", minutes)
    if not plan.is_default or length:
        raise ConfigError(
            "the length of the run is set twice",
            got=f"minutes={minutes:g} and {length or 'a recipe'}",
            hint="give either minutes, or epochs, steps or a recipe",
        )
    return minutes


def plan_init(
    plan: RunPlan, init: ModelSource, *, models: Mapping[str, ModelSource], settings: Settings | None
) -> RunPlan:
    """Return a plan with given initial weights, which decide the model."""
    config = tuning_config(plan) if plan.is_default else plan.config
    config = replace(config, model=replace(config.model, name=None, patch_size=None, settings=()))
    models = {INIT: init, **models}
    config = config.override(check_reserved(settings, (*plan.reserved_keys, *models)))
    return replace(plan, config=config, models=models, init_reason=REQUESTED)


def plan_auto(plan: RunPlan, settings: Mapping[str, object], *, stop: StopFlag | None = None) -> RunPlan:
    """Return a plan that chooses its initial weights when its directory is known: those of a run are not changed."""
    others = {key: value for key, value in settings.items() if key != "model.name"}

    @cache
    def choose() -> "InitialWeights":
        import torch

        from vitkit.weights.initial import choose_initial_weights

        device, name = plan.config.parallel.device, settings.get("model.name")
        is_gpu = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
        weights = partial(
            choose_initial_weights,
            device="gpu" if is_gpu else "cpu",
            model=None if name is None else str(name),
            minutes=plan.minutes,
            stop=stop,
        )
        return share_choice(weights, plan.config)

    return replace(plan, tuned_config=tuning_config(plan).override(others), choose_init=choose)


def share_choice(choose: "Callable[..., InitialWeights]", config: RunConfig) -> "InitialWeights":
    """Choose the initial weights on the main rank; the others wait for it, and find a download in the cache."""
    from vitkit.training.distributed import join_ranks

    with join_ranks(config.parallel) as ranks:
        if ranks.is_main:
            chosen = choose()
            ranks.broadcast_int(int(chosen.source is None or not chosen.source.startswith("hub:")))
            return chosen
        is_local = bool(ranks.broadcast_int(0))
        return choose(seconds=0.0) if is_local else choose()


def tuning_config(plan: RunPlan) -> RunConfig:
    """Return the default configuration from pretrained weights, on the images of a plan."""
    return replace(find_recipe(TUNING_RECIPE).make(), data=plan.config.data)


def plan_finetuning(
    model: ModelSource,
    data: DataSource,
    *,
    recipe: str = TUNING_RECIPE,
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
    config = replace(plan.config, model=choice).override(check_reserved(settings, (INIT, *plan.reserved_keys)))
    return replace(plan, config=config, models={INIT: model}, rates=rates)


def plan_data(data: DataSource | RunConfig | None, *, recipe: str | Path | None, has_budget: bool = False) -> RunPlan:
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
        return plan_path(os.fspath(data), recipe=recipe, has_budget=has_budget)
    from vitkit.data.layouts.registry import open_dataset

    dataset = open_dataset(data)
    return plan_images({"data.path": dataset.path, "data.layout": None}, name="pairs", recipe=recipe, dataset=dataset)


def plan_path(data: str, *, recipe: str | Path | None, has_budget: bool) -> RunPlan:
    """Return the run of a path, of a recipe or of a TOML file.

    With a time budget, the name of built-in images stands for these and not for the recipe of the same name.
    """
    if recipe is None and is_toml(data):
        return RunPlan(config=RunConfig.from_toml(data), name=clean_name(data), decisions=(f"settings of {data}",))
    from vitkit.data.layouts.files import is_pattern
    from vitkit.data.layouts.registry import EMBEDDED

    path = FilePath(data).expanduser()
    is_built_in = has_budget and data in EMBEDDED and not path.exists()
    if recipe is not None or path.exists() or is_pattern(path) or is_built_in:
        # a directory with the name of embedded images
        is_directory = recipe is None and data in EMBEDDED and not is_built_in
        settings = {"data.path": f"./{data}" if is_directory else data}
        return plan_images(settings, name=clean_name(data), recipe=recipe)
    if data.lower() not in RECIPES:
        raise explain_unknown(data)
    return RunPlan(config=find_recipe(data).make(), name=data.lower(), decisions=(f"recipe: {data.lower()}",))


def plan_images(
    settings: Settings, *, name: str, recipe: str | Path | None, dataset: "Dataset | None" = None
) -> RunPlan:
    """Return the run of a recipe, or of the default one, on the images that the settings describe."""
    return RunPlan(
        config=load_recipe(SCRATCH_RECIPE if recipe is None else recipe).override(settings),
        name=name,
        dataset=dataset,
        decisions=(f"recipe: {'the default for images' if recipe is None else recipe}",),
        reserved_keys=("data.path",),
        is_default=recipe is None,
    )


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
    return re.sub(r"[^\w.]+", "-", name).strip("-.") or "run"


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
    if plan.minutes is not None or run_dir.trials.exists():
        return not is_same_request(run_dir, plan, path)
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


def is_same_request(run_dir: "RunDir", plan: RunPlan, path: FilePath) -> bool:
    """Return whether a directory is empty or holds the run of a plan with a time budget."""
    if plan.minutes is None:
        return False
    if not run_dir.trials.exists():
        return not run_dir.config.exists() and not run_dir.find_other_files()
    from vitkit.training.auto_state import check_same_request, read_state

    try:
        check_same_request(run_dir, read_state(run_dir), make_request(plan, path))
    except ConfigError:
        return False
    return True


def make_request(plan: RunPlan, out: FilePath) -> "AutoRequest":
    """Return what to choose within the time budget of a plan."""
    from vitkit.training.auto_state import AutoRequest
    from vitkit.training.run_dir import RunDir

    minutes = plan.minutes or DEFAULT_MINUTES
    if plan.tuned_config is None:  # the initial weights are given, or none are to be used
        config = plan.configure(out)
        sources = (config.model.init,) if config.model.init else ()
        scratch = None if sources else config
        return AutoRequest(minutes=minutes, scratch=scratch, tuned=config, sources=sources, fixed=plan.fixed_keys)
    chosen = plan.choose_init() if plan.choose_init and not RunDir(out).trials.exists() else None
    sources = (chosen.source,) if chosen and chosen.source else ()
    advice = chosen.advice if chosen else None
    tuned = plan.config if chosen and not sources else plan.tuned_config
    return AutoRequest(
        minutes=minutes, scratch=plan.config, tuned=tuned, sources=sources, fixed=plan.fixed_keys, advice=advice
    )


def model_path(source: ModelSource, out: FilePath, *, name: str) -> str:
    """Return the path or name of a model; one in memory has a path below `out` that depends on its weights."""
    if isinstance(source, str | os.PathLike):  # a run is a path, too
        return os.fspath(source)
    from vitkit.weights.load import load_bundle

    return str(out / f"{name}-{load_bundle(source).fingerprint()[:12]}")


@contextmanager
def store_models(models: Mapping[str, ModelSource], out: FilePath) -> Iterator[None]:
    """Write the models that are in memory to the paths that `model_path` has given them, by those paths.

    If the run fails before it has written anything, they are removed.
    """
    new_dirs = [path for path in (out, *out.parents) if not path.exists()]
    stored = {FilePath(path): source for path, source in models.items() if not isinstance(source, str | os.PathLike)}
    if not stored or not is_main_rank():
        yield
        return
    from vitkit.weights.artifact import write_artifact
    from vitkit.weights.load import load_bundle

    for path, source in stored.items():
        if not path.exists():
            write_artifact(path, load_bundle(source))
    try:
        yield
    except Exception:
        if stored.keys() >= set(out.iterdir()):
            for path in stored:
                shutil.rmtree(path, ignore_errors=True)
            remove_empty_directories(new_dirs)
        raise
