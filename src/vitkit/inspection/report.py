"""The parts of an inspection go in, a folder comes out: `report.html`, every drawing as PNG and SVG, the numbers."""

import base64
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitkit.core.files import as_text, write_bytes
from vitkit.core.shapes import Float, Tensor
from vitkit.evaluate.plots import escape
from vitkit.evaluate.shell import asset, document
from vitkit.inspection.canvas import Canvas, Rgb
from vitkit.inspection.part import Part
from vitkit.inspection.parts import chosen_parts, make_part
from vitkit.inspection.subject import Subject

TOP = 5
ENLARGED = 1.15
"""Pixels of the page to one unit of a drawing."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What was found out about a model; a notebook shows the page."""

    subject: Subject
    parts: tuple[Part, ...]

    def page(self) -> str:
        """The report as one HTML page that needs nothing else."""
        return document(
            title=f"Inside {self.subject.model.name}",
            lead=lead(self.subject),
            top=answers(self.subject),
            sections=[(part.name, part.title, section(part, self.subject)) for part in self.parts],
            script=asset("inspect.js", package="vitkit.inspection"),
        )

    def numbers(self) -> dict[str, Any]:
        """All numbers, ready for JSON."""
        return {
            "model": self.subject.model.name,
            "images": [
                {"file": name, "predictions": predictions(self.subject, image)}
                for image, name in enumerate(self.subject.titles)
            ],
            "parts": {
                part.name: {"missing": part.missing} if part.missing else dict(part.numbers) for part in self.parts
            },
        }

    def write(self, folder: Path) -> list[Path]:
        """Write everything into a folder, each file whole or not at all, and name what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, content in self._files():
            write_bytes(folder / name, content)
            written.append(folder / name)
        return written

    def _files(self) -> Iterator[tuple[str, bytes]]:
        for part in self.parts:
            for name, drawing in part.drawings.items():
                yield f"{name}.svg", as_text(drawing.svg()).encode()
                yield f"{name}.png", drawing.png()
        yield "numbers.json", as_text(json.dumps(self.numbers(), indent=None, ensure_ascii=False)).encode()
        yield "report.html", as_text(self.page()).encode()

    def _repr_html_(self) -> str:
        """How a notebook shows it: in a frame, since the page has a style of its own."""
        return f'<iframe srcdoc="{escape_all(self.page())}" style="width:100%;height:720px;border:0"></iframe>'


def inspect(subject: Subject, *, only: str | None = None) -> Inspection:
    """Look inside a model: all parts, or those in a list such as `rollout,distance`."""
    return Inspection(subject=subject, parts=tuple(make_part(name, subject) for name in chosen_parts(only)))


def escape_all(page: str) -> str:
    """A page as the value of an attribute."""
    return page.replace("&", "&amp;").replace('"', "&quot;")


def lead(subject: Subject) -> str:
    """What was looked at, in one line."""
    parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    images = f"{len(subject.images):,} image{'s' if len(subject.images) > 1 else ''}"
    return f"{escape(subject.model.name)}, {parameters:,} parameters, on {images}"


def predictions(subject: Subject, image: int) -> list[dict[str, Any]]:
    """The likeliest classes of an image; none where the model has no head."""
    if subject.model.config.classes == 0:
        return []
    best = subject.probabilities[image].topk(min(TOP, subject.probabilities.shape[1]))
    return [
        {"label": subject.model.labels[int(label)], "probability": round(float(share), 6)}
        for share, label in zip(best.values, best.indices, strict=True)
    ]


def answers(subject: Subject) -> str:
    """The images with what the model says of them."""
    items = []
    for image, picture in enumerate(subject.pictures):
        likely = "".join(
            f'<div class="said"><bdi>{escape(each["label"], limit=40)}</bdi>'
            f'<span class="share">{each["probability"]:.1%}</span></div>'
            for each in predictions(subject, image)[:3]
        )
        name = escape(subject.titles[image], limit=40)
        items.append(
            f'<li><img class="picture" src="{data_address(picture)}" alt="{name}">{likely}'
            f'<div class="file"><bdi>{name}</bdi></div></li>'
        )
    more = len(subject.images) - len(items)
    note = f'<p class="about">{more:,} more images count in the means and are not drawn.</p>' if more else ""
    return f'<section><ul class="gallery">{"".join(items)}</ul>{note}</section>'


def section(part: Part, subject: Subject) -> str:
    """A part as HTML."""
    if part.missing:
        return f'<p class="empty">Not for this model: {escape(part.missing, limit=300)}</p>'
    if part.likeness:
        shown = "".join(pointable(each, subject, image) for image, each in enumerate(part.likeness))
        return f'<p class="about">{escape(part.text, limit=2000)}</p><div class="pointables">{shown}</div>'
    drawings = "".join(figure(drawing, captioned=len(part.drawings) > 1) for drawing in part.drawings.values())
    return f'<p class="about">{escape(part.text, limit=2000)}</p><div class="drawings">{drawings}</div>'


def figure(drawing: Canvas, *, captioned: bool) -> str:
    """A drawing at the size it was made for, not as wide as the page."""
    caption = f"<figcaption><bdi>{escape(drawing.title, limit=120)}</bdi></figcaption>" if captioned else ""
    size = f"max-width:{drawing.width * ENLARGED:.0f}px"
    return f'<figure class="drawing" style="{size}">{caption}{drawing.svg()}</figure>'


def pointable(likeness: Float[Tensor, "rows columns rows2 columns2"], subject: Subject, image: int) -> str:
    """A picture whose patches can be pointed at; the likeness of each pair of patches lies in it."""
    rows, columns = likeness.shape[:2]
    amounts = (likeness.clamp(0, 1) * 255).round().byte().contiguous().cpu().numpy().tobytes()
    name = escape(subject.titles[image], limit=40)
    return (
        f'<figure class="alike" tabindex="0" role="img" aria-label="patches of {name}" data-rows="{rows}" '
        f'data-columns="{columns}" data-likeness="{base64.b64encode(amounts).decode()}">'
        f'<div class="stage"><img src="{data_address(subject.pictures[image])}" alt=""><canvas></canvas>'
        f'<span class="here"></span></div><figcaption><bdi>{name}</bdi><span class="said"></span></figcaption></figure>'
    )


def data_address(pixels: Rgb) -> str:
    """A picture inside the page."""
    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(content, format="JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


def shown_names(images: Sequence[Path]) -> list[str]:
    """File names, with their folders where two would be called the same.

    >>> shown_names([Path("a/1.jpg"), Path("b/1.jpg"), Path("b/2.jpg")])
    ['a/1.jpg', 'b/1.jpg', '2.jpg']
    """
    short = [image.name for image in images]
    return [f"{image.parent.name}/{image.name}" if short.count(image.name) > 1 else image.name for image in images]
