"""Every engine gives the answers of the model as written: in fp32 the same numbers, in fewer bits nearly so."""

from typing import Any

import pytest
import torch
from model_cases import CASES, fresh, images_for, randomised, shrunk, small

import vitkit
from vitkit.core.errors import ConfigError
from vitkit.engine import prepacked as packing
from vitkit.engine.choose import chosen, engine_for, kinds, made
from vitkit.engine.compiled import compiled
from vitkit.engine.engine import Engine, check_precision
from vitkit.engine.prepacked import Int8Linear, in_int8, integer_product, prepacked, tanh_gelu
from vitkit.engine.written import written
from vitkit.model.resnet import BiTConfig
from vitkit.zoo.lookup import Model, configure
from vitkit.zoo.variants import ModelConfig

FP32 = 1e-4
"""What fp32 promises: sums in another order, logits of size one."""
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
        "grey",
        "hybrid",
    )
} | {"BiT": shrunk(configure("BiT-R50x1"))}


def ready(config: ModelConfig) -> Model:
    """A model whose logits are of size one, as a trained model's are: tolerances mean something only beside a size."""
    model = randomised(fresh(config), deviation=0.1)
    assert isinstance(model, Model)
    return model


@pytest.mark.parametrize("kind", ["prepacked", "chosen"])
@pytest.mark.parametrize("name", SEVERAL)
def test_fp32_logits_and_features_are_those_of_the_model_as_written(name: str, kind: str) -> None:
    config = SEVERAL[name]
    model, images = ready(config), images_for(config, batch=3)
    engine = prepacked(model) if kind == "prepacked" else engine_for(model)
    with torch.no_grad():
        features, logits = model.features(images), model(images)
    found = engine.answer(images)
    torch.testing.assert_close(found[0], features, atol=FP32, rtol=0)
    torch.testing.assert_close(found[1], logits, atol=FP32, rtol=0)
    torch.testing.assert_close(engine.features(images), features, atol=FP32, rtol=0)
    assert engine.precision == "fp32"


def test_the_model_as_written_gives_the_same_bits() -> None:
    model, images = ready(small()), images_for(small())
    with torch.no_grad():
        assert torch.equal(written(model).answer(images)[1], model(images))


@pytest.mark.parametrize("kind", ["prepacked", "chosen"])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["learned_1d-stem", "map-swiglu", "layer-scale", "erf", "axial-map", "hybrid", "BiT"])
def test_fewer_bits_move_logits_a_little(name: str, precision: str, kind: str) -> None:
    config = SEVERAL[name]
    model, images = ready(config), images_for(config, batch=4)
    with torch.no_grad():
        expected = model(images)
    make = prepacked if kind == "prepacked" else engine_for
    found = make(model, precision=precision).answer(images)[1]
    # A weight in bf16 is off by 2⁻⁹ of itself, in int8 by 1/254 of the largest: over two layers, parts in a hundred.
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert precision == "bf16" or name == "BiT" or not torch.allclose(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("engine", [written, prepacked], ids=lambda make: make.__name__)
def test_a_probe_can_be_trained_on_features(engine: Any) -> None:
    found = engine(ready(small())).answer(images_for(small()))
    for numbers in found:
        torch.nn.Linear(numbers.shape[1], 2)(numbers).sum().backward()


def test_a_resnet_in_int8_says_that_it_stays_in_fp32() -> None:
    config = SEVERAL["BiT"]
    model, images = ready(config), images_for(config, batch=2)
    engine = engine_for(model, precision="int8")
    assert "in fp32" in engine.name
    assert torch.equal(engine.answer(images)[1], prepacked(model).answer(images)[1])


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_every_precision_leaves_the_model_as_it_was(precision: str) -> None:
    config = SEVERAL["layer-scale"]
    model, images = ready(config).train(), images_for(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for engine in (prepacked(model, precision=precision), engine_for(model, precision=precision)):
        engine.answer(images)
    if precision == "bf16":
        written(model, precision=precision).answer(images)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])


def test_in_int8_an_image_has_one_answer_whatever_else_is_in_the_batch() -> None:
    config = SEVERAL["learned_1d-stem"]
    images = images_for(config, batch=5)
    images[1] *= 100  # a scale for the whole batch would be this image's
    engine = prepacked(ready(config), precision="int8")
    together, alone = engine.answer(images)[1], engine.answer(images[:1])[1]
    # The linear layers are exact integers; attention and norms sum in an order that may depend on the batch.
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=0)


def test_the_int8_layer_is_integer_arithmetic() -> None:
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
    numbers, scale = in_int8(torch.zeros(2, 4))
    assert not numbers.any()
    assert torch.isfinite(scale).all()


def test_without_integer_products_the_sums_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = (torch.randint(-127, 128, (size, 64), dtype=torch.int8) for size in (5, 7))
    exact = rows.long() @ weight.long().t()
    assert torch.equal(integer_product(rows, weight).long(), exact)
    monkeypatch.setattr(packing, "has_integer_product", lambda: False)
    assert torch.equal(integer_product(rows, weight).long(), exact)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_where_torch_cannot_pack_answers_are_right_all_the_same(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "reason_against_packing", lambda: "no oneDNN here")
    model, images = ready(small()), images_for(small())
    with torch.no_grad():
        expected = model(images)
    found = prepacked(model, precision=precision).answer(images)[1]
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN does not emulate bf16 on this CPU: no AVX-512"
)
def test_bf16_in_bf16_arithmetic_is_near_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "multiplies_bf16", lambda: True)  # slow where emulated, the same numbers
    model, images = ready(small()), images_for(small())
    with torch.no_grad():
        expected = model(images)
    engine = prepacked(model, precision="bf16")
    assert engine.dtype == torch.bfloat16
    found = engine.answer(images)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    # Activations are rounded to 8 bits at every step, too.
    assert (found[1] - expected).norm() < 0.1 * expected.norm()


def test_the_gelu_by_sigmoid_is_the_gelu_by_tanh() -> None:
    numbers = torch.linspace(-20, 20, 4001)
    expected = torch.nn.functional.gelu(numbers.double(), approximate="tanh").float()
    torch.testing.assert_close(tanh_gelu(numbers), expected, atol=2e-6, rtol=0)  # float32 beside float64, up to 20


def test_engines_are_engines_and_say_what_they_are() -> None:
    model = ready(small())
    for kind in kinds(model, precision="fp32"):
        engine = made(kind, model, precision="fp32")
        assert isinstance(engine, Engine)
        assert engine.name
    assert "written" not in kinds(model, precision="int8")
    with pytest.raises(ConfigError, match="no int8 form"):
        written(model, precision="int8")


def test_a_model_that_the_native_engine_does_not_take_says_why() -> None:
    found = chosen(ready(SEVERAL["BiT"]))
    assert isinstance(SEVERAL["BiT"], BiTConfig)
    assert found.engine.name.startswith("torch")
    assert found.remark


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such precision"):
        check_precision("fp16")


def test_int8_on_a_gpu_is_refused_with_a_way_out() -> None:
    model = vitkit.create(small(), device="meta")
    with pytest.raises(ConfigError, match="int8 is for the CPU") as caught:
        engine_for(model, precision="int8", device="cuda")
    assert caught.value.hint
    with pytest.raises(ConfigError, match="int8 is for the CPU"):
        compiled(model, precision="int8", device=torch.device("mps"))
