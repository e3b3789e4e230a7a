"""Guarantee X5: EXIF orientations are equivalent, and no output contains metadata of photos."""

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
from server.serving import run_server

import vitkit

WHERE = b"51 deg 28' 40.12\" N"
OWNER, COMMENT = b"Ada of Example Street", b"taken at home, door code 2020"
SECRETS = (WHERE, OWNER, COMMENT, b"GPSLatitude", b"Exif\0\0")


def photo(orientation: int, *, kind: str = "PNG", secrets: bool = True) -> bytes:
    """Create a photo with an EXIF orientation, GPS position and owner."""
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
    sizes = {"depth": 1, "width": 16, "heads": 1, "mlp_dim": 16}
    made = vitkit.create("B/16", image_size=32, patch_size=8, num_classes=3, settings=sizes)
    made.head.weight.data.normal_()
    vitkit.save(made, folder, labels=["a", "b", "c"])
    return folder


def test_photos_contain_the_metadata():
    for kind in ("PNG", "JPEG"):
        assert {secret for secret in SECRETS[:3] if secret in photo(1, kind=kind)} == set(SECRETS[:3])


def test_predict_respects_exif_orientation(model, tmp_path, capsys):
    for orientation in STORED:
        (tmp_path / f"{orientation}.png").write_bytes(photo(orientation))
    said = Shell(capsys)("predict", model, tmp_path, "--json")
    answers = [json.loads(line)["predictions"] for line in said.out.splitlines()]
    assert len(answers) == 8
    assert all(answer == answers[0] for answer in answers)  # PNG loses nothing, so neither do the answers
    upright = vitkit.Predictor(model)(photo(1, secrets=False), top=3)[0]
    assert [each["label"] for each in answers[0]] == [each.label for each in upright.predictions]


def test_server_respects_exif_orientation(model):
    with run_server(model) as server:
        answers = [server.post("/v1/predict", photo(orientation)) for orientation in STORED]
        assert {answer.status for answer in answers} == {200}
        assert len({answer.body for answer in answers}) == 1
        for path in ("/v1/predict", "/v1/features", "/v1/attention"):
            for kind in ("PNG", "JPEG"):
                answer = server.post(path, photo(6, kind=kind))
                assert answer.status == 200
                assert tells_nothing(answer.body)
                assert tells_nothing(repr(answer.headers).encode())
        assert tells_nothing("".join(server.log).encode())


def tells_nothing(content: bytes) -> bool:
    """Return whether an output, and the images embedded in it, contain no metadata of the photo."""
    inner = [b64decode(found) for found in re.findall(rb"base64,([A-Za-z0-9+/=]+)", content)]
    return not any(secret in each for each in (content, *inner) for secret in SECRETS)


@pytest.mark.usefixtures("forked_examples")
def test_no_output_contains_gps_data(model, tmp_path, capsys):
    shell = Shell(capsys)
    photos, out = tmp_path / "photos", tmp_path / "out"
    for number in range(8):
        label, kind = ("cat", "dog")[number % 2], ("JPEG", "PNG")[number // 2 % 2]
        path = photos / label / f"{number}.{kind.lower()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(1 + number, kind=kind))
    out.mkdir()
    for command in (
        ("data", "check", photos, "--workers", "0", "--contact-sheet", out / "sheet.png"),
        ("data", "quality", photos, "--out", out / "quality"),
        ("inspect", model, photos / "cat" / "0.jpeg", photos / "cat" / "2.png", "--out", out / "inspected"),
        ("predict", model, photos, "--out", out / "answers.jsonl"),
        ("export", model, out / "exported"),
    ):
        said = shell(*command)
        assert said.code == 0, said.stderr
        assert tells_nothing((said.out + said.stderr).encode())
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        assert tells_nothing(path.read_bytes()), path.name
