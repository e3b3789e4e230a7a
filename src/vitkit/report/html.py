"""Report pages: self-contained HTML from Jinja templates, without network access and with a single inline script.

Names of classes, files and models are untrusted. Templates escape everything; `visible` also spells out control and
direction characters, and the content security policy of a page allows only its own script.
"""

import base64
import hashlib
import io
import unicodedata
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from vitkit.core.errors import DataError
from vitkit.core.formatting import format_duration, format_number, format_percent
from vitkit.data.dataset import ImageSource
from vitkit.data.decode import decode
from vitkit.data.verify import read_image


class Section(NamedTuple):
    """A section of a page."""

    id: str
    title: str
    body: Markup


class Card(NamedTuple):
    """A number at the top of a page."""

    label: str | Markup
    value: str
    detail: str | Markup = ""


def render_page(
    *,
    title: str,
    lead: str | Markup,
    sections: Sequence[Section],
    cards: Sequence[Card] = (),
    notices: Sequence[str] = (),
    top: str | Markup = "",
    script: str = "",
    refresh: int | None = None,
) -> str:
    """Render a page. Strings are escaped, `Markup` is inserted unchanged. It reloads itself every `refresh` seconds.

    >>> page = render_page(title="<Pets>", lead="two classes", sections=[Section("data", "Data", Markup("<p>160</p>"))])
    >>> page.startswith("<!doctype html>"), "&lt;Pets&gt;" in page, "<Pets>" in page
    (True, True, False)
    """
    content: dict[str, object] = {"title": title, "lead": lead, "sections": sections, "cards": cards}
    content |= {"notices": notices, "top": top, "refresh": refresh}
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assets = {"css": Markup(asset("report.css")), "script": Markup(script), "script_hash": script_hash}
    return _environment().get_template("page.html").render(content | assets)


def template_macros(name: str) -> Any:
    """Return the macros of a template; each returns `Markup`."""
    return _environment().get_template(name).module


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vitkit.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bar": bar,
        "interval": format_interval,
        "duration": format_duration,
        "name": name_tag,
        "number": format_number,
        "percent": format_percent,
        "visible": visible,
        "picture": picture_url,
        "polyline": lambda points: "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points),
        "px": "{:.1f}".format,
    }
    return environment


def asset(name: str) -> str:
    """Return the text of a style sheet or script of the package."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def visible(text: str, limit: int = 60) -> str:
    """Spell out control and direction characters, and shorten a long text in its middle.

    >>> visible("cat\\u202egnp.exe"), visible("a" * 50 + ".jpg", limit=12)
    ('cat⟨U+202E⟩gnp.exe', 'aaaaaaa….jpg')
    """
    spelled = "".join(f"⟨U+{ord(each):04X}⟩" if _is_hidden(each) else each for each in text)
    if len(spelled) <= limit:
        return spelled
    tail = limit // 3
    return f"{spelled[: limit - tail - 1]}…{spelled[-tail:]}"


def _is_hidden(character: str) -> bool:
    joiners = "\u200c\u200d"  # needed by Persian, Indic scripts and emoji, and harmless
    return unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"} and character not in joiners


def name_tag(name: str, limit: int = 60) -> Markup:
    """Return an untrusted name as HTML, isolated from the text direction around it, with a tooltip if shortened.

    >>> str(name_tag("<i>"))
    '<bdi>&lt;i&gt;</bdi>'
    """
    tooltip = Markup(' title="{}"').format(visible(name, limit=400)) if len(name) > limit else Markup()
    return Markup("<bdi{}>{}</bdi>").format(tooltip, visible(name, limit=limit))


def bar(fraction: float) -> Markup:
    """Draw a small bar that is filled by a fraction."""
    filled = min(max(fraction, 0.0), 1.0) * 100
    return Markup(
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="rail" width="100" height="8"/><rect class="fill" width="{filled:.1f}" height="8"/></svg>'
    )


def format_interval(interval: tuple[float, float] | None) -> str:
    """Format an interval of a fraction; empty if there is none."""
    if interval is None:
        return ""
    return f"{interval[0] * 100:.1f}–{interval[1] * 100:.1f} %"


def read_picture(source: ImageSource, index: int, *, side: int) -> Image.Image | None:
    """Return an image of at most `side` pixels; None if it was removed, or if it is neither color nor gray."""
    try:
        picture = decode(read_image(source, index), draft_size=(side, side))
    except DataError:
        return None
    assert isinstance(picture, Image.Image)  # of three channels
    picture.thumbnail((side, side))
    return picture


def thumbnail(image: Image.Image, *, side: int = 160) -> bytes:
    """Return a small JPEG of the pixels alone, or a PNG if the image is tiny.

    >>> small = Image.open(io.BytesIO(thumbnail(Image.new("RGB", (400, 200)))))
    >>> small.format, small.size
    ('JPEG', (160, 80))
    """
    small = image.convert("L" if image.mode in {"1", "L"} else "RGB")
    small.thumbnail((side, side))
    # Rebuilt from pixels: a copy would carry the EXIF data of the photo, including its GPS position.
    clean = Image.frombytes(small.mode, small.size, small.tobytes())
    content = io.BytesIO()
    clean.save(content, format="PNG" if max(small.size) <= 64 else "JPEG", quality=82)
    return content.getvalue()


def picture_url(content: bytes | None) -> str | None:
    """Return a PNG or JPEG file as a data URL; None for anything else."""
    for signature, kind in ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg")):
        if content is not None and content.startswith(signature):
            return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return None


def data_url(pixels: NDArray[np.uint8]) -> str:
    """Return H × W × 3 pixels as a JPEG data URL, or PNG if they are few."""
    content = io.BytesIO()
    kind = "jpeg" if min(pixels.shape[:2]) > 64 else "png"
    Image.fromarray(np.ascontiguousarray(pixels)).save(content, format=kind, quality=88)
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
