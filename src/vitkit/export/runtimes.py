"""The kinds of program, by the name that users type."""

from vitkit.export.onnx_program import ONNX
from vitkit.export.openvino_program import OPENVINO
from vitkit.export.runtime import Runtime
from vitkit.export.torch_program import TORCH

RUNTIMES: dict[str, Runtime] = {runtime.name: runtime for runtime in (ONNX, TORCH, OPENVINO)}
