"""One table of models on data sets, its means, its page and its picture."""

from xml.etree import ElementTree

import pytest

from vitkit.evaluate.standings import Place, Score, Standings
from vitkit.evaluate.standings_page import page, picture


def test_a_mean_is_there_only_where_nothing_of_it_is_missing():
    places = tuple(Place(name=name, title=name, group=group) for name, group in (("a", "X"), ("b", "X"), ("c", "Y")))
    scores = {(name, "one"): Score(top1=share) for name, share in (("a", 0.2), ("b", 0.4), ("c", 0.9))}
    scores |= {("a", "two"): Score(top1=0.5), ("c", "two"): Score(top1=0.7)}
    table = Standings(title="T", models=("one", "two"), places=places, scores=scores, mean="All")
    means = {(each["name"], each["model"]): each["top1"] for each in table.to_json()["means"]}
    assert means == {
        ("All", "one"): pytest.approx(0.5),
        ("All", "two"): None,
        ("X", "one"): pytest.approx(0.3),
        ("X", "two"): None,
        ("Y", "one"): 0.9,
        ("Y", "two"): 0.7,
    }
    assert not table.is_complete
    assert "Not everything is finished" in page(table)


def test_names_in_page_and_picture_are_text():
    hostile = "<script>alert(1)</script>"
    place = Place(name="a", title=hostile, group=f"{hostile}\u202e")
    table = Standings(
        title=hostile, models=(hostile,), places=(place,), scores={("a", hostile): Score(top1=0.5)}, mean="]]><b>"
    )
    for drawn in (page(table), picture(table)):
        assert "<script>alert" not in drawn
        assert "\u202e" not in drawn
        assert "<b>]" not in drawn
    root = ElementTree.fromstring(picture(table))
    assert not [each for each in root.iter() if each.tag.endswith("}script")]


def test_a_picture_is_drawn_of_any_table():
    """Also of none, of one share, and of more models than colours."""
    for models in (0, 1, 9):
        names = tuple(f"model {number}" for number in range(models))
        for group in (None, "G"):
            places = (Place(name="a", title="a", group=group),)
            scores = {("a", name): Score(top1=1.0, interval=(1.0, 1.0), count=3) for name in names}
            table = Standings(title="T", models=names, places=places, scores=scores, mean="M")
            assert "nan" not in picture(table)
            ElementTree.fromstring(picture(table))
            assert page(table)
