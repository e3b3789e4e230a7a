"""One data set in many layouts gives the same pictures with the same classes, and each layout is recognised."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from data.layouts import CLASSES, LAYOUTS, samples

from vitkit.data.decode import decode
from vitkit.data.source import Source
from vitkit.data.sources.detect import detect, open_data

WITHOUT_NAMES = ("IDX", "IDX gzip", "Flowers", "split folders")  # compared by the order of their classes


def pictures(sources: Iterable[Source], classes: tuple[str, ...]) -> Counter[tuple[bytes, str]]:
    return Counter(
        (np.asarray(decode(source.content(i), channels=3)).tobytes(), classes[source.labels[i]])
        for source in sources
        for i in range(len(source))
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_one_data_set_gives_the_same_samples(layout: str, tmp_path: Path) -> None:
    if layout == "parquet":
        pytest.importorskip("pyarrow")
    write, kind = LAYOUTS[layout]
    place = write(tmp_path / "a folder — ünï")
    assert detect(place) == kind
    data = open_data(place)
    assert len(data.classes) == len(CLASSES)
    if layout not in WITHOUT_NAMES:
        assert data.classes == CLASSES
    wanted = Counter((sample.pixels.tobytes(), CLASSES[sample.label]) for sample in samples())
    assert pictures(data.splits.values(), CLASSES) == wanted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_are_unique_relative_and_the_same_wherever_the_set_lies(layout: str, tmp_path: Path) -> None:
    if layout == "parquet":
        pytest.importorskip("pyarrow")
    write, kind = LAYOUTS[layout]
    here = open_data(write(tmp_path / "here"))
    there = open_data(str(write(tmp_path / "there" / "deeper")), kind=kind)
    for split, source in here.splits.items():
        names = [source.name(i) for i in range(len(source))]
        assert len(set(names)) == len(names)
        assert not any(name.startswith("/") or "\\" in name or ".." in name for name in names)
        assert names == [there.splits[split].name(i) for i in range(len(source))]
        assert source.kind == here.kind
        assert source.labels.dtype == np.int64


def test_at_least_twelve_layouts_are_compared() -> None:
    assert len(LAYOUTS) >= 12
