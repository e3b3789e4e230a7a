"""`vitkit demo`: the first tour runs through on its own data."""

import json
import re

import pytest

from vitkit.cli.main import main


def test_the_tour_walks_through_the_four_steps(capsys):
    assert main(["demo"]) == 0
    output = capsys.readouterr().out
    assert "5,717,416" in output
    assert "An image is worth 14×14 words." in output
    for step in ("embed", "encode", "pool", "head"):
        assert any(line.split()[:1] == [step] for line in output.splitlines())


def test_the_tours_figures_are_there_for_scripts(capsys):
    assert main(["demo", "--model", "S/32", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["parameters"] == 22_878_952
    assert [step["step"] for step in figures["steps"]] == ["embed", "encode", "pool", "head"]
    assert all(step["milliseconds"] > 0 for step in figures["steps"])


def test_the_picture_is_drawn_in_the_colours_of_the_patches(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["demo", "--model", "S/32"]) == 0
    output = capsys.readouterr().out
    cells = re.findall(r"\x1b\[48;2;(\d+);(\d+);(\d+)m", output)
    assert len(cells) >= 7 * 3  # seven rows of at least three colours
    assert len(set(cells)) > 10


@pytest.mark.parametrize("name", ["R50x1", "R50+B/16"])
def test_a_model_without_patches_of_the_image_is_refused_with_a_way_out(capsys, name):
    assert main(["demo", "--model", name]) == 1
    assert "hint: try --model B/16" in capsys.readouterr().err
