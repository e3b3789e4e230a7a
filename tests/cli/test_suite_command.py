"""`vitkit suite`: leaderboard, resume, early errors."""

import csv
import json
import os
import re
from pathlib import Path

import pytest
from cli.tiny_runs import Shell, photos, tree
from data.vtab_tasks import task_folder

from vitkit.api.progress import RunDisplay
from vitkit.cli.main import main
from vitkit.evaluation.vtab import TASKS
from vitkit.training.callbacks import StepMetrics

SHORT = ("steps=2", "batch_size=4", "image_size=16", "workers=0", "schedule.warmup_steps=0", "logging.log_every=1")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest of models, trained for a step."""
    path = tmp_path_factory.mktemp("weights")
    photos(path / "photos", each=4)
    shape = ["model=Ti/16", "image_size=16", "model.patch_size=8", "steps=1", "batch_size=4", "workers=0"]
    settings = 'model.settings=["width=16","heads=2","depth=1","mlp_dim=16"]'
    assert main(["train", str(path / "photos"), "--out", str(path / "tiny"), *shape, settings]) == 0
    return path / "tiny"


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(weights)
    (tmp_path / "other").symlink_to(weights)
    return Shell(capsys)


def two_sets(weights: str = '["tiny"]') -> None:
    """A suite file of two data sets, one with val and no test."""
    task_folder(Path("data/one"), seed=1)
    for split in ("train", "val"):
        photos(Path("data/two", split), each=5)
    Path("two.toml").write_text(
        f"""
title = "Two sets"
root = "data"
mean = "Both"
models = {weights}
settings = ["schedule.batch_size=4", "model.image_size=16", "data.workers=0"]

[datasets.one]
path = "one"
group = "First"
recipe = "finetune-vtab1k"
steps = 2
settings = ["schedule.warmup_steps=0"]

[datasets.two]
path = "two"
title = "Second set"
group = "Second"
rates = [0.001, 0.01]
steps = 2
""",
        encoding="utf-8",
    )


def test_vtab_score_of_nineteen_tasks(shell):
    for number, task in enumerate(TASKS):
        task_folder(Path("vtab-1k", task.folders[0]), seed=number)
    result = shell("suite", "vtab-1k", "--model", "tiny", "--data", "vtab-1k", "--out", "out", *SHORT, "--json")
    assert result.code == 0, result.stderr
    actual = result.json
    accuracy = {each["dataset"]: each["top1"] for each in actual["results"]}
    assert accuracy.keys() == {task.name for task in TASKS}
    assert actual["complete"]
    sizes = {"VTAB-1k": 19, "Natural": 7, "Specialized": 4, "Structured": 8}
    assert {each["name"]: each["count"] for each in actual["means"]} == sizes
    for each in actual["means"]:
        of = [accuracy[task.name] for task in TASKS if each["name"] in ("VTAB-1k", task.group)]
        assert each["top1"] == pytest.approx(sum(of) / len(of))
    # The final run is trained on all of the examples and evaluated on the test images.
    summary = json.loads(Path("out/runs/tiny/dmlab/summary.json").read_bytes())
    assert summary["images"] == {"train": 6, "test": 3}
    config = Path("out/runs/tiny/dsprites-location/config.toml").read_text(encoding="utf-8")
    assert 'crop = "none"' in config
    assert "flip = false" in config


def test_leaderboard_of_models_and_datasets(shell):
    two_sets('["tiny", "other"]')
    result = shell("suite", "two.toml", "--out", "out")
    assert result.code == 0, result.stderr
    assert [line for line in result.stderr.splitlines() if line.startswith("task 1 of 4: tiny on one")]
    assert re.search(r"task 4 of 4: other on two; about \d+:\d\d(:\d\d)? left", result.stderr)
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0] == ["Two", "sets", "tiny", "other"]
    assert [line[0] for line in lines[1:]] == ["Both,", "First,", "one", "Second,", "Second"]
    rows = list(csv.DictReader(Path("out/suite.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["kind"] for row in rows] == ["mean", "group", "dataset", "group", "dataset"]
    assert rows[0].keys() == {"kind", "name", "title", "group", "tiny", "other"}
    # The two have the same weights, the same images and the same seed.
    assert all(row["tiny"] == row["other"] for row in rows)
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "Second set" in page
    assert "http" not in page.replace("http-equiv", "")
    assert Path("out/picture.svg").read_text(encoding="utf-8").startswith("<svg xmlns")
    # The final model is evaluated on val, which was used neither for training nor for choosing.
    summary = json.loads(Path("out/runs/tiny/two/summary.json").read_bytes())
    assert summary["evaluated_on"] == "test"
    assert summary["images"] == {"train": 10, "test": 10}
    tried = json.loads(Path("out/runs/tiny/two/sweep/lr-0.001/summary.json").read_bytes())
    assert tried["images"]["train"] < 10


def test_interrupted_suite_resumes(shell, monkeypatch):
    two_sets()
    straight = shell("suite", "two.toml", "--out", "straight", "--json")
    assert straight.code == 0, straight.stderr

    steps = []

    class Interrupting(RunDisplay):
        def on_step(self, metrics: StepMetrics) -> None:
            steps.append(metrics.step)
            if len(steps) == 4:  # within the second part
                os.kill(os.getpid(), 2)
            super().on_step(metrics)

    monkeypatch.setattr("vitkit.api.training.RunDisplay", Interrupting)
    stopped = shell("suite", "two.toml", "--out", "out", "--json")
    assert stopped.code == 75
    assert "run the same command again to resume" in stopped.stderr
    assert stopped.out == ""
    assert not json.loads(Path("out/suite.json").read_bytes())["complete"]
    first = tree(Path("out/runs/tiny/one"))

    before = len(steps)
    again = shell("suite", "two.toml", "--out", "out", "--json")
    assert again.code == 0, again.stderr
    assert again.json == straight.json
    assert tree(Path("out/runs/tiny/one")) == first
    # A part of 2 steps, and one of three runs of 2 steps: those not made before the stop, and none twice.
    assert before < len(steps) == 2 + 3 * 2

    once_more = shell("suite", "two.toml", "--out", "out", "--json")
    assert once_more.json == straight.json
    assert len(steps) == 2 + 3 * 2


def test_finished_suite_rejects_other_settings(shell):
    task_folder(Path("data/one"))
    Path("one.toml").write_text(
        'models = "tiny"\nroot = "data"\n[datasets.one]\npath = "one"\nrates = [0.01]\nsteps = 1\n'
    )
    assert shell("suite", "one.toml", "--out", "out", "batch_size=4", "image_size=16", "workers=0").code == 0
    result = shell("suite", "one.toml", "--out", "out", "batch_size=5", "image_size=16", "workers=0")
    assert result.code == 1
    assert "holds a run with schedule.batch_size=" in result.errors[0]
    usual = ("batch_size=4", "image_size=16", "workers=0")
    swept = shell("suite", "one.toml", "--out", "out", "--rates", "0.01,0.02", *usual)
    assert swept.code == 1
    assert "out/runs/tiny/one holds a run with a single learning rate" in swept.errors[0]
    assert not Path("out/runs/tiny/one/sweep").exists()
    with Path("one.toml").open("a", encoding="utf-8") as file:
        file.write('layout = "vtab"\n')
    other = shell("suite", "one.toml", "--out", "out", *usual)
    assert other.code == 1
    assert "holds a run with data.layout=" in other.errors[0]


def test_runs_are_evaluated_on_the_same_split(shell):
    for split in ("train", "val"):
        photos(Path("data/two", split), each=5)
    Path("one.toml").write_text('models = "tiny"\nroot = "data"\n[datasets.two]\npath = "two"\nrates = [0.01]\n')
    assert shell("suite", "one.toml", "--out", "out", *SHORT).code == 0
    run = "out/runs/tiny/two"
    result = shell("eval", run, "data/two", "--workers", "0", "--json")
    assert (result.json["split"], result.json["count"]) == ("test", 10)
    assert "may have seen them" not in result.stderr
    result = shell("compare", run, "tiny", "--data", "data/two", "--workers", "0", "--json")
    assert [each["count"] for each in result.json["models"]] == [10, 10]
    assert result.json["warnings"] == []


def test_only_keeps_finished_results(shell):
    two_sets()
    first = shell("suite", "two.toml", "--out", "out", "--only", "one", "--json")
    assert first.code == 0, first.stderr
    assert [each["dataset"] for each in first.json["results"]] == ["one"]
    assert {each["name"]: each["top1"] is None for each in first.json["means"]} == {
        "Both": True,
        "First": False,
        "Second": True,
    }
    both = shell("suite", "two.toml", "--out", "out", "--only", "two", "--json").json
    assert [each["dataset"] for each in both["results"]] == ["one", "two"]
    assert both["complete"]
    assert both["results"][0] == first.json["results"][0]
    # What was run with other settings is another thing.
    other = shell("suite", "two.toml", "--out", "out", "--only", "two", "--rates", "0.001,0.02")
    assert "holds a sweep of other learning rates" in other.errors[0]
    last = shell("suite", "two.toml", "--out", "out", "--only", "one", "--rates", "0.01,0.02", "steps=3")
    assert last.code == 1
    assert "warning: not in the leaderboard: out/runs/tiny/two holds a sweep of other learning rates" in last.stderr


def test_missing_datasets_are_named_first(shell):
    task_folder(Path("vtab", "dmlab"))
    result = shell("suite", "vtab-1k", "--model", "tiny", "--data", "vtab", "--out", "out", *SHORT)
    assert result.code == 1
    assert "18 of 19 datasets do not exist: caltech101 (vtab/caltech101), cifar100 (vtab/cifar)" in result.errors[0]
    assert "--skip-missing" in result.hints[0]
    assert not Path("out").exists()
    some = shell("suite", "vtab-1k", "--model", "tiny", "--data", "vtab", "--out", "out", *SHORT, "--skip-missing")
    assert some.code == 0, some.stderr
    assert some.stderr.count("warning: skipped") == 18
    assert "VTAB-1k, mean of 1 of 19" in some.out
    assert "because their images are missing: Caltech101" in Path("out/report.html").read_text(encoding="utf-8")
    actual = json.loads(Path("out/suite.json").read_bytes())
    assert len(actual["missing"]) == 18
    assert {each["expected"] for each in actual["means"]} == {19, 8}


def test_model_from_evaluates_without_training(shell):
    for split in ("train", "test"):
        photos(Path("data/pets", split), ["cat", "dog"], each=4)
    photos(Path("data/more"), ["hund", "katze"], each=3)
    Path("data/map.json").write_text('{"katze": "cat", "hund": "dog"}', encoding="utf-8")
    Path("two.toml").write_text(
        """
root = "data"
models = { A = "tiny" }
[datasets.pets]
path = "pets"
rates = [0.01]
steps = 1
[datasets.more]
path = "more"
model_from = "pets"
label_map = "map.json"
[datasets.untaught]
path = "more"
model_from = "init"
label_map = "map.json"
""",
        encoding="utf-8",
    )
    result = shell("suite", "two.toml", "--out", "out", "batch_size=4", "image_size=16", "workers=0", "--json")
    assert result.code == 0, result.stderr
    actual = {each["dataset"]: each for each in result.json["results"]}
    assert [actual[name]["count"] for name in ("pets", "more", "untaught")] == [8, 6, 6]
    for name, model in (("more", "out/runs/A/pets"), ("untaught", "tiny")):
        evaluated = shell("eval", model, "data/more", "--label-map", "data/map.json", "--workers", "0", "--json").json
        assert evaluated["top1"] == actual[name]["top1"]
    assert not Path("out/runs/A/more/model.safetensors").exists()
    Path("out/runs/A/more/evaluation.json").write_text("{}", encoding="utf-8")
    again = shell("suite", "two.toml", "--out", "out", "batch_size=4", "image_size=16", "workers=0", "--json")
    assert "evaluation.json: not an evaluation of a suite" in again.errors[0]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('modelz = "tiny"', "modelz is not a known key", "did you mean models?"),
        (
            'models = "tiny"\n[datasets.one]\npath = "one"\nrate = [0.1]',
            "datasets.one.rate is not a known key",
            "rates",
        ),
        ('models = "tiny"\n[datasets.one]\nsteps = 2', "datasets.one.path is missing", None),
        ('models = "tiny"\n[datasets.one]\npath = "one"\nsteps = "2"', "datasets.one.steps is not valid", None),
        ('models = "tiny"\n[datasets."../one"]\npath = "one"', "'../one' is not a name", None),
        ('models = 7\n[datasets.one]\npath = "one"', "models is not valid", None),
        ('models = "nowhere"\n[datasets.one]\npath = "one"', "nowhere does not exist", None),
        ('[datasets.one]\npath = "one"', "the suite has no models", "--model"),
        ('models = "tiny"', "no datasets", None),
        (
            'models = "tiny"\n[datasets.one]\npath = "one"\nrecipe = "finetune-pet"',
            "no recipe is called",
            "finetune-pets",
        ),
        (
            'models = "tiny"\n[datasets.one]\npath = "one"\nreal = "r.json"',
            "are for datasets that are only evaluated",
            "model_from",
        ),
        ('base = "vtab1k"\nmodels = "tiny"', "no suite vtab1k", "did you mean vtab-1k?"),
        ('models = "tiny"\n[datasets.one]\npath = "one"\nmodel_from = "two"', "evaluates the model of two", None),
        ("models = [", "not a TOML file", None),
        ('base = ["vtab-1k"]\nmodels = "tiny"', "there is no suite", None),
        (
            """
            models = "tiny"
            datasets.one = { path = "one", rates = [0.1], steps = 1, settings = ["data.workers=0"] }
            datasets.two = { path = "one", model_from = "one", label_map = "imagenet-aa" }
            """,
            "no label map or file called imagenet-aa",
            "did you mean imagenet-a?",
        ),
    ],
)
def test_errors_in_the_file_are_reported_first(shell, text, message, hint):
    task_folder(Path("one"))
    Path("mine.toml").write_text(text, encoding="utf-8")
    result = shell("suite", "mine.toml", "--out", "out")
    assert result.code == 1
    assert message in result.errors[0]
    assert hint is None or hint in result.hints[0]
    assert not Path("out").exists()


def test_errors_on_the_command_line_are_reported_first(shell):
    assert "did you mean vtab-1k?" in shell("suite", "vtab-1", "--out", "out").hints[0]
    task_folder(Path("one"))
    Path("mine.toml").write_text('models = "tiny"\n[datasets.one]\npath = "one"\n', encoding="utf-8")
    result = shell("suite", "mine.toml", "--out", "out", "--only", "on")
    assert "no dataset on" in result.errors[0]
    assert "did you mean one?" in result.hints[0]
    result = shell("suite", "mine.toml", "--out", "out", "--only", ",")
    assert result.code == 2
    assert "'--only': the list is empty" in result.errors[0]
    photos(Path("plain"), each=3)
    Path("mine.toml").write_text('models = "tiny"\n[datasets.plain]\npath = "plain"\n', encoding="utf-8")
    result = shell("suite", "mine.toml", "--out", "out")
    assert "plain has no images for evaluation" in result.errors[0]
    assert not Path("out").exists()
