"""Guarantees S5 to S7 at small counts: whatever clients send, the server returns 200 or 4xx and does not die or grow.

The full counts, and the CPU time of bombs, are those of tests/soak/attacks.py.
"""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import PIL
import pytest
from packaging.version import Version
from server.conftest import HOSTILE_LABELS
from server.serving import TIMEOUT, RunningServer, encode_image
from soak import attacks
from soak.bombs import BOMBS
from soak.faults import Finding
from soak.malformed import inconsistent_requests
from soak.mutants import MUTANTS

import vitkit

HAS_LAZY_EXIF = Version(PIL.__version__) >= Version("13")
"""Pillow 11 and 12 copy the values that the EXIF data of a JPEG claims when they open it: at most about 86 MiB."""


@pytest.fixture(scope="module", autouse=True)
def watch(server: RunningServer) -> Iterator[None]:
    """Check memory and worker over all tests of this module."""
    warm_up = Finding("warm-up")
    attacks.send_images(server, attacks.valid_images() * 2, warm_up)
    server.post("/v1/predict", b"\xff\xd8" + bytes(15_000_000))  # the largest request: allocators keep its memory
    assert warm_up.passed, warm_up.failures
    watching = attacks.ServerMonitor(server)
    yield
    watching.check(warm_up)
    assert warm_up.passed, warm_up.failures


@pytest.fixture
def result(server: RunningServer) -> Iterator[Finding]:
    """Results of a test, after which the worker must be the same process."""
    worker, results = server.worker(), Finding("only 200 and 4xx")
    yield results
    results.expect(server.worker() == worker, "the worker was replaced")
    assert results.passed, results.failures[:5]


@pytest.mark.skipif(not attacks.HOSTILE.is_file(), reason="the shared hostile images are not available")
def test_hostile_images_are_answered_or_rejected(server: RunningServer, result: Finding) -> None:
    attacks.send_images(server, attacks.hostile_images()[::12], result)
    assert result.figures["images sent"] > 140


def test_mutated_images_are_answered_or_rejected(server: RunningServer, result: Finding) -> None:
    attacks.send_images(server, attacks.mutate(attacks.valid_images(), count=200, seed=7), result)
    assert result.figures["200"] > 5  # some mutations keep a valid image, or only the decoder's checks were tested
    assert result.figures["422"] > 50


def test_malformed_http_is_rejected_and_nothing_is_smuggled(server: RunningServer, result: Finding) -> None:
    attacks.send_malformed_http(server, result)
    assert result.figures["malformed requests"] > 100


@pytest.mark.usefixtures("result")
@pytest.mark.parametrize("name", inconsistent_requests())
def test_inconsistent_body_is_rejected(name: str, server: RunningServer) -> None:
    path, body, headers = inconsistent_requests()[name]
    client = attacks.Client(server)
    status, response = client.post(path, body, headers)
    client.close()
    assert attacks.is_expected_status(status)
    assert ("error" in json.loads(response)) == (status != 200)
    assert len(response) < 10_000


@pytest.mark.usefixtures("result")
@pytest.mark.parametrize("name", BOMBS)
def test_bomb_takes_little_memory(name: str, server: RunningServer) -> None:
    client = attacks.Client(server)
    content = BOMBS[name]()
    costs = [attacks.measure_cost(server, lambda: client.post("/v1/predict", content)) for _ in range(2)]
    client.close()
    assert {cost.status for cost in costs} <= {200, 422}
    assert min(cost.memory for cost in costs) < (attacks.MAX_GROWTH if HAS_LAZY_EXIF else 96 << 20)


@pytest.mark.usefixtures("result")
def test_endless_body_is_rejected(server: RunningServer) -> None:
    status, _ = attacks.send_endless_body(server)
    assert status == 413


def test_generated_requests_follow_the_description(server: RunningServer, result: Finding) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis generates the requests")
    attacks.fuzz(server, result, examples=8)
    assert result.figures["operations"] >= 12
    assert result.figures["generated requests"] > 40


def test_hostile_label_is_returned_as_data(server: RunningServer) -> None:
    response = server.post("/v1/predict?model=hostile", encode_image())
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "x-evil" not in response.headers
    labels = [*HOSTILE_LABELS[:2], "\u202e\\udcff"]  # invalid text is escaped
    assert {row["label"] for row in response.json["predictions"]} == set(labels)
    assert response.body.isascii()
    assert server.get("/v1/models/hostile").json["labels"] == labels
    assert "\x1b" not in "".join(server.log)


@pytest.mark.parametrize(("off_by", "status"), [(0, 200), (1, 400), (-1, 400)])
def test_wrong_binary_size_is_rejected(off_by: int, status: int, server: RunningServer) -> None:
    file = encode_image()
    raw = len(file).to_bytes(4, "little") + file
    size = {"binary_data_size": len(raw) + off_by}
    head = json.dumps({"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "parameters": size}]}).encode()
    response = server.post("/v2/models/pets/infer", head + raw, **{"Inference-Header-Content-Length": str(len(head))})
    assert response.status == status


def test_server_listens_on_loopback_only(server: RunningServer) -> None:
    assert server.address[0] == "127.0.0.1"
    connection = http.client.HTTPConnection(*server.address, timeout=TIMEOUT)
    connection.request("GET", "/v1/models", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 400
    connection.close()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_applies_to_the_source(mutant: object) -> None:
    source = Path(vitkit.__file__).parent / "server" / f"{mutant.file}.py"  # type: ignore[attr-defined]
    assert source.read_text(encoding="utf-8").count(mutant.old) == 1  # type: ignore[attr-defined]
