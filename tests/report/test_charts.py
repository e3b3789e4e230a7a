"""Charts: ticks, well-formed XML, and visible names."""

import math
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from vitkit.evaluation.metrics import calibration
from vitkit.report.charts import (
    Panel,
    Scale,
    Series,
    confusion_heatmap,
    line_chart,
    nice_ticks,
    reliability_diagram,
    smooth,
)
from vitkit.report.html import bar, visible

numbers = st.floats(-1e9, 1e9, allow_nan=False)


def parsed(drawing: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawing)


def one_line(*values: float, name: str = "loss") -> Series:
    return Series(name=name, steps=tuple(range(len(values))), values=values)


@given(one=numbers, other=numbers)
def test_ticks_are_few_and_enclose_the_data(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    if 0 < high - low < 1e-6 * max(abs(low), abs(high)):
        return  # closer together than labels of three digits can tell
    ticks = nice_ticks(low, high)
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert 3 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= low + slack
    assert high - slack <= ticks[-1]


def test_ticks_of_small_numbers_are_exact() -> None:
    assert nice_ticks(0, 3e-5) == [0.0, 1e-5, 2e-5, 3e-5]


def test_smoothing_keeps_constants_and_skips_gaps() -> None:
    assert smooth([2.0, math.nan, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert math.isnan(smooth([math.nan])[0])


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize(
    "values",
    [(1.0,), (0.0,), (5.0, 5.0), (1.0, math.nan, 2.0), (math.inf, 1.0, 3.0), (-1.0, 2.0), (1e-12, 1e12), (1, 2)],
    ids=str,
)
def test_line_chart_stays_within_its_box(values: tuple[float, ...], scale: Scale) -> None:
    chart = line_chart(Panel(title="Loss", series=(one_line(*values),), scale=scale, smooth=True))
    root = parsed(chart)
    assert "nan" not in chart
    assert "inf" not in chart
    for path in root.iter("path"):
        if "line" in path.attrib["class"]:
            for corner in path.attrib["d"].removeprefix("M").split("L"):
                x, y = map(float, corner.split())
                assert 0 <= x <= 520
                assert 0 <= y <= 260


@pytest.mark.parametrize("values", [(), (math.nan, math.inf)], ids=str)
def test_empty_line_chart_has_a_message(values: tuple[float, ...]) -> None:
    assert "nothing was logged" in line_chart(Panel(title="Loss", series=(one_line(*values),)))


def test_long_lines_are_thinned_and_keep_spikes() -> None:
    values = [1.0] * 100_000
    values[54_321] = 9.0
    chart = line_chart(Panel(title="Loss", series=(one_line(*values),), smooth=True))
    assert len(chart) < 60_000
    raw = next(path for path in parsed(chart).iter("path") if path.attrib["class"].startswith("raw"))
    heights = {float(corner.split()[1]) for corner in raw.attrib["d"].removeprefix("M").split("L")}
    assert len(heights) == 2


def test_line_chart_tooltips() -> None:
    chart = line_chart(Panel(title="Top-1", series=(one_line(0.25, 0.5, name="val"),), percent=True))
    assert [title.text for title in parsed(chart).iter("title")] == ["step 0\nval: 25 %", "step 1\nval: 50 %"]


def test_heatmap_shows_nonzero_counts() -> None:
    counts = np.array([[5, 0, 1], [2, 7, 0], [0, 0, 12_345]])
    root = parsed(confusion_heatmap(counts, names=["a", "b", "c"], totals=counts.sum(axis=1)))
    assert [text.text for text in root.iter("text") if "count" in text.attrib["class"]] == ["5", "1", "2", "7", "12k"]
    assert "b predicted as a: 2 (22.2%)" in [title.text for title in root.iter("title")]


def test_heatmap_of_empty_classes() -> None:
    assert (
        len(list(parsed(confusion_heatmap(np.zeros((2, 2), np.int64), names=["a", ""], totals=np.zeros(2, np.int64)))))
        == 8
    )


def test_reliability_diagram_omits_empty_bins() -> None:
    bins = calibration(torch.tensor([0.95, 0.5, 0.5]), torch.tensor([True, False, True]))
    root = parsed(reliability_diagram(bins))
    assert len([box for box in root.iter("rect") if box.attrib["class"] == "fill"]) == 2
    assert "2 images: confidence 50.0%, accuracy 50.0%" in [title.text for title in root.iter("title")]


@pytest.mark.parametrize(("fraction", "width"), [(0, "0.0"), (0.5, "50.0"), (1.0, "100.0"), (7, "100.0"), (-1, "0.0")])
def test_bar_is_clamped(fraction: float, width: str) -> None:
    assert parsed(bar(fraction))[1].attrib["width"] == width


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cat\u202egpj.exe", "cat⟨U+202E⟩gpj.exe"),
        ("a\x00b\n\x1b[31m", "a⟨U+0000⟩b⟨U+000A⟩⟨U+001B⟩[31m"),
        ("\ufeffx\u2066y\u200b", "⟨U+FEFF⟩x⟨U+2066⟩y⟨U+200B⟩"),
        ("byte \udce9", "byte ⟨U+DCE9⟩"),
        ("שלום 猫 😀 é", "שלום 猫 😀 é"),
        ("می\u200cخواهم", "می\u200cخواهم"),
    ],
)
def test_hidden_characters_are_spelled_out(name: str, expected: str) -> None:
    assert visible(name) == expected


@given(st.text(max_size=300))
def test_escaped_names_are_short_and_encodable(name: str) -> None:
    assert len(visible(name, limit=40)) <= 40
    assert not set(escape(visible(name))) & set("<>\"'")
    visible(name).encode()
