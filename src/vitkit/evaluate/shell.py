"""Sections go in, one HTML page comes out that is whole by itself: no network, no script but its own, any theme."""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from vitkit.evaluate.plots import escape

Section = tuple[str, str, str]
"""The name in links, the title, and the content as HTML."""


def document(*, title: str, lead: str, sections: Sequence[Section], top: str = "", script: str = "") -> str:
    """The page. Title is text from anywhere; lead, top and sections are HTML that its maker has made safe.

    >>> page = document(title="<Pets>", lead="two classes", sections=[("data", "Data", "<p>160 images</p>")])
    >>> page.startswith("<!doctype html>"), "&lt;Pets&gt;" in page, "<Pets>" in page
    (True, True, False)
    """
    links = "".join(f'<a href="#{name}">{named}</a>' for name, named, _ in sections)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{named}</h2>{content}</section>'
        for name, named, content in sections
    )
    return (
        f"{_head(title, script)}<body><header><h1><bdi>{escape(title, limit=120)}</bdi></h1>"
        f'<p class="lead">{lead}</p><nav aria-label="Sections">{links}</nav></header>'
        f"<main>{top}{body}</main>"
        f"<footer>Made by vitkit. This page is one file and needs no network.</footer>"
        f"<script>{script}</script></body></html>\n"
    )


def asset(name: str, *, package: str = "vitkit.evaluate") -> str:
    """A file that lies beside the code."""
    return resources.files(package).joinpath("assets", name).read_text(encoding="utf-8")


def _head(title: str, script: str) -> str:
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title, limit=120)}</title><style>{asset('report.css')}</style></head>"
    )


def picture_tag(content: bytes | None, *, file: str) -> str:
    """A picture in the page itself, under the name of its file; words where there is none.

    >>> picture_tag(None, file="cat.jpg")
    '<div class="picture">no picture</div>'
    """
    kinds = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}
    kind = next((kind for start, kind in kinds.items() if (content or b"").startswith(start)), None)
    if content is None or kind is None:
        return '<div class="picture">no picture</div>'
    tiny = " tiny" if kind == "png" else ""  # only very small pictures are PNG: their pixels stay square
    encoded = base64.b64encode(content).decode()
    return f'<img class="picture{tiny}" loading="lazy" alt="{escape(file)}" src="data:image/{kind};base64,{encoded}">'
