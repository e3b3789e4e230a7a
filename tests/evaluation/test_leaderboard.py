"""Leaderboard: means, page and chart."""

from xml.etree import ElementTree

import pytest

from vitkit.evaluation.leaderboard import Leaderboard, LeaderboardDataset, LeaderboardScore
from vitkit.report.leaderboard import leaderboard_svg, render_leaderboard


def test_mean_needs_all_scores():
    datasets = tuple(
        LeaderboardDataset(name=name, title=name, group=group) for name, group in (("a", "X"), ("b", "X"), ("c", "Y"))
    )
    scores = {(name, "one"): LeaderboardScore(top1=share) for name, share in (("a", 0.2), ("b", 0.4), ("c", 0.9))}
    scores |= {("a", "two"): LeaderboardScore(top1=0.5), ("c", "two"): LeaderboardScore(top1=0.7)}
    table = Leaderboard(title="T", models=("one", "two"), datasets=datasets, scores=scores, mean_title="All")
    means = {(each["name"], each["model"]): each["top1"] for each in table.to_dict()["means"]}
    assert means == {
        ("All", "one"): pytest.approx(0.5),
        ("All", "two"): None,
        ("X", "one"): pytest.approx(0.3),
        ("X", "two"): None,
        ("Y", "one"): 0.9,
        ("Y", "two"): 0.7,
    }
    assert not table.is_complete
    assert "Not everything is finished" in render_leaderboard(table)


def test_page_and_chart_escape_names():
    hostile = "<script>alert(1)</script>"
    path = LeaderboardDataset(name="a", title=hostile, group=f"{hostile}\u202e")
    table = Leaderboard(
        title=hostile,
        models=(hostile,),
        datasets=(path,),
        scores={("a", hostile): LeaderboardScore(top1=0.5)},
        mean_title="]]><b>",
    )
    for drawn in (render_leaderboard(table), leaderboard_svg(table)):
        assert "<script>alert" not in drawn
        assert "\u202e" not in drawn
        assert "<b>]" not in drawn
    root = ElementTree.fromstring(leaderboard_svg(table))
    assert not [each for each in root.iter() if each.tag.endswith("}script")]


def test_chart_of_any_table_is_valid():
    """No models, equal scores, and more models than colors."""
    for models in (0, 1, 9):
        names = tuple(f"model {number}" for number in range(models))
        for group in (None, "G"):
            datasets = (LeaderboardDataset(name="a", title="a", group=group),)
            scores = {("a", name): LeaderboardScore(top1=1.0, interval=(1.0, 1.0), count=3) for name in names}
            table = Leaderboard(title="T", models=names, datasets=datasets, scores=scores, mean_title="M")
            assert "nan" not in leaderboard_svg(table)
            ElementTree.fromstring(leaderboard_svg(table))
            assert render_leaderboard(table)
