"""Agreement between evaluation and every other method to run a model.

python bench/agreement.py MODEL PHOTOS --write docs/reliability.md       all images and methods; labels are not used
python bench/agreement.py runs/photos photos --images 100 --methods predict,serve

The reference is the unmodified model in `vitkit.evaluation`. It is compared with `vitkit.Predictor`, with a running
`vitkit serve` that receives image files, and with exported models in their own runtimes.
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
from vitkit.data.dataset import ImageSource, Subset
from vitkit.data.layouts.registry import open_dataset
from vitkit.evaluation.evaluation import choose_split
from vitkit.evaluation.logits import compute_logits
from vitkit.exporters.exporter import RUNTIMES

Logits = npt.NDArray[np.float32]
Export = Callable[[str, str, Path], None]
"""Called with the export target, the model and a new directory to fill."""
MARKERS = ("<!-- agreement:begin -->", "<!-- agreement:end -->")
TOLERANCE = 1e-4
"""Largest allowed difference between logits."""
CLIENTS, IMAGES_PER_REQUEST, BATCH = 6, 2, 32
"""Concurrent clients of the server, images per request, and the batch size of all other methods."""
TIMEOUT_SECONDS = 600.0
EXPORTS = ("onnx", "torch", "openvino")
METHODS = ("predict", "serve", "serve /v1", *EXPORTS)
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
    """Agreement of one method with evaluation: images, those with the same top-1 class, the largest difference.

    The difference is between logits, or between probabilities if the method returns no logits. `skipped` is the reason
    if the method cannot run here.
    """

    method: str
    images: int = 0
    same_top1: int = 0
    difference: float = 0.0
    of: str = "logits"
    skipped: str | None = None

    @property
    def holds(self) -> bool:
        """Return whether the guarantee holds."""
        return self.skipped is not None or (self.same_top1 == self.images and self.difference <= TOLERANCE)


def compare(model: str, images: ImageSource, *, export: Export, methods: Sequence[str] = METHODS) -> list[Agreement]:
    """Run a model on the same images with every method; `export` writes an exported model into a directory."""
    contents = [images.read(index) for index in range(len(images))]
    files = [content for content in contents if isinstance(content, bytes)]
    if len(files) < len(images):
        raise SystemExit("error: the images must be files, so that a client can send them")
    loaded = vitkit.load(model)
    preprocessing = loaded.preprocess
    expected = compute_logits(loaded, images, preprocessing=preprocessing, batch_size=BATCH).logits.numpy()
    pixels = np.concatenate([loaded.preprocess(file).numpy() for file in files])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = cache(lambda: stack.enter_context(run_server(model)))
        runs: dict[str, Callable[[], Logits]] = {
            "predict": lambda: vitkit.Predictor(model, batch_size=BATCH).logits(list(files)).numpy(),
            "serve": lambda: server().logits(files),
            "serve /v1": lambda: server().probabilities(files),
            **{to: partial(run_exported, to, model, pixels, Path(folder) / to, export=export) for to in EXPORTS},
        }
        return [measure_agreement(method, expected, runs[method]) for method in methods]


def measure_agreement(method: str, expected: Logits, compute: Callable[[], Logits]) -> Agreement:
    """Compare one method with evaluation; what cannot run here is skipped with its reason."""
    print(f"{method}: {len(expected)} images", file=sys.stderr, flush=True)
    try:
        logits = compute()
    except MissingError as missing:
        return Agreement(method=method, skipped=str(missing))
    of = "logits"
    if method == "serve /v1":
        of, expected = "probabilities", torch.from_numpy(expected).softmax(dim=1).numpy()
    same = int((logits.argmax(axis=1) == expected.argmax(axis=1)).sum())
    difference = float(np.abs(logits - expected).max())
    return Agreement(method=method, images=len(expected), same_top1=same, difference=difference, of=of)


class MissingError(Exception):
    """A required package is not installed."""


# Exported models


def export_by_command(to: str, model: str, out: Path) -> None:
    """Export with the command, which verifies its output."""
    with redirect_stdout(sys.stderr):
        code = vitkit_command(["export", model, str(out), "--to", to])
    if code:
        raise SystemExit(f"error: vitkit export --to {to} ended with code {code}")


def run_exported(to: str, model: str, pixels: Logits, out: Path, *, export: Export) -> Logits:
    """Export and run the model with its runtime."""
    runtime = RUNTIMES[to]
    try:
        runtime.check_installed()
    except ConfigError as error:
        raise MissingError(str(error)) from error
    export(to, model, out)
    run = runtime.load(out)
    return np.concatenate([run(pixels[first : first + BATCH])["logits"] for first in range(0, len(pixels), BATCH)])


# The server


class ServerClient:
    """A running server and its clients."""

    def __init__(self, address: str) -> None:
        self.address = address
        [self.model] = self.get("/v1/models")["models"]
        self.labels: list[str] = self.get(f"/v1/models/{self.model['name']}")["labels"]

    def get(self, path: str) -> Any:
        """Return the JSON at a URL."""
        return json.loads(self.send("GET", path))

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        """Send a request, again while the server is overloaded."""
        sent_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        end = time.monotonic() + TIMEOUT_SECONDS
        while True:
            connection = http.client.HTTPConnection(self.address, timeout=TIMEOUT_SECONDS)
            try:
                connection.request(method, path, body=body, headers=sent_headers)
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
        """Return logits by KServe's protocol from several concurrent clients, so that the server makes batches."""
        groups = [files[first : first + IMAGES_PER_REQUEST] for first in range(0, len(files), IMAGES_PER_REQUEST)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            return np.concatenate(list(pool.map(self.infer, groups)))

    def infer(self, files: Sequence[bytes]) -> Logits:
        """Return the logits of a few files, sent and received as raw bytes."""
        raw = b"".join(struct.pack("<I", len(file)) + file for file in files)
        image = {"name": "image", "datatype": "BYTES", "shape": [len(files)]}
        fields = {
            "inputs": [image | {"parameters": {"binary_data_size": len(raw)}}],
            "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
        }
        head = json.dumps(fields).encode()
        path = f"/v2/models/{self.model['name']}/infer"
        kind = "application/octet-stream"
        answer = self.send("POST", path, head + raw, Content_Type=kind, Inference_Header_Content_Length=str(len(head)))
        numbers = np.frombuffer(answer[-4 * len(files) * len(self.labels) :], dtype="<f4")
        return numbers.reshape(len(files), -1).astype(np.float32)

    def probabilities(self, files: Sequence[bytes]) -> Logits:
        """Return probabilities by /v1/predict, one image per request, with all classes."""
        numbers = {label: number for number, label in enumerate(self.labels)}

        def one(file: bytes) -> Logits:
            results = json.loads(self.send("POST", f"/v1/predict?top={len(self.labels)}", file))["predictions"]
            row = np.zeros(len(self.labels), dtype=np.float32)
            for prediction in results:
                row[numbers[prediction["label"]]] = prediction["probability"]
            return row

        with ThreadPoolExecutor(CLIENTS) as pool:
            return np.stack(list(pool.map(one, files)))


@contextmanager
def run_server(model: str) -> Iterator[ServerClient]:
    """Run `vitkit serve` in a process on a free port."""
    line = [sys.executable, "-m", "vitkit", "serve", model, "--port", "0"]
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]:
        raise MissingError(f"serving needs {missing[0]}")
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip().removeprefix("http://")
            wait_until_ready(address, process)
            yield ServerClient(address)
        finally:
            process.send_signal(signal.SIGTERM)


def wait_until_ready(address: str, process: "subprocess.Popen[str]") -> None:
    """Wait until the models are ready."""
    end = time.monotonic() + TIMEOUT_SECONDS
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
@click.option("--images", default=0, help="Number of images; 0 means all.")
@click.option("--methods", default=",".join(METHODS), show_default=True, help="Methods to compare, comma-separated.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the results to this file.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the table into this Markdown file.")
def main(model: str, data: Path, images: int, methods: str, json_file: Path | None, write: Path | None) -> None:
    """Compare all methods to run MODEL on the images in DATA; exit with 1 if two outputs differ."""
    _, source = choose_split(open_dataset(data))
    if images:
        source = Subset(source, range(min(images, len(source))))
    results = compare(model, source, export=export_by_command, methods=methods.split(","))
    text = section(results, model=Path(model).name)
    print(text)
    if json_file:
        json_file.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    if write:
        from report import write_section  # noqa: PLC0415  psutil is only needed to write

        write_section(text, write, markers=MARKERS)
    sys.exit(0 if all(each.holds for each in results) else 1)


def section(results: Sequence[Agreement], *, model: str) -> str:
    """Return the section as Markdown."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        "## Agreement of all inference paths",
        "",
        "S10: every method to run a model agrees with evaluation, which runs the unmodified model: the top-1 class is",
        "the same for every image, and logits differ by at most 1e-4.",
        "",
        f"Measured on {today} with {model} by `python bench/agreement.py MODEL IMAGES`. Several clients send files to",
        "the server at once, so that it forms batches; exported models receive the pixels that vitkit preprocesses. A",
        "smaller comparison is part of `make test`.",
        "",
        "| method | images | same top-1 class | largest difference | holds |",
        "|---|--:|--:|--:|---|",
        *(row(each) for each in results),
        "",
    ]
    return "\n".join(lines)


def row(each: Agreement) -> str:
    """Return one line of the table."""
    title = TITLES[each.method]
    if each.skipped:
        return f"| {title} | – | – | – | skipped: {each.skipped} |"
    unit = "" if each.of == "logits" else f" ({each.of})"
    holds = "yes" if each.holds else "**no**"
    return f"| {title} | {each.images:,} | {each.same_top1:,} | {each.difference:.1e}{unit} | {holds} |"


if __name__ == "__main__":
    main()
