"""`predict` and `Predictor`: one row per image in any form, in memory or from a file."""

import io
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.tiny_runs import Shell, photos
from PIL import Image

import vitkit
from vitkit.core.result import to_json
from vitkit.errors import ArgumentError, ConfigError, DataError, InputError
from vitkit.inference import outputs, predictor
from vitkit.inference.predictions import Predictions

SETTINGS = {"width": 32, "depth": 1, "heads": 2, "mlp_dim": 32}


@pytest.fixture(scope="module")
def model() -> vitkit.ViT:
    return make_model()


def make_model(num_classes: int = 3) -> vitkit.ViT:
    model = vitkit.create("Ti/16", image_size=16, patch_size=8, num_classes=num_classes, settings=SETTINGS)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return model


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", each=4)
    (tmp_path / "photos/cat/01.png").write_bytes(b"not an image")
    vitkit.save(make_model(), "model", labels=["cat", "dog, or wolf", 'owl "hoot"\n'])
    return Shell(capsys)


def predict(*arguments: Any, **options: Any) -> Predictions:
    return vitkit.predict(*arguments, device="cpu", workers=0, progress=False, **options)


def rows(predictions: Sequence[Any]) -> list[dict[str, object]]:
    return [prediction.to_dict() for prediction in predictions]


@pytest.mark.parametrize("options", [{}, {"top": 1, "features": True}])
def test_rows_equal_the_lines_of_the_command(shell: Shell, options: dict[str, Any]) -> None:
    flags = ("--top", 1, "--features") if options else ()
    printed = shell("predict", "model", "photos", "--json", "--device", "cpu", "--workers", 0, *flags)
    result = predict("model", "photos", **options)
    assert rows(result) == [json.loads(line) for line in printed.out.splitlines()]
    assert [bad.name for bad in result.skipped] == ["photos/cat/01.png"]
    assert result.warnings[0].startswith("skipped photos/cat/01.png: ")


@pytest.mark.parametrize("name", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("features", [False, True])
def test_result_reads_from_the_file(shell: Shell, monkeypatch: pytest.MonkeyPatch, name: str, features: bool) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    monkeypatch.setattr(outputs, "PARQUET_ROWS", 3)
    expected = predict("model", "photos", features=features)
    written = predict("model", "photos", features=features, out=f"out.{name}")
    assert written.path == Path(f"out.{name}")
    assert rows(written) == rows(expected) == [written[index].to_dict() for index in range(len(written))]
    assert rows(written[1:7:2]) == rows(expected[1:7:2])
    assert written[-1] == expected[-1]
    assert (written.skipped, written.warnings) == (expected.skipped, expected.warnings)
    again = predict("model", "photos", features=features, out=f"out.{name}")
    assert rows(again) == rows(expected)
    printed = shell(
        "predict", "model", "photos", "--out", f"out.{name}", "--json", *(["--features"] if features else [])
    )
    assert printed.json == written.to_dict() == again.to_dict()
    with pytest.raises(IndexError):
        written[8]


def test_every_form_of_an_image_is_accepted(model: vitkit.ViT, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    (tmp_path / "a.png").write_bytes(content.getvalue())
    forms = [
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        content.getvalue(),
        Image.fromarray(pixels),
        pixels,
        torch.from_numpy(pixels).permute(2, 0, 1),
    ]
    single = [predict(model, form) for form in forms]
    assert {len(each) for each in single} == {1}
    assert len({each[0].predictions for each in single}) == 1
    together = predict(model, forms)
    assert [row.file for row in together] == [str(tmp_path / "a.png")] * 2 + [f"images[{n}]" for n in range(2, 6)]
    assert together[0].label == single[0][0].label == single[0][0].predictions[0].label
    assert together[0].probability == pytest.approx(single[0][0].probability, abs=1e-6)  # another batch size


def test_bad_images_do_not_abort_the_rest(model: vitkit.ViT, tmp_path: Path) -> None:
    good = np.zeros((20, 20, 3), dtype=np.uint8)
    bad = [b"", b"text", np.zeros((0, 4, 3), dtype=np.uint8), Image.new("F", (4, 4)), tmp_path / "missing.jpg"]
    result = predict(model, [good, *bad, good], batch_size=2)
    assert [row.error is None for row in result] == [True, *[False] * len(bad), True]
    assert [row.label for row in result[1:-1]] == [None] * len(bad)
    assert result[0].predictions == result[-1].predictions
    assert len(result.skipped) == len(bad)
    assert "no such file" in str(result[-2].error)
    written = predict(model, [good, *bad, good], out=tmp_path / "out.csv")
    assert [row.error for row in written] == [row.error for row in result]


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        ("https://example.org/cat.jpg", DataError, "URLs are not opened"),
        (["a.png", "http://example.org/cat.jpg"], DataError, "URLs are not opened"),
        ("missing.jpg", DataError, "missing.jpg"),
        ([], DataError, "no images"),
        (3, InputError, "not an image"),
        (np.zeros((4, 4, 3)), InputError, "uint8"),
        (torch.zeros(3, 4, 4), InputError, "uint8"),
    ],
)
def test_wrong_images_are_an_error(model: vitkit.ViT, images: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        predict(model, images)


def test_wrong_arguments_are_an_error(model: vitkit.ViT, tmp_path: Path) -> None:
    photo = np.zeros((4, 4, 3), dtype=np.uint8)
    with pytest.raises(ArgumentError, match="use top=3"):
        vitkit.predict(model, photo, top_k=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="unknown suffix"):
        predict(model, photo, out=tmp_path / "out.txt")
    with pytest.raises(ConfigError, match="top must be positive"):
        predict(model, photo, top=0)
    with pytest.raises(InputError, match="no classes\nhint: use predict\\(features=True\\)"):
        predict(make_model(num_classes=0), photo)
    features = predict(make_model(num_classes=0), photo, features=True)
    assert (features[0].label, len(features[0].features)) == (None, 32)


def test_images_in_memory_are_part_of_the_request(model: vitkit.ViT, tmp_path: Path) -> None:
    black, white = np.zeros((9, 9, 3), dtype=np.uint8), np.full((9, 9, 3), 255, dtype=np.uint8)
    out = tmp_path / "out.csv"
    first = predict(model, [black, white], out=out)
    assert rows(predict(model, [black, white], out=out)) == rows(first)
    with pytest.raises(DataError, match="another request"):
        predict(model, [white, black], out=out)
    changed = make_model()
    changed.head.weight.data += 1.0
    with pytest.raises(DataError, match="weights changed"):
        predict(changed, [black, white], out=out)


def test_interrupted_call_resumes(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, calls = predictor.compute_outputs, []

    def interrupt(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return compute(*arguments)

    monkeypatch.setattr(predictor, "compute_outputs", interrupt)
    with pytest.raises(vitkit.Interrupted) as stopped:
        predict("model", "photos", out="out.jsonl", batch_size=2)
    assert isinstance(stopped.value, KeyboardInterrupt)
    assert stopped.value.path == Path("out.jsonl.partial")
    result = predict("model", "photos", out="out.jsonl", batch_size=2)
    assert (len(calls), len(result)) == (4, 8)


def test_agreement_is_measured_for_approximate_engines(model: vitkit.ViT, tmp_path: Path) -> None:
    images = [np.full((9, 9, 3), value, dtype=np.uint8) for value in range(5)]
    assert predict(model, images).agreement is None
    result = predict(model, images, precision="int8")
    assert result.agreement is not None
    assert result.agreement.images == 5
    pairs = [(image, "any") for image in images[:2]]
    calibrated = predict(model, images, precision="int8", calibration=pairs, out=tmp_path / "out.csv")
    assert calibrated.agreement is not None
    assert calibrated.agreement.images == 2
    assert calibrated.to_dict()["agreement"] == to_json(calibrated.agreement)


def test_model_of_the_caller_is_not_changed(model: vitkit.ViT) -> None:
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    predict(model, np.zeros((9, 9, 3), dtype=np.uint8))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_result_has_a_short_representation_and_a_plot(shell: Shell) -> None:
    result = predict("model", "photos")
    assert repr(result).startswith("Predictions(images=8, ")
    assert repr(predict("model", "photos/cat/00.png")).startswith("Predictions(file=photos/cat/00.png, label=")
    assert repr(result[0]).startswith("ImagePrediction(file='photos/cat/00.png', label=")
    assert repr(result[1]).startswith("ImagePrediction(file='photos/cat/01.png', error=")
    for each in (result, result[:1], result[1:2], predict("model", "photos", out="out.csv")):
        assert each.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
        assert "\n" not in repr(each)


def test_predictor_equals_predict(shell: Shell) -> None:
    runner = vitkit.Predictor("model", device="cpu")
    assert rows(runner("photos", top=2)) == rows(predict("model", "photos", top=2))
    with pytest.raises(InputError, match="no images to predict"):
        runner([])
