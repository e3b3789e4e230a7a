"""A suite's name or TOML file goes in; which models are fine-tuned and judged on which data sets comes out."""

import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from vitkit.core.config import apply_overrides, from_mapping
from vitkit.core.errors import ConfigError, UnknownNameError, did_you_mean
from vitkit.data.sources.detect import EMBEDDED
from vitkit.evaluate.protocols import Protocol, check_map
from vitkit.evaluate.standings import Place, Score, Standings
from vitkit.evaluate.vtab import TASKS
from vitkit.recipes.table import find
from vitkit.train.config import RunConfig
from vitkit.train.suite import JUDGE_AS_TEST, Part

BIT_CROP = ("augment.crop_area=[0.7347, 0.7347]", "augment.crop_aspect=[1.0, 1.0]")
"""BiT takes 384 of 448 pixels each way, anywhere: so much of the area."""
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


@dataclass(frozen=True, kw_only=True)
class SetConfig:
    """One data set of a suite: where it is below the root, and how a model learns it and is judged.

    `also` are other names that its folder may have. `group` is whose mean it counts for. Without `rates` the recipe's
    are tried; one rate is not tried but taken. `settings` are `section.key=value` of the run. With `judge`, nothing
    learns: the model of that data set, or "weights" as they came, is judged by `label_map` or `real`.
    """

    path: str
    also: tuple[str, ...] = ()
    title: str | None = None
    group: str | None = None
    recipe: str = "finetune-folder"
    rates: tuple[float, ...] | None = None
    steps: int | None = None
    kind: str | None = None
    settings: tuple[str, ...] = ()
    judge: str | None = None
    label_map: str | None = None
    real: str | None = None

    def __post_init__(self) -> None:
        if self.judge is None and (self.label_map or self.real):
            raise ConfigError(
                f"{self.path}: label_map and real judge a model that is there", hint='say whose: judge = "weights"'
            )


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Weights and data sets by name; `mean` is what the mean over all data sets that are in a group is called."""

    title: str = "Suite"
    root: str = "."
    mean: str | None = None
    settings: tuple[str, ...] = ()
    weights: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sets: Mapping[str, SetConfig] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The keys of a suite's file that are no tables."""

    title: str = "Suite"
    root: str = "."
    mean: str | None = None
    settings: tuple[str, ...] = ()


# The paper's


def vtab_sets(*, below: str = "") -> Iterator[tuple[str, SetConfig]]:
    """The 19 tasks, each in the folder that releases keep it in."""
    for task in TASKS:
        crop = BIT_CROP if task.crop else ("augment.crop=none",)
        yield (
            task.name,
            SetConfig(
                path=f"{below}{task.folders[0]}",
                also=tuple(f"{below}{folder}" for folder in task.folders[1:]),
                title=task.title,
                group=task.group,
                recipe="finetune-vtab1k",
                settings=(*crop, *(() if task.flip else ("augment.flip=false",))),
            ),
        )


def vtab_1k() -> Suite:
    """VTAB-1k: 2500 steps at 0.01 on 1,000 examples of each of 19 tasks.

    >>> len(vtab_1k().sets), vtab_1k().sets["kitti-distance"].group
    (19, 'Structured')
    """
    return Suite(title="VTAB-1k", mean="VTAB-1k", sets=dict(vtab_sets()))


def table2() -> Suite:
    """The data sets of the paper's Table 2."""
    imagenet = SetConfig(path="imagenet", title="ImageNet", recipe="finetune-imagenet", kind=JUDGE_AS_TEST)
    real = SetConfig(path="imagenet", title="ImageNet ReaL", judge="imagenet", real="imagenet/real.json")
    sets = {
        "imagenet": imagenet,
        "real": real,
        "cifar10": SetConfig(path="cifar10", also=("cifar-10",), title="CIFAR-10", recipe="finetune-cifar10"),
        "cifar100": SetConfig(path="cifar100", also=("cifar-100",), title="CIFAR-100", recipe="finetune-cifar100"),
        "pets": SetConfig(path="pets", title="Oxford-IIIT Pets", recipe="finetune-pets"),
        "flowers": SetConfig(path="flowers", title="Oxford Flowers-102", recipe="finetune-flowers"),
    }
    tasks = {f"vtab-{name}": task for name, task in vtab_sets(below="vtab-1k/")}
    return Suite(title="Table 2", mean="VTAB-1k", sets=sets | tasks)


SUITES: Mapping[str, Callable[[], Suite]] = {"vtab-1k": vtab_1k, "table2": table2}


# Reading


def find_suite(name: str) -> Suite:
    """A suite by its name, or in a TOML file.

    >>> find_suite("table2").sets["real"].judge
    'imagenet'
    """
    if name in SUITES:
        return SUITES[name]()
    if name.endswith(".toml") or Path(name).is_file():
        return load_suite(Path(name))
    hint = did_you_mean(name, SUITES) or f"{', '.join(SUITES)}, or a TOML file"
    raise UnknownNameError(f"no suite is called {name}", hint=hint)


def load_suite(path: Path) -> Suite:
    """The suite in a TOML file, which may name one of the paper's as its base and then says only what differs."""
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    base = said.pop("base", None)
    if base is not None and (not isinstance(base, str) or base not in SUITES):
        raise UnknownNameError(f"{path}: there is no suite {base}", hint=did_you_mean(str(base), SUITES))
    start = Suite() if base is None else SUITES[base]()
    weights, sets = said.pop("weights", {}), said.pop("sets", {})
    tables = {"weights", "sets", "base"}
    if strange := [key for key in said if key not in {*_Head.__dataclass_fields__}]:
        known = [*_Head.__dataclass_fields__, *tables]
        hint = did_you_mean(strange[0], known) or f"known keys: {', '.join(known)}"
        raise ConfigError(f"{path}: {strange[0]} is not a known key", hint=hint)
    own = {key: getattr(start, key) for key in _Head.__dataclass_fields__}
    head = from_mapping(_Head, said, base=_Head(**own), where=f"{path}: ")
    return replace(
        start,
        **vars(head),
        weights=read_weights(weights, where=f"{path}: weights"),
        sets={**start.sets, **read_sets(sets, base=start.sets, where=f"{path}: sets")},
    )


def read_sets(said: object, *, base: Mapping[str, SetConfig], where: str) -> dict[str, SetConfig]:
    """The data sets of a file: `[sets.NAME]`, each a table."""
    if not isinstance(said, Mapping) or not all(isinstance(each, Mapping) for each in said.values()):
        raise ConfigError(f"{where} is not valid", expected='[sets.NAME] with path = "…"')
    return {
        name: from_mapping(SetConfig, one, base=base.get(name), where=f"{where}.{name}.")
        for name, one in ((checked_name(name, where=where), one) for name, one in said.items())
    }


def read_weights(said: object, *, where: str) -> dict[str, str]:
    """Weights by name, from a table of them or a list of paths.

    >>> read_weights(["runs/a", "ViT-B_16.npz"], where="weights")
    {'a': 'runs/a', 'ViT-B_16': 'ViT-B_16.npz'}
    """
    if isinstance(said, str):
        said = [said]
    if isinstance(said, Sequence) and all(isinstance(path, str) for path in said):
        return named(said)
    if isinstance(said, Mapping) and all(isinstance(path, str) for path in said.values()):
        return {checked_name(name, where=where): path for name, path in said.items()}
    raise ConfigError(f"{where} is not valid", expected='["runs/a", "b.npz"], or a table of names and paths')


def named(paths: Sequence[str]) -> dict[str, str]:
    """A name for each of several weights: its file's or folder's, and a number where another has the same.

    >>> named(["a/run", "b/run"])
    {'run': 'a/run', 'run-2': 'b/run'}
    """
    found: dict[str, str] = {}
    for path in paths:
        stem = Path(path).name.removesuffix(".npz").removesuffix(".safetensors").removesuffix(".pth") or "model"
        plain = "".join(character if character in NAME_CHARACTERS else "-" for character in stem).lstrip(".") or "model"
        name, number = plain, 2
        while name in found:
            name, number = f"{plain}-{number}", number + 1
        found[name] = path
    return found


def checked_name(name: str, *, where: str) -> str:
    """A name that can be a folder's."""
    if not name or set(name) - NAME_CHARACTERS or name.startswith("."):
        raise ConfigError(f"{where}: {name!r} is not a name", expected="letters, digits, - and _")
    return name


# Making


def check_names(suite: Suite, names: Sequence[str]) -> None:
    """Refuse a data set that the suite does not have."""
    for name in names:
        if name not in suite.sets:
            hint = did_you_mean(name, suite.sets) or f"one of {', '.join(suite.sets)}"
            raise UnknownNameError(f"the suite has no data set {name}", hint=hint)


def parts(suite: Suite, *, assignments: Sequence[str] = (), rates: tuple[float, ...] | None = None) -> list[Part]:
    """What there is to do: for each model every data set, those that judge another's model last."""
    if not suite.weights:
        raise ConfigError("the suite has no weights to begin from", hint="give --weights, or weights = […] in the file")
    if not suite.sets:
        raise ConfigError("the suite has no data sets", hint='give it [sets.NAME] with path = "…"')
    order = sorted(suite.sets.items(), key=lambda each: each[1].judge is not None)
    return [
        part(suite, name, one, model=model, assignments=assignments, rates=rates)
        for model in suite.weights
        for name, one in order
    ]


def part(
    suite: Suite,
    name: str,
    one: SetConfig,
    *,
    model: str,
    assignments: Sequence[str],
    rates: tuple[float, ...] | None,
) -> Part:
    """One model on one data set: the recipe, then the suite's settings, the data set's, and the command line's."""
    recipe = find(one.recipe)
    if recipe.kind != "finetune":
        raise ConfigError(f"sets.{name}: {one.recipe} trains from scratch", hint="vitkit recipes says which fine-tune")
    config = with_weights(recipe.make(), weights=suite.weights[model], place=place_of(suite, one), kind=one.kind)
    length = [] if one.steps is None else [f"schedule.steps={one.steps}", "schedule.epochs=none"]
    for given in (suite.settings, length, one.settings, assignments):
        config = apply_overrides(config, list(given))
    real = None if one.real is None else str(Path(suite.root, one.real))
    named_map = one.label_map
    if named_map is not None and Path(suite.root, named_map).is_file():
        named_map = str(Path(suite.root, named_map))
    if named_map is not None:
        check_map(named_map)
    return Part(
        set=name,
        model=model,
        config=config,
        rates=next(each for each in (rates, one.rates, recipe.rates) if each is not None),
        judge=one.judge,
        protocol=Protocol(label_map=named_map, real=real),
    )


def with_weights(config: RunConfig, *, weights: str, place: str, kind: str | None) -> RunConfig:
    """The run from these weights, with a new head, on this data."""
    return replace(
        config,
        model=replace(config.model, weights=weights, name=None, new_head=True),
        data=replace(config.data, path=place, kind=kind),
    )


def place_of(suite: Suite, one: SetConfig) -> str:
    """Where the data set is: the first of its names that is there, or where it should be."""
    if one.path in EMBEDDED:
        return one.path
    places = [Path(suite.root, name) for name in (one.path, *one.also)]
    return str(next((place for place in places if place.exists()), places[0]))


def standings(suite: Suite, scores: Mapping[tuple[str, str], Score], *, left_out: Collection[str] = ()) -> Standings:
    """The table of a suite from the accuracies that there are."""
    places = {name: Place(name=name, title=one.title or name, group=one.group) for name, one in suite.sets.items()}
    return Standings(
        title=suite.title,
        models=tuple(suite.weights),
        places=tuple(place for name, place in places.items() if name not in left_out),
        scores=scores,
        mean=suite.mean,
        left_out=tuple(place for name, place in places.items() if name in left_out),
    )
