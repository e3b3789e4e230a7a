"""Run report: complete, escaped and self-contained."""

import base64
import dataclasses
import hashlib
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
import torch
from PIL import Image

from vitkit.evaluation.evaluation import EvaluationResult, evaluate_logits
from vitkit.report.charts import Panel, Series
from vitkit.report.html import thumbnail
from vitkit.report.run import ComparisonRow, MistakeExample, ReportData, RunReport, render_run_report

VOID = {"meta", "img", "br", "rect", "path", "circle"}
HOSTILE = (
    "<script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "' onload='alert(1)",
    "</title></style></script><img src=x onerror=alert(1)>",
    "]]><svg/onload=alert(1)>",
    "evil\u202egpj.exe",
    "null\x00 bell\x07 escape\x1b[31m",
    "x" * 5000,
    "lone \udce9 surrogate",
    "&lt;b&gt;",
)


class Page(HTMLParser):
    """Elements, text, styles and scripts of a page; every element must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.styles = ""
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag
        elif self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "style":
            self.styles += data
        elif inside == "script":
            self.scripts.append(data)
        else:
            self.text += data

    def count(self, tag: str, **having: str) -> int:
        return sum(
            name == tag and all(attributes.get(key) == value for key, value in having.items())
            for name, attributes in self.elements
        )


def evaluate_random(classes: tuple[str, ...], *, images: int = 200) -> EvaluationResult:
    labels = torch.arange(images) % len(classes)
    logits = torch.randn(images, len(classes))
    logits[torch.arange(images), labels] += 1.5
    return evaluate_logits(logits, labels, labels=classes)


def picture(width: int = 200) -> bytes:
    return thumbnail(Image.new("RGB", (width, width), "teal"))


def a_report(classes: tuple[str, ...] = ("cat", "dog", "owl", "bee", "elk", "fox", "hen")) -> RunReport:
    evaluation = evaluate_random(classes)
    line = Series(name="train", steps=tuple(range(50)), values=tuple(2.0 / (1 + step) for step in range(50)))
    mistakes = [
        MistakeExample(
            picture=picture(),
            file=f"test/{classes[mistake.target]}/{mistake.index}.jpg",
            target=classes[mistake.target],
            predicted=classes[mistake.predicted],
            probability=mistake.probability,
            target_probability=mistake.target_probability,
        )
        for mistake in evaluation.mistakes(6)
    ]
    return RunReport(
        title="Pets, from scratch",
        model="Ti/16",
        parameters=5_526_346,
        data=ReportData(layout="class folders", source="pets", classes=classes, counts={"train": 800, "test": 200}),
        config='[optimizer]\nname = "adam"\n',
        curves=(Panel(title="Loss", series=(line,), smooth=True), Panel(title="Learning rate", series=(line,))),
        evaluations={"val": evaluate_random(classes, images=90), "test": evaluation},
        mistakes=tuple(mistakes),
        comparison=(ComparisonRow(label="from scratch", top1=0.5), ComparisonRow(label="after fractals", top1=0.75)),
        compute=(("exaFLOPs of the run", "0.31"), ("images/s", "412")),
        speed=(Panel(title="Images a second", series=(line,)),),
        wall_time="18 min",
        environment=(("torch", "2.13.0"),),
        bad_files=3,
        notes=("Stopped early.",),
        next_steps=(("Name your own images", "vitkit predict runs/pets photo.jpg"),),
    )


def hostile_report() -> RunReport:
    report = a_report(HOSTILE)
    evil = " ".join(HOSTILE[:7]) + HOSTILE[8]
    line = Series(name=evil, steps=(1, 2), values=(1.0, 2.0))
    return dataclasses.replace(
        report,
        title=evil,
        model=evil,
        data=ReportData(layout=evil, source=evil, classes=HOSTILE, counts={evil: 3}),
        config=evil,
        curves=(Panel(title=evil, series=(line,)),),
        evaluations={evil: report.evaluations["test"], HOSTILE[0]: report.evaluations["val"]},
        comparison=(ComparisonRow(label=evil, top1=0.5, columns={evil: evil}),),
        compute=((evil, evil),),
        wall_time=evil,
        environment=((evil, evil),),
        notes=(evil,),
        next_steps=((evil, evil),),
    )


def test_page_has_every_section() -> None:
    report = a_report()
    page = Page(render_run_report(report))
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    expected = "curves comparison splits confusion calibration classes mistakes compute data configuration next"
    assert sections == expected.split()
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links == [f"#{name}" for name in sections]
    evaluation = report.evaluations["test"]
    for text in (
        "Pets, from scratch",
        f"{evaluation.top1 * 100:.1f} %",
        f"{evaluation.ece * 100:.1f} %",
        "5,526,346",
        "18 min",
        "3 files could not be read",
        "Stopped early.",
        "after fractals",
        "exaFLOPs of the run",
        'name = "adam"',
        "vitkit predict runs/pets photo.jpg",
        "2.13.0",
        *report.data.classes,
    ):
        assert text in page.text
    assert page.count("figure") == 3
    assert page.count("svg", role="img") == 5
    assert page.count("img") == 6
    assert page.count("td", **{"class": "bar-cell wide"}) == 2 + 7


def test_equal_reports_give_equal_pages() -> None:
    report = a_report()
    assert render_run_report(report) == render_run_report(report)


@pytest.mark.parametrize("report", [a_report, hostile_report])
def test_page_has_no_external_references(report: Callable[[], RunReport]) -> None:
    text = render_run_report(report())
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form", "use", "image", "audio", "video"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in {"src", "href", "srcset", "action", "xlink:href", "data", "poster"}:
                assert (value or "").startswith(("#", "data:image/"))
            if name == "style":
                assert "url(" not in (value or "")
    assert "@import" not in page.styles
    assert not re.search(r"url\((?!data:)", page.styles)
    assert not re.search(r"https?://", page.styles + "".join(page.scripts))


@pytest.mark.parametrize("report", [a_report, hostile_report])
def test_policy_allows_only_the_own_script(report: Callable[[], RunReport]) -> None:
    page = Page(render_run_report(report()))
    assert len(page.scripts) == 1
    assert page.count("script") == 1
    policy = next(one["content"] for tag, one in page.elements if tag == "meta" and "http-equiv" in one)
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in (policy or "")
    assert (policy or "").startswith("default-src 'none';")


def test_hostile_names_stay_text() -> None:
    text = render_run_report(hostile_report())
    page = Page(text)
    text.encode()
    assert "<script>alert(1)</script>" in page.text
    assert "evil⟨U+202E⟩gpj.exe" in page.text
    assert "⟨U+0000⟩" in page.text
    assert "&lt;b&gt;" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)
    assert "x" * 500 not in text
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in Page(render_run_report(a_report())).elements}


def test_page_without_evaluation() -> None:
    page = Page(render_run_report(dataclasses.replace(a_report(), evaluations={}, mistakes=())))
    assert "accuracy was not measured" in page.text
    assert page.count("section", id="confusion") == 0
    assert "Top-1 on" not in page.text


def test_page_with_only_a_title() -> None:
    data = ReportData(layout="unlabeled tree", source="photos", classes=(), counts={})
    page = Page(render_run_report(RunReport(title="Run", model="Ti/16", parameters=1, data=data, config="")))
    assert "Nothing was logged" in page.text
    assert "Nothing was measured" in page.text


def test_page_prefers_the_test_split() -> None:
    report = a_report()
    assert "Top-1 on test" in Page(render_run_report(report)).text
    only = dataclasses.replace(report, evaluations={"val": report.evaluations["val"]})
    page = Page(render_run_report(only))
    assert "Top-1 on val" in page.text
    assert page.count("section", id="splits") == 0


def test_most_confused_of_many_classes_are_drawn() -> None:
    classes = tuple(f"class-{label:03}" for label in range(120))
    labels = torch.arange(1200) % 120
    logits = torch.nn.functional.one_hot(labels, 120).float() * 9
    logits[labels == 117, 3] = 20.0  # ten images of one class, predicted as one other
    evaluation = evaluate_logits(logits, labels, labels=classes)
    text = render_run_report(dataclasses.replace(a_report(), evaluations={"val": evaluation}, mistakes=()))
    page = Page(text)
    assert sum("cell" in (one.get("class") or "") for tag, one in page.elements if tag == "rect") == 30 * 30
    assert "class-117 predicted as class-003: 10 (100.0%)" in page.text
    assert all(name in page.text for name in classes)


def test_two_classes_and_a_single_point() -> None:
    report = a_report(("cat", "dog"))
    point = Series(name="train", steps=(1,), values=(0.5,))
    page = Page(render_run_report(dataclasses.replace(report, curves=(Panel(title="Loss", series=(point,)),))))
    assert page.count("circle") == 1
    assert "Most confused pairs" not in page.text
    assert "Top-5" not in page.text.split("Curves", 2)[1]


def test_page_of_a_perfect_model() -> None:
    perfect = evaluate_logits(torch.eye(3) * 20, torch.arange(3), labels=("a", "b", "c"))
    page = Page(
        render_run_report(dataclasses.replace(a_report(), evaluations={"test": perfect}, mistakes=(), comparison=()))
    )
    assert "every image was classified correctly" in page.text
    assert "No image was predicted as another class" in page.text
    assert "95 %: 43.9–100.0 %" in page.text  # three images prove little


@pytest.mark.parametrize("content", [None, b"", b"<svg onload=alert(1)>", b"GIF89a"])
def test_only_png_and_jpeg_are_embedded(content: bytes | None) -> None:
    report = a_report()
    mistake = dataclasses.replace(report.mistakes[0], picture=content)
    page = Page(render_run_report(dataclasses.replace(report, mistakes=(mistake,))))
    assert page.count("img") == 0
    assert "no picture" in page.text


def test_thumbnail_has_no_metadata() -> None:
    photo = Image.effect_noise((600, 300), 50).convert("RGB")
    exif = photo.getexif()
    exif[0x010E] = "taken at home"
    exif.get_ifd(0x8825)[1] = "N"
    stored = io.BytesIO()
    photo.save(stored, format="JPEG", exif=exif, comment=b"taken at home")
    assert b"taken at home" in stored.getvalue()
    small = thumbnail(Image.open(stored), side=100)
    with Image.open(io.BytesIO(small)) as image:
        assert image.size == (100, 50)
        assert not image.getexif()
    assert b"taken at home" not in small
    assert b"Exif" not in small


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_thumbnail_of_every_mode(mode: str) -> None:
    with Image.open(io.BytesIO(thumbnail(Image.new(mode, (8, 8))))) as image:
        assert (image.format, image.size) == ("PNG", (8, 8))
