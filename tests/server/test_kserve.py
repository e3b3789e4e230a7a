"""KServe protocol: Triton's client works unchanged, and invalid requests are rejected."""

import base64
import json
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.serving import RunningServer, encode_image

from vitkit.inference.predictor import Predictor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # gevent warns about its patches
    client_module = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")

CLOSE = 1e-5  # float32 sums in another order


@pytest.fixture(scope="module")
def predictor(models: Path) -> Predictor:
    return Predictor(models / "pets")


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        created = client_module.InferenceServerClient(server.url.removeprefix("http://"))
        yield created
        created.close()


def test_client_reads_server_and_model_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("pets")
    assert client.is_model_ready("pets", "1")
    assert not client.is_model_ready("cats")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    metadata = client.get_model_metadata("pets")
    assert [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in metadata["inputs"]] == [
        ("image", "BYTES", [-1]),
        ("pixels", "FP32", [-1, 3, 32, 32]),
    ]
    assert [(tensor["name"], tensor["shape"]) for tensor in metadata["outputs"]] == [
        ("logits", [-1, 3]),
        ("probabilities", [-1, 3]),
        ("label", [-1]),
        ("features", [-1, 32]),
    ]


def test_binary_files_get_binary_tensors(client: Any, predictor: Predictor) -> None:
    files = [encode_image(0), encode_image(1), encode_image(2)]
    tensor_input = client_module.InferInput("image", [3], "BYTES")
    tensor_input.set_data_from_numpy(np.array(files, dtype=np.object_))
    result = client.infer("pets", [tensor_input])
    expected = predictor.logits(files)
    assert np.allclose(result.as_numpy("logits"), expected, atol=CLOSE)
    assert np.allclose(result.as_numpy("probabilities"), expected.softmax(dim=1), atol=CLOSE)
    assert np.allclose(result.as_numpy("features"), predictor.features(files), atol=CLOSE)
    labels = [predictor.labels[number] for number in expected.argmax(dim=1).tolist()]
    assert [label.decode() for label in result.as_numpy("label")] == labels


@pytest.mark.parametrize("raw_in", [True, False])
@pytest.mark.parametrize("raw_out", [True, False])
def test_pixels_work_in_json_and_binary(client: Any, predictor: Predictor, raw_in: bool, raw_out: bool) -> None:
    files = [encode_image(3), encode_image(4)]
    pixels = np.concatenate([predictor.model.preprocess(file).numpy() for file in files])
    tensor_input = client_module.InferInput("pixels", list(pixels.shape), "FP32")
    tensor_input.set_data_from_numpy(pixels, binary_data=raw_in)
    requested = [
        client_module.InferRequestedOutput("logits", binary_data=raw_out),
        client_module.InferRequestedOutput("label", binary_data=raw_out),
    ]
    result = client.infer("pets", [tensor_input], outputs=requested, request_id="number 7", model_version="1")
    assert np.allclose(result.as_numpy("logits"), predictor.logits(files), atol=CLOSE)
    assert result.as_numpy("features") is None
    assert result.get_response()["id"] == "number 7"
    assert len(result.as_numpy("label")) == 2


def test_error_message_reaches_the_client(client: Any) -> None:
    tensor_input = client_module.InferInput("image", [1], "BYTES")
    tensor_input.set_data_from_numpy(np.array([b"broken"], dtype=np.object_))
    with pytest.raises(client_module.InferenceServerException, match="not a JPEG"):
        client.infer("pets", [tensor_input])


def test_base64_files_get_json_tensors(server: RunningServer, predictor: Predictor) -> None:
    texts = [base64.b64encode(encode_image(5)).decode()]
    body = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": texts}]}
    response = server.post("/v2/models/pets/infer", json.dumps(body).encode(), content_type="application/json").json
    assert [one["name"] for one in response["outputs"]] == ["logits", "probabilities", "label", "features"]
    assert np.allclose(response["outputs"][0]["data"], predictor.logits(encode_image(5))[0], atol=CLOSE)
    assert response["model_name"] == "pets"
    assert "id" not in response


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aGVsbG8="]} | changes


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"inputs": []},
        {"inputs": {}},
        {"inputs": [tensor(), tensor()]},
        {"inputs": [1]},
        {"inputs": [tensor(name="encode_image")]},
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
def test_invalid_request_is_400(server: RunningServer, body: Any) -> None:
    reply = server.post("/v2/models/pets/infer", json.dumps(body).encode(), content_type="application/json")
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
def test_invalid_binary_tensor_is_400(server: RunningServer, body: bytes, size: str) -> None:
    reply = server.post("/v2/models/pets/infer", body, inference_header_content_length=size)
    assert reply.status == 400, reply.body


def test_too_many_images_and_huge_pixels_are_rejected(server: RunningServer) -> None:
    many = {"inputs": [tensor(shape=[17], data=["aGVsbG8="] * 17)]}
    assert server.post("/v2/models/pets/infer", json.dumps(many).encode()).status == 413
    far = {"inputs": [tensor(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=[3e38] * 3072)]}
    assert server.post("/v2/models/pets/infer", json.dumps(far).encode()).status in (200, 422)


def test_image_count_cannot_be_hidden_from_the_queue(server: RunningServer) -> None:
    """The queue counts images by the first shape in the JSON; the worker accepts no more than that."""
    files = [base64.b64encode(encode_image(seed)).decode() for seed in range(3)]
    inputs = [{"name": "image", "datatype": "BYTES", "data": files, "shape": [3]}]  # behind thousands of bytes of data
    assert server.post("/v2/models/pets/infer", json.dumps({"inputs": inputs}).encode()).status == 200
    hidden = {"id": "x" * 5000, "inputs": inputs, "parameters": {"x": "y" * 5000}}
    assert server.post("/v2/models/pets/infer", json.dumps(hidden).encode()).status == 200
    lie = {"parameters": {"shape": [1]}, "inputs": inputs}
    assert server.post("/v2/models/pets/infer", json.dumps(lie).encode()).status == 413
