"""Engines of all libraries with the same weights, each imported only where it runs.

`prepare` writes the same weights once per model, in the formats of all engines.
"""

# ruff: noqa: PLC0415  a process imports only its own library, so that others do not count in its memory and start

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from vitkit.zoo.registry import Model

Library = Literal["vitkit", "timm", "transformers", "onnxruntime", "openvino"]
Precision = Literal["fp32", "bf16", "int8"]
Form = Literal["", "compiled", "dynamic", "two streams"]
Array = npt.NDArray[np.float32]
RunBatch = Callable[[], Array]
"""Runs a batch once and returns its logits."""
PrepareBatch = Callable[[Array], RunBatch]
"""Takes a batch of images and returns a function that runs it."""

THREADS = 2
WEIGHTS, ARTIFACT = "weights.safetensors", "artifact"
ONNX, ONNX_INT8, OPENVINO, OPENVINO_INT8 = "timm.onnx", "timm-int8.onnx", "timm.xml", "timm-int8.xml"
CALIBRATION = 8
"""Images that calibrate static quantization; speed does not depend on them."""
TITLES: dict[Library, str] = {
    "vitkit": "vitkit",
    "timm": "timm",
    "transformers": "transformers",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A library in one precision and form."""

    library: Library
    precision: Precision
    form: Form = ""

    def __str__(self) -> str:
        plain = "eager" if self.library in {"timm", "transformers"} else ""
        return " ".join(word for word in (TITLES[self.library], self.form or plain) if word)

    @property
    def key(self) -> str:
        """Return the unique name."""
        return f"{self} {self.precision}"


CANDIDATES = (
    Candidate(library="vitkit", precision="fp32"),
    Candidate(library="timm", precision="fp32"),
    Candidate(library="timm", precision="fp32", form="compiled"),
    Candidate(library="transformers", precision="fp32"),
    Candidate(library="onnxruntime", precision="fp32"),
    Candidate(library="openvino", precision="fp32"),
    Candidate(library="openvino", precision="fp32", form="two streams"),
    Candidate(library="vitkit", precision="bf16"),
    Candidate(library="timm", precision="bf16"),
    Candidate(library="timm", precision="bf16", form="compiled"),
    Candidate(library="transformers", precision="bf16"),
    Candidate(library="openvino", precision="bf16"),
    Candidate(library="vitkit", precision="int8"),
    Candidate(library="timm", precision="int8", form="dynamic"),
    Candidate(library="onnxruntime", precision="int8", form="dynamic"),
    Candidate(library="openvino", precision="int8"),
    Candidate(library="openvino", precision="int8", form="two streams"),
)
"""On CPUs, ONNX Runtime does not support bf16, and transformers has no int8 of its own."""
REFERENCE = CANDIDATES[1]
"""timm, eager, fp32: all speeds are relative to it."""


def images(batch: int) -> Array:
    """Return random images, the same for every engine."""
    return np.random.default_rng(1).standard_normal((batch, 3, 224, 224), dtype=np.float32)


def model_directory(model: str, folder: Path) -> Path:
    """Return the directory of a model's files."""
    return folder / model.replace("/", "_")


# Engines


def create_engine(candidate: Candidate, model: str, folder: Path) -> PrepareBatch:
    """Create an engine with its weights in this process."""
    factories = {
        "vitkit": create_vitkit,
        "timm": create_timm,
        "transformers": create_transformers,
        "onnxruntime": create_onnxruntime,
        "openvino": create_openvino,
    }
    return factories[candidate.library](candidate, model, model_directory(model, folder))


def create_vitkit(candidate: Candidate, model: str, folder: Path) -> PrepareBatch:
    """Create vitkit's fastest engine."""
    import torch

    import vitkit
    from vitkit.inference.select import select_engine

    torch.set_num_threads(THREADS)
    engine = select_engine(cast("Model", vitkit.load(folder / ARTIFACT)), precision=candidate.precision).engine

    def prepare_batch(batch: Array) -> RunBatch:
        return run_on_torch(lambda inputs: engine.forward(inputs)[1], batch, "fp32")

    prepare_batch.engine = engine.name  # type: ignore[attr-defined]
    return prepare_batch


def create_timm(candidate: Candidate, model: str, folder: Path) -> PrepareBatch:
    """Create timm's model: eager, compiled with frozen weights, or with torch's int8 linear layers."""
    import torch
    from peers import build
    from safetensors.torch import load_file
    from torch import nn

    torch.set_num_threads(THREADS)
    module = build("timm", model, activation="gelu_erf").eval()
    module.load_state_dict(load_file(folder / WEIGHTS), strict=True)
    if candidate.precision == "bf16":
        module = module.to(torch.bfloat16)
    if candidate.form == "dynamic":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
    if candidate.form == "compiled":
        os.environ["TORCHINDUCTOR_FREEZING"] = "1"
        import torch._inductor.config as inductor

        inductor.freezing = True
        module = cast("nn.Module", torch.compile(module))
    return lambda batch: run_on_torch(module, batch, candidate.precision)


def create_transformers(candidate: Candidate, model: str, folder: Path) -> PrepareBatch:
    """Create the model of transformers."""
    import torch
    from peers import as_transformers, build, logits
    from safetensors.torch import load_file

    torch.set_num_threads(THREADS)
    module = build("transformers", model, activation="gelu_erf").eval()
    module.load_state_dict(as_transformers(load_file(folder / WEIGHTS)), strict=True)
    if candidate.precision == "bf16":
        module = module.to(torch.bfloat16)
    return lambda batch: run_on_torch(lambda inputs: logits(module, inputs), batch, candidate.precision)


def run_on_torch(run: "Callable[[Tensor], Tensor]", batch: Array, precision: Precision) -> RunBatch:
    """Return a function that runs a batch, converted to the model's precision before timing."""
    import torch

    inputs = torch.from_numpy(batch).to(torch.bfloat16 if precision == "bf16" else torch.float32)

    def once() -> Array:
        with torch.inference_mode():
            return cast("Array", run(inputs).float().numpy())

    return once


def create_onnxruntime(candidate: Candidate, model: str, folder: Path) -> PrepareBatch:
    """Create timm's model in ONNX Runtime; threads spin only during a run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    file = folder / (ONNX_INT8 if candidate.precision == "int8" else ONNX)
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda batch: lambda: cast("Array", session.run(None, {"images": batch})[0])


def create_openvino(candidate: Candidate, model: str, folder: Path) -> PrepareBatch:
    """Create timm's model in OpenVINO, compiled for the batch; two streams share a batch, one per core."""
    openvino = import_openvino()
    core = openvino.Core()
    graph = core.read_model(str(folder / (OPENVINO_INT8 if candidate.precision == "int8" else OPENVINO)))
    streams = 2 if candidate.form == "two streams" else 1
    options: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": THREADS,
        "NUM_STREAMS": streams,
        "INFERENCE_PRECISION_HINT": "bf16" if candidate.precision == "bf16" else "f32",
    }

    def prepare_batch(batch: Array) -> RunBatch:
        graph.reshape([len(batch) // streams, *batch.shape[1:]])
        compiled = core.compile_model(graph, "CPU", options)
        requests = [compiled.create_infer_request() for _ in range(streams)]
        parts = np.split(batch, streams)

        def once() -> Array:
            for request, part in zip(requests, parts, strict=True):
                request.start_async({0: part}, share_inputs=True)
            for request in requests:
                request.wait()
            return np.concatenate([request.get_output_tensor(0).data for request in requests])

        return once

    return prepare_batch


def import_openvino() -> Any:
    """Import OpenVINO without its telemetry and NNCF's."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


# Files


def prepare(model: str, folder: Path) -> None:
    """Write a model's weights in every form, unless they exist from an earlier run."""
    path = model_directory(model, folder)
    done = path / "done"
    if done.exists():
        return
    path.mkdir(parents=True, exist_ok=True)
    write_weights(model, path)
    write_onnx(model, path)
    write_openvino(model, path)
    done.touch()


def write_weights(model: str, path: Path) -> None:
    """Write the same random weights under timm's names and as an artifact."""
    from peers import build, draw_weights
    from safetensors.torch import save_file

    import vitkit

    module = build("vitkit", model, activation="gelu_erf").eval()
    draw_weights(module)
    save_file(module.state_dict(), path / WEIGHTS)
    vitkit.save(cast("Model", module), path / ARTIFACT)


def load_timm_fp32(model: str, path: Path) -> Any:
    """Return timm's model, the source of the ONNX and OpenVINO files."""
    from peers import build
    from safetensors.torch import load_file

    module = build("timm", model, activation="gelu_erf").eval()
    module.load_state_dict(load_file(path / WEIGHTS), strict=True)
    return module


def write_onnx(model: str, path: Path) -> None:
    """Write ONNX in fp32, and with int8 weights and dynamically quantized inputs."""
    import onnx
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            load_timm_fp32(model, path),
            (torch.from_numpy(images(2)),),
            str(path / ONNX),
            dynamo=True,
            dynamic_shapes=({0: "batch"},),
            input_names=["images"],
            output_names=["logits"],
            external_data=False,
            verbose=False,
        )
    graph = onnx.load(path / ONNX)
    del graph.graph.value_info[:]  # shapes from the exporter that contradict the quantizer's
    kinds = ["MatMul", "Gemm"]
    quantize_dynamic(graph, path / ONNX_INT8, per_channel=True, weight_type=QuantType.QInt8, op_types_to_quantize=kinds)


def write_openvino(model: str, path: Path) -> None:
    """Write OpenVINO in fp32, and quantized by NNCF with its settings for transformers, if installed."""
    openvino = import_openvino()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = openvino.convert_model(load_timm_fp32(model, path), example_input=_example())
        openvino.save_model(graph, path / OPENVINO, compress_to_fp16=False)
        with suppress(ImportError):
            import nncf

            calibration = nncf.Dataset([image[None] for image in images(CALIBRATION)])
            transformer = nncf.ModelType.TRANSFORMER
            quantized = nncf.quantize(graph, calibration, model_type=transformer, subset_size=CALIBRATION)
            openvino.save_model(quantized, path / OPENVINO_INT8, compress_to_fp16=False)


def _example() -> "Tensor":
    import torch

    return torch.from_numpy(images(1))


def unavailable_reason(candidate: Candidate, model: str, folder: Path) -> str | None:
    """Return why a candidate cannot run here, or None."""
    needs_nncf = candidate.library == "openvino" and candidate.precision == "int8"
    if needs_nncf and not (model_directory(model, folder) / OPENVINO_INT8).exists():
        return "nncf is not installed"
    return None
