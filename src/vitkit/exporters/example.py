"""Files that describe an export to its users: `example.py`, README.md and preprocessing.json."""

from functools import cache

import jinja2
import numpy as np

from vitkit.core.config import to_mapping
from vitkit.core.formatting import format_plural
from vitkit.core.sizes import format_size, pair
from vitkit.data.preprocessing import RESAMPLING, Preprocessing
from vitkit.exporters.runtime import FEATURES, INPUT, LOGITS, Runtime
from vitkit.weights.artifact import escape_markdown
from vitkit.weights.bundle import ModelBundle

IMAGE_CHANNELS = (1, 2, 3, 4)
"""Numbers of channels that image formats support; others are read from arrays."""
MAX_RESIZED_PIXELS = 2**25
"""Size from which on `Preprocessing` resizes only the center of an image."""
COLORS = {1: " (gray)", 3: " (red, green, blue)"}


def format_example(preprocessing: Preprocessing, *, run_code: str, package: str, num_classes: int) -> str:
    """Return the source of example.py, given the code that defines `run(pixels)` and the package that it imports.

    >>> text = format_example(Preprocessing(), run_code="def run(pixels): ...", package="onnxruntime", num_classes=2)
    >>> compile(text, "example.py", "exec") is not None, "resize_area" in text
    (True, False)
    """
    is_area = preprocessing.interpolation == "area"
    values = {
        "image_channels": IMAGE_CHANNELS,
        "max_pixels": MAX_RESIZED_PIXELS,
        "image_size": pair(preprocessing.image_size),
        "method": "bilinear" if not preprocessing.antialias else "area" if is_area else "pillow",
        "resampling": f"Image.Resampling.{RESAMPLING[preprocessing.interpolation].name}",
        "mean": np.broadcast_to(preprocessing.mean, preprocessing.channels).tolist(),
        "deviation": np.broadcast_to(preprocessing.std, preprocessing.channels).tolist(),
    }
    template = _environment().get_template("example.py.jinja")
    return template.render(
        values, preprocessing=preprocessing, run_code=run_code.rstrip(), package=package, num_classes=num_classes
    )


def format_readme(bundle: ModelBundle, runtime: Runtime, *, verification: str) -> str:
    """Return the README.md of an exported program."""
    names = {"input": INPUT, "logits": LOGITS, "features": FEATURES}
    steps = describe_preprocessing(bundle.preprocessing)
    template = _environment().get_template("README.md.jinja")
    return template.render(
        names, bundle=bundle, config=bundle.config, runtime=runtime, steps=steps, verification=verification
    )


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vitkit.exporters"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"escape_markdown": escape_markdown, "format_size": format_size}
    return environment


def describe_preprocessing(preprocessing: Preprocessing) -> list[str]:
    """Describe the preprocessing steps in order.

    >>> describe_preprocessing(Preprocessing())[1]
    'resize to 224×224, ignoring the aspect ratio, with the bilinear filter of Pillow (antialias, rounded to integers)'
    """
    channels = preprocessing.channels
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (preprocessing.mean, preprocessing.std))
    return [
        f"decode to 8 bits, {format_plural(channels, 'channel')}{COLORS.get(channels, '')}, upright by EXIF",
        *_describe_resize(preprocessing),
        f"subtract 255 × ({mean}) and divide by 255 × ({std}), in float32",
        f"arrange as batch × {channels} × {' × '.join(map(str, pair(preprocessing.image_size)))}",
    ]


def _describe_resize(preprocessing: Preprocessing) -> list[str]:
    if not preprocessing.antialias:
        by = "bilinear between the four nearest pixels, half-pixel centers, no antialias, not rounded"
    elif preprocessing.interpolation == "area":
        by = "each pixel the mean of the area that it covers, truncated to an integer"
    else:
        by = f"with the {preprocessing.interpolation} filter of Pillow (antialias, rounded to integers)"
    whole = format_size(preprocessing.resize_size)
    if preprocessing.resize == "squash":
        return [f"resize to {whole}, ignoring the aspect ratio, {by}"]
    target = (
        "keeping the aspect ratio, until it covers"
        if preprocessing.resize == "crop"
        else "ignoring the aspect ratio, to"
    )
    half = "to the even pixel" if preprocessing.crop_rounding == "even" else "down"
    return [
        f"resize, {target} {whole}, {by}",
        f"crop the center, {format_size(preprocessing.image_size)}, half of an odd margin rounded {half}",
    ]


def preprocessing_json(preprocessing: Preprocessing) -> dict[str, object]:
    """Return the content of preprocessing.json: the exact settings, and the steps as text."""
    steps = describe_preprocessing(preprocessing)
    return {"input": INPUT, "dtype": "float32", **to_mapping(preprocessing), "steps": steps}
