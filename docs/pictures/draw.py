"""Draw vit.svg, the way of an image through vitkit, from an image drawn on the spot.

Run it in the repository's root: .venv/bin/python docs/pictures/draw.py
"""

from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

WIDTH, HEIGHT = 1000, 436
GRID = 14
MIDDLE = 182  # the height on which the data moves from left to right

INK, QUIET, LINE, PAPER, CARD = "#1f2933", "#5b6875", "#c9d1d9", "#ffffff", "#f6f8fa"
CLASS, CLASS_PALE = "#6d4bd8", "#e9e3fb"
ATTEND, MLP, NORM = "#dbe7fb", "#fde6d3", "#e7ecf0"
SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


# The image


def drawn_image(size: tuple[int, int]) -> Tensor:
    """A sun over hills, in red, green and blue from 0 to 1."""
    y, x = torch.meshgrid(*(torch.linspace(0, 1, side) for side in size), indexing="ij")
    image = torch.stack([0.35 + 0.5 * y, 0.55 + 0.25 * y, 0.95 - 0.25 * y])
    sun = ((x - 0.68) ** 2 + (y - 0.3) ** 2 < 0.012)[None]
    far = (y > 0.62 + 0.07 * torch.sin(7 * x))[None]
    near = (y > 0.78 + 0.06 * torch.cos(5 * x + 1))[None]
    for shape, color in ((sun, (1.0, 0.85, 0.3)), (far, (0.3, 0.5, 0.42)), (near, (0.14, 0.32, 0.2))):
        image = torch.where(shape, torch.tensor(color)[:, None, None], image)
    return image


# Shapes


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    radius: float = 0,
    stroke: str = "none",
    opacity: float = 1,
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
        f'stroke="{stroke}" opacity="{opacity:g}"/>'
    )


def text(x: float, y: float, content: str, *, style: str = "word", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{content}</text>'


def sub(content: str) -> str:
    """Written a little lower; what follows is back on the line."""
    return f'<tspan class="sub" dy="4">{content}</tspan><tspan dy="-4">&#8203;</tspan>'


def sup(content: str) -> str:
    """Written a little higher, over the subscript before it."""
    return f'<tspan class="sub" dy="-7" dx="-6">{content}</tspan><tspan dy="7">&#8203;</tspan>'


def arrow(left: float, right: float, y: float = MIDDLE) -> str:
    return f'<path d="M{left:g} {y:g}H{right - 2:g}" class="arrow" marker-end="url(#tip)"/>'


def hexadecimal(color: list[float]) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in color)


def colors(image: Tensor, cells: int) -> list[list[str]]:
    """Return the mean colors of cells × cells squares, row by row."""
    means = functional.adaptive_avg_pool2d(image, cells).permute(1, 2, 0).tolist()
    return [[hexadecimal(color) for color in row] for row in means]


# The five columns


def caption(x: float, name: str, equation: str, shape: str, *, note: str) -> list[str]:
    """Draw the captions of a column: the method, its equation in the paper, and the shape of its output."""
    return [
        text(x, 48, name, style="method"),
        text(x, 69, note, style="quiet"),
        text(x, 312, equation, style="equation"),
        text(x, 336, shape, style="shape"),
    ]


def picture(image: Tensor, *, x: float, side: float) -> list[str]:
    """Draw the image, row by row in runs of one color, and the grid of patches."""
    pixels, y = 112, MIDDLE - side / 2
    step = side / pixels
    parts = ['<g shape-rendering="crispEdges">']  # no seams between rows
    for row, line in enumerate(colors(image, pixels)):
        column = 0
        for color, run in groupby(line):
            length = len(list(run))
            parts.append(rect(x + column * step, y + row * step, length * step, step, color))
            column += length
    cuts = [f"M{x + i * side / GRID:g} {y:g}v{side:g}M{x:g} {y + i * side / GRID:g}h{side:g}" for i in range(GRID + 1)]
    return [*parts, "</g>", f'<path d="{"".join(cuts)}" stroke="{CARD}" stroke-width="1.6" fill="none"/>']


INDICES = (0, 1, 2, None, 66, None, 135, None, 196)
"""Indices of the tokens that are drawn; None is a gap."""


def tokens(patches: list[str], *, x: float, positions: bool, fade: bool) -> list[str]:
    """Draw the sequence as bars: the class token, then patches in their colors."""
    parts, pitch, length, height = [], 21.5, 92, 17
    for line, index in enumerate(INDICES):
        y = MIDDLE + (line - (len(INDICES) - 1) / 2) * pitch - height / 2
        if index is None:
            parts.append(text(x + length / 2, y + 14, "⋮", style="gap"))
            continue
        opacity = 0.28 if fade and index else 1
        color = CLASS if index == 0 else patches[index - 1]
        parts.append(rect(x, y, length, height, CLASS_PALE if index == 0 else NORM, radius=4, opacity=opacity))
        parts.append(rect(x, y, 26, height, color, radius=4, opacity=opacity))
        if index:
            cells = ((cell, (index + 5 * cell * cell + cell) % 11 / 10) for cell in range(7))
            parts += [
                rect(x + 30 + cell * 8.6, y + 3.5, 6.6, 10, color, radius=1, opacity=opacity * (0.15 + 0.55 * strength))
                for cell, strength in cells
            ]
        if index == 0:
            parts.append(text(x + 59, y + 13, "class", style="token"))
        if positions:
            parts.append(text(x - 10, y + 13, str(index), style="index", anchor="end"))
    if fade:
        y = MIDDLE - (len(INDICES) - 1) / 2 * pitch - height / 2
        parts.append(
            f'<rect x="{x - 3:g}" y="{y - 3:g}" width="{length + 6:g}" height="{height + 6:g}" rx="6" fill="none" '
            f'stroke="{CLASS}" stroke-width="2"/>'
        )
    return parts


def branch(x: float, y: float, name: str, equation: str, fill: str) -> list[str]:
    """LN, then attention or MLP, added to what went around them."""
    return [
        f'<path d="M{x:g} {y:g}H{x + 176:g}" class="wire"/>',
        f'<path d="M{x + 10:g} {y:g}v-24q0 -6 6 -6H{x + 150:g}q6 0 6 6v15" class="wire"/>',
        rect(x + 22, y - 15, 38, 30, NORM, radius=6, stroke=LINE),
        text(x + 41, y + 5, "LN"),
        rect(x + 74, y - 15, 60, 30, fill, radius=6, stroke=LINE),
        text(x + 104, y + 5, name),
        f'<circle cx="{x + 156:g}" cy="{y:g}" r="9" fill="{PAPER}" stroke="{QUIET}"/>',
        f'<path d="M{x + 151:g} {y:g}h10m-5 -5v10" stroke="{QUIET}" stroke-width="1.4"/>',
        text(x + 88, y + 35, equation, style="equation"),
    ]


def encoder(*, x: float) -> list[str]:
    """The blocks, one behind the other, and the inside of the first."""
    width, height = 204, 190
    y = MIDDLE - height / 2
    parts = [rect(x + shift, y - shift, width, height, PAPER, radius=10, stroke=LINE) for shift in (8, 4, 0)]
    parts += branch(x + 14, MIDDLE - 48, "MSA", "z′ = MSA(LN(z)) + z", ATTEND)
    parts += branch(x + 14, MIDDLE + 43, "MLP", "z = MLP(LN(z′)) + z′", MLP)
    return parts


def heat(*, x: float, y: float, side: float) -> list[str]:
    """A small map of attention; the pattern is only a sign for one."""
    cells = 5
    step = side / cells
    parts = [rect(x, y, side, side, CLASS_PALE, radius=3)]
    for row in range(cells):
        for column in range(cells):
            near = 1 / (1 + (row - column) ** 2) + (0.35 if column == 0 else 0)
            parts.append(rect(x + column * step, y + row * step, step - 1, step - 1, CLASS, opacity=min(near, 1)))
    return parts


def bars(*, x: float) -> list[str]:
    """Logits of a few classes."""
    lengths, parts = (34, 58, 22, 40, 96, 44, 16, None, 30), []
    for line, length in enumerate(lengths):
        y = MIDDLE + (line - 4) * 21.5 - 8.5
        if length is None:
            parts.append(text(x + 48, y + 14, "⋮", style="gap"))
        else:
            parts.append(rect(x, y, length, 17, CLASS if length == max(filter(None, lengths)) else LINE, radius=4))
    return parts


STYLE = f"""
text {{ font-family: {SANS}; fill: {INK}; font-size: 14px }}
.method {{ font-family: {MONO}; font-weight: 700; font-size: 20px }}
.quiet {{ fill: {QUIET} }}
.equation {{ font-size: 15px; font-style: italic }}
.shape, .index, .code {{ font-family: {MONO}; fill: {QUIET} }}
.code {{ font-size: 15px; fill: {INK} }}
.index {{ font-size: 13px }}
.sub {{ font-size: 11px }}
.token {{ fill: {CLASS}; font-weight: 600; font-size: 13px }}
.gap {{ fill: {QUIET}; font-size: 18px; font-weight: 700 }}
.arrow {{ stroke: {QUIET}; stroke-width: 2; fill: none }}
.kept {{ stroke: {CLASS}; stroke-width: 2; stroke-dasharray: 4 4; fill: none }}
.wire {{ stroke: {QUIET}; stroke-width: 1.4; fill: none }}
"""


def draw() -> str:
    """The whole picture as SVG text."""
    image = drawn_image((224, 224))
    patches = [color for row in colors(image, GRID) for color in row]
    parts = [
        rect(1, 1, WIDTH - 2, HEIGHT - 2, CARD, radius=16, stroke=LINE),
        *caption(125, "images", "x", "B × 3 × 224 × 224", note="cut into 14 × 14 patches"),
        *picture(image, x=30, side=190),
        arrow(228, 262),
        *caption(
            342,
            "embed",
            f"z{sub('0')} = [x{sub('class')}; x{sub('p')}E] + E{sub('pos')}",
            "B × 197 × 768",
            note="equation 1",
        ),
        *tokens(patches, x=302, positions=True, fade=False),
        arrow(404, 440),
        *caption(558, "encode", f"z{sub('0')} → z{sub('L')}", "B × 197 × 768", note="equations 2 and 3, 12 blocks"),
        *encoder(x=450),
        arrow(674, 708),
        *caption(770, "pool", f"y = LN(z{sub('L')}{sup('0')})", "B × 768", note="equation 4"),
        *tokens(patches, x=722, positions=False, fade=True),
        arrow(826, 860),
        *caption(916, "head", "logits", "B × 1000", note="one linear layer"),
        *bars(x=872),
        '<path d="M558 346v28" class="kept"/>',
        *heat(x=542, y=380, side=33),
        text(590, 393, "capture=Capture(attention=[-1])", style="code", anchor="start"),
        text(590, 413, "any layer you choose: B × 12 × 197 × 197", style="quiet", anchor="start"),
        text(30, 393, "model(images)", style="code", anchor="start"),
        text(30, 413, "runs all four; each can be called alone", style="quiet", anchor="start"),
    ]
    tip = (
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="7" refY="5" markerWidth="5" markerHeight="5" orient="auto">'
        f'<path d="M0 0L10 5L0 10z" fill="{QUIET}"/></marker></defs>'
    )
    title = "An image is cut into patches and goes through embed, encode, pool and head to logits"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            tip,
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_name("vit.svg").write_text(draw(), encoding="utf-8")
