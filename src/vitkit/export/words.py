"""A model goes in, what an export says of it to people comes out: its README and how images are prepared, in words."""

from collections.abc import Sequence

from vitkit.checkpoints.card import plain
from vitkit.checkpoints.native import Artefact
from vitkit.core.config import to_mapping
from vitkit.core.shapes import pair, sides
from vitkit.data.transforms import Preprocessing
from vitkit.export.program import FEATURES, INPUT, LOGITS
from vitkit.export.runtime import Runtime

COLOURS = {1: "grey", 3: "red, green, blue"}


def steps(how: Preprocessing) -> list[str]:
    """What is done to an image, in order.

    >>> steps(Preprocessing())[1]
    'resize to 224×224, whatever the aspect, with the bilinear filter of Pillow (antialias, rounded to whole numbers)'
    """
    numbers = f" ({COLOURS[how.channels]})" if how.channels in COLOURS else ""
    return [
        f"decode to 8 bits, {how.channels} channel{'' if how.channels == 1 else 's'}{numbers}, upright by EXIF",
        *_sizing(how),
        f"subtract 255 × ({_listed(how.mean)}) and divide by 255 × ({_listed(how.deviation)}), in float32",
        f"arrange as batch × {how.channels} × {' × '.join(map(str, pair(how.image_size)))}",
    ]


def _sizing(how: Preprocessing) -> list[str]:
    if not how.antialias:
        by = "bilinear between the four nearest pixels, half-pixel centres, no antialias, not rounded"
    elif how.filter == "area":
        by = "each pixel the mean of the area that it covers, its fraction cut off"
    else:
        by = f"with the {how.filter} filter of Pillow (antialias, rounded to whole numbers)"
    if how.resize == "squash":
        return [f"resize to {sides(how.resized)}, whatever the aspect, {by}"]
    whole = sides(how.resized)
    kept = "until it covers" if how.resize == "crop" else "whatever the aspect, to"
    half = "to the even pixel" if how.crop_rounding == "even" else "down"
    return [
        f"resize, {'keeping the aspect, ' if how.resize == 'crop' else ''}{kept} {whole}, {by}",
        f"crop the centre, {sides(how.image_size)}, half of an odd border rounded {half}",
    ]


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def preprocessing_json(how: Preprocessing) -> dict[str, object]:
    """For preprocessing.json: the fields of `Preprocessing`, exact, and the steps in words."""
    return {"input": INPUT, "dtype": "float32", **to_mapping(how), "steps": steps(how)}


def readme(artefact: Artefact, runtime: Runtime, *, proof: str) -> str:
    """The README.md of an exported program."""
    config = artefact.config
    height_width = sides(config.image_size)
    rows = [
        f"| in | `{INPUT}` | float32 | batch × {config.channels} × {height_width}, normalised |",
        *([f"| out | `{LOGITS}` | float32 | batch × {config.classes:,} |"] if config.classes else []),
        f"| out | `{FEATURES}` | float32 | batch × what the head reads |",
    ]
    labels = [f"`labels.json` names the {config.classes:,} classes in the order of the logits.", ""]
    return "\n".join(
        [
            f"# {plain(artefact.name)} for {runtime.title}",
            "",
            f"Exported by vitkit. Load it with `{runtime.loader.format(out='.')}`.",
            "",
            "    python example.py IMAGE...",
            "",
            f"`example.py` needs {runtime.package}, numpy and Pillow, and nothing of vitkit.",
            "A batch may be of any size.",
            "",
            "| | name | type | shape |",
            "|---|---|---|---|",
            *rows,
            "",
            *(labels if config.classes else []),
            "## Images",
            "",
            *(f"{number}. {step}" for number, step in enumerate(steps(artefact.preprocessing), start=1)),
            "",
            "All of this is done before the program: `preprocessing.json` has the numbers, `example.py` the code.",
            "",
            "## Proof",
            "",
            f"{proof}. `proof.json` has the figures, `sha256sum -c SHA256SUMS` checks the files.",
            "",
        ]
    )
