"""Fingerprints of weights and images change exactly when these do."""

import os
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.inference.image_inputs import ImageFiles
from vitkit.inference.outputs import fingerprint_images, fingerprint_weights
from vitkit.weights.convert import write_format
from vitkit.weights.formats.registry import get_format
from vitkit.weights.load import load_bundle

SETTINGS = {"width": 32, "depth": 1, "heads": 2, "mlp_dim": 32}


@pytest.mark.parametrize("weight_format", ["vitkit", "google", "timm"])
def test_weights_fingerprint_follows_the_loaded_files(tmp_path: Path, weight_format: str) -> None:
    model = vitkit.create("Ti/16", image_size=16, patch_size=8, num_classes=2, settings=SETTINGS)
    vitkit.save(model, tmp_path / "vitkit", labels=["cat", "dog"])
    path = tmp_path / "vitkit"
    if weight_format != "vitkit":
        path = tmp_path / ("weights.npz" if weight_format == "google" else "timm")
        write_format(get_format(weight_format), path, load_bundle(tmp_path / "vitkit"))
    first = fingerprint_weights(str(path))
    assert first is not None
    (tmp_path / "predictions.csv.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("unrelated")
    assert fingerprint_weights(str(path)) == first
    torch.nn.init.ones_(model.head.weight)
    if weight_format == "vitkit":
        vitkit.save(model, path, labels=["cat", "dog"])
    else:
        file = path if weight_format == "google" else next(path.glob("*.safetensors"))
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert fingerprint_weights(str(path)) not in (first, None)


def test_missing_weights_have_no_fingerprint(tmp_path: Path) -> None:
    assert fingerprint_weights(str(tmp_path)) is None
    assert fingerprint_weights(str(tmp_path / "nowhere")) is None
    assert fingerprint_weights("hub:no/../name") is None


def test_image_fingerprint_covers_names_and_order() -> None:
    lists = (["a", "b"], ["b", "a"], ["a"], ["ab"], ["a", "b", "c"], ["a", "\udcff"], [])
    fingerprints = [fingerprint_images(ImageFiles(names)) for names in lists]
    assert [each["count"] for each in fingerprints] == [2, 2, 1, 1, 3, 2, 0]
    assert len({str(each) for each in fingerprints}) == len(lists)
    assert fingerprint_images(ImageFiles(["x/a"])) == fingerprint_images(ImageFiles(["a"], prefix="x/"))
