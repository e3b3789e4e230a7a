"""Each command is one public function: the same options, and `--json` prints the result of the function."""

import functools
import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from api.tiny import CLASSES, make_model
from cli.tiny_runs import LENGTH, SHAPE, Shell, assigned, photos

import vitkit
from vitkit.api import system
from vitkit.cli import main as cli
from vitkit.core.cache_dir import create_cache_dir
from vitkit.core.config import to_mapping

CLI = Path(cli.__file__).parent
SETTINGS = {"model.patch_size": 8, "model.settings": ["width=16", "heads=2", "depth=1", "mlp_dim=16"]}
INTERVALS = {"evaluation.every": 2, "logging.log_every": 1}
SHORT = {"steps": 4, "batch_size": 8, "workers": 0}
QUIET: dict[str, Any] = {"device": "cpu", "workers": 0, "progress": False}
FLAGS = ("--device", "cpu", "--workers", 0)

FUNCTIONS = {
    "demo": ("demo",),
    "train": ("train",),
    "finetune": ("finetune",),
    "suite": ("suite",),
    "study": ("study", "list_studies"),
    "recipes": ("recipe", "list_recipes"),
    "data check": ("check_data",),
    "data quality": ("check_data_quality",),
    "eval": ("evaluate",),
    "predict": ("predict",),
    "fewshot": ("fewshot",),
    "compare": ("compare",),
    "inspect": ("inspect",),
    "models": ("list_models",),
    "cost": ("cost", "table6"),
    "weights info": ("describe_weights",),
    "weights convert": ("convert",),
    "weights diff": ("diff_weights",),
    "weights adapt": ("adapt",),
    "weights verify": ("verify",),
    "export": ("export",),
    "serve": ("serve",),
    "bench": ("benchmark",),
    "doctor": ("doctor",),
    "cache": ("cache_info",),
    "cache clear": ("clear_cache",),
}
"""Functions of each command."""
RENAMED = {"from": "init", "force": "overwrite", "class": "target", "with": "other", "token_file": "token"}
SOURCES = {"file": "source", "runs_and_settings": "models"}
"""Other names of options and of arguments of commands."""
DIFFERENT = {
    "cost": {"table6"},
    "finetune": {"rates"},
    "recipes": {"name", "pattern"},
    "study": {"data"},
    "suite": {"model", "models"},
}
"""Options and arguments that only one of command and function has: another function, or another form."""
COMMON_OPTIONS = {"json", "verbose", "log_format"}
PYTHON_ONLY = {"settings", "progress", "device", "workers", "callbacks", "keep_probabilities", "block"}
SHORT_KEYS = {"model", "image_size", "epochs", "steps", "lr", "batch_size", "channels", "teacher", "trainable", "seed"}
"""Arguments that the commands that train take as SETTING=VALUE."""

Case = tuple[tuple[object, ...], Callable[[], Any]]
CASES: dict[str, Case] = {
    "demo": (("demo", "--quick"), lambda: vitkit.demo(quick=True, progress=False)),
    "train": (
        ("train", "photos", "--from", "scratch", *assigned(SHAPE, dict(LENGTH))),
        lambda: vitkit.train(
            "photos", init="scratch", model="Ti/16", image_size=16, **SHORT, settings=SETTINGS | INTERVALS
        ),
    ),
    "finetune": (
        ("finetune", "run", "photos", "--out", "tuned", *assigned(SHORT, {}), "lr=0.01"),
        lambda: vitkit.finetune("run", "photos", out="tuned", lr=0.01, **SHORT),
    ),
    "finetune --sweep": (
        ("finetune", "run", "photos", "--sweep", "--rates", "0.01,0.03", *assigned(SHORT, {})),
        lambda: vitkit.finetune("run", "photos", sweep=[0.01, 0.03], **SHORT),
    ),
    "suite": (
        ("suite", "suite.toml", "--out", "suite", "--model", "run", *assigned(SHORT, {})),
        lambda: vitkit.suite("suite.toml", out="suite", models=["run"], settings=SHORT),
    ),
    "study": (("study",), vitkit.list_studies),
    "study --plan": (
        ("study", "table8", "--plan", "--quick", "schedule.batch_size=8"),
        lambda: vitkit.study("table8", plan=True, quick=True, settings={"schedule.batch_size": 8}),
    ),
    "recipes": (("recipes", "deit-*"), lambda: vitkit.list_recipes("deit-*")),
    "data check": (
        ("data", "check", "photos", "--workers", 0),
        lambda: vitkit.check_data("photos", **QUIET),
    ),
    "data quality": (
        ("data", "quality", "photos", "--model", "model", "--out", "quality", "--match-flips", *FLAGS),
        lambda: vitkit.check_data_quality("photos", model="model", out="quality", match_flips=True, **QUIET),
    ),
    "eval": (
        ("eval", "run", "photos", "--batch-size", 4, *FLAGS),
        lambda: vitkit.evaluate("run", "photos", batch_size=4, **QUIET),
    ),
    "predict": (
        ("predict", "model", "photos", "--top", 2, *FLAGS),
        lambda: vitkit.predict("model", "photos", top=2, **QUIET),
    ),
    "predict --out": (
        ("predict", "model", "photos", "--features", "--out", "rows.jsonl", *FLAGS),
        lambda: vitkit.predict("model", "photos", features=True, out="rows.jsonl", **QUIET),
    ),
    "fewshot": (
        ("fewshot", "model", "photos", "--shots", "1,2", "--seeds", 2, "--method", "all", *FLAGS),
        lambda: vitkit.fewshot("model", "photos", shots=[1, 2], seeds=2, method="all", **QUIET),
    ),
    "compare": (
        ("compare", "run", "model", "--data", "photos", "--against", "best", "--out", "compared", *FLAGS),
        lambda: vitkit.compare(["run", "model"], data="photos", against="best", out="compared", **QUIET),
    ),
    "inspect": (
        ("inspect", "run", "photos/cat", "--only", "rollout,distance", "--class", "dog", "--out", "page", *FLAGS[:2]),
        lambda: vitkit.inspect("run", ["photos/cat"], only=["rollout", "distance"], target="dog", out="page", **QUIET),
    ),
    "models": (("models", "*b*"), lambda: vitkit.list_models("*b*")),
    "models --pretrained": (
        ("models", "google/*", "--pretrained"),
        lambda: vitkit.list_models("google/*", pretrained=True),
    ),
    "cost": (
        ("cost", "Ti/16", "--image-size", "32x48", "--images", "1e3", "--epochs", 2, "pooling=mean"),
        lambda: vitkit.cost("Ti/16", image_size=(32, 48), images=1000, epochs=2, settings={"pooling": "mean"}),
    ),
    "cost --table6": (("cost", "--table6"), vitkit.table6),
    "weights info": (("weights", "info", "model"), lambda: vitkit.describe_weights("model")),
    "weights convert": (
        ("weights", "convert", "model", "out", "--to", "timm"),
        lambda: vitkit.convert("model", "out", to="timm"),
    ),
    "weights diff": (("weights", "diff", "model", "other"), lambda: vitkit.diff_weights("model", "other")),
    "weights adapt": (
        ("weights", "adapt", "model", "out", "--image-size", 32, "--channels", 1),
        lambda: vitkit.adapt("model", "out", image_size=32, channels=1),
    ),
    "weights verify": (("weights", "verify", "model"), lambda: vitkit.verify("model")),
    "export": (
        ("export", "model", "out", "--to", "google", "--images", "photos"),
        lambda: vitkit.export("model", "out", to="google", images="photos", progress=False),
    ),
    "bench": (
        ("bench", "model", "--batch-size", "1,2", "--precision", "fp32", "--seconds", 0, "--device", "cpu"),
        lambda: vitkit.benchmark("model", batch_size=[1, 2], precision=["fp32"], seconds=0, **QUIET),
    ),
    "doctor": (("doctor",), vitkit.doctor),
    "cache": (("cache",), vitkit.cache_info),
    "cache clear": (("cache", "clear"), vitkit.clear_cache),
}
"""Arguments of a command without `--json`, and the call of its function."""
MEASURED = {
    *("seconds", "images_per_second", "latency_p50", "latency_p99", "start_seconds", "memory_bytes", "recommendation"),
    *("utilization", "training_speed", "hours", "hours_left", "data_wait", "flops_per_second", "peak_flops_per_second"),
}
"""Keys whose values are measured times and speeds."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with images, two models, a finished run and a suite."""
    path = tmp_path_factory.mktemp("parity")
    photos(path / "photos", CLASSES[:2], each=6)
    for name, classes in (("sets/birds/train", 8), ("sets/birds/test", 2)):
        photos(path / name, ("robin", "wren"), each=classes)
    for seed, name in enumerate(("model", "other")):
        vitkit.save(make_model(seed=seed), path / name)
    (path / "suite.toml").write_text('[datasets.birds]\npath = "sets/birds"\nrates = [0.01]\n', encoding="utf-8")
    vitkit.train(path / "photos", out=path / "run", model="Ti/16", image_size=16, **SHORT, settings=SETTINGS)
    return path


@pytest.fixture
def copies(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """Move to a copy of the workspace each time, so that both sides find the same files and write to the same paths."""

    def enter() -> Iterator[Path]:
        for name in ("command", "function"):
            shutil.copytree(workspace, tmp_path / name)
            monkeypatch.chdir(tmp_path / name)
            if request.node.callspec.params["name"].startswith("cache"):  # others use compiled kernels
                monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
                create_cache_dir("features").joinpath("entry").write_bytes(bytes(1000))
            yield tmp_path / name

    monkeypatch.setattr(system, "examine_machine", functools.cache(system.examine_machine))
    return enter()


def to_json(result: Any) -> Any:
    """Return what a command prints for a result, without measured numbers."""
    if isinstance(result, vitkit.results.NameList):
        return to_json(json.loads(json.dumps(list(result.make_records()))))
    if isinstance(result, vitkit.results.Predictions) and result.path is None:
        return to_json([row.to_dict() for row in result])
    if hasattr(result, "to_dict"):
        return to_json(json.loads(json.dumps(result.to_dict())))
    if isinstance(result, dict):
        return {key: to_json(value) for key, value in result.items() if key not in MEASURED}
    return [to_json(each) for each in result] if isinstance(result, list) else result


@pytest.mark.usefixtures("forked_examples")
@pytest.mark.parametrize("name", CASES)
def test_command_prints_the_result_of_its_function(name: str, copies: Iterator[Path], capsys) -> None:
    arguments, call = CASES[name]
    next(copies)
    printed = Shell(capsys)(*arguments, "--json")
    assert printed.code == 0, printed.stderr
    lines = name == "predict"
    expected = [json.loads(line) for line in printed.out.splitlines()] if lines else printed.json
    next(copies)
    result = call()
    assert to_json(expected) == to_json(result)
    assert expected  # something was compared


def test_recipe_is_the_configuration_that_the_command_prints(capsys) -> None:
    assert Shell(capsys)("recipes", "digits", "--json").json["config"] == json.loads(
        json.dumps(to_mapping(vitkit.recipe("digits")))
    )


# Options


def list_commands(group: click.Group | None = None, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield all commands that do something, with their names."""
    context = click.Context(group := group or cli.vitkit)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield f"{prefix}{name}", command
        if isinstance(command, click.Group):
            yield from list_commands(command, f"{name} ")


COMMANDS = dict(list_commands())


def test_every_command_is_compared() -> None:
    assert COMMANDS.keys() == FUNCTIONS.keys()
    assert {name.partition(" --")[0] for name in CASES} == COMMANDS.keys() - {"serve"}  # which prints no result


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_have_the_names_of_the_arguments(name: str) -> None:
    parameters: dict[str, inspect.Parameter] = {}
    for function in FUNCTIONS[name]:
        parameters |= inspect.signature(getattr(vitkit, function)).parameters
    options = set()
    for parameter in COMMANDS[name].params:
        is_option = isinstance(parameter, click.Option)
        given = parameter.opts[-1].lstrip("-").replace("-", "_") if is_option else parameter.name
        options.add(RENAMED.get(given, given) if is_option else SOURCES.get(given, given))
    different = DIFFERENT.get(name, set())
    assert options - different - COMMON_OPTIONS <= parameters.keys()
    short_keys = SHORT_KEYS if name in ("train", "finetune") else set()
    assert parameters.keys() - options - different <= PYTHON_ONLY | short_keys


def test_commands_are_short() -> None:
    lines = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in CLI.glob("*.py")}
    assert not {name for name, count in lines.items() if count > 200}
    assert sum(lines.values()) <= 3000
