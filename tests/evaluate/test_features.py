"""Features are computed once, whatever interrupts, and belong to one model, one preparation and one set of images."""

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from model_cases import random_vit, small

from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import DataError
from vitkit.data.decode import decode
from vitkit.data.source import Subset
from vitkit.data.sources.embedded import digits
from vitkit.data.transforms import Preprocessing
from vitkit.evaluate import features as features_module
from vitkit.evaluate.features import cached_features, data_digest, model_digest
from vitkit.evaluate.least_squares import Head
from vitkit.evaluate.probing import as_released, labelled_features, learn_and_judge, with_head
from vitkit.model.config import TokenConfig

CONFIG = small(image_size=16, channels=1)


def artefact(config=CONFIG) -> Artefact:
    model = random_vit(config)
    how = Preprocessing(image_size=16, channels=1, mean=(0.5,), deviation=(0.5,))
    labels = tuple(str(number) for number in range(config.classes))
    return Artefact(name="tiny", config=config, state=model.state_dict(), preprocessing=how, labels=labels)


def some(count: int = 30) -> Subset:
    return Subset(digits().splits["train"], range(count))


def test_features_are_those_of_the_model_and_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, source = artefact(), some()
    found = cached_features(known, source, folder=tmp_path, batch_size=7)
    assert found.shape == (30, 16)
    with torch.no_grad():
        how = known.preprocessing
        pixels = torch.stack([torch.from_numpy(how.pixels(_picture(source, index))) for index in range(30)])
        expected = known.model().features(how.normalise(pixels))
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)
    monkeypatch.setattr(features_module, "_fill", lambda *_, **__: pytest.fail("computed again"))
    assert np.array_equal(found, cached_features(known, source, folder=tmp_path))
    assert isinstance(found, np.memmap)
    assert [path.suffix for path in tmp_path.iterdir() if not path.name.startswith(".")] == [".npy"]


def _picture(source: Subset, index: int):
    return decode(source.content(index), channels=1)


def test_another_model_preparation_or_image_has_features_of_its_own(tmp_path: Path) -> None:
    known = artefact()
    cached_features(known, some(), folder=tmp_path)
    moved = {name: tensor + 0.1 for name, tensor in known.state.items()}
    cached_features(replace(known, state=moved), some(), folder=tmp_path)
    cached_features(known, some(), folder=tmp_path, preprocessing=as_released(known.preprocessing))
    cached_features(known, some(29), folder=tmp_path)
    assert len(list(tmp_path.glob("*.npy"))) == 4
    assert model_digest(known) != model_digest(replace(known, state=moved))
    assert data_digest(some()) == data_digest(some()) != data_digest(some(29))


def test_an_interrupted_file_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, source = artefact(), some()
    whole = np.array(cached_features(known, source, folder=tmp_path / "whole", batch_size=4))
    monkeypatch.setattr(features_module, "SAVE_EVERY", 2)
    seen: list[int] = []

    def interrupt(images: int) -> None:
        seen.append(images)
        if sum(seen) >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_features(known, source, folder=tmp_path / "cut", batch_size=4, progress=interrupt)
    assert not [path for path in (tmp_path / "cut").glob("*.npy") if "partial" not in path.name]
    told: list[int] = []
    found = cached_features(known, source, folder=tmp_path / "cut", batch_size=4, progress=told.append)
    assert told[0] == 16  # what was saved; the batch after it is computed again
    assert sum(told) == 30
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-6)


def test_a_full_disk_is_named_and_what_was_computed_is_gone_on_from(tmp_path: Path) -> None:
    known, source = artefact(), some()
    whole = np.array(cached_features(known, source, folder=tmp_path / "whole"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole.nbytes // 2, limit[1]))
    try:
        with pytest.raises(DataError, match=r"partial\.npy: File too large") as caught:
            cached_features(known, source, folder=tmp_path / "full", batch_size=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "XDG_CACHE_HOME" in (caught.value.hint or "")
    found = cached_features(known, source, folder=tmp_path / "full")
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-6)


def test_no_images_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images"):
        cached_features(artefact(), some(0), folder=tmp_path)


@pytest.mark.parametrize("distilled", [False, True])
def test_a_head_on_features_makes_a_model_that_answers_with_it(distilled: bool, tmp_path: Path) -> None:
    known = artefact(replace(CONFIG, tokens=TokenConfig(distillation=distilled)))
    width = known.config.features
    head = Head(weight=torch.randn(7, width), bias=torch.randn(7))
    made = with_head(known, head, labels=tuple("abcdefg"), preprocessing=known.preprocessing)
    images = torch.randn(3, 1, 16, 16)
    with torch.no_grad():
        expected = head(known.model().features(images))
        torch.testing.assert_close(made.model()(images), expected, rtol=0, atol=1e-4)


def test_what_is_judged_by_is_not_learnt_from(tmp_path: Path) -> None:
    data = digits()
    train, test = learn_and_judge(data)
    assert (train, test) == (data.splits["train"], data.splits["test"])
    alone = replace(data, splits={"all": data.splits["train"]})
    kept, held = learn_and_judge(alone)
    names = [{source.name(index) for index in range(len(source))} for source in (kept, held)]
    assert not names[0] & names[1]
    assert 0.15 < len(held) / len(data.splits["train"]) < 0.25
    found = labelled_features(artefact(), Subset(held, range(5)), folder=tmp_path)
    assert found.labels.tolist() == held.labels[:5].tolist()
