"""KServe's protocol: Triton's published client works unchanged, and what breaks the protocol is refused."""

import base64
import json
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve.serving import Running, picture, served, tiny_model

from vitkit.predict.predictor import Predictor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # gevent warns of what it patches
    client_module = pytest.importorskip("tritonclient.http", reason="Triton's client is not installed")

CLOSE = 1e-5
"""Sums of float32 in another order."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("kserve") / "pets")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with served(model) as running:
        yield running


@pytest.fixture(scope="module")
def predictor(model: Path) -> Predictor:
    return Predictor(model)


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = client_module.InferenceServerClient(server.url.removeprefix("http://"))
        yield made
        made.close()


def test_the_client_finds_the_server_and_the_model(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("pets")
    assert client.is_model_ready("pets", "1")
    assert not client.is_model_ready("cats")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    about = client.get_model_metadata("pets")
    assert [(one["name"], one["datatype"], one["shape"]) for one in about["inputs"]] == [
        ("image", "BYTES", [-1]),
        ("pixels", "FP32", [-1, 3, 32, 32]),
    ]
    assert [(one["name"], one["shape"]) for one in about["outputs"]] == [
        ("logits", [-1, 3]),
        ("probabilities", [-1, 3]),
        ("label", [-1]),
        ("features", [-1, 32]),
    ]


def test_files_as_raw_bytes_are_answered_with_raw_numbers(client: Any, predictor: Predictor) -> None:
    files = [picture(0), picture(1), picture(2)]
    given = client_module.InferInput("image", [3], "BYTES")
    given.set_data_from_numpy(np.array(files, dtype=np.object_))
    answer = client.infer("pets", [given])
    expected = predictor.logits(files)
    assert np.allclose(answer.as_numpy("logits"), expected, atol=CLOSE)
    assert np.allclose(answer.as_numpy("probabilities"), expected.softmax(dim=1), atol=CLOSE)
    assert np.allclose(answer.as_numpy("features"), predictor.features(files), atol=CLOSE)
    labels = [predictor.labels[number] for number in expected.argmax(dim=1).tolist()]
    assert [label.decode() for label in answer.as_numpy("label")] == labels


@pytest.mark.parametrize("raw_in", [True, False])
@pytest.mark.parametrize("raw_out", [True, False])
def test_prepared_pixels_are_answered_in_either_form(
    client: Any, predictor: Predictor, raw_in: bool, raw_out: bool
) -> None:
    files = [picture(3), picture(4)]
    pixels = np.concatenate([predictor.model.preprocess(file).numpy() for file in files])
    given = client_module.InferInput("pixels", list(pixels.shape), "FP32")
    given.set_data_from_numpy(pixels, binary_data=raw_in)
    wished = [
        client_module.InferRequestedOutput("logits", binary_data=raw_out),
        client_module.InferRequestedOutput("label", binary_data=raw_out),
    ]
    answer = client.infer("pets", [given], outputs=wished, request_id="number 7", model_version="1")
    assert np.allclose(answer.as_numpy("logits"), predictor.logits(files), atol=CLOSE)
    assert answer.as_numpy("features") is None
    assert answer.get_response()["id"] == "number 7"
    assert len(answer.as_numpy("label")) == 2


def test_an_error_reaches_the_client_in_words(client: Any) -> None:
    given = client_module.InferInput("image", [1], "BYTES")
    given.set_data_from_numpy(np.array([b"broken"], dtype=np.object_))
    with pytest.raises(client_module.InferenceServerException, match="not a JPEG"):
        client.infer("pets", [given])


def test_files_in_base64_are_answered_in_json(server: Running, predictor: Predictor) -> None:
    texts = [base64.b64encode(picture(5)).decode()]
    asked = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": texts}]}
    said = server.post("/v2/models/pets/infer", json.dumps(asked).encode(), content_type="application/json").json
    assert [one["name"] for one in said["outputs"]] == ["logits", "probabilities", "label", "features"]
    assert np.allclose(said["outputs"][0]["data"], predictor.logits(picture(5))[0], atol=CLOSE)
    assert said["model_name"] == "pets"
    assert "id" not in said


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aGVsbG8="]} | changes


@pytest.mark.parametrize(
    "asked",
    [
        None,
        [],
        {},
        {"inputs": []},
        {"inputs": {}},
        {"inputs": [tensor(), tensor()]},
        {"inputs": [1]},
        {"inputs": [tensor(name="picture")]},
        {"inputs": [tensor(datatype="FP32")]},
        {"inputs": [tensor(shape=[])]},
        {"inputs": [tensor(shape=[0])]},
        {"inputs": [tensor(shape=[-1])]},
        {"inputs": [tensor(shape=[True])]},
        {"inputs": [tensor(shape=[1.0])]},
        {"inputs": [tensor(shape=[2])]},
        {"inputs": [tensor(shape="1")]},
        {"inputs": [tensor(data="x")]},
        {"inputs": [tensor(data=["***"])]},
        {"inputs": [tensor(data=[1])]},
        {"inputs": [tensor(data=None)]},
        {"inputs": [tensor(parameters={"binary_data_size": 5})]},
        {"inputs": [tensor()], "outputs": [{"name": "answer"}]},
        {"inputs": [tensor()], "outputs": 3},
        {"inputs": [tensor()], "outputs": [3]},
        {"inputs": [tensor()], "id": 3},
        {"inputs": [tensor(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=[1.0])]},
        {"inputs": [tensor(name="pixels", datatype="FP32", shape=[1, 3, 32, 31], data=[0.0] * 2976)]},
        {"inputs": [tensor(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=["x"] * 3072)]},
        {"inputs": [tensor(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=["0.5"] * 3072)]},
        {"inputs": [tensor(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=[True] * 3072)]},
        {"inputs": [tensor(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=[10**400] * 3072)]},
        {"inputs": [tensor(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=[1e300] * 3072)]},
        {"inputs": [tensor(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=[[0.0], [0.0, 1.0]])]},
        {"inputs": [tensor(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data={"a": 1})]},
    ],
)
def test_what_breaks_the_protocol_is_a_bad_request(server: Running, asked: Any) -> None:
    reply = server.post("/v2/models/pets/infer", json.dumps(asked).encode(), content_type="application/json")
    assert reply.status == 400, reply.body
    assert "error" in reply.json


def raw(head: dict[str, Any], tail: bytes, *, size: str | None = None) -> tuple[bytes, str]:
    text = json.dumps(head).encode()
    return text + tail, size or str(len(text))


ONE_FILE = {"name": "image", "datatype": "BYTES", "shape": [1]}


@pytest.mark.parametrize(
    ("body", "size"),
    [
        raw({"inputs": [ONE_FILE | {"parameters": {"binary_data_size": 4}}]}, struct.pack("<I", 9)),
        raw({"inputs": [ONE_FILE | {"parameters": {"binary_data_size": 2}}]}, b"ab"),
        raw({"inputs": [ONE_FILE | {"parameters": {"binary_data_size": 6}}]}, struct.pack("<I", 1) + b"ab"),
        raw({"inputs": [ONE_FILE | {"parameters": {"binary_data_size": 3}}]}, b"ab"),
        raw({"inputs": [ONE_FILE | {"parameters": {"binary_data_size": "2"}}]}, b"ab"),
        raw({"inputs": [ONE_FILE]}, b"ab"),
        raw({"inputs": [tensor(parameters={"binary_data_size": 6})]}, struct.pack("<I", 2) + b"hi"),
        raw({"inputs": [ONE_FILE]}, b"", size="99999"),
        raw({"inputs": [ONE_FILE]}, b"", size="-1"),
        raw({"inputs": [ONE_FILE]}, b"", size="one"),
        raw({"inputs": [ONE_FILE]}, b"", size="0"),
        raw(
            {
                "inputs": [
                    {
                        "name": "pixels",
                        "datatype": "FP32",
                        "shape": [1, 3, 32, 32],
                        "parameters": {"binary_data_size": 8},
                    }
                ]
            },
            bytes(8),
        ),
        raw(
            {
                "inputs": [
                    {
                        "name": "pixels",
                        "datatype": "FP32",
                        "shape": [1, 3, 32, 32],
                        "parameters": {"binary_data_size": 4 * 3072},
                    }
                ]
            },
            struct.pack("<f", float("nan")) * 3072,
        ),
    ],
)
def test_raw_tensors_that_do_not_fit_are_a_bad_request(server: Running, body: bytes, size: str) -> None:
    reply = server.post("/v2/models/pets/infer", body, inference_header_content_length=size)
    assert reply.status == 400, reply.body


def test_too_many_images_and_pixels_out_of_range_are_refused(server: Running) -> None:
    many = {"inputs": [tensor(shape=[17], data=["aGVsbG8="] * 17)]}
    assert server.post("/v2/models/pets/infer", json.dumps(many).encode()).status == 413
    far = {"inputs": [tensor(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=[3e38] * 3072)]}
    assert server.post("/v2/models/pets/infer", json.dumps(far).encode()).status in (200, 422)


def test_more_images_than_the_line_was_told_of_are_refused_wherever_the_shape_stands(server: Running) -> None:
    """The line counts images by the first shape that it sees; who shows it another one gains nothing."""
    files = [base64.b64encode(picture(seed)).decode() for seed in range(3)]
    inputs = [{"name": "image", "datatype": "BYTES", "data": files, "shape": [3]}]  # behind thousands of bytes of data
    assert server.post("/v2/models/pets/infer", json.dumps({"inputs": inputs}).encode()).status == 200
    hidden = {"id": "x" * 5000, "inputs": inputs, "parameters": {"x": "y" * 5000}}
    assert server.post("/v2/models/pets/infer", json.dumps(hidden).encode()).status == 200
    lie = {"parameters": {"shape": [1]}, "inputs": inputs}
    assert server.post("/v2/models/pets/infer", json.dumps(lie).encode()).status == 413
