"""Inspection report: `report.html`, every figure as PNG and SVG, and the numbers."""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from matplotlib.figure import Figure

from vitkit.core.errors import ConfigError, UnknownNameError, did_you_mean, summarize
from vitkit.core.files import escape_surrogates, write_bytes
from vitkit.core.formatting import format_plural
from vitkit.core.result import Result
from vitkit.core.signals import start_task
from vitkit.inspection.attention import NotApplicableError
from vitkit.report.figures import save_png
from vitkit.report.html import Section, asset, data_url, render_page, template_macros, visible
from vitkit.report.inspection_context import InspectionContext, InspectionSection
from vitkit.report.inspection_sections import SECTIONS


def select_sections(only: Sequence[str] | None) -> list[str]:
    """Return the names of the requested sections in the order of the report; all by default.

    >>> select_sections(["distance", "rollout"])
    ['rollout', 'distance']
    """
    if only is None:
        return list(SECTIONS)
    for name in only:
        if name not in SECTIONS:
            hint = did_you_mean(name, SECTIONS) or f"sections are {', '.join(SECTIONS)}"
            raise ConfigError(f"no section called {name!r}", hint=hint)
    if not only:
        raise ConfigError("no section chosen", expected=", ".join(SECTIONS))
    return [name for name in SECTIONS if name in only]


def make_section(name: str, context: InspectionContext) -> InspectionSection:
    """Make a section; if it does not apply to the model, it states the reason."""
    title, make = SECTIONS[name]
    try:
        return replace(make(context), name=name, title=title)
    except NotApplicableError as error:
        return InspectionSection(name=name, title=title, missing=summarize(error))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class InspectionResult(Result):
    """Sections of an inspection; shown as a page in notebooks."""

    context: InspectionContext
    sections: tuple[InspectionSection, ...]
    report_path: Path | None = None

    @property
    def skipped(self) -> dict[str, str]:
        """Return the sections that do not apply to the model, with the reasons."""
        return {section.name: section.missing for section in self.sections if section.missing}

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the numbers of each section."""
        return {section.name: dict(section.numbers) for section in self.sections if not section.missing}

    def figure(self, name: str) -> Figure:
        """Return a figure by its name."""
        figures = {name: drawing for section in self.sections for name, drawing in section.drawings.items()}
        if name not in figures:
            raise UnknownNameError(f"no figure called {name!r}", hint=f"figures are {', '.join(figures)}")
        return figures[name].to_figure()

    def plot(self, section: str | None = None) -> Figure:
        """Draw the first figure of a section, by default of the first one that has a figure."""
        names = {each.name: next(iter(each.drawings)) for each in self.sections if each.drawings}
        if section is None:
            section = next(iter(names), None)
        if section not in names:
            hint = f"sections with figures are {', '.join(names)}" if names else "; ".join(self.warnings)
            raise UnknownNameError(f"no section with a figure called {section!r}", hint=hint)
        return self.figure(names[section])

    def highlights(self) -> dict[str, object]:
        """Return the model, the number of images, and the sections."""
        sections = ", ".join(self.numbers)
        return {"model": self.context.model.name, "images": len(self.context.images), "sections": sections}

    def to_dict(self) -> dict[str, Any]:
        """Return what `vitkit inspect --json` prints."""
        return {
            "model": self.context.model.name,
            "images": [
                {"file": name, "predictions": self.context.top_predictions(image)}
                for image, name in enumerate(self.context.drawn_names)
            ],
            "sections": self.numbers | {name: {"missing": reason} for name, reason in self.skipped.items()},
        }

    def to_html(self) -> str:
        """Render the page."""
        context = self.context
        images = format_plural(len(context.images), "image")
        return render_page(
            title=f"Inspection of {context.model.name}",
            lead=f"{visible(context.model.name)}, {context.model.num_parameters():,} parameters, on {images}",
            top=_predictions(context),
            sections=[Section(each.name, each.title, _section_body(each, context)) for each in self.sections],
            script=asset("inspect.js"),
        )

    def write(self, directory: Path) -> list[Path]:
        """Write the page, all figures and numbers.json; return the paths."""
        directory.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, content in self._files():
            write_bytes(directory / name, content)
            paths.append(directory / name)
        return paths

    def _files(self) -> Iterator[tuple[str, bytes]]:
        for section in self.sections:
            for name, drawing in section.drawings.items():
                yield f"{name}.svg", escape_surrogates(drawing.to_svg()).encode()
                yield f"{name}.png", save_png(drawing.to_figure())
        yield "numbers.json", escape_surrogates(json.dumps(self.to_dict(), indent=None, ensure_ascii=False)).encode()
        yield "report.html", escape_surrogates(self.to_html()).encode()

    def _repr_html_(self) -> str:
        """Return the page in a frame, because it has its own style sheet."""
        return f'<iframe srcdoc="{escape(self.to_html())}" style="width:100%;height:720px;border:0"></iframe>'


def inspect_context(context: InspectionContext, *, only: Sequence[str] | None = None) -> InspectionResult:
    """Make all sections, or some of them."""
    names = select_sections(only)
    advance = start_task(context.progress, "inspecting", len(names))
    sections = []
    for name in names:
        sections.append(make_section(name, context))
        advance(1)
    warnings = tuple(f"skipped {each.name}: {each.missing}" for each in sections if each.missing)
    return InspectionResult(context=context, sections=tuple(sections), warnings=warnings)


def _predictions(context: InspectionContext) -> Markup:
    images = [
        {"url": data_url(picture), "name": name, "predictions": context.top_predictions(index, 3)}
        for index, (picture, name) in enumerate(zip(context.pictures, context.drawn_names, strict=True))
    ]
    return Markup(template_macros("inspection.html").predictions(images, len(context.images) - len(images)))


def _section_body(section: InspectionSection, context: InspectionContext) -> Markup:
    patches = []
    for index, similarity in enumerate(section.patch_similarity):
        amounts = (similarity.clamp(0, 1) * 255).round().byte().contiguous().cpu().numpy().tobytes()
        patches.append(
            {
                "name": context.drawn_names[index],
                "url": data_url(context.pictures[index]),
                "rows": similarity.shape[0],
                "columns": similarity.shape[1],
                "similarity": base64.b64encode(amounts).decode(),
            }
        )
    drawings = list(section.drawings.values())
    return Markup(template_macros("inspection.html").section(section, drawings, patches))


def unique_names(images: Sequence[Path]) -> list[str]:
    """Return file names, with their directory if two files have the same name.

    >>> unique_names([Path("a/1.jpg"), Path("b/1.jpg"), Path("b/2.jpg")])
    ['a/1.jpg', 'b/1.jpg', '2.jpg']
    """
    names = [image.name for image in images]
    return [f"{image.parent.name}/{image.name}" if names.count(image.name) > 1 else image.name for image in images]
