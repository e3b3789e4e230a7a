"""Marks go in, one drawing comes out as SVG and as PNG: boxes, dots, lines, words and pictures, in the page's colours.

Colours are names of the page's style sheet, with what they are on white where there is no page. Words come from
strangers too: file names and labels pass through `visible` and are escaped.
"""

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitkit.evaluate.plots import visible

Number = int | float
Anchor = Literal["start", "middle", "end"]
Rgb = NDArray[np.uint8]
"""Pixels, H × W × 3."""

COLOURS = {
    "ink": "#161b26",
    "soft": "#5b6478",
    "line": "#e3e6ee",
    "faint": "#f0f2f7",
    "s0": "#2f5bea",
    "s1": "#e0661a",
    "s2": "#12946f",
    "s3": "#a33fc4",
    "s4": "#b58a00",
    "s5": "#c22f5b",
}
"""The names that the style sheet knows, as they are in light."""
SERIES = ("s0", "s1", "s2", "s3", "s4", "s5")
SCALE = 2
"""Pixels of a PNG to one unit of the drawing."""


@dataclass(frozen=True)
class Mark:
    """One thing on the drawing, in both forms."""

    svg: str
    paint: Callable[[Image.Image, ImageDraw.ImageDraw], None]


@dataclass(kw_only=True)
class Canvas:
    """A drawing of a fixed size; marks lie on each other in the order they were made.

    >>> drawing = Canvas(width=100, height=40, title="one dot")
    >>> drawing.dot(50, 20, radius=4, colour="s0")
    >>> drawing.svg().count("<circle"), Image.open(io.BytesIO(drawing.png())).size
    (1, (200, 80))
    """

    width: Number
    height: Number
    title: str
    marks: list[Mark] = field(default_factory=list)

    def box(self, x: Number, y: Number, width: Number, height: Number, *, colour: str, told: str = "") -> None:
        """A filled rectangle; `told` is what hovering tells."""
        corner = [x * SCALE, y * SCALE, (x + width) * SCALE - 1, (y + height) * SCALE - 1]
        tip = f"<title>{words(told)}</title>" if told else ""
        svg = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{themed(colour)}">{tip}</rect>'
        self.marks.append(Mark(svg, lambda _, draw: draw.rectangle(corner, fill=plain(colour))))

    def dot(self, x: Number, y: Number, *, radius: Number, colour: str, told: str = "") -> None:
        """A filled circle, a little transparent so that those below it show."""
        tip = f"<title>{words(told)}</title>" if told else ""
        fill = f'fill="{themed(colour)}" fill-opacity=".75"'
        svg = f'<circle cx="{x:.5g}" cy="{y:.5g}" r="{radius:g}" {fill}>{tip}</circle>'
        corner = [(x - radius) * SCALE, (y - radius) * SCALE, (x + radius) * SCALE, (y + radius) * SCALE]

        def paint(image: Image.Image, _: ImageDraw.ImageDraw) -> None:
            over = Image.new("RGBA", image.size)
            ImageDraw.Draw(over).ellipse(corner, fill=(*rgb(plain(colour)), 191))
            image.paste(over, (0, 0), over)

        self.marks.append(Mark(svg, paint))

    def line(self, points: Sequence[tuple[Number, Number]], *, colour: str, width: Number = 1) -> None:
        """A line through points."""
        path = " ".join(f"{x:.5g},{y:.5g}" for x, y in points)
        svg = f'<polyline points="{path}" fill="none" stroke="{themed(colour)}" stroke-width="{width:g}"/>'
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        thick = max(1, round(width * SCALE))
        self.marks.append(Mark(svg, lambda _, draw: draw.line(scaled, fill=plain(colour), width=thick, joint="curve")))

    def text(
        self,
        x: Number,
        y: Number,
        content: str,
        *,
        size: Number = 12,
        colour: str = "soft",
        anchor: Anchor = "start",
        bold: bool = False,
        limit: int = 60,
    ) -> None:
        """One line of words; `y` is its base line."""
        shown = visible(content, limit=limit)
        weight = ' font-weight="600"' if bold else ""
        svg = (
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{themed(colour)}" text-anchor="{anchor}"{weight}>'
            f"{html.escape(shown)}</text>"
        )
        place = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]

        def paint(_: Image.Image, draw: ImageDraw.ImageDraw) -> None:
            font = ImageFont.load_default(size * SCALE)
            draw.text((x * SCALE, y * SCALE), shown, font=font, fill=plain(colour), anchor=place)

        self.marks.append(Mark(svg, paint))

    def picture(
        self, x: Number, y: Number, width: Number, height: Number, pixels: Rgb, *, smooth: bool = True, told: str = ""
    ) -> None:
        """An image, enlarged smoothly or with its pixels kept apart."""
        image = Image.fromarray(pixels)
        content = io.BytesIO()
        photo = smooth and min(image.size) > 64
        image.save(content, format="JPEG" if photo else "PNG", quality=88)
        kind = "jpeg" if photo else "png"
        sharp = "" if smooth else ' style="image-rendering:pixelated"'
        tip = f"<title>{words(told)}</title>" if told else ""
        svg = (
            f'<image x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" preserveAspectRatio="none"{sharp} '
            f'href="data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}">{tip}</image>'
        )
        size = max(1, round(width * SCALE)), max(1, round(height * SCALE))
        resampling = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
        corner = round(x * SCALE), round(y * SCALE)
        self.marks.append(Mark(svg, lambda whole, _: whole.paste(image.resize(size, resampling), corner)))

    def svg(self) -> str:
        """The drawing as SVG, whole by itself and in the page's colours inside a page."""
        inside = "".join(mark.svg for mark in self.marks)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'font-family="system-ui, sans-serif" aria-label="{words(self.title)}">{inside}</svg>'
        )

    def png(self) -> bytes:
        """The drawing as PNG on white, two pixels to a unit."""
        image = Image.new("RGB", (round(self.width * SCALE), round(self.height * SCALE)), "white")
        draw = ImageDraw.Draw(image)
        for mark in self.marks:
            mark.paint(image, draw)
        content = io.BytesIO()
        image.save(content, format="PNG")
        return content.getvalue()

    def _repr_svg_(self) -> str:
        """How a notebook shows it."""
        return self.svg()


def themed(colour: str) -> str:
    """A colour as SVG takes it: by the style sheet's name, or as it is.

    >>> themed("ink"), themed("#ff0000")
    ('var(--ink, #161b26)', '#ff0000')
    """
    return f"var(--{colour}, {COLOURS[colour]})" if colour in COLOURS else colour


def plain(colour: str) -> str:
    """A colour as it is in light."""
    return COLOURS.get(colour, colour)


def rgb(colour: str) -> tuple[int, int, int]:
    """The three numbers of a colour such as #ff8000."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def words(text: str) -> str:
    """Untrusted words, ready to stand in SVG."""
    return html.escape(visible(text, limit=200), quote=True)
