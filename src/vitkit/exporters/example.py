"""Files that describe an export to its users: `example.py`, README.md and preprocessing.json.

`example.py` reproduces `vitkit predict` without vitkit. It needs its runtime, numpy and Pillow, and contains only the
code that its preprocessing uses: the source of functions of this module.
"""

import inspect
import io
from collections.abc import Callable
from pathlib import Path
from string import Template
from textwrap import indent

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitkit.core.config import to_mapping
from vitkit.core.formatting import format_plural
from vitkit.core.sizes import format_size, pair
from vitkit.data.preprocessing import RESAMPLING, Preprocessing
from vitkit.exporters.runtime import FEATURES, INPUT, LOGITS, Runtime
from vitkit.weights.artifact import escape_markdown
from vitkit.weights.bundle import ModelBundle

PNG_CHANNELS = (1, 2, 3, 4)
MAX_RESIZED_PIXELS = 2**25
"""Size from which on `Preprocessing` resizes only the center of an image."""
COLORS = {1: " (gray)", 3: " (red, green, blue)"}

EXAMPLE = Template("""\
\"""Print the $output of images: python example.py IMAGE... [--json]

Needs numpy, Pillow and $package, but not vitkit.
\"""

import io
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FOLDER = Path(__file__).parent


$code


$main

if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
""")
MAIN_CLASSES = """\
def main(arguments):
    labels = json.loads((FOLDER / "labels.json").read_text(encoding="utf-8"))
    for path in [argument for argument in arguments if argument != "--json"]:
        predictions = top_predictions(run(preprocess(path)[None])[0], labels, top=5)
        if "--json" in arguments:
            print(json.dumps({"file": path, "predictions": predictions}))
            continue
        print(printable(path))
        for each in predictions:
            print(f"  {each['probability']:7.2%}  {printable(each['label'])}")
"""
MAIN_FEATURES = """\
def main(arguments):
    for path in [argument for argument in arguments if argument != "--json"]:
        features = run(preprocess(path)[None])[0].tolist()
        if "--json" in arguments:
            print(json.dumps({"file": path, "features": features}))
        else:
            print(printable(path), *(f"{value:.4f}" for value in features[:8]), "..." if len(features) > 8 else "")
"""
RESIZE_AND_CROP = """\
height, width = size = {cover}(pixels.shape[1:], {whole})
{offset}
if height * width > {max_pixels}:  # resize only the center of a very long image
    down, across = pixels.shape[1] / height, pixels.shape[2] / width
    right = min((left + {target[1]}) * across, pixels.shape[2])
    bottom = min((top + {target[0]}) * down, pixels.shape[1])
    box = (left * across, top * down, right, bottom)
    pixels = resize_pillow(pixels, {target}, {filter}, box)
else:
    pixels = {resize}
    {crop}"""
README = Template("""\
# $name for $title

Exported by vitkit. Load it with `$load_command`.

    python example.py IMAGE...

`example.py` needs $package, numpy and Pillow, but not vitkit.
The batch size is dynamic.

| | name | type | shape |
|---|---|---|---|
$rows

$labels## Preprocessing

$steps

Preprocessing is not part of the program: `preprocessing.json` has the settings, `example.py` the code.

## Verification

$verification. `verification.json` has the details, `sha256sum -c SHA256SUMS` checks the files.
""")


def format_example(preprocessing: Preprocessing, *, run_code: str, package: str, num_classes: int) -> str:
    """Return the source of example.py, given the code that defines `run(pixels)` and the package that it imports.

    >>> text = format_example(Preprocessing(), run_code="def run(pixels): ...", package="onnxruntime", num_classes=2)
    >>> compile(text, "example.py", "exec") is not None, "resize_area" in text
    (True, False)
    """
    preprocess, functions = _format_preprocess(preprocessing)
    functions += [top_predictions, printable] if num_classes else [printable]
    code = [run_code.rstrip(), *(inspect.getsource(function).rstrip() for function in functions), preprocess]
    return EXAMPLE.substitute(
        output="most probable classes" if num_classes else "features",
        package=package,
        code="\n\n\n".join(code),
        main=MAIN_CLASSES if num_classes else MAIN_FEATURES,
    )


def _format_preprocess(preprocessing: Preprocessing) -> tuple[str, list[Callable[..., object]]]:
    """Return the source of `preprocess(path)` and the functions that it calls."""
    load_code, functions = _format_load(preprocessing.channels)
    resize_code, resize_functions = _format_resize(preprocessing)
    mean, deviation = (
        np.broadcast_to(each, preprocessing.channels).tolist() for each in (preprocessing.mean, preprocessing.std)
    )
    height, width = pair(preprocessing.image_size)
    lines = [
        f'"""Return the model input, {preprocessing.channels} × {height} × {width}."""',
        load_code,
        resize_code,
        f"mean = np.float32(255 * np.array({mean}))[:, None, None]",
        f"deviation = np.float32(255 * np.array({deviation}))[:, None, None]",
        "return (pixels.astype(np.float32) - mean) / deviation",
    ]
    return "def preprocess(path):\n" + indent("\n".join(lines), "    "), [*functions, *resize_functions]


def _format_load(channels: int) -> tuple[str, list[Callable[..., object]]]:
    """Return the lines that load `pixels`, C × H × W and upright, from a file."""
    if channels not in PNG_CHANNELS:  # no image format supports them
        return "pixels = np.moveaxis(np.load(path, allow_pickle=False), 2, 0)  # saved as height × width × channels", []
    convert: Callable[..., object] = {1: to_gray, 3: to_rgb}.get(channels, to_channels)
    call = f"{convert.__name__}(image, {channels})" if convert is to_channels else f"{convert.__name__}(image)"
    code = f"image = open_image(path)\npixels = rotate({call}, orientation(image))"
    return code, [orientation, open_image, to_8_bits, convert, rotate]


def _format_resize(preprocessing: Preprocessing) -> tuple[str, list[Callable[..., object]]]:
    """Return the lines that resize and crop `pixels` to the model's size."""
    target, whole = pair(preprocessing.image_size), preprocessing.resize_size
    resampling = f"Image.Resampling.{RESAMPLING[preprocessing.interpolation].name}"
    keeps_aspect = preprocessing.resize == "crop"
    size = "size" if keeps_aspect else whole
    function: Callable[..., object] = resize_pillow
    if not preprocessing.antialias:
        function = resize_bilinear
    elif preprocessing.interpolation == "area":
        function = resize_area
    arguments = f"pixels, {size}, {resampling}" if function is resize_pillow else f"pixels, {size}"
    resize = f"{function.__name__}({arguments})"
    height, width = ("height", "width") if keeps_aspect else whole
    top, left = f"({height} - {target[0]})", f"({width} - {target[1]})"
    even = preprocessing.crop_rounding == "even"
    offset = f"top, left = round({top} / 2), round({left} / 2)" if even else f"top, left = {top} // 2, {left} // 2"
    crop = f"pixels = pixels[:, top : top + {target[0]}, left : left + {target[1]}]"
    if not keeps_aspect:
        lines = [f"pixels = {resize}", *([offset, crop] if whole != target else [])]
        return "\n".join(lines), [function]
    is_square = whole[0] == whole[1] and preprocessing.interpolation != "area"
    cover = cover_size if is_square else cover_size_rounded
    code = RESIZE_AND_CROP.format(
        cover=cover.__name__,
        whole=whole,
        offset=offset,
        max_pixels=MAX_RESIZED_PIXELS,
        target=target,
        filter=resampling,
        resize=resize,
        crop=crop,
    )
    return code, [cover, *dict.fromkeys([resize_pillow, function])]


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


def format_readme(bundle: ModelBundle, runtime: Runtime, *, verification: str) -> str:
    """Return the README.md of an exported program."""
    config = bundle.config
    rows = [
        f"| in | `{INPUT}` | float32 | batch × {config.channels} × {format_size(config.image_size)}, normalized |",
        *([f"| out | `{LOGITS}` | float32 | batch × {config.num_classes:,} |"] if config.num_classes else []),
        f"| out | `{FEATURES}` | float32 | batch × width of the head's input |",
    ]
    labels = f"`labels.json` lists the {config.num_classes:,} classes in the order of the logits.\n\n"
    steps = enumerate(describe_preprocessing(bundle.preprocessing), start=1)
    return README.substitute(
        name=escape_markdown(bundle.name),
        title=runtime.title,
        load_command=runtime.load_command.format(out="."),
        package=runtime.package,
        rows="\n".join(rows),
        labels=labels if config.num_classes else "",
        steps="\n".join(f"{number}. {step}" for number, step in steps),
        verification=verification,
    )


# Functions for example.py. They give the same pixels as `vitkit.data.decode` and `Preprocessing`, which tests compare,
# and may use only the imports of EXAMPLE.


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8. Pillow rotates TIFF files itself; unreadable EXIF data is ignored."""
    try:
        return 1 if image.format == "TIFF" else Image.Image.getexif(image).get(0x0112, 1)
    except Exception:
        return 1


def open_image(path: str) -> Image.Image:
    """Open and decode an image file."""
    image = Image.open(io.BytesIO(Path(path).read_bytes()))
    image.load()
    return image


def to_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit and float images to 8 bits; Pillow would clip them at 255."""
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)
    if image.mode == "F":
        return Image.fromarray(np.rint(values * (255.0 if values.max() <= 1 else 1.0)).astype(np.uint8))
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB."""
    return to_8_bits(image).convert("RGB")


def to_gray(image: Image.Image) -> Image.Image:
    """Convert to one channel."""
    image = to_8_bits(image)
    return image.convert("L") if image.mode in ("1", "L", "LA", "P") else image.convert("RGB").convert("L")


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Return the image with its stored channels; exit if their number is another."""
    image = to_8_bits(image)
    if image.mode in ("P", "PA") and image.has_transparency_data:
        image = image.convert("RGBA")
    if image.mode == "P" or len(image.getbands()) != channels:
        raise SystemExit(f"the model takes images of {channels} channels, this one has {len(image.getbands())}")
    return image


def rotate(image: Image.Image, orientation: int) -> NDArray[np.uint8]:
    """Apply the EXIF orientation and return the pixels, channels × height × width."""
    names = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
    if orientation in range(2, 9):
        image = image.transpose(Image.Transpose[names[int(orientation) - 2]])
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)


def resize_pillow(
    pixels: NDArray[np.uint8],
    size: tuple[int, int],
    resampling: Image.Resampling,
    box: tuple[float, float, float, float] | None = None,
) -> NDArray[np.uint8]:
    """Resize each channel, or a box of it, to (height, width) with Pillow's antialiasing."""
    height, width = size
    bands = [Image.fromarray(np.ascontiguousarray(plane)) for plane in pixels]
    return np.stack([np.asarray(band.resize((width, height), resampling, box=box)) for band in bands])


def resize_area(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Resize by averaging the area that each new pixel covers, truncated to integers."""
    means = pixels.astype(np.float64)
    for axis, length in ((1, size[0]), (2, size[1])):
        along = np.moveaxis(means, axis, 0)
        sums = np.concatenate([np.zeros_like(along[:1]), np.cumsum(along, axis=0)])
        borders = np.linspace(0, len(along), length + 1)
        before = np.minimum(borders.astype(np.int64), len(along) - 1)
        inside = (borders - before)[:, None, None]
        up_to = sums[before] * (1 - inside) + sums[before + 1] * inside
        means = np.moveaxis(np.diff(up_to, axis=0) * (length / len(along)), 0, axis)
    return np.floor(means + 1e-4).astype(np.uint8)


def resize_bilinear(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.float32]:
    """Resize bilinearly between the four nearest pixels, without antialiasing or rounding."""
    values = pixels.astype(np.float32)
    for axis, length in ((2, size[1]), (1, size[0])):
        length_before = values.shape[axis]
        centers = (np.arange(length, dtype=np.float32) + np.float32(0.5)) * (
            np.float32(length_before) / np.float32(length)
        )
        centers = np.maximum(centers - np.float32(0.5), np.float32(0.0))
        first = np.minimum(centers.astype(np.int64), length_before - 1)
        second = np.minimum(first + 1, length_before - 1)
        weight = (centers - first).astype(np.float32).reshape([-1 if each == axis else 1 for each in range(3)])
        values = values.take(first, axis) * (1 - weight) + values.take(second, axis) * weight
    return values


def cover_size(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Scale height and width to cover the square target, truncating the longer side."""
    height, width = size
    if height < width:
        return target[0], int(target[0] * width / height)
    return int(target[0] * height / width), target[0]


def cover_size_rounded(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Scale height and width to cover the target, with rounding."""
    ratio = min(size[0] / target[0], size[1] / target[1])
    return round(size[0] / ratio), round(size[1] / ratio)


def top_predictions(logits: NDArray[np.float32], labels: list[str], top: int) -> list[dict[str, object]]:
    """Return the most probable classes with their probabilities, in descending order."""
    probabilities = np.exp(logits.astype(np.float64) - logits.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")[:top]
    return [{"label": labels[index], "probability": float(probabilities[index])} for index in order]


def printable(text: object) -> str:
    """Replace characters that could control a terminal."""
    return "".join(char if char.isprintable() else "?" for char in str(text))
