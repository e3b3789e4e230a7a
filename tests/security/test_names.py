"""Guarantee X4: names of classes and files never act as script, terminal codes or paths in any output."""

import ast
import csv
import io
import json
import os
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from cli.tiny_runs import CommandResult, Shell
from PIL import Image

import vitkit
from vitkit.core.files import escape_surrogates

CLASSES = (
    '"><img src=x onerror=alert(1)>',
    '\'"""\nimport os\nos.mkdir(\'it-ran\')\n"""',
    "..",  # only as a label: no folder can be called so
    "../../escaped",
    "</script><script>alert(1)</script><!--",
    "=cmd()|' calc'!A0",
    "\x1b[2J\x1b[31mred\x07",
    "line\nbreak\r\ttab",
    "{{7*7}}${7*7}%s%n{0}",
    "\u202egnp.exe\u2066",
    "\udcff\udcfe no UTF-8",
    "\ud800 alone",
)
FILES = (
    b'"><script>alert(1)<.png',
    b"\x1b]0;title\x07\x1b[2J.png",
    b"=cmd()|.png",
    b"line\nbreak.png",
    b"\xff\xfe.png",
    "\u202egnp.png".encode(),
    b"-rf.png",
    b"{{7*7}}.png",
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal or the direction of text; newlines and tabs are checked per line."""


class Skeleton(HTMLParser):
    """Tags and attributes of a page without texts and values."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[tuple[str, ...]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.parts.append((tag, *(name for name, _ in attrs)))
        assert not any(name.startswith("on") for name, _ in attrs)


def saved(folder: Path, labels: Sequence[str]) -> Path:
    torch.manual_seed(0)
    sizes = {"depth": 1, "width": 16, "heads": 1, "mlp_dim": 16}
    vitkit.save(
        vitkit.create("B/16", image_size=16, patch_size=8, num_classes=len(labels), settings=sizes),
        folder,
        labels=labels,
    )
    return folder


def pictures(folder: Path, names: Sequence[bytes]) -> Path:
    folder.mkdir(parents=True)
    for number, name in enumerate(sorted(names)):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "PNG")
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(stream.getvalue())
    return folder


@pytest.fixture
def shell(capsys) -> Shell:
    return Shell(capsys)


@pytest.fixture
def hostile(tmp_path, monkeypatch) -> Path:
    """A model and photos with hostile names."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "model", CLASSES)
    pictures(tmp_path / "photos", FILES)
    return tmp_path


@pytest.fixture
def plain(tmp_path) -> Path:
    """The same model and photos with plain names."""
    saved(tmp_path / "plain" / "model", [f"class {number}" for number in range(len(CLASSES))])
    pictures(tmp_path / "plain" / "photos", [f"{number}.png".encode() for number in range(len(FILES))])
    return tmp_path / "plain"


def is_quiet(said: CommandResult) -> bool:
    return not CONTROL.search(said.out + said.stderr)


def test_terminal_output_escapes_names(hostile, shell):
    for command in (
        ("predict", "model", "photos", "--top", "12"),
        ("predict", "model", "photos", "--top", "12", "--json"),
        ("weights", "info", "model"),
        ("weights", "info", "model", "--json"),
        ("data", "check", "photos", "--layout", "unlabeled", "--workers", "0"),
        ("data", "check", "photos", "--layout", "unlabeled", "--workers", "0", "--json"),
        (
            "inspect",
            "model",
            *map(os.fsdecode, (b"photos/" + name for name in FILES[-4:])),
            "--out",
            "seen",
            "--only",
            "norms",
        ),
    ):
        said = shell(*command)
        assert said.code == 0, said.stderr
        assert is_quiet(said), command
    assert not (hostile / "it-ran").exists()


def test_name_is_printed_on_one_line(hostile, shell):
    said = shell("predict", "model", "photos", "--top", "12")
    assert len(said.out.splitlines()) == len(FILES) * (1 + len(CLASSES))


def test_error_messages_escape_names(hostile, shell):
    for name in ("\x1b[2Jno.png", "no\nerror: all is lost", "\udcff"):
        for command in (
            ("predict", "model", name),
            ("data", "check", name),
            ("weights", "info", name),
            ("eval", name, name),
        ):
            said = shell(*command)
            assert said.code in (1, 2)
            assert is_quiet(said), command
            assert len(said.errors) == 1


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_prediction_files_keep_names(form, hostile, shell):
    said = shell("predict", "model", "photos", "--top", "12", "--out", f"answers.{form}")
    assert said.code == 0, said.stderr
    files, labels = set(), set()
    path = hostile / f"answers.{form}"
    if form == "csv":
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            for row in csv.DictReader(file):
                files.add(row["file"])
                labels |= {row[f"label_{number}"] for number in range(1, 13)}
    elif form == "jsonl":
        for line in path.read_bytes().splitlines():
            row = json.loads(line)
            files.add(row["file"])
            labels |= {each["label"] for each in row["predictions"]}
    else:
        for row in pyarrow.parquet.read_table(path).to_pylist():
            files.add(row["file"])
            labels |= set(row["labels"])
    wanted = {os.fsdecode(b"photos/" + name) for name in FILES}
    if form == "parquet":  # it holds texts alone; what is none is spelled out
        assert len(files) == len(wanted)
        assert len(labels) == len(CLASSES)
        assert {name for name in wanted if name.isprintable()} <= files
    else:
        assert files == wanted
        assert labels == set(map(escape_surrogates, CLASSES))  # labels are texts from the moment that they are loaded


@pytest.mark.parametrize("command", ["inspect", "quality"])
def test_names_do_not_change_the_tags_of_a_report(command, hostile, plain, shell, tmp_path):
    pages = []
    for folder in (hostile, plain):
        out = tmp_path / f"out-{len(pages)}"
        files = sorted((folder / "photos").iterdir(), key=os.fsencode)[-4:]
        if command == "inspect":
            said = shell("inspect", folder / "model", *files, "--out", out)
        else:
            said = shell("data", "quality", folder / "photos", "--out", out)
        assert said.code == 0, said.stderr
        found = sorted(out.rglob("*.html"))
        assert found
        pages.append("".join(path.read_text(encoding="utf-8") for path in found))
    assert Skeleton(pages[0]).parts == Skeleton(pages[1]).parts
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", pages[0])


def test_evaluation_escapes_class_names(hostile, shell):
    photos = sorted(path.name for path in (hostile / "photos").iterdir())
    labels = json.loads((hostile / "model" / "labels.json").read_bytes())
    rows = [
        {"file_name": f"{number}.png", "label": label, "class_index": number}
        for number, label in enumerate(labels[: len(photos)])
    ]
    (hostile / "classed").mkdir()
    for row, name in zip(rows, photos, strict=True):
        (hostile / "classed" / str(row["file_name"])).write_bytes((hostile / "photos" / name).read_bytes())
    (hostile / "classed" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for how in ((), ("--json",)):
        assert is_quiet(shell("eval", "model", "classed", "--workers", "0", *how))


@pytest.mark.usefixtures("forked_examples")
@pytest.mark.parametrize("form", ["huggingface", "timm", "onnx"])
def test_exported_labels_are_data(form, hostile, plain, shell):
    skeletons = []
    for folder in (hostile, plain):
        said = shell("export", folder / "model", folder / form, "--to", form)
        assert said.code == 0, said.stderr
        assert not CONTROL.search((said.out + said.stderr).replace("\r", ""))  # other libraries draw bars of progress
        scripts = sorted((folder / form).rglob("*.py"))
        skeletons.append([code_of(path) for path in scripts])
    assert skeletons[0] == skeletons[1]
    assert not (hostile / "it-ran").exists()
    written = {path.relative_to(hostile).parts[0] for path in hostile.rglob("*")}
    assert written <= {"model", "photos", "plain", form}


def code_of(path: Path) -> str:
    """Return a script without its string literals."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)
