"""`vitkit suite`: every model on every data set, in one table; interrupted it goes on, and mistakes are found first."""

import csv
import json
import os
import re
from pathlib import Path

import pytest
from cli.tiny_runs import Shell, photos, tree
from data.vtab_tasks import task_folder

from vitkit.cli.main import main
from vitkit.cli.watching import Shown
from vitkit.evaluate.vtab import TASKS
from vitkit.train.watch import Pulse

SHORT = ("steps=2", "batch_size=4", "image_size=16", "workers=0", "schedule.warmup_steps=0", "keep.log_every=1")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest of models, trained for a step."""
    place = tmp_path_factory.mktemp("weights")
    photos(place / "photos", each=4)
    shape = ["model=Ti/16", "image_size=16", "model.patch_size=8", "steps=1", "batch_size=4", "workers=0"]
    settings = 'model.settings=["width=16","heads=2","depth=1","mlp_dim=16"]'
    assert main(["train", str(place / "photos"), "--out", str(place / "tiny"), *shape, settings]) == 0
    return place / "tiny"


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
weights = {weights}
settings = ["schedule.batch_size=4", "model.image_size=16", "data.workers=0"]

[sets.one]
path = "one"
group = "First"
recipe = "finetune-vtab1k"
steps = 2
settings = ["schedule.warmup_steps=0"]

[sets.two]
path = "two"
title = "Second set"
group = "Second"
rates = [0.001, 0.01]
steps = 2
""",
        encoding="utf-8",
    )


def test_nineteen_tasks_in_the_releases_layout_give_vtabs_score(shell):
    for number, task in enumerate(TASKS):
        task_folder(Path("vtab-1k", task.folders[0]), seed=number)
    said = shell("suite", "vtab-1k", "--weights", "tiny", "--data", "vtab-1k", "--out", "out", *SHORT, "--json")
    assert said.code == 0, said.talk
    found = said.json
    accuracy = {each["set"]: each["top1"] for each in found["results"]}
    assert accuracy.keys() == {task.name for task in TASKS}
    assert found["complete"]
    sizes = {"VTAB-1k": 19, "Natural": 7, "Specialized": 4, "Structured": 8}
    assert {each["name"]: each["sets"] for each in found["means"]} == sizes
    for each in found["means"]:
        of = [accuracy[task.name] for task in TASKS if each["name"] in ("VTAB-1k", task.group)]
        assert each["top1"] == pytest.approx(sum(of) / len(of))
    # The final run learns from all of the examples, and is judged on the test images.
    summary = json.loads(Path("out/runs/tiny/dmlab/summary.json").read_bytes())
    assert summary["images"] == {"train": 6, "test": 3}
    config = Path("out/runs/tiny/dsprites-location/config.toml").read_text(encoding="utf-8")
    assert 'crop = "none"' in config
    assert "flip = false" in config


def test_models_by_data_sets_in_one_table(shell):
    two_sets('["tiny", "other"]')
    said = shell("suite", "two.toml", "--out", "out")
    assert said.code == 0, said.talk
    assert [line for line in said.talk.splitlines() if line.startswith("part 1 of 4: one with tiny")]
    assert re.search(r"part 4 of 4: two with other; about \d\d:\d\d:\d\d left for all", said.talk)
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0] == ["Two", "sets", "tiny", "other"]
    assert [line[0] for line in lines[1:]] == ["Both,", "First,", "one", "Second,", "Second"]
    rows = list(csv.DictReader(Path("out/suite.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["kind"] for row in rows] == ["mean", "group", "set", "group", "set"]
    assert rows[0].keys() == {"kind", "name", "title", "group", "tiny", "other"}
    # The two have the same weights, the same images and the same seed.
    assert all(row["tiny"] == row["other"] for row in rows)
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "Second set" in page
    assert "http" not in page.replace("http-equiv", "")
    assert Path("out/picture.svg").read_text(encoding="utf-8").startswith("<svg xmlns")
    # What was called val is what the final model is judged by, and nothing learned from it or was chosen by it.
    summary = json.loads(Path("out/runs/tiny/two/summary.json").read_bytes())
    assert summary["judged_on"] == "test"
    assert summary["images"] == {"train": 10, "test": 10}
    tried = json.loads(Path("out/runs/tiny/two/sweep/lr-0.001/summary.json").read_bytes())
    assert tried["images"]["train"] < 10


def test_interrupted_it_goes_on_and_ends_with_the_same_table(shell, monkeypatch):
    two_sets()
    straight = shell("suite", "two.toml", "--out", "straight", "--json")
    assert straight.code == 0, straight.talk

    pulses = []

    class Interrupting(Shown):
        def pulse(self, pulse: Pulse) -> None:
            pulses.append(pulse.step)
            if len(pulses) == 4:  # within the second part
                os.kill(os.getpid(), 2)
            super().pulse(pulse)

    monkeypatch.setattr("vitkit.cli.watching.Shown", Interrupting)
    stopped = shell("suite", "two.toml", "--out", "out", "--json")
    assert stopped.code == 75
    assert "run the same command again to go on" in stopped.talk
    assert stopped.out == ""
    assert not json.loads(Path("out/suite.json").read_bytes())["complete"]
    first = tree(Path("out/runs/tiny/one"))

    before = len(pulses)
    again = shell("suite", "two.toml", "--out", "out", "--json")
    assert again.code == 0, again.talk
    assert again.json == straight.json
    assert tree(Path("out/runs/tiny/one")) == first
    # A part of 2 steps, and one of three runs of 2 steps: those not made before the stop, and none twice.
    assert before < len(pulses) == 2 + 3 * 2

    once_more = shell("suite", "two.toml", "--out", "out", "--json")
    assert once_more.json == straight.json
    assert len(pulses) == 2 + 3 * 2


def test_a_finished_suite_is_not_taken_for_another(shell):
    task_folder(Path("data/one"))
    Path("one.toml").write_text(
        'weights = "tiny"\nroot = "data"\n[sets.one]\npath = "one"\nrates = [0.01]\nsteps = 1\n'
    )
    assert shell("suite", "one.toml", "--out", "out", "batch_size=4", "image_size=16", "workers=0").code == 0
    said = shell("suite", "one.toml", "--out", "out", "batch_size=5", "image_size=16", "workers=0")
    assert said.code == 1
    assert "holds a run with another schedule.batch_size" in said.errors[0]
    usual = ("batch_size=4", "image_size=16", "workers=0")
    swept = shell("suite", "one.toml", "--out", "out", "--rates", "0.01,0.02", *usual)
    assert swept.code == 1
    assert "out/runs/tiny/one holds a run at one rate" in swept.errors[0]
    assert not Path("out/runs/tiny/one/sweep").exists()
    with Path("one.toml").open("a", encoding="utf-8") as file:
        file.write('kind = "vtab"\n')
    other = shell("suite", "one.toml", "--out", "out", *usual)
    assert other.code == 1
    assert "holds a run with another data.kind" in other.errors[0]


def test_its_runs_are_judged_again_on_the_images_that_they_were_judged_by(shell):
    for split in ("train", "val"):
        photos(Path("data/two", split), each=5)
    Path("one.toml").write_text('weights = "tiny"\nroot = "data"\n[sets.two]\npath = "two"\nrates = [0.01]\n')
    assert shell("suite", "one.toml", "--out", "out", *SHORT).code == 0
    run = "out/runs/tiny/two"
    said = shell("eval", run, "data/two", "--workers", "0", "--json")
    assert (said.json["split"], said.json["count"]) == ("test", 10)
    assert "may have seen them" not in said.talk
    said = shell("compare", run, "tiny", "--data", "data/two", "--workers", "0", "--json")
    assert [each["count"] for each in said.json["runs"]] == [10, 10]
    assert said.json["warnings"] == []


def test_only_some_leave_what_was_finished_in_the_table(shell):
    two_sets()
    first = shell("suite", "two.toml", "--out", "out", "--only", "one", "--json")
    assert first.code == 0, first.talk
    assert [each["set"] for each in first.json["results"]] == ["one"]
    assert {each["name"]: each["top1"] is None for each in first.json["means"]} == {
        "Both": True,
        "First": False,
        "Second": True,
    }
    both = shell("suite", "two.toml", "--out", "out", "--only", "two", "--json").json
    assert [each["set"] for each in both["results"]] == ["one", "two"]
    assert both["complete"]
    assert both["results"][0] == first.json["results"][0]
    # What was run with other settings is another thing.
    other = shell("suite", "two.toml", "--out", "out", "--only", "two", "--rates", "0.001,0.02")
    assert "holds a sweep of other rates" in other.errors[0]
    last = shell("suite", "two.toml", "--out", "out", "--only", "one", "--rates", "0.01,0.02", "steps=3")
    assert last.code == 1
    assert "warning: not in the table: out/runs/tiny/two holds a sweep of other rates" in last.talk


def test_data_sets_that_are_not_there_are_named_before_anything_starts(shell):
    task_folder(Path("vtab", "dmlab"))
    said = shell("suite", "vtab-1k", "--weights", "tiny", "--data", "vtab", "--out", "out", *SHORT)
    assert said.code == 1
    assert "18 of 19 data sets are not there: caltech101 (vtab/caltech101), cifar100 (vtab/cifar)" in said.errors[0]
    assert "--skip-missing" in said.hints[0]
    assert not Path("out").exists()
    some = shell("suite", "vtab-1k", "--weights", "tiny", "--data", "vtab", "--out", "out", *SHORT, "--skip-missing")
    assert some.code == 0, some.talk
    assert some.talk.count("warning: left out") == 18
    assert "VTAB-1k, mean of 1 of 19" in some.out
    assert "since their images are not there: Caltech101" in Path("out/report.html").read_text(encoding="utf-8")
    found = json.loads(Path("out/suite.json").read_bytes())
    assert len(found["left_out"]) == 18
    assert {each["whole"] for each in found["means"]} == {19, 8}


def test_a_model_of_the_suite_is_judged_on_further_images_without_learning(shell):
    for split in ("train", "test"):
        photos(Path("data/pets", split), ["cat", "dog"], each=4)
    photos(Path("data/more"), ["hund", "katze"], each=3)
    Path("data/map.json").write_text('{"katze": "cat", "hund": "dog"}', encoding="utf-8")
    Path("two.toml").write_text(
        """
root = "data"
weights = { A = "tiny" }
[sets.pets]
path = "pets"
rates = [0.01]
steps = 1
[sets.more]
path = "more"
judge = "pets"
label_map = "map.json"
[sets.untaught]
path = "more"
judge = "weights"
label_map = "map.json"
""",
        encoding="utf-8",
    )
    said = shell("suite", "two.toml", "--out", "out", "batch_size=4", "image_size=16", "workers=0", "--json")
    assert said.code == 0, said.talk
    found = {each["set"]: each for each in said.json["results"]}
    assert [found[name]["count"] for name in ("pets", "more", "untaught")] == [8, 6, 6]
    for name, model in (("more", "out/runs/A/pets"), ("untaught", "tiny")):
        judged = shell("eval", model, "data/more", "--label-map", "data/map.json", "--workers", "0", "--json").json
        assert judged["top1"] == found[name]["top1"]
    assert not Path("out/runs/A/more/model.safetensors").exists()
    Path("out/runs/A/more/judgement.json").write_text("{}", encoding="utf-8")
    again = shell("suite", "two.toml", "--out", "out", "batch_size=4", "image_size=16", "workers=0", "--json")
    assert "judgement.json: no judgement of a suite" in again.errors[0]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('weightz = "tiny"', "weightz is not a known key", "did you mean weights?"),
        ('weights = "tiny"\n[sets.one]\npath = "one"\nrate = [0.1]', "sets.one.rate is not a known key", "rates"),
        ('weights = "tiny"\n[sets.one]\nsteps = 2', "sets.one.path is missing", None),
        ('weights = "tiny"\n[sets.one]\npath = "one"\nsteps = "2"', "sets.one.steps is not valid", None),
        ('weights = "tiny"\n[sets."../one"]\npath = "one"', "'../one' is not a name", None),
        ('weights = 7\n[sets.one]\npath = "one"', "weights is not valid", None),
        ('weights = "nowhere"\n[sets.one]\npath = "one"', "no weights at nowhere", None),
        ('[sets.one]\npath = "one"', "no weights to begin from", "--weights"),
        ('weights = "tiny"', "no data sets", None),
        ('weights = "tiny"\n[sets.one]\npath = "one"\nrecipe = "finetune-pet"', "no recipe is called", "finetune-pets"),
        ('weights = "tiny"\n[sets.one]\npath = "one"\nreal = "r.json"', "judge a model that is there", "weights"),
        ('base = "vtab1k"\nweights = "tiny"', "no suite vtab1k", "did you mean vtab-1k?"),
        ('weights = "tiny"\n[sets.one]\npath = "one"\njudge = "two"', "judges the model of two", None),
        ("weights = [", "not a TOML file", None),
        ('base = ["vtab-1k"]\nweights = "tiny"', "there is no suite", None),
        (
            """
            weights = "tiny"
            sets.one = { path = "one", rates = [0.1], steps = 1, settings = ["data.workers=0"] }
            sets.two = { path = "one", judge = "one", label_map = "imagenet-aa" }
            """,
            "no label map is called imagenet-aa",
            "did you mean imagenet-a?",
        ),
    ],
)
def test_mistakes_in_the_file_are_told_before_anything_starts(shell, text, message, hint):
    task_folder(Path("one"))
    Path("mine.toml").write_text(text, encoding="utf-8")
    said = shell("suite", "mine.toml", "--out", "out")
    assert said.code == 1
    assert message in said.errors[0]
    assert hint is None or hint in said.hints[0]
    assert not Path("out").exists()


def test_mistakes_on_the_command_line_too(shell):
    assert "did you mean vtab-1k?" in shell("suite", "vtab-1", "--out", "out").hints[0]
    task_folder(Path("one"))
    Path("mine.toml").write_text('weights = "tiny"\n[sets.one]\npath = "one"\n', encoding="utf-8")
    said = shell("suite", "mine.toml", "--out", "out", "--only", "on")
    assert "no data set on" in said.errors[0]
    assert "did you mean one?" in said.hints[0]
    said = shell("suite", "mine.toml", "--out", "out", "--only", ",")
    assert said.code == 2
    assert "--only names no data set" in said.errors[0]
    photos(Path("plain"), each=3)
    Path("mine.toml").write_text('weights = "tiny"\n[sets.plain]\npath = "plain"\n', encoding="utf-8")
    said = shell("suite", "mine.toml", "--out", "out")
    assert "plain has no images to judge by" in said.errors[0]
    assert not Path("out").exists()
