"""Promises S5 to S7 in small numbers: whatever strangers send, the server answers 200 or 4xx, stays, and stays small.

The full numbers are those of tests/soak/attacks.py.
"""

import http.client
import json
from pathlib import Path

import pytest
from serve.serving import Running, picture, served, tiny_model
from soak import attacks
from soak.bombs import BOMBS
from soak.faults import Finding
from soak.mutants import MUTANTS
from soak.odd import questions

import vitkit

LABELS = ["</script><script>alert(1)</script>", "\x1b[2J\r\nX-Evil: 1", "\u202e\udcff"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model, odd = tiny_model(tmp_path_factory.mktemp("fuzz") / "model"), tmp_path_factory.mktemp("odd")
    sizes = ["depth=1", "width=16", "heads=1", "mlp_dim=16"]
    vitkit.save(vitkit.create("B/16", image_size=16, patch_size=8, classes=3, settings=sizes), odd, labels=LABELS)
    with served(model, f"odd={odd}", "limits.receive=2", "limits.keep_alive=2") as running:
        first = Finding("warm")
        attacks.send_images(running, attacks.own_images() * 2, first)
        running.post("/v1/predict", b"\xff\xd8" + bytes(15_000_000))  # the largest that will come: allocators keep it
        assert first.kept, first.failures
        watch = attacks.Watch(running)
        yield running
        watch.judge(first)
        assert first.kept, first.failures


@pytest.fixture
def finding(server):
    """What a test found; and afterwards the server must be the one that it was."""
    worker, found = server.worker(), Finding("only 200 and 4xx")
    yield found
    found.expect(server.worker() == worker, "the worker was replaced")
    assert found.kept, found.failures[:5]


@pytest.mark.skipif(not attacks.HOSTILE.is_file(), reason="the shared hostile images are not here")
def test_collected_hostile_images_are_answered_or_refused(server, finding):
    attacks.send_images(server, attacks.hostile_images()[::12], finding)
    assert finding.figures["images sent"] > 140


def test_mutated_images_are_answered_or_refused(server, finding):
    attacks.send_images(server, attacks.mutated(attacks.own_images(), count=200, seed=7), finding)
    assert finding.figures["200"] > 5  # some mutations leave a picture, else nothing but the gate is tried
    assert finding.figures["422"] > 50


def test_odd_http_is_refused_and_nothing_is_smuggled(server, finding):
    attacks.send_odd_http(server, finding)
    assert finding.figures["odd requests"] > 100


@pytest.mark.parametrize("name", questions())
def test_a_body_that_lies_about_itself_is_refused(name, server, finding):
    path, body, headers = questions()[name]
    client = attacks.Client(server)
    code, said = client.post(path, body, headers)
    client.close()
    assert attacks.is_fine(code)
    assert ("error" in json.loads(said)) == (code != 200)
    assert len(said) < 10_000


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_the_server_next_to_nothing(name, server, finding):
    client = attacks.Client(server)
    content = BOMBS[name]()
    costs = [attacks.cost_of(server, lambda: client.post("/v1/predict", content)) for _ in range(2)]
    client.close()
    assert {cost.status for cost in costs} <= {200, 422}
    # Twice the promise: other tests run beside this one, and a clock tick is a tenth of it.
    assert min(cost.work for cost in costs) <= 2 * attacks.MOST_SECONDS
    assert min(cost.memory for cost in costs) < attacks.MOST_GROWTH


def test_a_body_without_an_end_is_refused(server, finding):
    code, _ = attacks.endless(server)
    assert code == 413


def test_made_up_questions_are_answered_as_the_description_says(server, finding):
    attacks.fuzz(server, finding, examples=8)
    assert finding.figures["operations"] >= 12
    assert finding.figures["made-up questions"] > 40


def test_a_label_that_is_hostile_comes_out_as_data(server):
    answer = server.post("/v1/predict?model=odd", picture())
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "x-evil" not in answer.headers
    shown = [*LABELS[:2], "\u202e\\udcff"]  # what was no text is an escape
    assert {each["label"] for each in answer.json["predictions"]} == set(shown)
    assert answer.body.isascii()
    assert server.get("/v1/models/odd").json["labels"] == shown
    assert "\x1b" not in "".join(server.talk)


@pytest.mark.parametrize(("off_by", "status"), [(0, 200), (1, 400), (-1, 400)])
def test_a_raw_size_that_is_not_so_is_refused(off_by, status, server):
    file = picture()
    raw = len(file).to_bytes(4, "little") + file
    size = {"binary_data_size": len(raw) + off_by}
    head = json.dumps({"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "parameters": size}]}).encode()
    sent = server.post("/v2/models/model/infer", head + raw, **{"Inference-Header-Content-Length": str(len(head))})
    assert sent.status == status


def test_nothing_but_the_loopback_is_bound(server: Running):
    host = server.url.removeprefix("http://").rpartition(":")[0]
    assert host == "127.0.0.1"
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    connection.request("GET", "/v1/models", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 400
    connection.close()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_the_faults_that_are_put_into_the_server_can_be_put_in(mutant):
    source = Path(vitkit.__file__).parent / "serve" / f"{mutant.file}.py"
    assert source.read_text(encoding="utf-8").count(mutant.old) == 1
