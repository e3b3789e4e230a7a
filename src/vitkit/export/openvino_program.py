"""A model goes in, OpenVINO's two files come out, made from its ONNX form, in float32."""

import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from vitkit.checkpoints.native import Artefact
from vitkit.export import onnx_program
from vitkit.export.onnx_program import described
from vitkit.export.program import INPUT
from vitkit.export.quiet import quietly
from vitkit.export.runtime import Numbers, Run, Runtime

FILE = "model.xml"
SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
"""Without the first, a processor that has bfloat16 would compute in it."""
REPORTER = "openvino_telemetry"


def imported() -> ModuleType:
    """OpenVINO, without the part that tells its makers over the network that it was imported."""
    if "openvino" not in sys.modules:
        modules: dict[str, Any] = sys.modules
        known = modules.get(REPORTER)
        modules[REPORTER] = None  # to Python a module that cannot be imported, and OpenVINO does without it
        try:
            with quietly():
                importlib.import_module("openvino")
        finally:
            del modules[REPORTER]
            if known is not None:
                modules[REPORTER] = known
    return sys.modules["openvino"]


def write(artefact: Artefact, folder: Path) -> None:
    """Write the program; the weights are in the .bin beside it."""
    # In the folder, because weights of more than 2 GB need as much room as the export itself, and are found there
    # with it if this is killed.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".onnx.") as aside:
        onnx_program.write(artefact, Path(aside))
        convert(Path(aside) / onnx_program.FILE, folder, artefact)


def convert(file: Path, folder: Path, artefact: Artefact) -> None:
    """Write the program of an ONNX file; without the part of OpenVINO that calls home, which its converter has."""
    openvino = imported()
    model = openvino.Core().read_model(file)
    for name, text in described(artefact).items():
        model.set_rt_info(text, name.split("."))
    openvino.save_model(model, folder / FILE, compress_to_fp16=False)


def start(folder: Path) -> Run:
    """The program in a folder, ready to run in float32, on as many threads as torch has."""
    settings = SETTINGS | {"INFERENCE_NUM_THREADS": str(torch.get_num_threads())}
    compiled = imported().Core().compile_model(folder / FILE, "CPU", settings)
    names = [output.get_any_name() for output in compiled.outputs]

    def run(pixels: Numbers) -> dict[str, Numbers]:
        found = compiled({INPUT: pixels})
        return {name: np.array(found[name]) for name in names}

    return run


OPENVINO = Runtime(
    name="openvino",
    title="OpenVINO",
    file=FILE,
    loader=f'openvino.compile_model("{{out}}/{FILE}", "CPU")',
    package="openvino",
    needs=("onnx", "onnxscript", "onnxruntime", "openvino"),
    extra="export,openvino",
    write=write,
    start=start,
)
