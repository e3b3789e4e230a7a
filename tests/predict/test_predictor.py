"""A model's answers are the same however an image comes to it, and those that it was judged by."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit.checkpoints.foreign import load
from vitkit.core.errors import ConfigError, DataError, InputError
from vitkit.data.sources.embedded import digits
from vitkit.data.transforms import Preprocessing
from vitkit.evaluate.accuracy import answers as judged_answers
from vitkit.predict.places import images_at
from vitkit.predict.predictor import Prediction, Predictor
from vitkit.predict.stream import Question, answers, sample

SETTINGS = ("width=32", "depth=1", "heads=2", "mlp_dim=32")


def saved(folder: Path, *, channels: int = 3, classes: int = 3, antialias: bool = True) -> Path:
    model = vitkit.create("Ti/16", image_size=16, patch_size=8, channels=channels, classes=classes, settings=SETTINGS)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    how = Preprocessing(image_size=16, channels=channels, mean=(0.4,), deviation=(0.3,), antialias=antialias)
    vitkit.save(
        model,
        folder,
        labels=["cat", "dog", "owl", "elk", "hen", "ant", "bee", "fox", "emu", "cow"][:classes],
        preprocessing=how,
    )
    return folder


def photo(seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, size=(21, 17, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_an_image_has_one_answer_whatever_it_comes_as(tmp_path: Path) -> None:
    predictor, picture = Predictor(saved(tmp_path / "model")), photo()
    picture.save(tmp_path / "cat.png")
    content = io.BytesIO()
    picture.save(content, format="PNG")
    forms = [str(tmp_path / "cat.png"), tmp_path / "cat.png", content.getvalue(), picture, np.asarray(picture)]
    assert len({tuple(predictor(form)[0]) for form in forms}) == 1
    together = predictor(forms)
    assert [[each.label for each in row] for row in together] == [[each.label for each in together[0]]] * 5


def test_probabilities_are_of_the_models_logits_the_likeliest_first(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path), batch_size=2)
    model, images = vitkit.load(tmp_path), [photo(seed) for seed in range(5)]
    with torch.no_grad():
        expected = torch.cat([model(model.preprocess(image)) for image in images]).softmax(dim=1)
    # One image at a time or two: matrix products of other sizes sum in another order.
    torch.testing.assert_close(predictor.probabilities(images), expected, atol=1e-6, rtol=0)
    for row, shares in zip(predictor(images, top=2), expected, strict=True):
        order = shares.argsort(descending=True)[:2].tolist()
        assert [each.label for each in row] == [("cat", "dog", "owl")[number] for number in order]
        assert [each.probability for each in row] == pytest.approx(shares[order].tolist(), abs=1e-6)


def test_of_equally_likely_classes_the_first_comes_first(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path))
    said = predictor.likeliest(torch.tensor([0.2, 0.4, 0.4]), top=3)
    assert [each.label for each in said] == ["dog", "owl", "cat"]
    assert said[0] == Prediction("dog", pytest.approx(0.4))


@pytest.mark.parametrize("antialias", [True, False])
def test_predictions_are_those_that_the_model_was_judged_by(tmp_path: Path, antialias: bool) -> None:
    place = saved(tmp_path, channels=1, classes=10, antialias=antialias)
    predictor, source = Predictor(place, batch_size=64), digits().splits["test"]
    artefact = load(place)
    judged = judged_answers(artefact.model(), source, preprocessing=artefact.preprocessing, batch_size=64)
    found = [answer for batch in answers(predictor, source, Question(top=10)) for answer in batch]
    assert [answer.file for answer in found] == [source.name(index) for index in range(len(source))]
    for answer, expected in zip(found, judged.logits.softmax(dim=1), strict=True):
        shares = {each.label: each.probability for each in answer.predictions}
        assert answer.predictions[0].label == artefact.labels[int(expected.argmax())]
        # Eval runs the model as written, predict the fast engine: sums in another order, logits within 1e-4.
        assert [shares[label] for label in artefact.labels] == pytest.approx(expected.tolist(), abs=1e-4)


def test_features_are_what_the_head_reads(tmp_path: Path) -> None:
    predictor, source = Predictor(saved(tmp_path / "model"), batch_size=2), tmp_path / "photos"
    source.mkdir()
    for seed in range(3):
        photo(seed).save(source / f"{seed}.png")
    found = [each for batch in answers(predictor, images_at([str(source)]), Question(features=True)) for each in batch]
    model = vitkit.load(tmp_path / "model")
    with torch.no_grad():
        for seed, answer in enumerate(found):
            expected = model.features(model.preprocess(photo(seed)))[0]
            torch.testing.assert_close(torch.tensor(answer.features), expected, atol=1e-5, rtol=0)
    files = [str(source / f"{seed}.png") for seed in range(3)]
    assert [list(answer.predictions) for answer in found] == predictor(files)


def test_a_model_without_classes_gives_features_alone(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path, classes=0))
    with pytest.raises(InputError, match="no classes to answer with"):
        predictor(photo())
    assert predictor.features(photo()).shape == (1, 32)


def test_one_bad_image_among_good_ones_costs_only_itself(tmp_path: Path) -> None:
    predictor, folder = Predictor(saved(tmp_path / "model"), batch_size=4), tmp_path / "photos"
    folder.mkdir()
    for seed in range(6):
        photo(seed).save(folder / f"{seed}.png")
    before = [answer for batch in answers(predictor, images_at([str(folder)]), Question()) for answer in batch]
    (folder / "3.png").write_bytes(b"no picture")
    after = [answer for batch in answers(predictor, images_at([str(folder)]), Question()) for answer in batch]
    assert after[3].error is not None
    assert "predictions" not in after[3].to_json()
    assert after[:3] + after[4:] == before[:3] + before[4:]


def test_places_are_joined_in_their_order(tmp_path: Path) -> None:
    for name in ("b.png", "folder/z.png", "folder/a/y.jpg", "folder/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    source = images_at([str(tmp_path / "b.png"), str(tmp_path / "folder"), "digits"])
    names = [source.name(index) for index in range(len(source))]
    assert names[:4] == [f"{tmp_path}/{name}" for name in ("b.png", "folder/a/y.jpg", "folder/z.png")] + [
        digits().splits["train"].name(0)
    ]
    assert source.content(1) == b"folder/a/y.jpg"
    assert len(source) == 3 + 1797


@pytest.mark.parametrize("place", ["missing.jpg", "empty"])
def test_a_place_without_images_is_named(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=place):
        images_at([place])


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "int8"}, {"merge": 1}])
def test_other_engines_answer_nearly_as_fp32_does(tmp_path: Path, options: dict[str, Any]) -> None:
    loaded = vitkit.load(saved(tmp_path))
    exact, other = Predictor(loaded), Predictor(loaded, **options)
    assert exact.model is other.model  # a loaded model is shared
    images = [photo(seed) for seed in range(5)]
    assert (other.precision, other.merge) == (options.get("precision", "fp32"), options.get("merge", 0))
    # One layer: 8 bits in its products, or one patch of four that is merged after them, move logits of 3 by tenths.
    torch.testing.assert_close(other.logits(images), exact.logits(images), atol=0.3, rtol=0)
    assert other.engine.name
    assert bool(other.remark) == ("merge" in options or not exact.engine.name.startswith("native"))


def test_features_and_logits_of_prepared_images_come_in_one_pass(tmp_path: Path) -> None:
    predictor = Predictor(saved(tmp_path))
    pixels = torch.cat([predictor.model.preprocess(photo(seed)) for seed in range(3)])
    features, logits = predictor.answer(pixels)
    with torch.no_grad():
        expected = predictor.model.features(pixels)
        # fp32 promises logits within 1e-4.
        torch.testing.assert_close(features, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(logits, predictor.model.head(expected), atol=1e-4, rtol=0)


def test_a_sample_is_the_first_images_that_can_be_read(tmp_path: Path) -> None:
    for seed in range(9):
        photo(seed).save(tmp_path / f"{seed}.png")
    for bad in (0, 3):
        (tmp_path / f"{bad}.png").write_bytes(b"no picture")
    source, how = images_at([str(tmp_path)]), Preprocessing(image_size=16)
    found = torch.cat(list(sample(source, how, images=5, batch_size=3)))
    expected = [how.normalise(torch.from_numpy(how.pixels(photo(seed)))[None]) for seed in (1, 2, 4, 5, 6)]
    assert torch.equal(found, torch.cat(expected))
    assert len(torch.cat(list(sample(source, how)))) == 7
    assert len(torch.cat(list(sample(source, how, looked_at=4)))) == 2
    assert not list(sample(source, how, looked_at=1))


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    place = saved(tmp_path)
    with pytest.raises(ConfigError, match="cannot be negative"):
        Predictor(place, merge=-1)
    with pytest.raises(ConfigError, match="at least one image"):
        Predictor(place, batch_size=0)
    with pytest.raises(InputError, match="no images to answer for"):
        Predictor(place)([])
