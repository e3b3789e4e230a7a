"""One dataset in every layout: the same images and classes, and the right detection."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from data.layouts import CLASSES, LAYOUTS, samples

from vitkit.data.dataset import ImageSource
from vitkit.data.decode import decode
from vitkit.data.layouts.registry import detect_layout, open_dataset

WITHOUT_NAMES = ("IDX", "IDX gzip", "Flowers", "split folders")  # compared by the order of their classes


def pictures(sources: Iterable[ImageSource], classes: tuple[str, ...]) -> Counter[tuple[bytes, str]]:
    return Counter(
        (np.asarray(decode(source.read(i), channels=3)).tobytes(), classes[source.labels[i]])
        for source in sources
        for i in range(len(source))
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_layouts_give_the_same_samples(name: str, tmp_path: Path) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow")
    write, layout = LAYOUTS[name]
    place = write(tmp_path / "a folder — ünï")
    assert detect_layout(place) == layout
    data = open_dataset(place)
    assert len(data.classes) == len(CLASSES)
    if name not in WITHOUT_NAMES:
        assert data.classes == CLASSES
    wanted = Counter((sample.pixels.tobytes(), CLASSES[sample.label]) for sample in samples())
    assert pictures(data.splits.values(), CLASSES) == wanted


@pytest.mark.parametrize("name", LAYOUTS)
def test_names_are_unique_and_independent_of_the_path(name: str, tmp_path: Path) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow")
    write, layout = LAYOUTS[name]
    here = open_dataset(write(tmp_path / "here"))
    there = open_dataset(str(write(tmp_path / "there" / "deeper")), layout=layout)
    for split, source in here.splits.items():
        names = [source.name(i) for i in range(len(source))]
        assert len(set(names)) == len(names)
        assert not any(name.startswith("/") or "\\" in name or ".." in name for name in names)
        assert names == [there.splits[split].name(i) for i in range(len(source))]
        assert source.layout == here.layout
        assert source.labels.dtype == np.int64


def test_at_least_twelve_layouts_are_compared() -> None:
    assert len(LAYOUTS) >= 12
