"""Inspection report: every kind of model, escaping, and the page in Chromium."""

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
from vitkit.core.sizes import pair
from vitkit.model.config import BiTConfig
from vitkit.report.inspection import InspectionResult, inspect_context, select_sections
from vitkit.report.inspection_context import InspectionContext, find_class
from vitkit.report.inspection_sections import SECTIONS
from vitkit.zoo.registry import Model

KINDS = [
    "learned_1d-stem",
    "rotary-shared",
    "relative-every_layer",
    "learned_1d-mean",
    "map-with-class-token",
    "registers",
    "distilled",
    "axial",
    "gray",
    "headless",
    "hybrid",
]
HOSTILE = '"><script>alert(1)</script>\u202e'


def loaded(model: Model, folder: Path, *, labels: list[str] | None = None):
    vitkit.save(model, folder, labels=labels)
    return vitkit.load(folder)


def random_images(config, *, count: int = 2) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    height, width = pair(config.image_size)
    shape = (height, width) if config.channels == 1 else (height, width, config.channels)
    return [generator.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]


def inspect_model(model: Model, folder: Path, **choices) -> InspectionResult:
    ready = loaded(model, folder / "model")
    images = random_images(model.config)
    return inspect_context(InspectionContext(model=ready, images=images, names=["a.jpg", HOSTILE]), **choices)


@pytest.mark.parametrize("case", KINDS)
def test_every_model_kind_has_all_sections(case: str, tmp_path: Path) -> None:
    result = inspect_model(random_vit(CASES[case]), tmp_path)
    assert [section.name for section in result.sections] == list(SECTIONS)
    for section in result.sections:
        assert section.missing or section.drawings
        assert section.missing is None or len(section.missing) > 10
    page = result.to_html()
    assert "<script>alert" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")


@pytest.mark.parametrize("case", ["learned_1d-stem", "gray"])
def test_report_files_are_complete_and_valid(case: str, tmp_path: Path) -> None:
    result = inspect_model(random_vit(CASES[case]), tmp_path)
    paths = result.write(tmp_path / "out")
    assert {path.suffix for path in paths} == {".svg", ".png", ".json", ".html"}
    drawings = {name: drawing for section in result.sections for name, drawing in section.drawings.items()}
    assert {path.stem for path in paths if path.suffix == ".png"} == set(drawings)
    for name, drawing in drawings.items():
        ElementTree.fromstring((tmp_path / "out" / f"{name}.svg").read_text())
        with Image.open(tmp_path / "out" / f"{name}.png") as image:
            assert abs(image.width - drawing.width * 2) <= 1
    assert set(json.loads((tmp_path / "out" / "numbers.json").read_text())["sections"]) == set(SECTIONS)


def test_resnet_report_skips_attention(tmp_path: Path) -> None:
    config = BiTConfig(units=(1, 1), image_size=64, num_classes=5)
    result = inspect_model(fresh(config), tmp_path)
    names = {part.name for part in result.sections if part.missing is None}
    assert names == {"colors", "patch-similarity", "filters", "similarity"}
    assert "a ResNet has no attention" in result.to_html()


def test_rollout_text_names_the_followed_row(tmp_path: Path) -> None:
    for case, text in {"learned_1d-mean": "no class token", "map": "attention probe"}.items():
        (part,) = inspect_model(random_vit(CASES[case]), tmp_path / case, only=["rollout"]).sections
        assert text in part.text


def test_means_use_all_images_and_figures_eight(tmp_path: Path) -> None:
    model = random_vit(CASES["learned_1d-stem"])
    ready = loaded(model, tmp_path)
    images = random_images(model.config, count=11)
    context = InspectionContext(model=ready, images=images, names=[f"{number}.jpg" for number in range(11)])
    parts = {part.name: part for part in inspect_context(context).sections}
    assert [part.name for part in parts.values() if part.missing] == ["reconstruction"]  # it is no masked model
    part = parts["distance"]
    assert part.numbers["images"] == 11
    batches = torch.cat([ready.preprocess(image) for image in images])
    expected = vitkit.inspection.attention_distance(ready, [batches])
    torch.testing.assert_close(torch.tensor(part.numbers["pixels"]), expected, rtol=0, atol=1e-3)
    assert len(context.drawn) == 8
    assert "3 more images" in InspectionResult(context=context, sections=()).to_html()


def test_pictures_are_the_model_input(tmp_path: Path) -> None:
    model = random_vit(CASES["learned_1d-stem"])
    ready = loaded(model, tmp_path)
    images = random_images(model.config)
    context = InspectionContext(model=ready, images=images, names=["a", "b"])
    assert all(
        np.abs(picture.astype(int) - image).max() <= 1 for picture, image in zip(context.pictures, images, strict=True)
    )


def test_target_class_and_other_model(tmp_path: Path) -> None:
    model, other = random_vit(CASES["learned_1d-stem"]), random_vit(CASES["registers"])
    ready = loaded(model, tmp_path / "one", labels=list("abcde"))
    beside = loaded(other, tmp_path / "two")
    assert find_class(ready, "d") == find_class(ready, "3") == 3
    with pytest.raises(InputError, match="no class 'dd'"):
        find_class(ready, "dd")
    context = InspectionContext(
        model=ready, images=random_images(model.config), names=["a", "b"], target=3, other=beside
    )
    rolled, similar = inspect_context(context, only=["similarity", "rollout"]).sections
    chosen = torch.tensor(rolled.numbers["relevance_target"])
    expected = vitkit.inspection.relevance(ready, context.drawn, classes=torch.tensor([3, 3]))
    torch.testing.assert_close(chosen, expected, rtol=0, atol=1e-5)
    assert len(similar.numbers["cka"]) == 2


def test_progress_counts_sections_and_images(tmp_path: Path) -> None:
    ready, calls = loaded(random_vit(CASES["learned_1d-stem"]), tmp_path / "model"), list[tuple[str, int, int]]()
    context = InspectionContext(
        model=ready,
        images=random_images(ready.config, count=10),
        names=[f"{number}.jpg" for number in range(10)],
        progress=lambda task, done, total: calls.append((task, done, total)),
    )
    inspect_context(context, only=["distance", "filters"])
    images = [("attention distance", done, 10) for done in (0, 8, 10)]
    assert calls == [("inspecting", 0, 2), *images, ("inspecting", 1, 2), ("inspecting", 2, 2)]


def test_invalid_choices_are_rejected(tmp_path: Path) -> None:
    ready = loaded(random_vit(CASES["learned_1d-stem"]), tmp_path)
    with pytest.raises(InputError, match="no images"):
        InspectionContext(model=ready, images=[], names=[])
    with pytest.raises(ConfigError, match="no section called 'rolout'") as caught:
        select_sections(["rolout"])
    assert "rollout" in str(caught.value.hint)


def test_notebook_representations(tmp_path: Path) -> None:
    found = inspect_model(random_vit(CASES["learned_1d-stem"]), tmp_path, only=["filters"])
    assert found._repr_html_().startswith("<iframe srcdoc=")
    (drawing,) = found.sections[0].drawings.values()
    assert drawing.to_svg().startswith("<svg")


def test_page_script_runs_in_chromium(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    found = inspect_model(random_vit(CASES["learned_1d-stem"]), tmp_path, only=["patch-similarity", "filters"])
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
