"""One model in two precisions on a real server: both have names, the second says how far it agrees with the first."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from serve.serving import is_ready, picture, request, served, tiny_model, until

from vitkit.predict.predictor import Predictor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("precisions")
    tiny_model(place / "pets")
    (place / "photos").mkdir()
    for seed in range(6):
        (place / "photos" / f"{seed}.png").write_bytes(picture(seed))
    (place / "photos" / "broken.png").write_bytes(b"broken")
    return place


def test_each_precision_has_a_name_and_the_second_its_agreement(folder: Path) -> None:
    calibration = ("--calibration", folder / "photos")
    with served(folder / "pets", "--precision", "fp32,int8", *calibration, "--access-log") as server:
        first, second = server.get("/v1/models").json["models"]
        assert (first["name"], first["precision"], first["agreement"]) == ("pets", "fp32", None)
        assert (second["name"], second["precision"]) == ("pets-int8", "int8")
        assert second["agreement"]["images"] == 6
        assert 0.5 < second["agreement"]["same_top1"] <= 1.0
        said = server.post("/v1/features?model=pets-int8", picture(1)).json["features"]
        exact = Predictor(folder / "pets").features(picture(1))[0].numpy()
        # Int8 is right to about a hundredth of the range, and not right to a millionth: it is another engine.
        assert 1e-6 < np.abs(said - exact).max() / np.abs(exact).max() < 0.1
        request(f"{server}/v1/%1b[31mred")
        assert "of 6 images" in second["agreed"]
        # A worker that replaces another measures nothing again, so that it is there soon: the images may be gone.
        shutil.rmtree(folder / "photos")
        worker = server.worker()
        os.kill(worker, signal.SIGKILL)
        until(lambda: not is_ready(server))
        until(lambda: is_ready(server))
        assert server.get("/v1/models").json["models"] == [first, second]
    talk = "".join(server.talk)
    assert "6 of 6 images" in talk or "of 6 images" in talk
    assert "POST /v1/features 200" in talk
    assert "\x1b" not in talk
