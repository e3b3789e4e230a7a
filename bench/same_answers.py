"""A model and images go in; whether every way of asking it gives the same answers comes out, as a table and as JSON.

python bench/same_answers.py MODEL PHOTOS --write docs/reliability.md       all images in every way; labels are not used
python bench/same_answers.py runs/photos photos --images 100 --ways predict,serve

The measure is evaluation: the model as written, by `vitkit.evaluate`. Beside it stand `vitkit.Predictor`, a running
`vitkit serve` that is sent the image files, and the programs that `vitkit export` writes, each run by its own runtime.
"""

import datetime
import http.client
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch

import vitkit
from vitkit.cli.main import main as vitkit_command
from vitkit.core.errors import ConfigError
from vitkit.data.source import Source, Subset
from vitkit.data.sources.detect import open_data
from vitkit.evaluate.accuracy import answers
from vitkit.evaluate.judging import choose_split
from vitkit.export.runtime import check_installed
from vitkit.export.runtimes import RUNTIMES

Logits = npt.NDArray[np.float32]
Export = Callable[[str, str, Path], None]
"""The kind of a program, a model and a new folder, which it fills."""
MARKERS = ("<!-- same_answers:begin -->", "<!-- same_answers:end -->")
BOUND = 1e-4
"""How far a logit may be from evaluation's."""
CLIENTS, TOGETHER, BATCH = 6, 2, 32
"""How many clients ask the server at once, with how many images each; and the batch of all other ways."""
PATIENCE = 600.0
PROGRAMS = ("onnx", "torch", "openvino")
WAYS = ("predict", "serve", "serve /v1", *PROGRAMS)
TITLES = {
    "predict": "`vitkit.Predictor`, image files",
    "serve": "`vitkit serve`, KServe inference from image files, many clients",
    "serve /v1": "`vitkit serve`, `/v1/predict`",
    "onnx": "`vitkit export --to onnx`, ONNX Runtime",
    "torch": "`vitkit export --to torch`, `torch.export.load`",
    "openvino": "`vitkit export --to openvino`, OpenVINO",
}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How one way of asking agrees with evaluation: images, those with the same first class, the largest difference.

    The difference is one of logits, but where only probabilities can be had; `left_out` says why a way was not tried.
    """

    way: str
    images: int = 0
    same_first: int = 0
    difference: float = 0.0
    of: str = "logits"
    left_out: str | None = None

    @property
    def holds(self) -> bool:
        """Whether the promise is kept."""
        return self.left_out is not None or (self.same_first == self.images and self.difference <= BOUND)


def compare(model: str, images: Source, *, export: Export, ways: Sequence[str] = WAYS) -> list[Agreement]:
    """Ask a model for the same images in every way; `export` writes a program of a kind into a folder."""
    contents = [images.content(index) for index in range(len(images))]
    files = [content for content in contents if isinstance(content, bytes)]
    if len(files) < len(images):
        raise SystemExit("error: the images are not files, which a client could send")
    loaded = vitkit.load(model)
    how = loaded.preprocess.preprocessing
    expected = answers(loaded, images, preprocessing=how, batch_size=BATCH).logits.numpy()
    pixels = np.concatenate([loaded.preprocess(file).numpy() for file in files])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = cache(lambda: stack.enter_context(served(model)))
        asking: dict[str, Callable[[], Logits]] = {
            "predict": lambda: vitkit.Predictor(model, batch_size=BATCH).logits(list(files)).numpy(),
            "serve": lambda: server().logits(files),
            "serve /v1": lambda: server().probabilities(files),
            **{to: partial(from_program, to, model, pixels, Path(folder) / to, export=export) for to in PROGRAMS},
        }
        return [agreement(way, expected, asking[way]) for way in ways]


def agreement(way: str, expected: Logits, given: Callable[[], Logits]) -> Agreement:
    """How the answers of one way agree; what cannot run here is left out with its reason."""
    print(f"{way}: {len(expected)} images", file=sys.stderr, flush=True)
    try:
        logits = given()
    except MissingError as missing:
        return Agreement(way=way, left_out=str(missing))
    of = "logits"
    if way == "serve /v1":
        of, expected = "probabilities", torch.from_numpy(expected).softmax(dim=1).numpy()
    same = int((logits.argmax(axis=1) == expected.argmax(axis=1)).sum())
    difference = float(np.abs(logits - expected).max())
    return Agreement(way=way, images=len(expected), same_first=same, difference=difference, of=of)


class MissingError(Exception):
    """What a way of asking needs is not installed."""


# Programs


def export_by_command(to: str, model: str, out: Path) -> None:
    """What users type; it runs a proof of its own."""
    with redirect_stdout(sys.stderr):
        code = vitkit_command(["export", model, str(out), "--to", to])
    if code:
        raise SystemExit(f"error: vitkit export --to {to} ended with code {code}")


def from_program(to: str, model: str, pixels: Logits, out: Path, *, export: Export) -> Logits:
    """Export, and run what was written with its own runtime."""
    runtime = RUNTIMES[to]
    try:
        check_installed(runtime.title, needs=runtime.needs, extra=runtime.extra)
    except ConfigError as error:
        raise MissingError(str(error)) from error
    export(to, model, out)
    run = runtime.start(out)
    return np.concatenate([run(pixels[first : first + BATCH])["logits"] for first in range(0, len(pixels), BATCH)])


# The server


class Asked:
    """A running server, and ways to ask it."""

    def __init__(self, address: str) -> None:
        self.address = address
        [self.model] = self.get("/v1/models")["models"]
        self.labels: list[str] = self.get(f"/v1/models/{self.model['name']}")["labels"]

    def get(self, path: str) -> Any:
        """The JSON at an address."""
        return json.loads(self.send("GET", path))

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        """A request that is sent again while the server has no room."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        end = time.monotonic() + PATIENCE
        while True:
            connection = http.client.HTTPConnection(self.address, timeout=PATIENCE)
            try:
                connection.request(method, path, body=body, headers=named)
                reply = connection.getresponse()
                content = reply.read()
            finally:
                connection.close()
            if reply.status == 200:
                return content
            if reply.status not in {429, 503, 504} or time.monotonic() > end:
                raise SystemExit(f"error: {method} {path}: {reply.status} {content[:300]!r}")
            time.sleep(0.05)

    def logits(self, files: Sequence[bytes]) -> Logits:
        """By KServe's protocol, a few clients at once, so that the server makes batches of its own."""
        groups = [files[first : first + TOGETHER] for first in range(0, len(files), TOGETHER)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            return np.concatenate(list(pool.map(self.infer, groups)))

    def infer(self, files: Sequence[bytes]) -> Logits:
        """The logits of a few files, sent and received as raw bytes."""
        raw = b"".join(struct.pack("<I", len(file)) + file for file in files)
        image = {"name": "image", "datatype": "BYTES", "shape": [len(files)]}
        asked = {
            "inputs": [image | {"parameters": {"binary_data_size": len(raw)}}],
            "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
        }
        head = json.dumps(asked).encode()
        path = f"/v2/models/{self.model['name']}/infer"
        kind = "application/octet-stream"
        answer = self.send("POST", path, head + raw, Content_Type=kind, Inference_Header_Content_Length=str(len(head)))
        numbers = np.frombuffer(answer[-4 * len(files) * len(self.labels) :], dtype="<f4")
        return numbers.reshape(len(files), -1).astype(np.float32)

    def probabilities(self, files: Sequence[bytes]) -> Logits:
        """By /v1/predict, an image a request, with all classes."""
        numbers = {label: number for number, label in enumerate(self.labels)}

        def one(file: bytes) -> Logits:
            found = json.loads(self.send("POST", f"/v1/predict?top={len(self.labels)}", file))["predictions"]
            row = np.zeros(len(self.labels), dtype=np.float32)
            for prediction in found:
                row[numbers[prediction["label"]]] = prediction["probability"]
            return row

        with ThreadPoolExecutor(CLIENTS) as pool:
            return np.stack(list(pool.map(one, files)))


@contextmanager
def served(model: str) -> Iterator[Asked]:
    """`vitkit serve` in a process of its own, on a free port, until it has been asked."""
    line = [sys.executable, "-m", "vitkit", "serve", model, "--port", "0"]
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]:
        raise MissingError(f"serving needs {missing[0]}")
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip().removeprefix("http://")
            wait_until_ready(address, process)
            yield Asked(address)
        finally:
            process.send_signal(signal.SIGTERM)


def wait_until_ready(address: str, process: "subprocess.Popen[str]") -> None:
    """Ask until the models answer."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        connection = http.client.HTTPConnection(address, timeout=10)
        try:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    raise SystemExit("error: the server did not become ready")


# The report


@click.command()
@click.argument("model")
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.option("--images", default=0, help="Ask for the first so many images; all, where this is 0.")
@click.option("--ways", default=",".join(WAYS), show_default=True, help="Which ways to compare, with commas between.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the table into this Markdown file.")
def main(model: str, data: Path, images: int, ways: str, json_file: Path | None, write: Path | None) -> None:
    """Compare every way of asking MODEL for the images in DATA; the exit code is 1 where two answers differ."""
    _, source = choose_split(open_data(data))
    if images:
        source = Subset(source, range(min(images, len(source))))
    found = compare(model, source, export=export_by_command, ways=ways.split(","))
    text = section(found, model=Path(model).name)
    print(text)
    if json_file:
        json_file.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    if write:
        from report import write_section  # noqa: PLC0415  psutil is not needed to compare

        write_section(text, write, markers=MARKERS)
    sys.exit(0 if all(each.holds for each in found) else 1)


def section(found: Sequence[Agreement], *, model: str) -> str:
    """The section as Markdown."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        "## The same answers everywhere",
        "",
        "S10: what was evaluated is what answers. Every way of asking a model is compared with evaluation, which runs",
        "the model as written: the first class must be the same for every image, and every logit within 1e-4.",
        "",
        f"Seen on {today} with {model}; the command is `python bench/same_answers.py MODEL IMAGES`. Clients send files",
        "to the server, several at once, so that it makes batches of its own; the programs get the pixels that vitkit",
        "prepares. A small count of this runs in `make test`.",
        "",
        "| way of asking | images | same first class | largest difference | kept |",
        "|---|--:|--:|--:|---|",
        *(row(each) for each in found),
        "",
    ]
    return "\n".join(lines)


def row(each: Agreement) -> str:
    """One line of the table."""
    title = TITLES[each.way]
    if each.left_out:
        return f"| {title} | – | – | – | left out: {each.left_out} |"
    unit = "" if each.of == "logits" else f" ({each.of})"
    kept = "yes" if each.holds else "**no**"
    return f"| {title} | {each.images:,} | {each.same_first:,} | {each.difference:.1e}{unit} | {kept} |"


if __name__ == "__main__":
    main()
