"""ONNX export, with labels and preprocessing in the file's metadata."""

import importlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.core.config import to_mapping
from vitkit.core.environment import usable_cores
from vitkit.core.errors import WeightsError
from vitkit.exporters.runtime import INPUT, FloatArray, Runner, Runtime, build_export_module, suppress_output
from vitkit.exporters.torch_export import dynamic_batch, trace
from vitkit.weights.bundle import ModelBundle

FILE = "model.onnx"
OPSET = 20
"""Of 2023, read by ONNX Runtime since 1.17 and by OpenVINO; has LayerNormalization and Gelu as single operations. From
21 on GroupNormalization is one too, which ONNX Runtime computes inaccurately."""
MAX_FILE_BYTES = 2_000_000_000
"""Size above which weights are stored in a second file; protobuf is limited to 2 GiB."""


def write_program(bundle: ModelBundle, directory: Path) -> None:
    """Write the ONNX file and check it. Weights above `MAX_FILE_BYTES` are stored in a file next to it."""
    module = build_export_module(bundle)
    graph = trace(module)
    with suppress_output():
        program = torch.onnx.export(
            graph,
            input_names=[INPUT],
            output_names=list(module.outputs),
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=dynamic_batch(),
            verbose=False,
        )
        assert program is not None
        _remove_trace_metadata(program.model)
        program.model.metadata_props.update(metadata_properties(bundle))
        size = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
        program.save(str(directory / FILE), external_data=size > MAX_FILE_BYTES)
    check_file(directory)


def metadata_properties(bundle: ModelBundle) -> dict[str, str]:
    """Return the metadata that is stored in the program."""
    return {
        "vitkit.version": metadata.version("vitkit"),
        "vitkit.model": bundle.name,
        "vitkit.labels": json.dumps(list(bundle.labels)),
        "vitkit.preprocessing": json.dumps(to_mapping(bundle.preprocessing)),
    }


def check_file(directory: Path) -> None:
    """Raise WeightsError if a file is not valid ONNX, or refers to weights outside of its directory.

    Runtimes follow any path that a file names for its weights.
    """
    import onnx  # noqa: PLC0415  not everyone exports

    model = onnx.load(str(directory / FILE), load_external_data=False)
    entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data]
    for location in [entry.value for entry in entries if entry.key == "location"]:
        if Path(location).name != location or location in ("", ".", "..") or (directory / location).is_symlink():
            raise WeightsError(f"{directory / FILE}: its weights are not in its directory", got=location)
    try:
        onnx.checker.check_model(str(directory / FILE), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise WeightsError(f"{directory / FILE}: not valid ONNX: {' '.join(str(error).split())[:200]}") from error


def load_program(directory: Path) -> Runner:
    """Load the program, with as many threads as torch has."""
    onnxruntime = importlib.import_module("onnxruntime")  # an optional dependency
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = min(torch.get_num_threads(), usable_cores())
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(directory / FILE), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(pixels: FloatArray) -> dict[str, FloatArray]:
        outputs = session.run(names, {INPUT: pixels})
        return {name: np.asarray(output) for name, output in zip(names, outputs, strict=True)}

    return run


def _remove_trace_metadata(model: Any) -> None:
    """Remove traces of the export from the graph: three times the size of a small graph, with local file names."""
    graph = model.graph
    graph.metadata_props.clear()
    graph.doc_string = None
    for node in graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in [*graph.inputs, *graph.initializers.values()]:
        value.metadata_props.clear()


EXAMPLE = f"""\
import onnxruntime

session = onnxruntime.InferenceSession(str(FOLDER / "{FILE}"), providers=["CPUExecutionProvider"])


def run(pixels):
    return session.run(["$output"], {{"{INPUT}": pixels}})[0]
"""
ONNX = Runtime(
    name="onnx",
    title="ONNX",
    load_command=f'onnxruntime.InferenceSession("{{out}}/{FILE}")',
    package="onnxruntime",
    requires=("onnx", "onnxscript", "onnxruntime"),
    extra="export",
    example=EXAMPLE,
    write=write_program,
    load=load_program,
)
