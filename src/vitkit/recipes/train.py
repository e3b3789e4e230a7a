"""Training, fine-tuning and the demo, by recipe and settings.

Settings override a run's configuration; they are given as `section.key=value` or by a short key.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from vitkit.core.config import apply_overrides, load_toml
from vitkit.core.errors import ConfigError, UnknownNameError, did_you_mean
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.data.config import AugmentConfig, FractalConfig
from vitkit.data.layouts.files import is_pattern
from vitkit.recipes.registry import RECIPES, find_recipe
from vitkit.recipes.small import small_model
from vitkit.training.callbacks import Callback
from vitkit.training.config import DataConfig, ModelChoice, OptimizerConfig, ReportConfig, RunConfig, ScheduleConfig
from vitkit.training.run import RunResult, run_sweep, run_training

SHORT_KEYS = {
    "data": "data.path",
    "model": "model.name",
    "init": "model.init",
    "image_size": "model.image_size",
    "lr": "schedule.lr",
    "epochs": "schedule.epochs",
    "steps": "schedule.steps",
    "batch_size": "schedule.batch_size",
    "workers": "data.workers",
    "channels": "data.channels",
    "device": "parallel.device",
    "teacher": "objective.distillation.teacher",
    "trainable": "optimizer.trainable",
}
"""Keys that need no section."""

EXCLUSIVE_KEYS = {"schedule.epochs": "schedule.steps", "schedule.steps": "schedule.epochs"}
"""Keys that set another to none, unless that is set too."""

ARCHITECTURE_KEYS = ("width", "depth", "heads", "mlp_dim", "pooling", "block.activation")
"""Settings of a recipe's model that do not apply to another model."""

LOW, HIGH = 16, 24
"""Image sizes of pre-training and fine-tuning: grids of 4×4 and 6×6 patches."""
QUICK_SETTINGS = (
    "schedule.epochs=none",
    "schedule.steps=4",
    "data.fractals.num_classes=10",
    "data.fractals.per_class=20",
    "data.workers=0",
)


def train(
    data: str | Path | RunConfig,
    *,
    out: Path | str,
    init: str | None = None,
    settings: Sequence[str] = (),
    callback: Callback | None = None,
    stop: StopFlag | None = None,
) -> RunResult:
    """Train on a directory of images, by a recipe's name or TOML file, or by a configuration; resume if interrupted.

    `init` are initial weights; `settings` override the configuration. Raises `StopRequested` if a stop was requested
    and the run is saved.
    """
    config = data if isinstance(data, RunConfig) else resolve_train_config(str(data), settings, init=init)
    return _finished(run_training(config, out, callback=callback, stop=stop))


def finetune(
    model: str | Path,
    data: str | Path,
    *,
    out: Path | str,
    recipe: str = "finetune-folder",
    sweep: bool | Sequence[float] = False,
    settings: Sequence[str] = (),
    callback: Callback | None = None,
    stop: StopFlag | None = None,
) -> RunResult:
    """Fine-tune a model on a dataset by a recipe; `sweep` chooses among the recipe's learning rates, or among others.

    Raises `StopRequested` if a stop was requested and the run is saved.
    """
    config = resolve_finetune_config(str(model), str(data), recipe=recipe, settings=settings)
    if sweep is False:
        return _finished(run_training(config, out, callback=callback, stop=stop))
    rates = find_recipe(recipe).rates if sweep is True else sweep
    return _finished(run_sweep(config, rates, out, callback=callback, stop=stop))


def resolve_train_config(data: str, settings: Sequence[str] = (), *, init: str | None = None) -> RunConfig:
    """Return the configuration of a recipe, a TOML file, or the default recipe on a dataset, with settings applied."""
    path = []
    if data.endswith(".toml"):
        config = load_toml(data, RunConfig, recipes={name: recipe.make for name, recipe in RECIPES.items()})
    elif data.lower() in RECIPES:
        config = find_recipe(data).make()
    elif Path(data).expanduser().exists() or is_pattern(Path(data)):
        config, path = find_recipe("folder").make(), [f"data.path={data}"]
    else:
        raise explain_unknown(data)
    if init is not None:
        config = apply_overrides(config, ["model.name=none", "model.settings=[]", "model.patch_size=none"])
        path.append(f"model.init={init}")
    return override(config, [*path, *settings])


def resolve_finetune_config(model: str, data: str, *, recipe: str, settings: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a fine-tuning recipe for a model and a dataset, with settings applied."""
    entry = find_recipe(recipe)
    if entry.kind != "finetune":
        raise ConfigError(
            f"the recipe {recipe} does not fine-tune",
            hint="vitkit recipes lists the recipes that do; the default is finetune-folder",
        )
    fixed = [f"model.init={model}", f"data.path={data}", "model.name=none", "model.new_head=true"]
    # In two steps, so that model.name in the settings is reported as a conflict with model.init, not as set twice.
    return apply_overrides(apply_overrides(entry.make(), fixed), expand_keys(settings))


def explain_unknown(text: str) -> UnknownNameError:
    """Return the error for a name that is neither a recipe nor a path, with the nearest that is.

    >>> print(explain_unknown("digit").hint)
    did you mean digits?
    """
    directory, name = Path(text).parent, Path(text).name
    neighbors = [str(directory / entry.name) for entry in directory.iterdir()] if directory.is_dir() else []
    if name != text:
        hint = did_you_mean(text, neighbors) or "give a directory of images, or a recipe"
        return UnknownNameError(f"{text} does not exist", hint=hint)
    hint = did_you_mean(text, [*RECIPES, *neighbors]) or "vitkit recipes lists the recipes"
    return UnknownNameError(f"{text} is neither a recipe nor a directory here", hint=hint)


def _finished(result: RunResult) -> RunResult:
    if result.summary is None:
        raise StopRequested
    return result


def demo(
    *, out: Path | str, quick: bool = False, callback: Callback | None = None, stop: StopFlag | None = None
) -> dict[str, RunResult]:
    """Run the three runs of the demo and return their results by name; `quick` trains for a few steps only.

    Raises `StopRequested` if a stop was requested and the run is saved.
    """
    out, callback = Path(out), callback or Callback()
    scratch, fractals = out / "from-scratch", out / "fractals"
    runs = {
        "from-scratch": ("training on digits from scratch, for comparison", digits()),
        "fractals": ("pre-training on fractals", fractals_run()),
        "fractals-then-digits": (
            "fine-tuning on digits at a higher resolution",
            tuned_digits(init=str(fractals), compare_with=str(scratch)),
        ),
    }
    results = {}
    for number, (name, (title, config)) in enumerate(runs.items(), start=1):
        callback.on_message(f"{number}/{len(runs)} · {title}")
        run_config = apply_overrides(config, QUICK_SETTINGS) if quick else config
        results[name] = run_training(run_config, out / name, callback=callback, stop=stop)
        if results[name].summary is None:
            raise StopRequested
    return results


def fractals_run() -> RunConfig:
    """Return the pre-training run, on gray fractals of fifty formulas."""
    return RunConfig(
        model=small_model(image_size=LOW, patch_size=4, width=96, depth=4, mlp_dim=192),
        data=DataConfig(
            path="fractals", channels=1, fractals=FractalConfig(num_classes=50, per_class=400, size=LOW, color=False)
        ),
        augment=AugmentConfig(crop="pad", pad=2),
        optimizer=OptimizerConfig(weight_decay=0.05),
        schedule=ScheduleConfig(batch_size=32, epochs=5.0, lr=1.5e-3, warmup_steps=50),
    )


def digits() -> RunConfig:
    """Return the run from scratch, on all training images and evaluated on the test images alone."""
    return RunConfig(
        model=replace(fractals_run().model, image_size=HIGH),
        data=DataConfig(path="digits", channels=1, val_fraction=0.0),
        augment=AugmentConfig(crop="pad", pad=2, flip=False),
        optimizer=OptimizerConfig(weight_decay=0.05),
        schedule=ScheduleConfig(batch_size=32, epochs=12.0, lr=2e-3, warmup_steps=40),
    )


def tuned_digits(*, init: str, compare_with: str) -> RunConfig:
    """Return the same run from initial weights, with another run in its report."""
    return replace(
        digits(),
        model=ModelChoice(init=init, image_size=HIGH, new_head=True),
        report=ReportConfig(compare_with=(compare_with,)),
    )


def expand_keys(settings: Sequence[str]) -> list[str]:
    """Replace short keys by full ones."""
    sections = [field.name for field in fields(RunConfig)]
    expanded = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if "." not in key and key not in (*SHORT_KEYS, *sections):
            hint = (
                did_you_mean(key, [*SHORT_KEYS, *sections])
                or f"{', '.join(SHORT_KEYS)}; or section.key, as printed by vitkit recipes NAME"
            )
            raise ConfigError(f"{key} is not a known key", hint=hint)
        expanded.append(f"{SHORT_KEYS.get(key, key)}{equals}{value}" if equals else setting)
    keys = {setting.partition("=")[0] for setting in expanded}
    return expanded + [f"{other}=none" for key, other in EXCLUSIVE_KEYS.items() if key in keys and other not in keys]


def override(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Apply settings; another model name drops the architecture settings of the recipe's model."""
    expanded = expand_keys(settings)
    if "model.name" in {setting.partition("=")[0] for setting in expanded}:
        remaining = tuple(each for each in config.model.settings if each.partition("=")[0] not in ARCHITECTURE_KEYS)
        config = replace(config, model=replace(config.model, patch_size=None, settings=remaining))
    return apply_overrides(config, expanded)
