"""An engine's name and a model's files go in, a function that runs images comes out; each engine imports its own.

All read the same weights: `prepare` writes them once for each model, in every form that an engine takes.
"""

# ruff: noqa: PLC0415  a process imports its own library alone: what the others bring would be in its memory and start

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

    from vitkit.zoo.lookup import Model

Library = Literal["vitkit", "timm", "transformers", "onnxruntime", "openvino"]
Precision = Literal["fp32", "bf16", "int8"]
Form = Literal["", "compiled", "dynamic", "two streams"]
Array = npt.NDArray[np.float32]
Once = Callable[[], Array]
"""Runs a batch once and gives its logits."""
Ready = Callable[[Array], Once]
"""Takes a batch of images and gives what runs it."""

THREADS = 2
WEIGHTS, ARTEFACT = "weights.safetensors", "artefact"
ONNX, ONNX_INT8, OPENVINO, OPENVINO_INT8 = "timm.onnx", "timm-int8.onnx", "timm.xml", "timm-int8.xml"
CALIBRATION = 8
"""Images that static quantisation looks at; speed does not depend on them."""
TITLES: dict[Library, str] = {
    "vitkit": "vitkit",
    "timm": "timm",
    "transformers": "transformers",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One library, in one precision and one way of using it."""

    library: Library
    precision: Precision
    form: Form = ""

    def __str__(self) -> str:
        plain = "eager" if self.library in {"timm", "transformers"} else ""
        return " ".join(word for word in (TITLES[self.library], self.form or plain) if word)

    @property
    def key(self) -> str:
        """Its name among all."""
        return f"{self} {self.precision}"


CONTENDERS = (
    Contender(library="vitkit", precision="fp32"),
    Contender(library="timm", precision="fp32"),
    Contender(library="timm", precision="fp32", form="compiled"),
    Contender(library="transformers", precision="fp32"),
    Contender(library="onnxruntime", precision="fp32"),
    Contender(library="openvino", precision="fp32"),
    Contender(library="openvino", precision="fp32", form="two streams"),
    Contender(library="vitkit", precision="bf16"),
    Contender(library="timm", precision="bf16"),
    Contender(library="timm", precision="bf16", form="compiled"),
    Contender(library="transformers", precision="bf16"),
    Contender(library="openvino", precision="bf16"),
    Contender(library="vitkit", precision="int8"),
    Contender(library="timm", precision="int8", form="dynamic"),
    Contender(library="onnxruntime", precision="int8", form="dynamic"),
    Contender(library="openvino", precision="int8"),
    Contender(library="openvino", precision="int8", form="two streams"),
)
"""ONNX Runtime computes nothing in bf16 on a CPU; transformers has no int8 of its own there."""
REFERENCE = CONTENDERS[1]
"""timm, eager, fp32: what every speed is relative to."""


def images(batch: int) -> Array:
    """Random images, the same for every engine."""
    return np.random.default_rng(1).standard_normal((batch, 3, 224, 224), dtype=np.float32)


def folder_of(model: str, folder: Path) -> Path:
    """Where a model's files are."""
    return folder / model.replace("/", "_")


# Ready to run


def ready(contender: Contender, model: str, folder: Path) -> Ready:
    """An engine with its weights, in this process."""
    makers = {
        "vitkit": ready_vitkit,
        "timm": ready_timm,
        "transformers": ready_transformers,
        "onnxruntime": ready_onnxruntime,
        "openvino": ready_openvino,
    }
    return makers[contender.library](contender, model, folder_of(model, folder))


def ready_vitkit(contender: Contender, model: str, folder: Path) -> Ready:
    """Ours: whatever `engine_for` chooses here."""
    import torch

    import vitkit
    from vitkit.engine.choose import engine_for

    torch.set_num_threads(THREADS)
    engine = engine_for(cast("Model", vitkit.load(folder / ARTEFACT)), precision=contender.precision)

    def prepared(batch: Array) -> Once:
        return on_torch(lambda given: engine.answer(given)[1], batch, "fp32")

    prepared.engine = engine.name  # type: ignore[attr-defined]
    return prepared


def ready_timm(contender: Contender, model: str, folder: Path) -> Ready:
    """timm's model as it comes, compiled with its weights frozen, or with torch's int8 linear layers."""
    import torch
    from peers import build
    from safetensors.torch import load_file
    from torch import nn

    torch.set_num_threads(THREADS)
    made = build("timm", model, activation="gelu_erf").eval()
    made.load_state_dict(load_file(folder / WEIGHTS), strict=True)
    if contender.precision == "bf16":
        made = made.to(torch.bfloat16)
    if contender.form == "dynamic":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = torch.ao.quantization.quantize_dynamic(made, {nn.Linear}, dtype=torch.qint8)
    if contender.form == "compiled":
        os.environ["TORCHINDUCTOR_FREEZING"] = "1"
        import torch._inductor.config as inductor

        inductor.freezing = True
        made = cast("nn.Module", torch.compile(made))
    return lambda batch: on_torch(made, batch, contender.precision)


def ready_transformers(contender: Contender, model: str, folder: Path) -> Ready:
    """The model of transformers as it comes."""
    import torch
    from peers import as_transformers, build, logits
    from safetensors.torch import load_file

    torch.set_num_threads(THREADS)
    made = build("transformers", model, activation="gelu_erf").eval()
    made.load_state_dict(as_transformers(load_file(folder / WEIGHTS)), strict=True)
    if contender.precision == "bf16":
        made = made.to(torch.bfloat16)
    return lambda batch: on_torch(lambda given: logits(made, given), batch, contender.precision)


def on_torch(run: "Callable[[Tensor], Tensor]", batch: Array, precision: Precision) -> Once:
    """What runs a batch that is a tensor in the model's own precision before the clock starts."""
    import torch

    given = torch.from_numpy(batch).to(torch.bfloat16 if precision == "bf16" else torch.float32)

    def once() -> Array:
        with torch.inference_mode():
            return cast("Array", run(given).float().numpy())

    return once


def ready_onnxruntime(contender: Contender, model: str, folder: Path) -> Ready:
    """timm's model as ONNX; the session's threads spin while it runs, and stop where it ends."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    file = folder / (ONNX_INT8 if contender.precision == "int8" else ONNX)
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda batch: lambda: cast("Array", session.run(None, {"images": batch})[0])


def ready_openvino(contender: Contender, model: str, folder: Path) -> Ready:
    """timm's model as OpenVINO has it, compiled for the batch; two streams share a batch, each on a core."""
    openvino = imported_openvino()
    core = openvino.Core()
    graph = core.read_model(str(folder / (OPENVINO_INT8 if contender.precision == "int8" else OPENVINO)))
    streams = 2 if contender.form == "two streams" else 1
    how: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": THREADS,
        "NUM_STREAMS": streams,
        "INFERENCE_PRECISION_HINT": "bf16" if contender.precision == "bf16" else "f32",
    }

    def prepared(batch: Array) -> Once:
        graph.reshape([len(batch) // streams, *batch.shape[1:]])
        program = core.compile_model(graph, "CPU", how)
        requests = [program.create_infer_request() for _ in range(streams)]
        parts = np.split(batch, streams)

        def once() -> Array:
            for request, part in zip(requests, parts, strict=True):
                request.start_async({0: part}, share_inputs=True)
            for request in requests:
                request.wait()
            return np.concatenate([request.get_output_tensor(0).data for request in requests])

        return once

    return prepared


def imported_openvino() -> Any:
    """OpenVINO, without the part by which it and NNCF tell their makers over the network that they are used."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


# Files


def prepare(model: str, folder: Path) -> None:
    """Write a model's weights in every form, unless they are there from an earlier run."""
    place = folder_of(model, folder)
    done = place / "done"
    if done.exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    write_weights(model, place)
    write_onnx(model, place)
    write_openvino(model, place)
    done.touch()


def write_weights(model: str, place: Path) -> None:
    """The same random numbers for all, under timm's names, and as our artefact."""
    from peers import build, draw_weights
    from safetensors.torch import save_file

    import vitkit

    made = build("vitkit", model, activation="gelu_erf").eval()
    draw_weights(made)
    save_file(made.state_dict(), place / WEIGHTS)
    vitkit.save(cast("Model", made), place / ARTEFACT)


def timm_in_fp32(model: str, place: Path) -> Any:
    """timm's model, from which ONNX Runtime's and OpenVINO's are made."""
    from peers import build
    from safetensors.torch import load_file

    made = build("timm", model, activation="gelu_erf").eval()
    made.load_state_dict(load_file(place / WEIGHTS), strict=True)
    return made


def write_onnx(model: str, place: Path) -> None:
    """ONNX in fp32, and with int8 weights whose inputs are quantised as they come."""
    import onnx
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            timm_in_fp32(model, place),
            (torch.from_numpy(images(2)),),
            str(place / ONNX),
            dynamo=True,
            dynamic_shapes=({0: "batch"},),
            input_names=["images"],
            output_names=["logits"],
            external_data=False,
            verbose=False,
        )
    graph = onnx.load(place / ONNX)
    del graph.graph.value_info[:]  # shapes that the exporter leaves behind, and the quantiser contradicts
    kinds = ["MatMul", "Gemm"]
    quantize_dynamic(
        graph, place / ONNX_INT8, per_channel=True, weight_type=QuantType.QInt8, op_types_to_quantize=kinds
    )


def write_openvino(model: str, place: Path) -> None:
    """OpenVINO's form in fp32, and quantised by NNCF as its makers advise for transformers, where that is installed."""
    openvino = imported_openvino()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = openvino.convert_model(timm_in_fp32(model, place), example_input=_example())
        openvino.save_model(graph, place / OPENVINO, compress_to_fp16=False)
        with suppress(ImportError):
            import nncf

            calibration = nncf.Dataset([image[None] for image in images(CALIBRATION)])
            transformer = nncf.ModelType.TRANSFORMER
            quantised = nncf.quantize(graph, calibration, model_type=transformer, subset_size=CALIBRATION)
            openvino.save_model(quantised, place / OPENVINO_INT8, compress_to_fp16=False)


def _example() -> "Tensor":
    import torch

    return torch.from_numpy(images(1))


def reason_against(contender: Contender, model: str, folder: Path) -> str | None:
    """Why a contender cannot run here, or None."""
    needs_nncf = contender.library == "openvino" and contender.precision == "int8"
    if needs_nncf and not (folder_of(model, folder) / OPENVINO_INT8).exists():
        return "nncf is not installed"
    return None
