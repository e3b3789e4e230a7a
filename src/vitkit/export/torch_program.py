"""A model goes in, PyTorch's exported program comes out: one file that `torch.export.load` runs without vitkit."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import torch
from jaxtyping import config

from vitkit.checkpoints.native import Artefact
from vitkit.core.shapes import Tensor
from vitkit.export.program import INPUT, Program, example_pixels, program_of
from vitkit.export.quiet import quietly
from vitkit.export.runtime import Numbers, Run, Runtime

FILE = "model.pt2"


def traced(program: Program) -> torch.export.ExportedProgram:
    """The program as a graph of operations over a batch of any size."""
    with quietly(), sizes_unchecked(), torch.no_grad():
        found = torch.export.export(program, (example_pixels(program.model),), dynamic_shapes=any_batch())
    for part in found.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)  # where vitkit is installed is nobody's business
    return found


@contextmanager
def sizes_unchecked() -> Iterator[None]:
    """Trace without the checks of shapes, where they are on: a size that stands for any is not an integer to them."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", before)


def any_batch() -> dict[str, dict[int, torch.export.Dim]]:
    """That the first axis of the input may have any size."""
    return {INPUT: {0: torch.export.Dim("batch", min=1)}}


def write(artefact: Artefact, folder: Path) -> None:
    """Write the exported program."""
    content = io.BytesIO()  # not into the file itself: on a disk that is full, torch's writer aborts the process
    with quietly():
        torch.export.save(traced(program_of(artefact)), content)
    with (folder / FILE).open("wb") as file:
        file.write(content.getbuffer())


def start(folder: Path) -> Run:
    """The program in a folder, ready to run."""
    with quietly():
        module = torch.export.load(folder / FILE).module()

    def run(pixels: Numbers) -> dict[str, Numbers]:
        with torch.inference_mode():
            answers = cast("dict[str, Tensor]", module(torch.from_numpy(pixels)))
        return {name: np.asarray(answer) for name, answer in answers.items()}

    return run


TORCH = Runtime(
    name="torch",
    title="PyTorch's exported program",
    file=FILE,
    loader=f'torch.export.load("{{out}}/{FILE}").module()',
    package="torch",
    needs=("torch",),
    extra="export",
    write=write,
    start=start,
)
