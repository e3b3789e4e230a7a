"""Outputs of all engines: equal to the model in fp32, and close to it in bf16 and int8."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_cases import CASES, fresh, images_for, randomized, reduce_size, small

import vitkit
from vitkit.core.errors import ConfigError
from vitkit.inference import packed as packing
from vitkit.inference.engine import Engine, check_precision, compiled_engine, eager_engine
from vitkit.inference.packed import Int8Linear, int8_matmul, packed_engine, quantize_rows, tanh_gelu
from vitkit.inference.select import available_engines, create_engine, select_engine
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.registry import Model, configure
from vitkit.zoo.variants import ModelConfig

FP32 = 1e-4
"""The guarantee of fp32: another order of summation, logits of about one."""
SEVERAL: dict[str, ModelConfig] = {
    name: CASES[name]
    for name in (
        "learned_1d-stem",
        "learned_2d-every_layer",
        "none-mean",
        "map",
        "map-swiglu",
        "registers",
        "registers-mean",
        "distilled-registers",
        "relative-every_layer",
        "rotary-shared",
        "qk-norm-rotary",
        "no-qkv-bias",
        "layer-scale",
        "swiglu",
        "erf",
        "axial-map",
        "pre-logits",
        "norm-after-mean-pooling",
        "headless",
        "gray",
        "hybrid",
    )
} | {"BiT": reduce_size(configure("BiT-R50x1"))}


def ready(config: ModelConfig) -> Model:
    """A model whose logits are of size one, as a trained model's are: tolerances mean something only beside a size."""
    model = randomized(fresh(config), deviation=0.1)
    assert isinstance(model, Model)
    return model


def fastest_engine(model: Any, **options: Any) -> Engine:
    return select_engine(model, **options).engine


@pytest.mark.parametrize("kind", ["packed", "fastest"])
@pytest.mark.parametrize("name", SEVERAL)
def test_fp32_engines_equal_the_model(name: str, kind: str) -> None:
    config = SEVERAL[name]
    model, images = ready(config), images_for(config, batch=3)
    engine = packed_engine(model) if kind == "packed" else select_engine(model).engine
    with torch.no_grad():
        features, logits = model.features(images), model(images)
    found = engine.forward(images)
    torch.testing.assert_close(found[0], features, atol=FP32, rtol=0)
    torch.testing.assert_close(found[1], logits, atol=FP32, rtol=0)
    torch.testing.assert_close(engine.features(images), features, atol=FP32, rtol=0)
    assert engine.precision == "fp32"


def test_eager_engine_is_bit_identical() -> None:
    model, images = ready(small()), images_for(small())
    with torch.no_grad():
        assert torch.equal(eager_engine(model).forward(images)[1], model(images))


@pytest.mark.parametrize("kind", ["packed", "fastest"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["learned_1d-stem", "map-swiglu", "layer-scale", "erf", "axial-map", "hybrid", "BiT"])
def test_bf16_and_int8_are_close_to_fp32(name: str, precision: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SEVERAL[name]
    model, images = ready(config), images_for(config, batch=4)
    with torch.no_grad():
        expected = model(images)
    monkeypatch.setattr(packing, "has_bf16_instructions", lambda: False)  # the same arithmetic on every machine
    make = packed_engine if kind == "packed" else fastest_engine
    found = make(model, precision=precision).forward(images)[1]
    # Weights are rounded to 2⁻⁹ (bf16) or 1/254 of the largest (int8): a few percent over two layers.
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert precision == "bf16" or name == "BiT" or not torch.allclose(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("engine", [eager_engine, packed_engine], ids=lambda make: make.__name__)
def test_features_can_be_used_for_training(engine: Any) -> None:
    found = engine(ready(small())).forward(images_for(small()))
    for numbers in found:
        torch.nn.Linear(numbers.shape[1], 2)(numbers).sum().backward()


def test_resnet_in_int8_stays_in_fp32() -> None:
    config = SEVERAL["BiT"]
    model, images = ready(config), images_for(config, batch=2)
    engine = fastest_engine(model, precision="int8")
    assert "in fp32" in engine.name
    assert torch.equal(engine.forward(images)[1], packed_engine(model).forward(images)[1])


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_engines_do_not_change_the_model(precision: str) -> None:
    config = SEVERAL["layer-scale"]
    model, images = ready(config).train(), images_for(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for engine in (packed_engine(model, precision=precision), fastest_engine(model, precision=precision)):
        engine.forward(images)
    if precision == "bf16":
        eager_engine(model, precision=precision).forward(images)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])


def test_int8_output_is_independent_of_the_batch() -> None:
    config = SEVERAL["learned_1d-stem"]
    images = images_for(config, batch=5)
    images[1] *= 100  # a scale for the whole batch would be this image's
    engine = packed_engine(ready(config), precision="int8")
    together, alone = engine.forward(images)[1], engine.forward(images[:1])[1]
    # The linear layers are exact integers; attention and norms sum in an order that may depend on the batch.
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=0)


def test_int8_layer_uses_integer_arithmetic() -> None:
    weight, bias, tokens = torch.randn(6, 8), torch.randn(6), torch.randn(2, 3, 8)
    found = Int8Linear(weight, bias)(tokens)
    for image, row in ((0, 0), (1, 2)):
        token = tokens[image, row]
        step = token.abs().max().item() / 127
        for output in range(6):
            scale = weight[output].abs().max().item() / 127
            total = sum(
                round(number / step) * round(factor / scale)
                for number, factor in zip(token.tolist(), weight[output].tolist(), strict=True)
            )
            expected = total * step * scale + bias[output].item()
            # A number just between two integers may be rounded either way: one step of the largest factor.
            assert found[image, row, output].item() == pytest.approx(expected, abs=127 * step * scale)
            assert found[image, row, output].item() == pytest.approx((weight @ token + bias)[output].item(), abs=0.2)


def test_zeros_stay_zeros_in_int8() -> None:
    numbers, scale = quantize_rows(torch.zeros(2, 4))
    assert not numbers.any()
    assert torch.isfinite(scale).all()


def test_float_fallback_equals_int8_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = (torch.randint(-127, 128, (size, 64), dtype=torch.int8) for size in (5, 7))
    exact = rows.long() @ weight.long().t()
    assert torch.equal(int8_matmul(rows, weight).long(), exact)
    monkeypatch.setattr(packing, "has_int8_matmul", lambda: False)
    assert torch.equal(int8_matmul(rows, weight).long(), exact)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_outputs_are_equal_without_packing(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "packing_unavailable_reason", lambda: "no oneDNN here")
    model, images = ready(small()), images_for(small())
    with torch.no_grad():
        expected = model(images)
    found = packed_engine(model, precision=precision).forward(images)[1]
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_torch_without_packed_layers_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    reason = packing.packing_unavailable_reason.__wrapped__()
    assert "does not pack layers" in reason
    assert "_reorder_linear_weight" in reason


@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="oneDNN does not emulate bf16 on this CPU: no AVX-512",
)
def test_native_bf16_arithmetic_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "has_bf16_instructions", lambda: True)  # slow where emulated, the same numbers
    model, images = ready(small()), images_for(small())
    with torch.no_grad():
        expected = model(images)
    engine = packed_engine(model, precision="bf16")
    assert engine.dtype == torch.bfloat16
    found = engine.forward(images)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    # Activations are rounded to 8 bits at every step, too.
    assert (found[1] - expected).norm() < 0.1 * expected.norm()


def test_tanh_gelu_equals_torch() -> None:
    numbers = torch.linspace(-20, 20, 4001)
    expected = torch.nn.functional.gelu(numbers.double(), approximate="tanh").float()
    torch.testing.assert_close(tanh_gelu(numbers), expected, atol=2e-6, rtol=0)  # float32 beside float64, up to 20


def test_engines_implement_the_protocol() -> None:
    model = ready(small())
    for kind in available_engines(model, precision="fp32"):
        engine = create_engine(kind, model, precision="fp32")
        assert isinstance(engine, Engine)
        assert engine.name
    assert "eager" not in available_engines(model, precision="int8")
    with pytest.raises(ConfigError, match="no int8"):
        eager_engine(model, precision="int8")


def test_fallback_has_a_reason() -> None:
    found = select_engine(ready(SEVERAL["BiT"]))
    assert isinstance(SEVERAL["BiT"], BiTConfig)
    assert found.engine.name.startswith("torch")
    assert found.fallback_reason


def test_unknown_precision_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no such precision"):
        check_precision("fp16")


def test_int8_on_a_gpu_is_rejected_with_a_hint() -> None:
    model = vitkit.create(small(), device="meta")
    with pytest.raises(ConfigError, match="int8 runs only on the CPU") as caught:
        select_engine(model, precision="int8", device="cuda")
    assert caught.value.hint
    with pytest.raises(ConfigError, match="int8 runs only on the CPU"):
        compiled_engine(model, precision="int8", device=torch.device("mps"))
