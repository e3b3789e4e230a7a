"""Cached features: correctness, cache keys and resume."""

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from model_cases import random_vit, small

from vitkit.core.errors import DataError
from vitkit.data.dataset import Subset
from vitkit.data.decode import decode
from vitkit.data.fingerprint import fingerprint_contents
from vitkit.data.layouts.arrays import open_digits
from vitkit.data.preprocessing import Preprocessing
from vitkit.evaluation import features as features_module
from vitkit.evaluation.features import LabeledFeatures, compute_features
from vitkit.evaluation.fewshot import LinearHead, fewshot_splits, released_preprocessing, replace_head
from vitkit.model.config import TokenConfig
from vitkit.weights.bundle import ModelBundle

CONFIG = small(image_size=16, channels=1)


def make_bundle(config=CONFIG) -> ModelBundle:
    model = random_vit(config)
    preprocessing = Preprocessing(image_size=16, channels=1, mean=(0.5,), std=(0.5,))
    labels = tuple(str(number) for number in range(config.num_classes))
    return ModelBundle(name="tiny", config=config, state=model.state_dict(), preprocessing=preprocessing, labels=labels)


def some(count: int = 30) -> Subset:
    return Subset(open_digits().splits["train"], range(count))


def test_features_equal_the_model_and_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, source = make_bundle(), some()
    result = compute_features(bundle, source, directory=tmp_path, batch_size=7)
    assert result.shape == (30, 16)
    with torch.no_grad():
        preprocessing = bundle.preprocessing
        pixels = torch.stack(
            [torch.from_numpy(preprocessing.to_pixels(_picture(source, index))) for index in range(30)]
        )
        expected = bundle.build_model().features(preprocessing.normalize(pixels))
    np.testing.assert_allclose(result, expected.numpy(), rtol=0, atol=1e-5)
    monkeypatch.setattr(features_module, "_fill_cache", lambda *_, **__: pytest.fail("computed again"))
    assert np.array_equal(result, compute_features(bundle, source, directory=tmp_path))
    assert isinstance(result, np.memmap)
    assert [path.suffix for path in tmp_path.iterdir() if not path.name.startswith(".")] == [".npy"]


def test_features_are_computed_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bundle, source, counts = make_bundle(), some(), list[int]()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "file/cache"))
    result = compute_features(bundle, source, batch_size=7, progress=counts.append)
    assert np.array_equal(result, compute_features(bundle, source, directory=tmp_path / "cache", batch_size=7))
    assert sum(counts) == 30
    compute_features(bundle, some(20), batch_size=7)
    assert caplog.text.count("features are not cached: ") == 1


def _picture(source: Subset, index: int):
    return decode(source.read(index), channels=1)


def test_cache_depends_on_model_preprocessing_and_images(tmp_path: Path) -> None:
    bundle = make_bundle()
    compute_features(bundle, some(), directory=tmp_path)
    moved = {name: tensor + 0.1 for name, tensor in bundle.state.items()}
    compute_features(replace(bundle, state=moved), some(), directory=tmp_path)
    compute_features(bundle, some(), directory=tmp_path, preprocessing=released_preprocessing(bundle.preprocessing))
    compute_features(bundle, some(29), directory=tmp_path)
    assert len(list(tmp_path.glob("*.npy"))) == 4
    assert bundle.checksum() != replace(bundle, state=moved).checksum()
    assert (
        fingerprint_contents(some()).checksum
        == fingerprint_contents(some()).checksum
        != fingerprint_contents(some(29)).checksum
    )


def test_interrupted_cache_file_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, source = make_bundle(), some()
    whole = np.array(compute_features(bundle, source, directory=tmp_path / "whole", batch_size=4))
    monkeypatch.setattr(features_module, "SAVE_EVERY", 2)
    observed: list[int] = []

    def interrupt(images: int) -> None:
        observed.append(images)
        if sum(observed) >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_features(bundle, source, directory=tmp_path / "cut", batch_size=4, progress=interrupt)
    assert not [path for path in (tmp_path / "cut").glob("*.npy") if "partial" not in path.name]
    messages: list[int] = []
    result = compute_features(bundle, source, directory=tmp_path / "cut", batch_size=4, progress=messages.append)
    assert messages[0] == 16  # what was saved; the batch after it is computed again
    assert sum(messages) == 30
    np.testing.assert_allclose(result, whole, rtol=0, atol=1e-6)


def test_full_disk_is_reported_and_resumed(tmp_path: Path) -> None:
    bundle, source = make_bundle(), some()
    whole = np.array(compute_features(bundle, source, directory=tmp_path / "whole"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole.nbytes // 2, limit[1]))
    try:
        with pytest.raises(DataError, match=r"partial\.npy: File too large") as caught:
            compute_features(bundle, source, directory=tmp_path / "full", batch_size=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "VITKIT_CACHE" in (caught.value.hint or "")
    result = compute_features(bundle, source, directory=tmp_path / "full")
    np.testing.assert_allclose(result, whole, rtol=0, atol=1e-6)


def test_empty_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images"):
        compute_features(make_bundle(), some(0), directory=tmp_path)


@pytest.mark.parametrize("distilled", [False, True])
def test_replaced_head_is_used_by_the_model(distilled: bool, tmp_path: Path) -> None:
    bundle = make_bundle(replace(CONFIG, tokens=TokenConfig(distillation=distilled)))
    width = bundle.config.num_features
    head = LinearHead(weight=torch.randn(7, width), bias=torch.randn(7))
    created = replace_head(bundle, head, labels=tuple("abcdefg"), preprocessing=bundle.preprocessing)
    images = torch.randn(3, 1, 16, 16)
    with torch.no_grad():
        expected = head(bundle.build_model().features(images))
        torch.testing.assert_close(created.build_model()(images), expected, rtol=0, atol=1e-4)


def test_fewshot_splits_are_disjoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path))
    data = open_digits()
    train, test = fewshot_splits(data)
    assert (train, test) == (data.splits["train"], data.splits["test"])
    alone = replace(data, splits={"all": data.splits["train"]})
    remaining, held = fewshot_splits(alone)
    names = [{source.name(index) for index in range(len(source))} for source in (remaining, held)]
    assert not names[0] & names[1]
    assert 0.15 < len(held) / len(data.splits["train"]) < 0.25
    few = Subset(held, range(5))
    result = LabeledFeatures.from_arrays(compute_features(make_bundle(), few), few.labels)
    assert result.targets.tolist() == held.labels[:5].tolist()
