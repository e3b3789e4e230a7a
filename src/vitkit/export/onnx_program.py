"""A model goes in, an ONNX file comes out, with its labels and preprocessing in it, as ONNX Runtime runs it."""

import importlib
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitkit.checkpoints.native import Artefact
from vitkit.core.config import to_mapping
from vitkit.core.errors import WeightsError
from vitkit.export.program import INPUT, program_of
from vitkit.export.quiet import quietly
from vitkit.export.runtime import Numbers, Run, Runtime
from vitkit.export.torch_program import any_batch, traced

if TYPE_CHECKING:
    import onnx

FILE = "model.onnx"
OPSET = 20
"""Of 2023: ONNX Runtime since 1.17 and OpenVINO read it, and LayerNormalization and Gelu are one operation each in it.
From 21 on GroupNormalization is one too, which ONNX Runtime rounds badly."""
LARGEST = 2_000_000_000
"""Bytes of weights that one file may hold; the format that ONNX is written in ends at 2 GiB."""


def write(artefact: Artefact, folder: Path) -> None:
    """Write the ONNX file; weights beyond `LARGEST` go into one file beside it."""
    program = program_of(artefact)
    graph = traced(program)
    with quietly():
        made = torch.onnx.export(
            graph,
            input_names=[INPUT],
            output_names=list(program.outputs),
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=any_batch(),
            verbose=False,
        )
        assert made is not None
        _keep_what_matters(made.model)
        made.model.metadata_props.update(described(artefact))
        size = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict().values())
        made.save(str(folder / FILE), external_data=size > LARGEST)
    check(folder)


def described(artefact: Artefact) -> dict[str, str]:
    """What travels inside the program: texts by name."""
    return {
        "vitkit.version": metadata.version("vitkit"),
        "vitkit.model": artefact.name,
        "vitkit.labels": json.dumps(list(artefact.labels)),
        "vitkit.preprocessing": json.dumps(to_mapping(artefact.preprocessing)),
    }


def check(folder: Path) -> None:
    """Refuse a file that is not valid ONNX, or whose weights lie anywhere but in the folder.

    A runtime follows whatever path a file names for its weights.
    """
    import onnx  # noqa: PLC0415  not everyone exports

    model = onnx.load(str(folder / FILE), load_external_data=False)
    for place in places(model):
        if Path(place).name != place or place in ("", ".", "..") or (folder / place).is_symlink():
            raise WeightsError(f"{folder / FILE}: its weights are not in its folder", got=place)
    try:
        onnx.checker.check_model(str(folder / FILE), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise WeightsError(f"{folder / FILE}: not valid ONNX: {' '.join(str(error).split())[:200]}") from error


def places(model: "onnx.ModelProto") -> Iterator[str]:
    """Where the tensors that are not in the file itself are said to be."""
    for tensor in model.graph.initializer:
        yield from (entry.value for entry in tensor.external_data if entry.key == "location")


def start(folder: Path) -> Run:
    """The program in a folder, ready to run, on as many threads as torch has."""
    onnxruntime = importlib.import_module("onnxruntime")  # not everyone exports
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(folder / FILE), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(pixels: Numbers) -> dict[str, Numbers]:
        found = session.run(names, {INPUT: pixels})
        return {name: np.asarray(answer) for name, answer in zip(names, found, strict=True)}

    return run


def _keep_what_matters(model: Any) -> None:
    """Take out how the graph was made, node by node: three times the size of a small graph, and file names in it."""
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


ONNX = Runtime(
    name="onnx",
    title="ONNX",
    file=FILE,
    loader=f'onnxruntime.InferenceSession("{{out}}/{FILE}")',
    package="onnxruntime",
    needs=("onnx", "onnxscript", "onnxruntime"),
    extra="export",
    write=write,
    start=start,
)
