"""The report of an inspection: whole for every kind of model, inert whatever names come in, and alive in a browser."""

import io
import json
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from model_cases import CASES, fresh, random_vit
from PIL import Image

import vitkit
from vitkit.core.errors import ConfigError, InputError
from vitkit.core.shapes import pair
from vitkit.inspection.parts import PARTS, chosen_parts
from vitkit.inspection.report import Inspection, inspect
from vitkit.inspection.subject import Subject, class_named
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.lookup import Model

KINDS = [
    "learned_1d-stem",
    "rotary-shared",
    "relative-every_layer",
    "learned_1d-mean",
    "map-with-class-token",
    "registers",
    "distilled",
    "axial",
    "grey",
    "headless",
    "hybrid",
]
HOSTILE = '"><script>alert(1)</script>\u202e'


def loaded(model: Model, folder: Path, *, labels: list[str] | None = None):
    vitkit.save(model, folder, labels=labels)
    return vitkit.load(folder)


def photos(config, *, count: int = 2) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    height, width = pair(config.image_size)
    shape = (height, width) if config.channels == 1 else (height, width, config.channels)
    return [generator.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]


def looked_into(model: Model, folder: Path, **choices) -> Inspection:
    ready = loaded(model, folder / "model")
    images = photos(model.config)
    return inspect(Subject(model=ready, images=images, names=["a.jpg", HOSTILE]), **choices)


@pytest.mark.parametrize("case", KINDS)
def test_every_kind_of_model_has_a_whole_report(case: str, tmp_path: Path) -> None:
    found = looked_into(random_vit(CASES[case]), tmp_path)
    assert [part.name for part in found.parts] == list(PARTS)
    for part in found.parts:
        assert part.missing or part.drawings
        assert part.missing is None or len(part.missing) > 10
        for drawing in part.drawings.values():
            ElementTree.fromstring(drawing.svg())
            with Image.open(io.BytesIO(drawing.png())) as image:
                assert image.size == (round(drawing.width * 2), round(drawing.height * 2))
    written = found.write(tmp_path / "out")
    numbers = json.loads((tmp_path / "out" / "numbers.json").read_text())
    assert set(numbers["parts"]) == set(PARTS)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>alert" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert {path.suffix for path in written} == {".svg", ".png", ".json", ".html"}


def test_a_resnet_shows_what_it_has_and_says_what_it_has_not(tmp_path: Path) -> None:
    config = BiTConfig(units=(1, 1), image_size=64, classes=5)
    found = looked_into(fresh(config), tmp_path)
    there = {part.name for part in found.parts if part.missing is None}
    assert there == {"colours", "nearest", "filters", "similarity"}
    assert "a ResNet has no attention" in found.page()


def test_a_model_without_a_class_token_says_what_is_followed_instead(tmp_path: Path) -> None:
    for case, said in {"learned_1d-mean": "no class token", "map": "attention probe"}.items():
        (part,) = looked_into(random_vit(CASES[case]), tmp_path / case, only="rollout").parts
        assert said in part.text


def test_numbers_of_means_are_of_all_images_and_pictures_of_eight(tmp_path: Path) -> None:
    model = random_vit(CASES["learned_1d-stem"])
    ready = loaded(model, tmp_path)
    images = photos(model.config, count=11)
    subject = Subject(model=ready, images=images, names=[f"{number}.jpg" for number in range(11)])
    parts = {part.name: part for part in inspect(subject).parts}
    assert [part.name for part in parts.values() if part.missing] == ["hidden"]  # it is no masked model
    part = parts["distance"]
    assert part.numbers["images"] == 11
    batches = torch.cat([ready.preprocess(image) for image in images])
    expected = vitkit.inspection.attention_distance(ready, [batches])
    torch.testing.assert_close(torch.tensor(part.numbers["pixels"]), expected, rtol=0, atol=1e-3)
    assert len(subject.shown) == 8
    assert "3 more images" in Inspection(subject=subject, parts=()).page()


def test_pictures_are_what_the_model_was_given(tmp_path: Path) -> None:
    model = random_vit(CASES["learned_1d-stem"])
    ready = loaded(model, tmp_path)
    images = photos(model.config)
    subject = Subject(model=ready, images=images, names=["a", "b"])
    assert all(
        np.abs(seen.astype(int) - image).max() <= 1 for seen, image in zip(subject.pictures, images, strict=True)
    )


def test_a_class_can_be_chosen_and_layers_compared_with_another_model(tmp_path: Path) -> None:
    model, other = random_vit(CASES["learned_1d-stem"]), random_vit(CASES["registers"])
    ready = loaded(model, tmp_path / "one", labels=list("abcde"))
    beside = loaded(other, tmp_path / "two")
    assert class_named(ready, "d") == class_named(ready, "3") == 3
    with pytest.raises(InputError, match="no class 'dd'"):
        class_named(ready, "dd")
    subject = Subject(model=ready, images=photos(model.config), names=["a", "b"], chosen=3, other=beside)
    rolled, similar = inspect(subject, only="similarity,rollout").parts
    chosen = torch.tensor(rolled.numbers["relevance_chosen"])
    expected = vitkit.inspection.relevance(ready, subject.shown, classes=torch.tensor([3, 3]))
    torch.testing.assert_close(chosen, expected, rtol=0, atol=1e-5)
    assert len(similar.numbers["cka"]) == 2


def test_wrong_choices_are_named(tmp_path: Path) -> None:
    ready = loaded(random_vit(CASES["learned_1d-stem"]), tmp_path)
    with pytest.raises(InputError, match="no images"):
        Subject(model=ready, images=[], names=[])
    with pytest.raises(ConfigError, match="no part called 'rolout'") as caught:
        chosen_parts("rolout")
    assert "rollout" in str(caught.value.hint)


def test_a_notebook_shows_the_page_and_each_drawing(tmp_path: Path) -> None:
    found = looked_into(random_vit(CASES["learned_1d-stem"]), tmp_path, only="filters")
    assert found._repr_html_().startswith("<iframe srcdoc=")
    (drawing,) = found.parts[0].drawings.values()
    assert drawing._repr_svg_().startswith("<svg")


def test_the_page_comes_alive_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    found = looked_into(random_vit(CASES["learned_1d-stem"]), tmp_path, only="nearest,filters")
    found.write(tmp_path / "out")
    shown = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
            "--dump-dom",
            (tmp_path / "out" / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert shown.stdout.count("row 3, column 4</span>") == 2  # the middle of 4×6 patches, written by the page's script
    assert "CONSOLE" not in shown.stderr
