"""Every kind of model as a program of every runtime: valid, of any batch, with the model's own answers."""

from pathlib import Path

import pytest
from export.programs import artefact_of
from model_cases import images_for, small

from vitkit.export import onnx_program, openvino_program, torch_program
from vitkit.export.program import Program, program_of
from vitkit.export.proof import DIFFERENCE, check, compare, judged
from vitkit.model.attention import AttentionConfig
from vitkit.model.config import TokenConfig
from vitkit.model.encoder import BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BackboneConfig, BiTConfig
from vitkit.zoo.variants import ModelConfig

RELATIVE = PositionConfig(kind="relative")
ROTARY = PositionConfig(kind="rotary")
EVERY_LAYER = PositionConfig(kind="learned_2d", injection="every_layer")
MODELS: dict[str, ModelConfig] = {
    "paper": small(depth=1),
    "relative registers map grey": small(
        depth=1, positions=RELATIVE, tokens=TokenConfig(registers=2), pooling="map", channels=1
    ),
    "rotary gated normed scaled": small(
        positions=ROTARY,
        block=BlockConfig(
            attention=AttentionConfig(qk_norm=True, qkv_bias=False), activation="swiglu", layer_scale=0.1
        ),
    ),
    "distilled headless four channels": small(
        depth=1, positions=EVERY_LAYER, tokens=TokenConfig(distillation=True), classes=0, channels=4
    ),
    "axial mean erf pre-logits": small(
        depth=1,
        positions=PositionConfig(kind="sincos_2d"),
        block=BlockConfig(axial=True, activation="gelu_erf"),
        pooling="mean",
        head=HeadConfig(pre_logits=12, norm="after_pooling"),
    ),
    "hybrid": small(depth=1, patch_size=1, image_size=(32, 64), backbone=BackboneConfig(units=(1,), root_width=32)),
    "BiT": BiTConfig(units=(1,), image_size=(48, 64), classes=5),
}
"""Between them, all that a model can be: kinds of positions, tokens, pooling, blocks, heads, channels and stems."""


def need(*names: str) -> None:
    for name in names:
        pytest.importorskip(name, reason=f"{name} comes with vitkit[export] or vitkit[openvino]")


@pytest.mark.parametrize("name", MODELS)
def test_every_runtime_gives_the_models_answers_for_any_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    need("onnx", "onnxscript", "onnxruntime")
    config = MODELS[name]
    artefact = artefact_of(config)
    model = judged(Program(artefact.model()))
    batches = [images_for(config, batch=size) for size in (1, 2, 7)]
    graph = torch_program.traced(program_of(artefact))
    for module in (torch_program, onnx_program):  # both write what this gives, and it takes the most time
        monkeypatch.setattr(module, "traced", lambda program: graph)
    torch_program.write(artefact, tmp_path)
    onnx_program.write(artefact, tmp_path)
    runs = {"onnx": onnx_program.start(tmp_path), "torch": torch_program.start(tmp_path)}
    try:
        openvino_program.convert(tmp_path / onnx_program.FILE, tmp_path, artefact)
        runs["openvino"] = openvino_program.start(tmp_path)
    except ImportError:
        pass  # the two others are tested all the same
    for runtime, run in runs.items():
        found = compare(run, model, batches)
        check(found, title=runtime)
        assert found.images == 10
        assert found.largest_difference <= DIFFERENCE
        assert (found.top1_agreement is None) == (config.classes == 0)
    assert compare(runs["torch"], model, batches).largest_difference <= 1e-5  # torch's own kernels, fused otherwise
