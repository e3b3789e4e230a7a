"""Served models: names, precisions and agreement with the unmodified model."""

from pathlib import Path

import numpy as np
import pytest
from server.serving import encode_image

from vitkit.core.errors import DataError
from vitkit.inference.predictor import Predictor
from vitkit.server.config import EngineConfig, configure_server
from vitkit.server.models import load_models


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for seed in range(6):
        (tmp_path / f"{seed}.png").write_bytes(encode_image(seed))
    (tmp_path / "broken.png").write_bytes(b"broken")
    return tmp_path


def test_each_precision_has_a_name_and_its_agreement(models: Path, photos: Path) -> None:
    _, configs = configure_server({"pets": str(models / "pets")}, {}, precisions=("fp32", "int8"))
    served = load_models(configs, engine=EngineConfig(device="cpu"), calibration=str(photos), batch=4)
    first, second = (model.describe() for model in served.values())
    assert (first["name"], first["precision"], first["agreement"]) == ("pets", "fp32", None)
    assert (second["name"], second["precision"]) == ("pets-int8", "int8")
    assert second["agreement"]["images"] == 6
    assert 0.5 < second["agreement"]["same_top1"] <= 1.0
    assert "of 6 images" in second["agreed"]
    assert all(model.seconds_per_image > 0 for model in served.values())
    exact = Predictor(models / "pets")
    image = exact.model.preprocess(encode_image(1))
    features = served["pets-int8"].run(image)[0][0].numpy()
    expected = exact.features(encode_image(1))[0].numpy()
    # int8 is exact to about a hundredth of the range, and not to a millionth: it is another engine.
    assert 1e-6 < np.abs(features - expected).max() / np.abs(expected).max() < 0.1


def test_calibration_without_a_readable_image_is_an_error(models: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"broken")
    _, configs = configure_server({"pets": str(models / "pets")}, {}, precisions=("bf16",))
    with pytest.raises(DataError, match="calibration"):
        load_models(configs, engine=EngineConfig(device="cpu"), calibration=str(tmp_path), batch=4)
