"""A model with its preprocessing and labels goes in, the text of its model card comes out."""

import re
from collections.abc import Sequence

from vitkit.core.shapes import sides
from vitkit.data.transforms import Preprocessing
from vitkit.model.config import ViTConfig
from vitkit.zoo.lookup import create
from vitkit.zoo.variants import ModelConfig

SHOWN = 20
"""Of many labels the card shows so many."""
RESIZES = {
    "squash": "resized to exactly this size, whatever their aspect",
    "squash_crop": "resized to a larger size, whatever their aspect, and cropped to the centre",
    "crop": "resized by their shorter side, and cropped to the centre",
}


def model_card(
    *, name: str, config: ModelConfig, preprocessing: Preprocessing, labels: Sequence[str], timm_refuses: str | None
) -> str:
    """The README.md of an artefact; the licence is the user's to choose.

    >>> card = model_card(name="B/16", config=ViTConfig(), preprocessing=Preprocessing(), labels=(), timm_refuses=None)
    >>> card.splitlines()[1]
    'library_name: vitkit'
    """
    task = "image-classification" if config.classes else "image-feature-extraction"
    tags = ["vitkit", "vision-transformer" if isinstance(config, ViTConfig) else "resnet"]
    tags += [] if timm_refuses else ["timm"]
    head = ["---", "library_name: vitkit", f"pipeline_tag: {task}", "tags:", *(f"- {tag}" for tag in tags)]
    head += ["# license: the licence of the weights is yours to choose", "---", ""]
    parts = [
        f"# {plain(name)}",
        "",
        _what_it_is(config),
        "",
        *_sizes(config),
        "",
        "## Images",
        "",
        *_images(preprocessing),
        "",
        *_labels(labels),
        *_loading(config, timm_refuses),
    ]
    return "\n".join([*head, *parts]) + "\n"


def plain(text: str) -> str:
    """A text that Markdown and terminals take as it is, on one line.

    >>> plain("<b>`cat`" + chr(10))
    "＜b＞'cat' "
    """
    text = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", " ", text)
    return text.translate({ord("`"): "'", ord("<"): "＜", ord(">"): "＞"})


def _what_it_is(config: ModelConfig) -> str:
    kind = "A ResNet of Big Transfer" if not isinstance(config, ViTConfig) else "A Vision Transformer"
    if isinstance(config, ViTConfig) and config.backbone:
        kind = "A Vision Transformer on a ResNet"
    task = f"that tells {config.classes:,} classes apart" if config.classes else "that gives features of images"
    return f"{kind} {task}, written by vitkit."


def _sizes(config: ModelConfig) -> list[str]:
    parameters = sum(tensor.numel() for tensor in create(config, device="meta").state_dict().values())
    rows = [("parameters", f"{parameters:,}"), ("classes", f"{config.classes:,}")]
    if isinstance(config, ViTConfig):
        rows += [("width", f"{config.width:,}"), ("depth", str(config.depth)), ("heads", str(config.heads))]
        rows += [("MLP width", f"{config.mlp_dim:,}"), ("patches", sides(config.patch_size))]
        rows += [("positions", config.positions.kind), ("pooling", config.pooling)]
    else:
        rows += [("units", "-".join(map(str, config.units))), ("width factor", str(config.width_factor))]
    return ["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]


def _images(preprocessing: Preprocessing) -> list[str]:
    count = preprocessing.channels
    share = f" ({preprocessing.crop_share:g} of it)" if preprocessing.resize != "squash" else ""
    edges = "" if preprocessing.antialias else " without antialiasing"
    numbers = (preprocessing.mean, preprocessing.deviation)
    mean, deviation = (", ".join(f"{number:g}" for number in row) for row in numbers)
    return [
        f"{sides(preprocessing.image_size)} pixels of {count} channel{'' if count == 1 else 's'},",
        f"{RESIZES[preprocessing.resize]}{share}, by a {preprocessing.filter} filter{edges}.",
        f"From their values, as shares from 0 to 1, {mean} is subtracted, and they are divided by {deviation}.",
    ]


def _labels(labels: Sequence[str]) -> list[str]:
    if not labels:
        return []
    more = [f"- … and {len(labels) - SHOWN:,} more, in `labels.json`"] if len(labels) > SHOWN else []
    return ["## Labels", "", *(f"- `{plain(label)}`" for label in labels[:SHOWN]), *more, ""]


def _loading(config: ModelConfig, timm_refuses: str | None) -> list[str]:
    ours = [
        "## Loading it",
        "",
        "```python",
        "import vitkit",
        "",
        'model = vitkit.load("this/folder")',
        'logits = model(model.preprocess("image.jpg"))',
        *(["print(model.labels[int(logits.argmax())])"] if config.classes else []),
        "```",
        "",
    ]
    if timm_refuses:
        return [*ours, f"timm, and transformers through it, have no such model: {timm_refuses}."]
    auto = "AutoModelForImageClassification" if config.classes else "AutoModel"
    return [
        *ours,
        "```python",
        "import timm",
        "",
        'model = timm.create_model("local-dir:this/folder", pretrained=True).eval()',
        "```",
        "",
        "```python",
        f"from transformers import {auto}",
        "",
        f'model = {auto}.from_pretrained("this/folder").eval()',
        "```",
    ]
