"""Predictions do not depend on the form of an image, and equal those of evaluation."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit.core.errors import ConfigError, DataError, InputError
from vitkit.data.layouts.arrays import open_digits
from vitkit.data.preprocessing import Preprocessing
from vitkit.evaluation.logits import compute_logits as evaluate_logits
from vitkit.inference.agreement import sample_images
from vitkit.inference.image_inputs import open_images
from vitkit.inference.predictions import Prediction
from vitkit.inference.predictor import PredictionOptions, Predictor, predict_batches
from vitkit.model.vit import ViT
from vitkit.weights.load import load_bundle
from vitkit.zoo.registry import configure

SETTINGS = {"width": 32, "depth": 1, "heads": 2, "mlp_dim": 32}


def saved(folder: Path, *, channels: int = 3, num_classes: int = 3, antialias: bool = True) -> Path:
    model = vitkit.create(
        "Ti/16", image_size=16, patch_size=8, channels=channels, num_classes=num_classes, settings=SETTINGS
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    how = Preprocessing(image_size=16, channels=channels, mean=(0.4,), std=(0.3,), antialias=antialias)
    vitkit.save(
        model,
        folder,
        labels=["cat", "dog", "owl", "elk", "hen", "ant", "bee", "fox", "emu", "cow"][:num_classes],
        preprocessing=how,
    )
    return folder


def photo(seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, size=(21, 17, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_model_built_from_its_class_gets_names_and_preprocessing() -> None:
    model = ViT(configure("Ti/16", image_size=16, num_classes=2, settings=SETTINGS))
    predictor = Predictor(model, device="cpu")
    assert predictor.model is model
    assert (predictor.labels, predictor.preprocessing.image_size) == (("0", "1"), 16)
    assert predictor(photo())[0].label == "0"


def test_prediction_does_not_depend_on_the_input_type(tmp_path: Path) -> None:
    predictor, picture = Predictor(saved(tmp_path / "model")), photo()
    picture.save(tmp_path / "cat.png")
    content = io.BytesIO()
    picture.save(content, format="PNG")
    forms = [str(tmp_path / "cat.png"), tmp_path / "cat.png", content.getvalue(), picture, np.asarray(picture)]
    forms.append(torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1))
    assert len({predictor(form)[0].predictions for form in forms}) == 1
    together = predictor(forms)
    assert [[each.label for each in row.predictions] for row in together] == [
        [each.label for each in together[0].predictions]
    ] * 6


def test_probabilities_are_the_softmax_in_descending_order(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path), batch_size=2)
    model, images = vitkit.load(tmp_path), [photo(seed) for seed in range(5)]
    with torch.no_grad():
        expected = torch.cat([model(model.preprocess(image)) for image in images]).softmax(dim=1)
    # Other batch sizes change the order of summation.
    torch.testing.assert_close(predictor.probabilities(images), expected, atol=1e-6, rtol=0)
    for row, probabilities in zip(predictor(images, top=2), expected, strict=True):
        order = probabilities.argsort(descending=True)[:2].tolist()
        assert [each.label for each in row.predictions] == [("cat", "dog", "owl")[number] for number in order]
        assert [each.probability for each in row.predictions] == pytest.approx(probabilities[order].tolist(), abs=1e-6)


def test_ties_keep_the_order_of_the_classes(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path))
    first, second = predictor.top_predictions(torch.tensor([[0.2, 0.4, 0.4], [0.3, 0.3, 0.3]]), top=2)
    assert first == (Prediction("dog", pytest.approx(0.4)), Prediction("owl", pytest.approx(0.4)))
    assert [each.label for each in second] == ["cat", "dog"]


def test_classes_of_a_batch_are_ranked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, source = Predictor(saved(tmp_path, channels=1, num_classes=10), batch_size=64), open_digits()
    shapes: list[torch.Size] = []
    original = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda tensor, k: (shapes.append(tensor.shape), original(tensor, k))[1])
    batches = predict_batches(predictor, source.splits["test"], PredictionOptions(top=5))
    assert [len(next(batches)), len(next(batches))] == [64, 64]
    assert shapes == [(64, 10), (64, 10)]


@pytest.mark.parametrize("antialias", [True, False])
def test_predictions_equal_those_of_evaluation(tmp_path: Path, antialias: bool) -> None:
    place = saved(tmp_path, channels=1, num_classes=10, antialias=antialias)
    predictor, source = Predictor(place, batch_size=64), open_digits().splits["test"]
    artifact = load_bundle(place)
    evaluated = evaluate_logits(artifact.build_model(), source, preprocessing=artifact.preprocessing, batch_size=64)
    found = [answer for batch in predict_batches(predictor, source, PredictionOptions(top=10)) for answer in batch]
    assert [answer.file for answer in found] == [source.name(index) for index in range(len(source))]
    for answer, expected in zip(found, evaluated.logits.softmax(dim=1), strict=True):
        probabilities = {each.label: each.probability for each in answer.predictions}
        assert answer.predictions[0].label == artifact.labels[int(expected.argmax())]
        # eval runs the eager model, predict the fastest engine: logits within 1e-4.
        assert [probabilities[label] for label in artifact.labels] == pytest.approx(expected.tolist(), abs=1e-4)


def test_features_are_the_input_of_the_head(tmp_path: Path) -> None:
    predictor, source = Predictor(saved(tmp_path / "model"), batch_size=2), tmp_path / "photos"
    source.mkdir()
    for seed in range(3):
        photo(seed).save(source / f"{seed}.png")
    found = [
        each
        for batch in predict_batches(predictor, open_images([str(source)]), PredictionOptions(features=True))
        for each in batch
    ]
    model = vitkit.load(tmp_path / "model")
    with torch.no_grad():
        for seed, answer in enumerate(found):
            expected = model.features(model.preprocess(photo(seed)))[0]
            torch.testing.assert_close(torch.tensor(answer.features), expected, atol=1e-5, rtol=0)
    files = [str(source / f"{seed}.png") for seed in range(3)]
    assert [answer.predictions for answer in found] == [answer.predictions for answer in predictor(files)]


def test_model_without_classes_returns_features_only(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path, num_classes=0))
    with pytest.raises(InputError, match="no classes"):
        predictor(photo())
    assert predictor.features(photo()).shape == (1, 32)


def test_unreadable_image_affects_no_other(tmp_path: Path) -> None:
    predictor, folder = Predictor(saved(tmp_path / "model"), batch_size=4), tmp_path / "photos"
    folder.mkdir()
    for seed in range(6):
        photo(seed).save(folder / f"{seed}.png")
    before = [
        answer
        for batch in predict_batches(predictor, open_images([str(folder)]), PredictionOptions())
        for answer in batch
    ]
    (folder / "3.png").write_bytes(b"not an image")
    after = [
        answer
        for batch in predict_batches(predictor, open_images([str(folder)]), PredictionOptions())
        for answer in batch
    ]
    assert after[3].error is not None
    assert "predictions" not in after[3].to_dict()
    assert after[:3] + after[4:] == before[:3] + before[4:]


def test_images_keep_the_order_of_the_paths(tmp_path: Path) -> None:
    for name in ("b.png", "folder/z.png", "folder/a/y.jpg", "folder/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    source = open_images([str(tmp_path / "b.png"), str(tmp_path / "folder"), "digits"])
    names = [source.name(index) for index in range(len(source))]
    assert names[:4] == [f"{tmp_path}/{name}" for name in ("b.png", "folder/a/y.jpg", "folder/z.png")] + [
        open_digits().splits["train"].name(0)
    ]
    assert source.read(1) == b"folder/a/y.jpg"
    assert len(source) == 3 + 1797


@pytest.mark.parametrize("path", ["missing.jpg", "empty"])
def test_path_without_images_is_named(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=path):
        open_images([path])


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "int8"}, {"merge": 1}])
def test_approximate_engines_are_close_to_fp32(tmp_path: Path, options: dict[str, Any]) -> None:
    loaded = vitkit.load(saved(tmp_path))
    exact, other = Predictor(loaded), Predictor(loaded, **options)
    assert exact.model is other.model  # a loaded model is shared
    images = [photo(seed) for seed in range(5)]
    assert (other.precision, other.merge) == (options.get("precision", "fp32"), options.get("merge", 0))
    # In one layer, int8 products or one merged patch of four change logits of about 3 by a few tenths.
    torch.testing.assert_close(other.logits(images), exact.logits(images), atol=0.3, rtol=0)
    assert other.engine.name
    assert bool(other.fallback_reason) == ("merge" in options or not exact.engine.name.startswith("native"))


def test_forward_takes_preprocessed_images(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path))
    pixels = torch.cat([predictor.model.preprocess(photo(seed)) for seed in range(3)])
    features, logits = predictor.forward(pixels)
    with torch.no_grad():
        expected = predictor.model.features(pixels)
        # fp32 guarantees logits within 1e-4.
        torch.testing.assert_close(features, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(logits, predictor.model.head(expected), atol=1e-4, rtol=0)


def test_sample_has_the_first_readable_images(tmp_path: Path) -> None:
    for seed in range(9):
        photo(seed).save(tmp_path / f"{seed}.png")
    for bad in (0, 3):
        (tmp_path / f"{bad}.png").write_bytes(b"not an image")
    source, how = open_images([str(tmp_path)]), Preprocessing(image_size=16)
    found = torch.cat(list(sample_images(source, how, images=5, batch_size=3)))
    expected = [how.normalize(torch.from_numpy(how.to_pixels(photo(seed)))[None]) for seed in (1, 2, 4, 5, 6)]
    assert torch.equal(found, torch.cat(expected))
    assert len(torch.cat(list(sample_images(source, how)))) == 7
    assert len(torch.cat(list(sample_images(source, how, max_tried=4)))) == 2
    assert not list(sample_images(source, how, max_tried=1))


def test_invalid_arguments_are_rejected(tmp_path: Path) -> None:
    place = saved(tmp_path)
    with pytest.raises(ConfigError, match="cannot be negative"):
        Predictor(place, merge=-1)
    with pytest.raises(ConfigError, match="at least 1"):
        Predictor(place, batch_size=0)
    with pytest.raises(InputError, match="no images to predict"):
        Predictor(place)([])
