"""Stand-in for the Hugging Face hub: repositories in huggingface_hub's cache, which is used without a network.

`make_hub_cache` writes what examples download: timm's Ti/16, Google's B/16 (of one layer, which its config.json states)
and an artifact with labels, all with random weights.
"""

import hashlib
import os
from pathlib import Path

import torch

from vitkit.data.preprocessing import get_preprocessing
from vitkit.weights import artifact as artifact_io
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import write_format
from vitkit.weights.formats.registry import get_format
from vitkit.zoo.registry import create

COMMIT = "0123456789abcdef" * 2 + "01234567"
TIMM_TINY = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
GOOGLE_BASE = "google/vit-base-patch16-224"
CATS = "me/cats"


def fill(cache: Path, repository: str, files: dict[str, bytes], *, commit: str = COMMIT, ref: str = "main") -> Path:
    """Write files in the layout of huggingface_hub's cache and return the snapshot directory."""
    home = cache / f"models--{repository.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (home / "refs" / ref).write_text(commit)
    for name, content in files.items():
        blob = home / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    return snapshot


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def random_bundle(
    name: str, settings: dict[str, object], *, image_size: int = 224, labels: tuple[str, ...] | None = None
) -> ModelBundle:
    """Return a model with random weights, the head included, and numbered classes unless labels are given."""
    num_classes = 1000 if labels is None else len(labels)
    generator = torch.Generator().manual_seed(0)
    model = create(name, image_size=image_size, num_classes=num_classes, settings=settings, generator=generator)
    with torch.no_grad():
        model.head.weight.normal_(0, 0.02, generator=generator)
    return ModelBundle(
        name=name,
        config=model.config,
        state=dict(model.state_dict()),
        preprocessing=get_preprocessing("paper", image_size=image_size),
        labels=labels or tuple(f"class {number}" for number in range(num_classes)),
    )


def publish(cache: Path, repository: str, bundle: ModelBundle, *, to: str | None, directory: Path) -> None:
    """Put a model into the cache in a format; None is vitkit's artifact."""
    written = directory / repository
    written.parent.mkdir(parents=True, exist_ok=True)
    if to is None:
        artifact_io.write_artifact(written, bundle)
    else:
        write_format(get_format(to), written, bundle)
    fill(cache, repository, read_all(written))


def make_hub_cache(directory: Path) -> Path:
    """Write the three repositories and return the cache directory, for HF_HUB_CACHE together with HF_HUB_OFFLINE=1."""
    cache = directory / "hub"
    erf: dict[str, object] = {"block.activation": "gelu_erf"}
    publish(cache, TIMM_TINY, random_bundle("Ti/16", erf), to="timm", directory=directory)
    base = random_bundle("B/16", erf | {"depth": 1, "block.norm_eps": 1e-12})
    publish(cache, GOOGLE_BASE, base, to="huggingface", directory=directory)
    cats = random_bundle("Ti/16", {"depth": 1}, image_size=32, labels=("cat", "dog", "owl"))
    publish(cache, CATS, cats, to=None, directory=directory)
    return cache
