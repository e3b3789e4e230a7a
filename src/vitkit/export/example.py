"""A preprocessing and a runtime go in, the text of an `example.py` comes out that gives `vitkit predict`'s answers.

The file needs its runtime or library, numpy and Pillow, and holds the code that this one preprocessing takes, no other.
"""

import inspect
from collections.abc import Callable, Mapping
from textwrap import indent

import numpy as np

from vitkit.core.shapes import pair
from vitkit.data.geometry import RESAMPLING
from vitkit.data.transforms import Preprocessing
from vitkit.export import standalone
from vitkit.export.openvino_program import SETTINGS
from vitkit.export.program import FEATURES, INPUT, LOGITS

IMPORTS = """\
import io
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
"""
PNG_CHANNELS = (1, 2, 3, 4)
_CONVERSIONS: dict[int, tuple[Callable[..., object], str]] = {
    1: (standalone.in_grey, "in_grey(image)"),
    3: (standalone.in_colour, "in_colour(image)"),
}
"""What any picture can be had in; a model of other channels takes pictures that have just these."""
STRIP = 2**25
"""Pixels from which on `Preprocessing` resizes only the middle of a picture."""

LOADS = {
    "onnx": """\
import onnxruntime

session = onnxruntime.InferenceSession(str(FOLDER / "{file}"), providers=["CPUExecutionProvider"])


def run(pixels):
    return session.run(["{output}"], {{"{input}": pixels}})[0]
""",
    "torch": """\
import torch

program = torch.export.load(FOLDER / "{file}").module()


def run(pixels):
    with torch.inference_mode():
        return program(torch.from_numpy(pixels))["{output}"].numpy()
""",
    "openvino": """\
sys.modules.setdefault("openvino_telemetry", None)  # else importing OpenVINO tells its makers, over the network
import openvino

# In float32, whatever else the processor has.
program = openvino.Core().compile_model(FOLDER / "{file}", "CPU", {settings})


def run(pixels):
    return program({{"{input}": pixels}})["{output}"]
""",
    "timm": """\
import timm
import torch

model = timm.create_model(f"local-dir:{{FOLDER}}", pretrained=True).float().eval()


def run(pixels):
    with torch.inference_mode():
        return model(torch.from_numpy(pixels)).numpy()
""",
    "npz": """\
import timm
import torch

model = timm.create_model(
    "{architecture}",
{args}
).eval()
model.load_pretrained(str(FOLDER / "{file}"))


def run(pixels):
    with torch.inference_mode():
        return model(torch.from_numpy(pixels)).numpy()
""",
    "huggingface": """\
import torch
import transformers

model = transformers.{kind}.from_pretrained(FOLDER).float().eval()


def run(pixels):
    with torch.inference_mode():
        return model(pixel_values=torch.from_numpy(pixels)).{answer}.numpy()
""",
}
"""How each runtime, or a library that has the model's code, is loaded and run."""
NEEDS = {
    "onnx": "onnxruntime",
    "torch": "torch",
    "openvino": "openvino",
    **dict.fromkeys(("timm", "npz"), "timm"),
    "huggingface": "transformers",
}

MAIN_CLASSES = """\
def main(arguments):
    labels = json.loads((FOLDER / "labels.json").read_text(encoding="utf-8"))
    for path in [each for each in arguments if each != "--json"]:
        said = likeliest(run(prepare(path)[None])[0], labels, top=5)
        if "--json" in arguments:
            print(json.dumps({"file": path, "predictions": said}))
            continue
        print(printable(path))
        for each in said:
            print(f"  {each['probability']:7.2%}  {printable(each['label'])}")
"""
MAIN_FEATURES = """\
def main(arguments):
    for path in [each for each in arguments if each != "--json"]:
        features = run(prepare(path)[None])[0].tolist()
        if "--json" in arguments:
            print(json.dumps({"file": path, "features": features}))
        else:
            print(printable(path), *(f"{number:.4f}" for number in features[:8]), "..." if len(features) > 8 else "")
"""
END = """\
if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
"""


def example(
    preprocessing: Preprocessing, *, runtime: str, file: str, classes: int, more: Mapping[str, str] | None = None
) -> str:
    """The text of the file; `more` is what else the runtime's part names.

    >>> text = example(Preprocessing(), runtime="onnx", file="model.onnx", classes=2)
    >>> compile(text, "example.py", "exec") is not None, "averaged" in text
    (True, False)
    """
    body, functions = _preparing(preprocessing)
    functions += [standalone.likeliest, standalone.printable] if classes else [standalone.printable]
    words = "the classes that the model finds likeliest" if classes else "the features that the model finds"
    load = LOADS[runtime].format(
        file=file, input=INPUT, output=LOGITS if classes else FEATURES, settings=repr(SETTINGS), **(more or {})
    )
    head = (
        f'"""Image files go in, {words} come out: python example.py IMAGE... [--json]\n\n'
        f'Needs numpy, Pillow and {NEEDS[runtime]}, and nothing of vitkit.\n"""\n\n'
        f"{IMPORTS}\nFOLDER = Path(__file__).parent"
    )
    parts = [
        head,
        load.rstrip(),
        *(inspect.getsource(function).rstrip() for function in functions),
        body.rstrip(),
        (MAIN_CLASSES if classes else MAIN_FEATURES).rstrip(),
        END,
    ]
    return "\n\n\n".join(parts)


def _preparing(how: Preprocessing) -> tuple[str, list[Callable[..., object]]]:
    """The text of `prepare`, which makes of a file what the model takes, and the functions that it calls."""
    reading, functions = _reading(how)
    sizing, more = _sizing(how)
    mean, deviation = (np.broadcast_to(each, how.channels).tolist() for each in (how.mean, how.deviation))
    height, width = pair(how.image_size)
    lines = [
        *reading,
        *sizing,
        f"mean = np.float32(255 * np.array({mean}))[:, None, None]",
        f"deviation = np.float32(255 * np.array({deviation}))[:, None, None]",
        "return (pixels.astype(np.float32) - mean) / deviation",
    ]
    head = f'def prepare(path):\n    """The pixels as the model takes them, {how.channels} × {height} × {width}."""\n'
    return head + indent("\n".join(lines), "    ") + "\n", [*functions, *more]


def _reading(how: Preprocessing) -> tuple[list[str], list[Callable[..., object]]]:
    """Lines that make `pixels` of a file, C × H × W, upright."""
    if how.channels not in PNG_CHANNELS:  # no image file has so many
        return [
            "pixels = np.moveaxis(np.load(path, allow_pickle=False), 2, 0)  # saved as height × width × channels"
        ], []
    named, convert = _CONVERSIONS.get(how.channels, (standalone.in_channels, f"in_channels(image, {how.channels})"))
    lines = ["image = decoded(path)", f"pixels = upright({convert}, orientation(image))"]
    return lines, [standalone.orientation, standalone.decoded, standalone.in_8_bits, named, standalone.upright]


def _sizing(how: Preprocessing) -> tuple[list[str], list[Callable[..., object]]]:
    """Lines that bring `pixels` to the model's size."""
    target, whole = pair(how.image_size), how.resized
    if how.resize == "crop":
        square = whole[0] == whole[1] and how.filter != "area"
        cover = standalone.covering if square else standalone.covering_rounded
        resize, resizing = _resizing(how)
        lines = [
            f"height, width = size = {cover.__name__}(pixels.shape[1:], {whole})",
            *_beginning(how, "height", "width"),
            f"if height * width > {STRIP}:  # a strip: only its middle is resized",
            "    down, across = pixels.shape[1] / height, pixels.shape[2] / width",
            f"    right = min((left + {target[1]}) * across, pixels.shape[2])",
            f"    bottom = min((top + {target[0]}) * down, pixels.shape[1])",
            f"    pixels = resized(pixels, {target}, {_filter(how)}, (left * across, top * down, right, bottom))",
            "else:",
            f"    pixels = {resize.format(size='size')}",
            f"    pixels = pixels[:, top : top + {target[0]}, left : left + {target[1]}]",
        ]
        return lines, [cover, *dict.fromkeys([standalone.resized, resizing])]
    resize, resizing = _resizing(how)
    lines = [f"pixels = {resize.format(size=whole)}"]
    if whole != target:
        lines += _beginning(how, str(whole[0]), str(whole[1]))
        lines.append(f"pixels = pixels[:, top : top + {target[0]}, left : left + {target[1]}]")
    return lines, [resizing]


def _beginning(how: Preprocessing, height: str, width: str) -> list[str]:
    """Lines that find the corner of the centre crop; of an odd border, the half is rounded one way or the other."""
    target = pair(how.image_size)
    top, left = (f"{whole} - {part}" for whole, part in zip((height, width), target, strict=True))
    if how.crop_rounding == "even":
        return [f"top, left = round(({top}) / 2), round(({left}) / 2)"]
    return [f"top, left = ({top}) // 2, ({left}) // 2"]


def _resizing(how: Preprocessing) -> tuple[str, Callable[..., object]]:
    """The call that resizes, with a place for the size, and the function that it calls."""
    if not how.antialias:
        return "sampled(pixels, {size})", standalone.sampled
    if how.filter == "area":
        return "averaged(pixels, {size})", standalone.averaged
    return f"resized(pixels, {{size}}, {_filter(how)})", standalone.resized


def _filter(how: Preprocessing) -> str:
    return f"Image.Resampling.{RESAMPLING[how.filter].name}"
