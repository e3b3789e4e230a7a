"""Suites of datasets: VTAB-1k, the paper's Table 2, or a TOML file."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitkit.core.config import apply_overrides, from_mapping, read_toml
from vitkit.core.errors import ConfigError, DataError, UnknownNameError, WeightsError, did_you_mean
from vitkit.core.files import write_json, write_text
from vitkit.core.formatting import shorten_list
from vitkit.core.signals import StopFlag, StopRequested
from vitkit.data.layouts.registry import EMBEDDED
from vitkit.evaluation.leaderboard import Leaderboard, LeaderboardDataset, LeaderboardScore
from vitkit.evaluation.protocols import Protocol, check_label_map
from vitkit.evaluation.vtab import TASKS
from vitkit.recipes.registry import find_recipe
from vitkit.report.leaderboard import leaderboard_svg, render_leaderboard
from vitkit.training.callbacks import Callback
from vitkit.training.distributed import join_ranks
from vitkit.training.suite import VAL_AS_TEST, SuiteTask, read_finished, run_suite

BIT_CROP = ("augment.crop_area=[0.7347, 0.7347]", "augment.crop_aspect=[1.0, 1.0]")
"""BiT's random crop of 384 of 448 pixels each way, as a fraction of the area."""
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


@dataclass(frozen=True, kw_only=True)
class SuiteDataset:
    """A dataset of a suite, and how models are fine-tuned and evaluated on it.

    Args:
        path: Path below the root of the suite.
        alternatives: Other paths at which the dataset may be.
        group: Group of datasets with a mean of its own.
        rates: Learning rates to try instead of the recipe's; a single one is used without trying.
        settings: `section.key=value` settings of the run.
        model_from: Do not fine-tune: evaluate the model of another dataset of the suite, or "init" for the initial
            weights, by `label_map` or `real`.
    """

    path: str
    alternatives: tuple[str, ...] = ()
    title: str | None = None
    group: str | None = None
    recipe: str = "finetune-folder"
    rates: tuple[float, ...] | None = None
    steps: int | None = None
    layout: str | None = None
    settings: tuple[str, ...] = ()
    model_from: str | None = None
    label_map: str | None = None
    real: str | None = None

    def __post_init__(self) -> None:
        if self.model_from is None and (self.label_map or self.real):
            raise ConfigError(
                f"{self.path}: label_map and real are for datasets that are only evaluated",
                hint='set model_from = "init", or to the name of another dataset',
            )


@dataclass(frozen=True, kw_only=True)
class SuiteSettings:
    """Keys of a suite that are not tables; `mean` is the title of the mean over all datasets that have a group."""

    title: str = "Suite"
    root: str = "."
    mean: str | None = None
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Suite(SuiteSettings):
    """Models and datasets by name."""

    models: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, SuiteDataset] = field(default_factory=dict)


def vtab_datasets(*, prefix: str = "", below: str = "") -> dict[str, SuiteDataset]:
    """Return the 19 tasks, each at the path that its releases use."""
    datasets = {}
    for task in TASKS:
        path, *alternatives = (f"{below}{folder}" for folder in task.folders)
        crop, flip = BIT_CROP if task.crop else ("augment.crop=none",), () if task.flip else ("augment.flip=false",)
        datasets[f"{prefix}{task.name}"] = SuiteDataset(
            path=path,
            alternatives=tuple(alternatives),
            title=task.title,
            group=task.group,
            recipe="finetune-vtab1k",
            settings=(*crop, *flip),
        )
    return datasets


def vtab_1k() -> Suite:
    """Return VTAB-1k: 2500 steps at lr 0.01 on 1,000 examples of each of 19 tasks."""
    return Suite(title="VTAB-1k", mean="VTAB-1k", datasets=vtab_datasets())


def table2() -> Suite:
    """Return the datasets of the paper's Table 2."""
    imagenet = SuiteDataset(path="imagenet", title="ImageNet", recipe="finetune-imagenet", layout=VAL_AS_TEST)
    real = SuiteDataset(path="imagenet", title="ImageNet ReaL", model_from="imagenet", real="imagenet/real.json")
    others = {
        name: SuiteDataset(path=name, alternatives=alternatives, title=title, recipe=f"finetune-{name}")
        for name, title, alternatives in (
            ("cifar10", "CIFAR-10", ("cifar-10",)),
            ("cifar100", "CIFAR-100", ("cifar-100",)),
            ("pets", "Oxford-IIIT Pets", ()),
            ("flowers", "Oxford Flowers-102", ()),
        )
    }
    datasets = {"imagenet": imagenet, "real": real} | others | vtab_datasets(prefix="vtab-", below="vtab-1k/")
    return Suite(title="Table 2", mean="VTAB-1k", datasets=datasets)


SUITES: Mapping[str, Callable[[], Suite]] = {"vtab-1k": vtab_1k, "table2": table2}


def find_suite(name: str) -> Suite:
    """Return a suite by its name or TOML file."""
    if name in SUITES:
        return SUITES[name]()
    if name.endswith(".toml") or Path(name).is_file():
        return load_suite(Path(name))
    hint = did_you_mean(name, SUITES) or f"{', '.join(SUITES)}, or a TOML file"
    raise UnknownNameError(f"no suite is called {name}", hint=hint)


def load_suite(path: Path) -> Suite:
    """Read a suite from a TOML file, which may name a built-in one as its base and list only the differences."""
    content = read_toml(path)
    base = content.pop("base", None)
    if base is not None and (not isinstance(base, str) or base not in SUITES):
        raise UnknownNameError(f"{path}: there is no suite {base}", hint=did_you_mean(str(base), SUITES))
    suite = Suite() if base is None else SUITES[base]()
    models, datasets = content.pop("models", {}), content.pop("datasets", {})
    keys = [*SuiteSettings.__dataclass_fields__]
    if unknown := [key for key in content if key not in keys]:
        keys += ["models", "datasets", "base"]
        hint = did_you_mean(unknown[0], keys) or f"known keys: {', '.join(keys)}"
        raise ConfigError(f"{path}: {unknown[0]} is not a known key", hint=hint)
    return replace(
        suite,
        **vars(from_mapping(SuiteSettings, content, base=suite, where=f"{path}: ")),
        models=read_models(models, where=f"{path}: models"),
        datasets={**suite.datasets, **read_datasets(datasets, base=suite.datasets, where=f"{path}: datasets")},
    )


def read_datasets(value: object, *, base: Mapping[str, SuiteDataset], where: str) -> dict[str, SuiteDataset]:
    """Parse the `[datasets.NAME]` tables of a file."""
    if not isinstance(value, Mapping) or not all(isinstance(table, Mapping) for table in value.values()):
        raise ConfigError(f"{where} is not valid", expected='[datasets.NAME] with path = "…"')
    return {
        check_name(name, where=where): from_mapping(SuiteDataset, table, base=base.get(name), where=f"{where}.{name}.")
        for name, table in value.items()
    }


def read_models(value: object, *, where: str) -> dict[str, str]:
    """Parse models by name, from a table or a list of paths."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Sequence) and all(isinstance(path, str) for path in value):
        return name_models(value)
    if isinstance(value, Mapping) and all(isinstance(path, str) for path in value.values()):
        return {check_name(name, where=where): path for name, path in value.items()}
    raise ConfigError(f"{where} is not valid", expected='["runs/a", "b.npz"], or a table of names and paths')


def name_models(paths: Sequence[str]) -> dict[str, str]:
    """Name each model after its file or directory, with a number if the name is taken.

    >>> name_models(["a/run", "b/run", "ViT-B_16.npz"])
    {'run': 'a/run', 'run-2': 'b/run', 'ViT-B_16': 'ViT-B_16.npz'}
    """
    models: dict[str, str] = {}
    for path in paths:
        stem = Path(path).name.removesuffix(".npz").removesuffix(".safetensors").removesuffix(".pth") or "model"
        plain = "".join(character if character in NAME_CHARACTERS else "-" for character in stem).lstrip(".") or "model"
        name, number = plain, 2
        while name in models:
            name, number = f"{plain}-{number}", number + 1
        models[name] = path
    return models


def check_name(name: str, *, where: str) -> str:
    """Return a name that is valid as a directory name, or raise an error."""
    if not name or set(name) - NAME_CHARACTERS or name.startswith("."):
        raise ConfigError(f"{where}: {name!r} is not a name", expected="letters, digits, - and _")
    return name


def check_suite(suite: Suite, names: Sequence[str]) -> None:
    """Raise an error for a name that is not a dataset of the suite, or for initial weights that do not exist."""
    for name in names:
        if name not in suite.datasets:
            hint = did_you_mean(name, suite.datasets) or f"one of {', '.join(suite.datasets)}"
            raise UnknownNameError(f"the suite has no dataset {name}", hint=hint)
    for path in suite.models.values():
        if not path.startswith("hub:") and not Path(path).exists():
            raise WeightsError(f"{path} does not exist", hint="give a run, or a file that vitkit weights info knows")


def suite_tasks(
    suite: Suite, *, settings: Mapping[str, object] | None = None, rates: tuple[float, ...] | None = None
) -> list[SuiteTask]:
    """Return the tasks of a suite: every dataset for each model, those that are only evaluated last."""
    if not suite.models:
        raise ConfigError("the suite has no models", hint="give --model, or models = […] in the file")
    if not suite.datasets:
        raise ConfigError("the suite has no datasets", hint='add [datasets.NAME] with path = "…"')
    order = sorted(suite.datasets, key=lambda name: suite.datasets[name].model_from is not None)
    return [
        suite_task(suite, name, model=model, settings=settings or {}, rates=rates)
        for model in suite.models
        for name in order
    ]


def suite_task(
    suite: Suite, name: str, *, model: str, settings: Mapping[str, object], rates: tuple[float, ...] | None
) -> SuiteTask:
    """Return the task of one model on one dataset; `settings` override those of the dataset."""
    dataset = suite.datasets[name]
    recipe = find_recipe(dataset.recipe)
    if recipe.kind != "finetune":
        raise ConfigError(
            f"datasets.{name}: {dataset.recipe} does not fine-tune", hint="vitkit recipes lists the recipes that do"
        )
    config = recipe.make()
    config = replace(
        config,
        model=replace(config.model, init=suite.models[model], name=None, new_head=True),
        data=replace(config.data, path=dataset_path(suite, dataset), layout=dataset.layout),
    )
    length = [] if dataset.steps is None else [f"schedule.steps={dataset.steps}", "schedule.epochs=none"]
    for assignments in (suite.settings, length, dataset.settings):
        config = apply_overrides(config, list(assignments))
    config = config.override(settings)
    label_map = dataset.label_map
    if label_map is not None and Path(suite.root, label_map).is_file():
        label_map = str(Path(suite.root, label_map))
    if label_map is not None:
        check_label_map(label_map)
    return SuiteTask(
        dataset=name,
        model=model,
        config=config,
        rates=next(each for each in (rates, dataset.rates, recipe.rates) if each is not None),
        model_from=dataset.model_from,
        protocol=Protocol(
            label_map=label_map, real=None if dataset.real is None else str(Path(suite.root, dataset.real))
        ),
    )


def dataset_path(suite: Suite, dataset: SuiteDataset) -> str:
    """Return the first path of a dataset that exists, or its usual one."""
    if dataset.path in EMBEDDED:
        return dataset.path
    paths = [Path(suite.root, name) for name in (dataset.path, *dataset.alternatives)]
    return str(next((path for path in paths if path.exists()), paths[0]))


def build_leaderboard(
    suite: Suite, scores: Mapping[tuple[str, str], LeaderboardScore], *, left_out: Collection[str] = ()
) -> Leaderboard:
    """Return the table of a suite from the accuracies that exist."""
    datasets = {
        name: LeaderboardDataset(name=name, title=dataset.title or name, group=dataset.group)
        for name, dataset in suite.datasets.items()
    }
    return Leaderboard(
        title=suite.title,
        models=tuple(suite.models),
        datasets=tuple(dataset for name, dataset in datasets.items() if name not in left_out),
        scores=scores,
        mean_title=suite.mean,
        missing=tuple(dataset for name, dataset in datasets.items() if name in left_out),
    )


def suite(
    name: str,
    *,
    out: Path | str,
    models: Sequence[str] = (),
    data: Path | str | None = None,
    only: Sequence[str] | None = None,
    rates: Sequence[float] | None = None,
    skip_missing: bool = False,
    settings: Mapping[str, object] | None = None,
    callback: Callback | None = None,
    stop: StopFlag | None = None,
) -> Leaderboard:
    """Fine-tune and evaluate models on the datasets of a suite, and write a leaderboard to `out`; or resume.

    `only` selects datasets; finished results of the others are in the leaderboard too. Raises `StopRequested` if
    a stop was requested; the leaderboard so far is written in that case.
    """
    out, callback = Path(out), callback or Callback()
    definition = find_suite(name)
    definition = replace(definition, root=definition.root if data is None else str(data))
    definition = replace(definition, models=name_models(models)) if models else definition
    selected = list(definition.datasets) if only is None else list(only)
    check_suite(definition, selected)
    tasks = suite_tasks(definition, settings=settings, rates=None if rates is None else tuple(rates))
    missing = find_missing([task for task in tasks if task.dataset in selected])
    to_run = [task for task in tasks if task.dataset in selected and task.dataset not in missing]
    if missing and (not skip_missing or not to_run):
        names = shorten_list([f"{dataset} ({path})" for dataset, path in missing.items()], limit=30)
        raise DataError(
            f"{len(missing)} of {len(selected)} datasets do not exist: {names}",
            hint="set their directory with --data, or skip them with --skip-missing",
        )
    finished, errors = read_finished([task for task in tasks if task.dataset not in selected], out)
    for dataset, path in missing.items():
        callback.on_warning(f"skipped {dataset}: {path} does not exist")
    for error in errors:
        callback.on_warning(f"not in the leaderboard: {error}")
    parallel = to_run[0].config.parallel
    with join_ranks(parallel) as ranks:
        result = run_suite(to_run, out, parallel=parallel, callback=callback, stop=stop)
        leaderboard = build_leaderboard(definition, finished | dict(result.scores), left_out=missing)
        if ranks.is_main:
            write_leaderboard(leaderboard, out)
    if not result.finished:
        raise StopRequested
    return leaderboard


def find_missing(tasks: Sequence[SuiteTask]) -> dict[str, str]:
    """Return datasets and ReaL labels that do not exist, and datasets that need the model of a missing one."""
    missing = dict[str, str]()
    for task in tasks:
        path, real = task.config.data.path, task.protocol.real
        if path not in EMBEDDED and not Path(path).exists():
            missing[task.dataset] = path
        elif real is not None and not Path(real).is_file():
            missing[task.dataset] = real
    dependent = [task for task in tasks if task.model_from in missing and task.dataset not in missing]
    return missing | {task.dataset: missing[task.model_from] for task in dependent if task.model_from}


def write_leaderboard(leaderboard: Leaderboard, out: Path) -> None:
    """Write the leaderboard as JSON, CSV, SVG and HTML."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "suite.json", leaderboard.to_dict())
    write_text(out / "suite.csv", leaderboard.to_csv())
    write_text(out / "picture.svg", leaderboard_svg(leaderboard))
    write_text(out / "report.html", render_leaderboard(leaderboard))
