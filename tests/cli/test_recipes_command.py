"""`vitkit recipes`: what scripts rely on, what a person sees, and a file that training takes."""

import json

import pytest

from vitkit.cli.main import main
from vitkit.core.config import load_toml
from vitkit.recipes.table import RECIPES
from vitkit.train.config import RunConfig

KEYS = {"name", "group", "kind", "summary", "command", "time", "expected", "rates"}


def test_the_list_has_every_group_and_a_line_for_each_recipe_but_augregs(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for recipe in RECIPES.values():
        assert recipe.group in lines
        own = sum(f"{line} ".startswith(f"  {recipe.name} ") for line in lines)
        assert own == (0 if recipe.name.startswith("augreg-") else 1), recipe.name
    assert any("augreg-MODEL-LEVEL" in line for line in lines)


def test_a_pattern_lists_what_fits_it(capsys):
    assert main(["recipes", "AUGREG-b16-strong?"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  augreg")] == [
        "augreg-b16-strong1",
        "augreg-b16-strong2",
    ]


def test_every_head_is_in_the_json_list(capsys):
    assert main(["recipes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in listed] == list(RECIPES)
    assert all(set(row) >= KEYS for row in listed)


def test_one_recipe_as_json_has_its_configuration(capsys):
    assert main(["recipes", "finetune-pets", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) >= KEYS
    assert shown["rates"] == [0.001, 0.003, 0.01, 0.03]
    assert shown["config"]["schedule"]["steps"] == 500


@pytest.mark.parametrize("name", ["digits", "imagenet-b16", "finetune-imagenet-l16-512"])
def test_a_recipe_in_a_file_is_a_run_that_can_be_trained(capsys, tmp_path, name):
    assert main(["recipes", name]) == 0
    shown = capsys.readouterr().out
    head = [line for line in shown.splitlines() if line.startswith("#")]
    for label in ("# command:", "# time:", "# expected:"):
        assert sum(line.startswith(label) for line in head) == 1
    (tmp_path / "my.toml").write_text(shown, encoding="utf-8")
    assert load_toml(tmp_path / "my.toml", RunConfig, recipes={}) == RECIPES[name].make()


def test_a_wrong_name_fails_and_suggests(capsys):
    assert main(["recipes", "digit"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == ["error: no recipe is called digit", "hint: did you mean digits?"]


def test_a_pattern_that_fits_nothing_fails(capsys):
    assert main(["recipes", "cat*"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == "error: no recipe fits cat*"
