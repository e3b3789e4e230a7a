"""torch.export: a program that `torch.export.load` runs without vitkit."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jaxtyping
import torch

from vitkit.core.sizes import pair
from vitkit.exporters.runtime import (
    INPUT,
    ExportModule,
    Runner,
    Runtime,
    as_runner,
    build_export_module,
    suppress_output,
)
from vitkit.weights.bundle import ModelBundle

FILE = "model.pt2"


def trace(module: ExportModule) -> torch.export.ExportedProgram:
    """Trace the module into a graph with a dynamic batch size."""
    config = module.model.config
    pixels = torch.zeros(2, config.channels, *pair(config.image_size))  # a batch of one would be traced as a constant
    with suppress_output(), shape_checks_disabled(), torch.no_grad():
        program = torch.export.export(module, (pixels,), dynamic_shapes=dynamic_batch())
    for graph_module in program.graph_module.modules():
        if isinstance(graph_module, torch.fx.GraphModule):
            for node in graph_module.graph.nodes:
                node.meta.pop("stack_trace", None)  # contains local paths
    return program


@contextmanager
def shape_checks_disabled() -> Iterator[None]:
    """Disable jaxtyping, which does not accept symbolic sizes."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def dynamic_batch() -> dict[str, dict[int, torch.export.Dim]]:
    """Return the specification of a dynamic batch axis."""
    return {INPUT: {0: torch.export.Dim("batch", min=1)}}


def write_program(bundle: ModelBundle, directory: Path) -> None:
    """Write the exported program."""
    content = io.BytesIO()  # torch's file writer aborts the process on a full disk
    with suppress_output():
        torch.export.save(trace(build_export_module(bundle)), content)
    (directory / FILE).write_bytes(content.getbuffer())


def load_program(directory: Path) -> Runner:
    """Load the program."""
    with suppress_output():
        return as_runner(torch.export.load(directory / FILE).module())


EXAMPLE = f"""\
import torch

program = torch.export.load(FOLDER / "{FILE}").module()


def run(pixels):
    with torch.inference_mode():
        return program(torch.from_numpy(pixels))["$output"].numpy()
"""
TORCH = Runtime(
    name="torch",
    title="PyTorch's exported program",
    load_command=f'torch.export.load("{{out}}/{FILE}").module()',
    package="torch",
    requires=("torch",),
    extra="export",
    example=EXAMPLE,
    write=write_program,
    load=load_program,
)
