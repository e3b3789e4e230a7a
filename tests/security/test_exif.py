"""Promise X5: a photo means the same however the camera was held, and nothing but its pixels goes into any output."""

import io
import json
import re
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from cli.tiny_runs import Shell
from data.test_decode import STORED
from PIL import Image, PngImagePlugin
from serve.serving import served

import vitkit

WHERE = b"51 deg 28' 40.12\" N"
OWNER, COMMENT = b"Ada of Example Street", b"taken at home, door code 2020"
SECRETS = (WHERE, OWNER, COMMENT, b"GPSLatitude", b"Exif\0\0")


def photo(orientation: int, *, kind: str = "PNG", secrets: bool = True) -> bytes:
    """One scene as a camera would store it in this orientation, with remarks on where and whose it is."""
    scene = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, object] = {}
    if secrets:
        exif[0x013B] = OWNER.decode()  # Artist
        exif.get_ifd(0x8825)[0x1D] = WHERE.decode()  # GPS
        exif.get_ifd(0x8769)[0x9286] = COMMENT  # UserComment
        if kind == "JPEG":
            options["comment"] = COMMENT
        if kind == "PNG":
            options["pnginfo"] = PngImagePlugin.PngInfo()
            options["pnginfo"].add_text("Comment", COMMENT.decode())
    stream = io.BytesIO()
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](scene)))
    stored.save(stream, kind, exif=exif, **options)
    return stream.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exif") / "model"
    sizes = ["depth=1", "width=16", "heads=1", "mlp_dim=16"]
    made = vitkit.create("B/16", image_size=32, patch_size=8, classes=3, settings=sizes)
    made.head.weight.data.normal_()
    vitkit.save(made, folder, labels=["a", "b", "c"])
    return folder


def test_the_photos_do_carry_the_secrets():
    for kind in ("PNG", "JPEG"):
        assert {secret for secret in SECRETS[:3] if secret in photo(1, kind=kind)} == set(SECRETS[:3])


def test_eight_orientations_are_one_answer_of_predict(model, tmp_path, capsys):
    for orientation in STORED:
        (tmp_path / f"{orientation}.png").write_bytes(photo(orientation))
    said = Shell(capsys)("predict", model, tmp_path, "--json")
    answers = [json.loads(line)["predictions"] for line in said.out.splitlines()]
    assert len(answers) == 8
    assert all(answer == answers[0] for answer in answers)  # PNG loses nothing, so neither do the answers
    upright = vitkit.Predictor(model)(photo(1, secrets=False), top=3)[0]
    assert [each["label"] for each in answers[0]] == [each.label for each in upright]


def test_eight_orientations_are_one_answer_of_the_server_and_no_answer_tells_where(model):
    with served(model) as server:
        answers = [server.post("/v1/predict", photo(orientation)) for orientation in STORED]
        assert {answer.status for answer in answers} == {200}
        assert len({answer.body for answer in answers}) == 1
        for path in ("/v1/predict", "/v1/features", "/v1/attention"):
            for kind in ("PNG", "JPEG"):
                answer = server.post(path, photo(6, kind=kind))
                assert answer.status == 200
                assert tells_nothing(answer.body)
                assert tells_nothing(repr(answer.headers).encode())
        assert tells_nothing("".join(server.talk).encode())


def tells_nothing(content: bytes) -> bool:
    """Whether no remark of the photo's is in an output, nor in the images that are inside of it."""
    inner = [b64decode(found) for found in re.findall(rb"base64,([A-Za-z0-9+/=]+)", content)]
    return not any(secret in each for each in (content, *inner) for secret in SECRETS)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_no_file_that_is_written_tells_where_a_photo_was_taken(kind, model, tmp_path, capsys):
    shell = Shell(capsys)
    for number in range(4):
        path = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.{kind.lower()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(1 + number, kind=kind))
    photos, one = tmp_path / "photos", tmp_path / "photos" / "cat" / f"0.{kind.lower()}"
    out = tmp_path / "out"
    out.mkdir()
    for command in (
        ("data", "check", photos, "--workers", "0", "--contact-sheet", out / "sheet.png"),
        ("data", "problems", photos, "--out", out / "problems"),
        ("inspect", model, one, "--out", out / "inspected"),
        ("predict", model, photos, "--out", out / "answers.jsonl"),
        ("export", model, out / "exported"),
    ):
        said = shell(*command)
        assert said.code == 0, said.talk
        assert tells_nothing((said.out + said.talk).encode())
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        assert tells_nothing(path.read_bytes()), path.name
