"""`inspect`: images in every form, figures by name, the page in notebooks, and errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api.tiny import make_model, make_pairs
from matplotlib.figure import Figure
from PIL import Image

import vitkit
from vitkit.core.errors import ConfigError, DataError, InputError, UnknownNameError
from vitkit.results import InspectionResult

IMAGE = make_pairs(1)[0][0]


def inspect(*arguments: Any, **options: Any) -> InspectionResult:
    return vitkit.inspect(*arguments, device="cpu", progress=False, **options)


def test_every_form_of_an_image_is_inspected(tmp_path: Path) -> None:
    Image.fromarray(IMAGE).save(tmp_path / "a.png")
    forms = [IMAGE, Image.fromarray(IMAGE), (tmp_path / "a.png").read_bytes(), tmp_path / "a.png", str(tmp_path)]
    results = [inspect(make_model(), form, only=["distance"]) for form in forms]
    assert all(result.numbers == results[0].numbers for result in results)
    assert [result.context.names for result in results] == [["image-00001"]] * 3 + [["a.png"]] * 2
    assert inspect(make_model(), forms[:2], only=["distance"]).context.names == ["image-00001", "image-00002"]


def test_figures_and_page() -> None:
    result = inspect(make_model(), IMAGE, only=["rollout", "distance", "reconstruction"])
    assert isinstance(result.figure("distance"), Figure)
    assert result.plot()._repr_png_().startswith(b"\x89PNG")
    assert isinstance(result.plot("distance"), Figure)
    assert result._repr_html_().startswith("<iframe srcdoc=")
    assert list(result.skipped) == ["reconstruction"]
    assert result.warnings[0].startswith("skipped reconstruction: ")
    assert repr(result) == f"InspectionResult(model={make_model().name}, images=1, sections=rollout, distance)"
    for call in (result.figure, result.plot):
        with pytest.raises(UnknownNameError, match="distance"):
            call("distances")


def test_labels_are_names_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    model = make_model()
    for labels in (["a", "b", "c"], tmp_path / "labels.txt", str(tmp_path / "labels.txt")):
        result = inspect(model, IMAGE, only=["rollout"], labels=labels, target="b")
        assert {each["label"] for each in result.to_dict()["images"][0]["predictions"]} == {"a", "b", "c"}
    assert model.labels == ("cat", "dog", "owl")  # the model itself is not changed
    with pytest.raises(ConfigError, match="not the labels of the model"):
        inspect(model, IMAGE, labels=["a"])


def test_wrong_images_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images in this directory"):
        inspect(make_model(), tmp_path)
    with pytest.raises(DataError, match="URLs are not opened"):
        inspect(make_model(), "https://example.org/cat.jpg")
    with pytest.raises(InputError, match="no images to inspect"):
        inspect(make_model(), [])
    with pytest.raises(DataError, match="not an image"):
        inspect(make_model(), np.zeros((2, 2), np.float32), only=["distance"])
