"""The routes of a real server: every answer is the Predictor's, and every refusal says what was wrong."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from serve.serving import Reply, Running, picture, request, served, tiny_model

import vitkit
from vitkit.inspection.attention import head_maps, rollout
from vitkit.predict.predictor import Predictor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("app")
    tiny_model(place / "pets")
    tiny_model(place / "birds", classes=5, seed=1)
    tiny_model(place / "eyes", classes=0, seed=2)
    return place


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with served(folder / "pets", f"sky={folder / 'birds'}", folder / "eyes", "limits.queue=64") as running:
        yield running


@pytest.fixture(scope="module")
def predictor(folder: Path) -> Predictor:
    return Predictor(folder / "pets")


def as_said(predictor: Predictor, image: bytes, top: int = 5) -> list[dict[str, Any]]:
    return [{"label": label, "probability": value} for label, value in predictor(image, top=top)[0]]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same classes in the same order, and shares that differ by rounding at most: batches are summed otherwise."""
    assert [one["label"] for one in found] == [one["label"] for one in expected]
    shares = [[one["probability"] for one in each] for each in (found, expected)]
    assert np.allclose(shares[0], shares[1], atol=1e-5)


def based(*files: bytes) -> bytes:
    return json.dumps([base64.b64encode(file).decode() for file in files]).encode()


def assert_refused(reply: Reply, status: int, *words: str) -> None:
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json) <= {"error", "hint"}
    assert all(word in reply.body.decode() for word in words), reply.body


def test_a_raw_image_is_answered_as_the_predictor_answers(server: Running, predictor: Predictor) -> None:
    for seed in range(5):
        reply = server.post("/v1/predict", picture(seed), content_type="image/png")
        assert reply.status == 200
        assert reply.json["model"] == "pets"
        assert_same(reply.json["predictions"], as_said(predictor, picture(seed)))


def test_top_says_how_many_classes_and_nearest_asks_for_cosines(server: Running, predictor: Predictor) -> None:
    said = server.post("/v1/predict?top=2&nearest=3", picture()).json
    assert_same(said["predictions"], as_said(predictor, picture(), top=2))
    rows = torch.nn.functional.normalize(predictor.model.head.weight.detach(), dim=1)
    cosines = torch.nn.functional.normalize(predictor.features(picture()), dim=1) @ rows.T
    order = cosines[0].argsort(descending=True).tolist()
    assert [near["label"] for near in said["nearest"]] == [predictor.labels[number] for number in order]
    assert [near["similarity"] for near in said["nearest"]] == pytest.approx(cosines[0, order].tolist(), abs=1e-5)


def test_another_model_answers_where_it_is_named(server: Running, folder: Path) -> None:
    said = server.post("/v1/predict?model=sky", picture()).json
    assert said["model"] == "sky"
    assert_same(said["predictions"], as_said(Predictor(folder / "birds"), picture()))


def test_a_list_is_answered_in_its_order_and_a_broken_image_alone_has_an_error(
    server: Running, predictor: Predictor
) -> None:
    images = [picture(0), b"broken", picture(1), picture(2)[:60]]
    said = server.post("/v1/predict?top=3", based(*images), content_type="application/json").json
    assert [set(one) for one in said["results"]] == [{"predictions"}, {"error"}, {"predictions"}, {"error"}]
    assert_same(said["results"][2]["predictions"], as_said(predictor, picture(1), top=3))


def test_a_text_in_a_list_that_is_not_base64_has_an_error_alone_and_is_400_where_it_is_all_there_is(
    server: Running, predictor: Predictor
) -> None:
    good = json.loads(based(picture(1)))[0]
    reply = server.post("/v1/predict?top=3", json.dumps(["%%%", good]).encode(), content_type="application/json")
    assert reply.json["results"][0] == {"error": "not base64"}
    assert_same(reply.json["results"][1]["predictions"], as_said(predictor, picture(1), top=3))
    reply = server.post("/v1/predict", b'["%%%"]', content_type="application/json")
    assert_refused(reply, 400, "not base64", "data:")


def test_features_are_the_predictors(server: Running, predictor: Predictor) -> None:
    one = server.post("/v1/features", picture(3)).json["features"]
    several = server.post("/v1/features", based(picture(3), b"x"), content_type="application/json").json["results"]
    assert np.allclose(one, predictor.features(picture(3))[0], atol=1e-5)  # rounding of sums in another order
    assert np.allclose(several[0]["features"], one, atol=1e-5)
    assert "error" in several[1]


def test_attention_is_what_inspection_finds(server: Running, predictor: Predictor) -> None:
    said = server.post("/v1/attention?top=1", picture(4)).json
    image = predictor.model.preprocess(picture(4))
    assert (said["grid"], said["layers"], said["heads"]) == ([4, 4], 2, 2)
    half = 5.1e-6  # numbers are rounded to five digits
    assert np.allclose(said["rollout"], rollout(predictor.model, image)[0], atol=half)
    assert np.allclose(said["maps"], head_maps(predictor.model, image, layers=[0, 1])[0], atol=half)
    assert len(said["predictions"]) == 1


def test_each_row_of_patches_is_what_a_patch_looks_at(server: Running) -> None:
    both = [server.post(f"/v1/attention?layer=1&head={head}", picture(4)).json for head in (0, 1)]
    mean = server.post("/v1/attention?layer=1", picture(4)).json
    assert mean["head"] == "mean"
    assert both[1]["head"] == 1
    patches = np.array(mean["patches"])
    assert patches.shape == (16, 16)
    assert (patches.sum(axis=1) < 1.001).all()  # the class token has its share as well
    assert np.allclose(patches, (np.array(both[0]["patches"]) + np.array(both[1]["patches"])) / 2, atol=1.1e-5)


def test_models_are_listed_and_described(server: Running) -> None:
    listed = server.get("/v1/models").json["models"]
    assert [model["name"] for model in listed] == ["pets", "sky", "eyes"]
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
    page = server.get("/v1/models/sky").json
    assert page["labels"] == [f"class-{number}" for number in range(5)]
    assert page["preprocessing"]["size"] == {"height": 32, "width": 32}


def test_a_model_without_classes_gives_features_alone(server: Running) -> None:
    assert len(server.post("/v1/features?model=eyes", picture()).json["features"]) == 32
    assert_refused(server.post("/v1/predict?model=eyes", picture()), 400, "no classes", "/v1/features")
    assert server.post("/v1/attention?model=eyes", picture()).json["predictions"] == []


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
def test_a_question_that_makes_no_sense_is_refused_with_a_reason(
    server: Running, path: str, status: int, word: str
) -> None:
    assert_refused(server.post(path, picture()), status, word)


@pytest.mark.parametrize("body", [b"", b"hello", picture()[:100], b"\xff\xd8\xff", b"GIF89a"])
def test_what_is_no_image_is_refused(server: Running, body: bytes) -> None:
    assert_refused(server.post("/v1/predict", body), 422)


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
        (based(*[b"x"] * 17), 413),
    ],
)
def test_json_that_is_no_list_of_images_is_refused(server: Running, body: bytes, status: int) -> None:
    assert_refused(server.post("/v1/predict", body, content_type="application/json"), status)


def test_another_method_is_refused_and_the_right_one_named(server: Running) -> None:
    reply = request(f"{server}/v1/predict", method="DELETE")
    assert_refused(reply, 405, "DELETE")
    assert reply.headers["allow"] == "POST"


def test_head_is_answered_as_get_without_a_body(server: Running) -> None:
    for path in ("/", "/v2/health/ready", "/v1/models", "/nothing"):
        said, asked = request(f"{server}{path}", method="HEAD"), server.get(path)
        assert (said.status, said.body) == (asked.status, b"")
        assert said.headers["content-length"] == str(len(asked.body))
    assert request(f"{server}/v1/predict", method="HEAD").status == 405


def test_turned_photos_are_upright_and_nothing_of_their_metadata_comes_back(
    server: Running, predictor: Predictor
) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 24, 3), dtype=np.uint8)
    said = []
    for orientation, turn in ((1, None), (6, Image.Transpose.ROTATE_90)):
        image = Image.fromarray(pixels)
        exif = image.getexif()
        exif[0x0112], exif[0x010E] = orientation, "a secret place"
        file = BytesIO()
        (image if turn is None else image.transpose(turn)).save(file, "PNG", exif=exif)
        reply = server.post("/v1/predict", file.getvalue())
        assert b"secret" not in reply.body
        said.append(reply.json)
    assert said[0] == said[1]


def test_answers_do_not_depend_on_what_else_is_asked_at_once(server: Running, predictor: Predictor) -> None:
    """Forty clients at once, two models, so that requests are put into batches in many ways."""
    paths = ["/v1/predict", "/v1/predict?model=sky", "/v1/features"]
    alone = {(path, seed): server.post(path, picture(seed)).json for path in paths for seed in range(8)}
    asked = [(path, seed) for seed in range(8) for path in paths for _ in range(2)]
    with ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(lambda one: server.post(one[0], picture(one[1])), asked))
    assert {reply.status for reply in replies} == {200}
    for one, reply in zip(asked, replies, strict=True):
        if "features" in one[0]:
            assert np.allclose(reply.json["features"], alone[one]["features"], atol=1e-5)
        else:
            assert_same(reply.json["predictions"], alone[one]["predictions"])


def test_every_answer_forbids_what_a_page_could_be_tricked_into(server: Running) -> None:
    for path in ("/", "/docs", "/v1/models", "/nothing", "/metrics", "/web/main.js"):
        headers = server.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert not [name for name in headers if name.startswith("access-control-")]
        assert "server" not in headers


class Links(HTMLParser):
    """What a page fetches or leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src")]


def test_the_pages_need_no_other_host(server: Running) -> None:
    for path in ("/", "/docs"):
        links = Links()
        links.feed(server.get(path).body.decode())
        assert not [link for link in links.found if "//" in link]


def test_a_browser_fetches_a_file_of_the_page_once(server: Running) -> None:
    for path in ("/", "/docs", "/web/main.js"):
        first = server.get(path)
        again = server.get(path, **{"If-None-Match": first.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
        assert server.get(path, **{"If-None-Match": '"another"'}).body == first.body


@pytest.mark.parametrize("name", ["../runs.py", "%2e%2e%2fapp.py", "__init__.py", "nothing.js", "..%5capp.py"])
def test_no_file_but_the_pages_own_can_be_reached(server: Running, name: str) -> None:
    assert_refused(server.get(f"/web/{name}"), 404)


def test_metrics_are_prometheus_text_and_count(server: Running) -> None:
    def numbers() -> dict[str, float]:
        text = server.get("/metrics").body.decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {f"{one.name}{sorted(one.labels.items())}": one.value for one in samples}

    before = numbers()
    server.post("/v1/predict", picture())
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


def test_the_description_for_programs_is_whole_and_answers_follow_it(server: Running) -> None:
    schema = server.get("/openapi.json").json
    assert schema["openapi"].startswith("3.1")
    operations = {f"{method} {path}" for path, methods in schema["paths"].items() for method in methods}
    assert {"post /v1/predict", "post /v2/models/{name}/infer", "get /v1/runs/{name}", "get /metrics"} <= operations
    assert "HTTPValidationError" not in json.dumps(schema)

    def assert_follows(method: str, path: str, reply: Reply) -> None:
        declared = schema["paths"][path][method]["responses"][str(reply.status)]
        kind = reply.headers["content-type"].partition(";")[0]
        part = declared["content"][kind]["schema"]
        jsonschema_rs.validator_for(part | {"components": schema["components"]}).validate(reply.json)

    for path in ("/v1/predict", "/v1/predict?nearest=1", "/v1/features", "/v1/attention", "/v1/attention?layer=0"):
        assert_follows("post", path.partition("?")[0], server.post(path, picture()))
        assert_follows("post", path.partition("?")[0], server.post(path, b"hello"))
    assert_follows(
        "post", "/v1/predict", server.post("/v1/predict", based(picture(), b"x"), content_type="application/json")
    )
    for path in ("/v1/models", "/v2", "/v2/health/live", "/v2/health/ready"):
        assert_follows("get", path, server.get(path))
    for path in ("/v1/models/{name}", "/v2/models/{name}", "/v2/models/{name}/ready"):
        assert_follows("get", path, server.get(path.replace("{name}", "pets")))
        assert_follows("get", path, server.get(path.replace("{name}", "cats")))


def test_loading_through_the_public_name_gives_the_served_model(folder: Path, server: Running) -> None:
    count = sum(parameter.numel() for parameter in vitkit.load(folder / "pets").parameters())
    assert server.get("/v1/models/pets").json["parameters"] == count
