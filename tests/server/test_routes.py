"""Routes of a real server: responses equal those of the Predictor, and errors say what is wrong."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from server.serving import HTTPResponse, RunningServer, encode_image, request

import vitkit
from vitkit.inference.predictor import Predictor
from vitkit.inspection.attention import head_maps, rollout


@pytest.fixture(scope="module")
def predictor(models: Path) -> Predictor:
    return Predictor(models / "pets")


def expected_classes(predictor: Predictor, image: bytes, top: int = 5) -> list[dict[str, Any]]:
    return [{"label": label, "probability": value} for label, value in predictor(image, top=top)[0].predictions]


def assert_same(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare classes and their order; probabilities may differ by rounding, which depends on the batch."""
    assert [row["label"] for row in actual] == [row["label"] for row in expected]
    probabilities = [[row["probability"] for row in rows] for rows in (actual, expected)]
    assert np.allclose(probabilities[0], probabilities[1], atol=1e-5)


def encode_list(*files: bytes) -> bytes:
    return json.dumps([base64.b64encode(file).decode() for file in files]).encode()


def assert_error(response: HTTPResponse, status: int, *words: str) -> None:
    assert response.status == status, response.body
    assert response.headers["content-type"] == "application/json"
    assert set(response.json) <= {"error", "hint"}
    assert all(word in response.body.decode() for word in words), response.body


def test_raw_image_is_classified_as_by_the_predictor(server: RunningServer, predictor: Predictor) -> None:
    for seed in range(5):
        response = server.post("/v1/predict", encode_image(seed), content_type="image/png")
        assert response.status == 200
        assert response.json["model"] == "pets"
        assert_same(response.json["predictions"], expected_classes(predictor, encode_image(seed)))


def test_top_and_nearest_classes_are_returned(server: RunningServer, predictor: Predictor) -> None:
    body = server.post("/v1/predict?top=2&nearest=3", encode_image()).json
    assert_same(body["predictions"], expected_classes(predictor, encode_image(), top=2))
    rows = torch.nn.functional.normalize(predictor.model.head.weight.detach(), dim=1)
    cosines = torch.nn.functional.normalize(predictor.features(encode_image()), dim=1) @ rows.T
    order = cosines[0].argsort(descending=True).tolist()
    assert [near["label"] for near in body["nearest"]] == [predictor.labels[number] for number in order]
    assert [near["similarity"] for near in body["nearest"]] == pytest.approx(cosines[0, order].tolist(), abs=1e-5)


def test_model_is_chosen_by_name(server: RunningServer, models: Path) -> None:
    body = server.post("/v1/predict?model=sky", encode_image()).json
    assert body["model"] == "sky"
    assert_same(body["predictions"], expected_classes(Predictor(models / "birds"), encode_image()))


def test_broken_image_in_a_list_is_an_error_entry(server: RunningServer, predictor: Predictor) -> None:
    images = [encode_image(0), b"broken", encode_image(1), encode_image(2)[:60]]
    body = server.post("/v1/predict?top=3", encode_list(*images), content_type="application/json").json
    assert [set(one) for one in body["results"]] == [{"predictions"}, {"error"}, {"predictions"}, {"error"}]
    assert_same(body["results"][2]["predictions"], expected_classes(predictor, encode_image(1), top=3))


def test_invalid_base64_is_an_error_entry_or_400(server: RunningServer, predictor: Predictor) -> None:
    good = json.loads(encode_list(encode_image(1)))[0]
    response = server.post("/v1/predict?top=3", json.dumps(["%%%", good]).encode(), content_type="application/json")
    assert response.json["results"][0] == {"error": "not base64"}
    assert_same(response.json["results"][1]["predictions"], expected_classes(predictor, encode_image(1), top=3))
    response = server.post("/v1/predict", b'["%%%"]', content_type="application/json")
    assert_error(response, 400, "not base64", "data:")


def test_features_equal_those_of_the_predictor(server: RunningServer, predictor: Predictor) -> None:
    one = server.post("/v1/features", encode_image(3)).json["features"]
    several = server.post("/v1/features", encode_list(encode_image(3), b"x"), content_type="application/json").json[
        "results"
    ]
    assert np.allclose(one, predictor.features(encode_image(3))[0], atol=1e-5)  # rounding of sums in another order
    assert np.allclose(several[0]["features"], one, atol=1e-5)
    assert "error" in several[1]


def test_attention_equals_that_of_inspection(server: RunningServer, predictor: Predictor) -> None:
    body = server.post("/v1/attention?top=1", encode_image(4)).json
    image = predictor.model.preprocess(encode_image(4))
    assert (body["grid"], body["layers"], body["heads"]) == ([4, 4], 2, 2)
    half = 5.1e-6  # numbers are rounded to five digits
    assert np.allclose(body["rollout"], rollout(predictor.model, image)[0], atol=half)
    assert np.allclose(body["maps"], head_maps(predictor.model, image, layers=[0, 1])[0], atol=half)
    assert len(body["predictions"]) == 1


def test_patch_attention_has_a_row_per_patch(server: RunningServer) -> None:
    both = [server.post(f"/v1/attention?layer=1&head={head}", encode_image(4)).json for head in (0, 1)]
    mean = server.post("/v1/attention?layer=1", encode_image(4)).json
    assert mean["head"] == "mean"
    assert both[1]["head"] == 1
    patches = np.array(mean["patches"])
    assert patches.shape == (16, 16)
    assert (patches.sum(axis=1) < 1.001).all()  # the class token has its share as well
    assert np.allclose(patches, (np.array(both[0]["patches"]) + np.array(both[1]["patches"])) / 2, atol=1.1e-5)


def test_models_are_listed_and_described(server: RunningServer) -> None:
    listed = server.get("/v1/models").json["models"]
    assert [model["name"] for model in listed] == ["pets", "sky", "eyes", "hostile"]
    assert listed[0] | {"engine": ""} == {
        "name": "pets",
        "model": listed[0]["model"],
        "precision": "fp32",
        "engine": "",
        "classes": 3,
        "image_size": [32, 32],
        "channels": 3,
        "features": 32,
        "layers": 2,
        "heads": 2,
        "grid": [4, 4],
        "parameters": listed[0]["parameters"],
        "attention": True,
        "agreement": None,
        "agreed": None,
    }
    details = server.get("/v1/models/sky").json
    assert details["labels"] == [f"class-{number}" for number in range(5)]
    assert details["preprocessing"]["size"] == {"height": 32, "width": 32}


def test_model_without_classes_has_features_only(server: RunningServer) -> None:
    assert len(server.post("/v1/features?model=eyes", encode_image()).json["features"]) == 32
    assert_error(server.post("/v1/predict?model=eyes", encode_image()), 400, "no classes", "/v1/features")
    assert server.post("/v1/attention?model=eyes", encode_image()).json["predictions"] == []


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/v1/predict?model=cats", 404, "pets"),
        ("/v1/predict?model=../x", 400, "model"),
        ("/v1/predict?top=0", 400, "top"),
        ("/v1/predict?top=ten", 400, "top"),
        ("/v1/predict?nearest=-1", 400, "nearest"),
        ("/v1/attention?layer=2", 400, "2 layers"),
        ("/v1/attention?layer=0&head=2", 400, "2 heads"),
        ("/v1/attention?head=all", 400, "head"),
        ("/v1/nothing", 404, "/docs"),
        ("/v1/predict/", 404, "/docs"),
        ("/v1/predict%0A", 404, "/docs"),
        ("/v2/models/cats/infer", 404, "pets"),
        ("/v2/models/pets/versions/2/infer", 404, "/docs"),
    ],
)
def test_invalid_query_is_rejected_with_a_reason(server: RunningServer, path: str, status: int, word: str) -> None:
    assert_error(server.post(path, encode_image()), status, word)


@pytest.mark.parametrize("body", [b"", b"hello", encode_image()[:100], b"\xff\xd8\xff", b"GIF89a"])
def test_invalid_image_is_rejected(server: RunningServer, body: bytes) -> None:
    assert_error(server.post("/v1/predict", body), 422)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{}", 400),
        (b"[]", 400),
        (b"[1]", 400),
        (b'["***"]', 400),
        (b"[" * 100_000, 400),
        (b"\xff\xfe", 400),
        (b'["aGVsbG8="]', 422),
        (encode_list(*[b"x"] * 17), 413),
    ],
)
def test_json_without_a_list_of_images_is_rejected(server: RunningServer, body: bytes, status: int) -> None:
    assert_error(server.post("/v1/predict", body, content_type="application/json"), status)


def test_wrong_method_is_rejected_with_the_right_one(server: RunningServer) -> None:
    response = request(f"{server}/v1/predict", method="DELETE")
    assert_error(response, 405, "DELETE")
    assert response.headers["allow"] == "POST"


def test_head_is_get_without_a_body(server: RunningServer) -> None:
    for path in ("/", "/v2/health/ready", "/v1/models", "/nothing"):
        head, get = request(f"{server}{path}", method="HEAD"), server.get(path)
        assert (head.status, head.body) == (get.status, b"")
        assert head.headers["content-length"] == str(len(get.body))
    assert request(f"{server}/v1/predict", method="HEAD").status == 405


def test_exif_rotates_the_image_and_is_not_returned(server: RunningServer, predictor: Predictor) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 24, 3), dtype=np.uint8)
    responses = []
    for orientation, turn in ((1, None), (6, Image.Transpose.ROTATE_90)):
        image = Image.fromarray(pixels)
        exif = image.getexif()
        exif[0x0112], exif[0x010E] = orientation, "a secret place"
        file = BytesIO()
        (image if turn is None else image.transpose(turn)).save(file, "PNG", exif=exif)
        response = server.post("/v1/predict", file.getvalue())
        assert b"secret" not in response.body
        responses.append(response.json)
    assert responses[0] == responses[1]


def test_responses_do_not_depend_on_concurrent_requests(server: RunningServer, predictor: Predictor) -> None:
    """Forty clients and two models, so that requests are batched in many ways."""
    paths = ["/v1/predict", "/v1/predict?model=sky", "/v1/features"]
    alone = {(path, seed): server.post(path, encode_image(seed)).json for path in paths for seed in range(8)}
    requests = [(path, seed) for seed in range(8) for path in paths for _ in range(2)]
    with ThreadPoolExecutor(40) as pool:
        responses = list(pool.map(lambda one: server.post(one[0], encode_image(one[1])), requests))
    assert {response.status for response in responses} == {200}
    for one, response in zip(requests, responses, strict=True):
        if "features" in one[0]:
            assert np.allclose(response.json["features"], alone[one]["features"], atol=1e-5)
        else:
            assert_same(response.json["predictions"], alone[one]["predictions"])


def test_every_response_has_security_headers(server: RunningServer) -> None:
    for path in ("/", "/docs", "/v1/models", "/nothing", "/metrics", "/web/main.js"):
        headers = server.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert not [name for name in headers if name.startswith("access-control-")]
        assert "server" not in headers


class Links(HTMLParser):
    """URLs in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.urls += [value or "" for name, value in attrs if name in ("href", "src")]


def test_pages_load_nothing_from_other_hosts(server: RunningServer) -> None:
    for path in ("/", "/docs"):
        links = Links()
        links.feed(server.get(path).body.decode())
        assert not [link for link in links.urls if "//" in link]


def test_static_files_are_cached_by_etag(server: RunningServer) -> None:
    for path in ("/", "/docs", "/web/main.js"):
        first = server.get(path)
        again = server.get(path, **{"If-None-Match": first.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
        assert server.get(path, **{"If-None-Match": '"another"'}).body == first.body


@pytest.mark.parametrize("name", ["../runs.py", "%2e%2e%2fapp.py", "__init__.py", "nothing.js", "..%5capp.py"])
def test_only_static_files_can_be_requested(server: RunningServer, name: str) -> None:
    assert_error(server.get(f"/web/{name}"), 404)


def test_metrics_count_responses(server: RunningServer) -> None:
    def numbers() -> dict[str, float]:
        text = server.get("/metrics").body.decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {f"{sample.name}{sorted(sample.labels.items())}": sample.value for sample in samples}

    before = numbers()
    server.post("/v1/predict", encode_image())
    server.post("/v1/predict", b"hello")
    server.get("/strange/" + "x" * 50)
    after = numbers()
    good, bad = (
        f"vitkit_requests_total{sorted({'route': '/v1/predict', 'status': status}.items())}"
        for status in ("200", "422")
    )
    assert after[good] == before.get(good, 0) + 1
    assert after[bad] == before.get(bad, 0) + 1
    assert after["vitkit_images_total[]"] == before["vitkit_images_total[]"] + 1
    assert after["vitkit_ready[]"] == 1
    assert not [name for name in after if "strange" in name]


def test_responses_follow_the_openapi_description(server: RunningServer) -> None:
    schema = server.get("/openapi.json").json
    assert schema["openapi"].startswith("3.1")
    operations = {f"{method} {path}" for path, methods in schema["paths"].items() for method in methods}
    assert {"post /v1/predict", "post /v2/models/{name}/infer", "get /v1/runs/{name}", "get /metrics"} <= operations
    assert "HTTPValidationError" not in json.dumps(schema)

    def assert_follows(method: str, path: str, response: HTTPResponse) -> None:
        declared = schema["paths"][path][method]["responses"][str(response.status)]
        kind = response.headers["content-type"].partition(";")[0]
        part = declared["content"][kind]["schema"]
        jsonschema.validate(response.json, part | {"components": schema["components"]})

    for path in ("/v1/predict", "/v1/predict?nearest=1", "/v1/features", "/v1/attention", "/v1/attention?layer=0"):
        assert_follows("post", path.partition("?")[0], server.post(path, encode_image()))
        assert_follows("post", path.partition("?")[0], server.post(path, b"hello"))
    assert_follows(
        "post",
        "/v1/predict",
        server.post("/v1/predict", encode_list(encode_image(), b"x"), content_type="application/json"),
    )
    for path in ("/v1/models", "/v2", "/v2/health/live", "/v2/health/ready"):
        assert_follows("get", path, server.get(path))
    for path in ("/v1/models/{name}", "/v2/models/{name}", "/v2/models/{name}/ready"):
        assert_follows("get", path, server.get(path.replace("{name}", "pets")))
        assert_follows("get", path, server.get(path.replace("{name}", "cats")))


def test_served_model_has_the_parameters_of_the_loaded_one(models: Path, server: RunningServer) -> None:
    count = sum(parameter.numel() for parameter in vitkit.load(models / "pets").parameters())
    assert server.get("/v1/models/pets").json["parameters"] == count


def test_pixels_beyond_the_limit_are_rejected(server: RunningServer) -> None:
    file = BytesIO()
    Image.new("1", (8000, 6251)).save(file, "PNG")
    response = server.post("/v1/predict", file.getvalue())
    assert_error(response, 422, "50,000,000", "smaller")
