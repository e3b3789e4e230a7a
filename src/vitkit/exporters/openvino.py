"""OpenVINO export in float32, converted from ONNX."""

import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from vitkit.core.environment import usable_cores
from vitkit.exporters import onnx
from vitkit.exporters.onnx import metadata_properties
from vitkit.exporters.runtime import INPUT, FloatArray, Runner, Runtime, suppress_output
from vitkit.weights.bundle import ModelBundle

FILE = "model.xml"
SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
"""Without the precision hint, a CPU with bfloat16 instructions would use them."""
TELEMETRY = "openvino_telemetry"


def import_openvino() -> ModuleType:
    """Import OpenVINO without its telemetry, which would report the import over the network."""
    if "openvino" not in sys.modules:
        modules: dict[str, Any] = sys.modules
        telemetry = modules.get(TELEMETRY)
        modules[TELEMETRY] = None  # makes its import fail, which OpenVINO tolerates
        try:
            with suppress_output():
                importlib.import_module("openvino")
        finally:
            del modules[TELEMETRY]
            if telemetry is not None:
                modules[TELEMETRY] = telemetry
    return sys.modules["openvino"]


def write_program(bundle: ModelBundle, directory: Path) -> None:
    """Write the program as .xml and its weights as .bin."""
    # Inside the directory: large weights need as much space as the export, and leftovers are removed with it.
    with tempfile.TemporaryDirectory(dir=directory, prefix=".onnx.") as temporary:
        onnx.write_program(bundle, Path(temporary))
        convert(Path(temporary) / onnx.FILE, directory, bundle)


def convert(file: Path, directory: Path, bundle: ModelBundle) -> None:
    """Convert an ONNX file. The `ovc` converter is not used: it sends telemetry."""
    openvino = import_openvino()
    model = openvino.Core().read_model(file)
    for name, text in metadata_properties(bundle).items():
        model.set_rt_info(text, name.split("."))
    openvino.save_model(model, directory / FILE, compress_to_fp16=False)


def load_program(directory: Path) -> Runner:
    """Load the program in float32, with as many threads as torch has."""
    settings = SETTINGS | {"INFERENCE_NUM_THREADS": str(min(torch.get_num_threads(), usable_cores()))}
    compiled = import_openvino().Core().compile_model(directory / FILE, "CPU", settings)
    names = [output.get_any_name() for output in compiled.outputs]

    def run(pixels: FloatArray) -> dict[str, FloatArray]:
        outputs = compiled({INPUT: pixels})
        return {name: np.array(outputs[name]) for name in names}

    return run


EXAMPLE = f"""\
sys.modules.setdefault("openvino_telemetry", None)  # otherwise importing OpenVINO sends telemetry
import openvino

# float32, even if the processor has bfloat16.
program = openvino.Core().compile_model(FOLDER / "{FILE}", "CPU", {SETTINGS!r})


def run(pixels):
    return program({{"{INPUT}": pixels}})["$output"]
"""
OPENVINO = Runtime(
    name="openvino",
    title="OpenVINO",
    load_command=f'openvino.compile_model("{{out}}/{FILE}", "CPU")',
    package="openvino",
    requires=("onnx", "onnxscript", "onnxruntime", "openvino"),
    extra="export,openvino",
    example=EXAMPLE,
    write=write_program,
    load=load_program,
)
