"""`vitkit recipes`: table, JSON and TOML."""

import json

import pytest

from vitkit.cli.main import main
from vitkit.core.config import load_toml
from vitkit.recipes.registry import RECIPES
from vitkit.training.config import RunConfig

KEYS = {"name", "group", "kind", "summary", "command", "time", "expected", "rates"}


def test_table_has_every_group_and_recipe(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for recipe in RECIPES.values():
        assert recipe.group in lines
        own = sum(f"{line} ".startswith(f"  {recipe.name} ") for line in lines)
        assert own == (0 if recipe.name.startswith("augreg-") else 1), recipe.name
    assert any("augreg-MODEL-LEVEL" in line for line in lines)


def test_pattern_lists_matching_recipes(capsys):
    assert main(["recipes", "AUGREG-b16-strong?"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  augreg")] == [
        "augreg-b16-strong1",
        "augreg-b16-strong2",
    ]


def test_json_lists_every_recipe(capsys):
    assert main(["recipes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in listed] == list(RECIPES)
    assert all(set(row) >= KEYS for row in listed)


def test_json_of_one_recipe_has_its_configuration(capsys):
    assert main(["recipes", "finetune-pets", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert set(output) >= KEYS
    assert output["rates"] == [0.001, 0.003, 0.01, 0.03]
    assert output["config"]["schedule"]["steps"] == 500


@pytest.mark.parametrize("name", ["digits", "imagenet-b16", "finetune-imagenet-l16-512"])
def test_printed_recipe_is_a_valid_file(capsys, tmp_path, name):
    assert main(["recipes", name]) == 0
    output = capsys.readouterr().out
    head = [line for line in output.splitlines() if line.startswith("#")]
    for label in ("# command:", "# time:", "# expected:"):
        assert sum(line.startswith(label) for line in head) == 1
    (tmp_path / "my.toml").write_text(output, encoding="utf-8")
    assert load_toml(tmp_path / "my.toml", RunConfig, recipes={}) == RECIPES[name].make()


def test_unknown_name_has_a_suggestion(capsys):
    assert main(["recipes", "digit"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == ["error: no recipe is called digit", "hint: did you mean digits?"]


def test_pattern_without_match_fails(capsys):
    assert main(["recipes", "cat*"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == "error: no recipe matches cat*"
