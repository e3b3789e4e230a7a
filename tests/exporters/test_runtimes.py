"""Every kind of model with every runtime: valid programs with the model's outputs for any batch size."""

from pathlib import Path

import pytest
from exporters.programs import artifact_of
from model_cases import images_for, small

from vitkit.exporters import onnx, openvino, torch_export
from vitkit.exporters.runtime import build_export_module
from vitkit.exporters.verification import ABSOLUTE_TOLERANCE, check_outputs, compare_outputs, model_runner
from vitkit.model.config import (
    AttentionConfig,
    BackboneConfig,
    BiTConfig,
    BlockConfig,
    HeadConfig,
    PositionConfig,
    TokenConfig,
)
from vitkit.zoo.variants import ModelConfig

RELATIVE = PositionConfig(kind="relative")
ROTARY = PositionConfig(kind="rotary")
EVERY_LAYER = PositionConfig(kind="learned_2d", injection="every_layer")
MODELS: dict[str, ModelConfig] = {
    "relative registers map gray": small(
        depth=1, positions=RELATIVE, tokens=TokenConfig(registers=2), pooling="map", channels=1
    ),
    "rotary gated normed scaled": small(
        depth=1,
        positions=ROTARY,
        block=BlockConfig(
            attention=AttentionConfig(qk_norm=True, qkv_bias=False), activation="swiglu", layer_scale=0.1
        ),
    ),
    "distilled headless four channels": small(
        depth=1, positions=EVERY_LAYER, tokens=TokenConfig(distillation=True), num_classes=0, channels=4
    ),
    "axial mean erf pre-logits": small(
        depth=1,
        positions=PositionConfig(kind="sincos_2d"),
        block=BlockConfig(axial=True, activation="gelu_erf"),
        pooling="mean",
        head=HeadConfig(pre_logits=12, norm="after_pooling"),
    ),
    "hybrid": small(depth=1, patch_size=1, image_size=(32, 48), backbone=BackboneConfig(units=(1,), root_width=32)),
    "BiT": BiTConfig(units=(1,), image_size=(32, 48), num_classes=5),
}
"""With the plain model of test_onnx_file.py, they cover all kinds of positions, tokens, pooling, blocks and stems.

BiT's stem pads with zeros, which ONNX Runtime would fuse into the following pooling and ignore: one batch is negative.
"""


def need(*names: str) -> None:
    for name in names:
        pytest.importorskip(name, reason=f"{name} comes with vitkit[export] or vitkit[openvino]")


@pytest.mark.parametrize("name", MODELS)
def test_runtime_reproduces_the_model_for_any_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    need("onnx", "onnxscript", "onnxruntime")
    config = MODELS[name]
    artifact = artifact_of(config)
    model = model_runner(artifact)
    batches = [images_for(config, batch=size) for size in (1, 2, 7)]
    batches[1] = -batches[1].abs()
    graph = torch_export.trace(build_export_module(artifact))
    for module in (torch_export, onnx):  # trace once: it takes the most time
        monkeypatch.setattr(module, "trace", lambda module: graph)
    torch_export.write_program(artifact, tmp_path)
    onnx.write_program(artifact, tmp_path)
    runs = {"onnx": onnx.load_program(tmp_path), "torch": torch_export.load_program(tmp_path)}
    try:
        openvino.convert(tmp_path / onnx.FILE, tmp_path, artifact)
        runs["openvino"] = openvino.load_program(tmp_path)
    except ImportError:
        pass  # the other two are still tested
    for runtime, run in runs.items():
        found = compare_outputs(run, model, batches)
        check_outputs(found, title=runtime)
        assert found.images == 10
        assert found.largest_difference <= ABSOLUTE_TOLERANCE
        assert (found.top1_agreement is None) == (config.num_classes == 0)
    # The same kernels of torch, fused differently.
    assert compare_outputs(runs["torch"], model, batches).largest_difference <= 1e-5
