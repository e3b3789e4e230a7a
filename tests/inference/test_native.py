"""Outputs of the native engine equal the model's in every precision, batch and number of threads."""

import gc
import multiprocessing
import platform
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import vitkit
from vitkit.core.config import parse_assignments
from vitkit.core.errors import ConfigError, InputError, VitkitError
from vitkit.inference.native.encoder import NativeEngine, unsupported_reason
from vitkit.inference.native.library import compile_library, find_compiler
from vitkit.inference.select import select_engine
from vitkit.model.vit import ViT

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")

# Each a small ViT with something of its own. Widths and tokens are chosen not to fill registers.
SMALL = ("depth=2", "width=48", "heads=3", "mlp_dim=80")
MODELS: dict[str, tuple[str, ...]] = {
    "plain": SMALL,
    "erf": (*SMALL, "block.activation=gelu_erf"),
    "odd sizes": ("depth=2", "width=30", "heads=3", "mlp_dim=50", "pooling=mean"),
    "whole panels": ("depth=2", "width=64", "heads=1", "mlp_dim=1300"),
    "registers": (*SMALL, "tokens.registers=3", "positions.covers=patches"),
    "distillation": (*SMALL, "tokens.distillation=true"),
    "layer scale": (*SMALL, "block.layer_scale=0.1"),
    "queries and keys normed": (*SMALL, "block.attention.qk_norm=true", "block.attention.qkv_bias=false"),
    "mean, normed after": (*SMALL, "pooling=mean", "head.norm=after_pooling", "tokens.class_token=true"),
    "mean, sine and cosine": (*SMALL, "pooling=mean", "positions.kind=sincos_2d"),
    "probe": (*SMALL, "pooling=map", "positions.kind=learned_2d"),
    "positions at every layer": (*SMALL, "positions.injection=every_layer"),
    "positions shared by layers": (*SMALL, "positions.kind=learned_2d", "positions.injection=shared"),
    "pre-logits": (*SMALL, "head.pre_logits=20"),
    "no positions": (*SMALL, "positions.kind=none"),
    "gated": (*SMALL, "block.activation=swiglu"),
    "gated, odd sizes": ("depth=2", "width=30", "heads=3", "mlp_dim=1101", "block.activation=swiglu"),
    "rotary": (*SMALL, "positions.kind=rotary", "tokens.registers=2", "block.attention.qk_norm=true"),
}


def model_with(*settings: str, image_size=(24, 40), num_classes: int = 7) -> ViT:
    """A model in which every parameter matters: fresh ones have a head and biases of zero."""
    model = vitkit.create(
        "Ti/16", image_size=image_size, patch_size=8, num_classes=num_classes, settings=parse_assignments(settings)
    )
    assert isinstance(model, ViT)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or "head" in name:
                parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    return model.eval()


def images_for(model: ViT, count: int) -> torch.Tensor:
    return torch.randn(count, model.config.channels, *model.patch_embed.image_size)


@torch.inference_mode()
def model_outputs(model: ViT, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    features = model.features(images)
    return features, model.head(features)


def test_fp32_equals_the_model() -> None:
    for name, settings in MODELS.items():
        model = model_with(*settings)
        images = images_for(model, 3)
        for found, right in zip(NativeEngine(model).forward(images), model_outputs(model, images), strict=True):
            # Sums of at most 1,300 float32 in another order, and features of order 1: 2e-6 was seen. A GELU that is
            # wrong in its fourth digit shows at 3e-5.
            assert (found - right).abs().max() < 1e-5, name


# Relative to all features: bf16 keeps 8 bits of a number, int8 255 steps of a token's range. Two layers deep, with
# parameters drawn at random, errors stay near their share of one rounding; a wrong scale or place is off by far more.
@pytest.mark.parametrize(("precision", "error"), [("bf16", 0.01), ("int8", 0.04)])
def test_bf16_and_int8_are_close_to_the_model(precision, error) -> None:
    for name, settings in MODELS.items():
        model = model_with(*settings)
        images = images_for(model, 3)
        found, right = NativeEngine(model, precision=precision).features(images), model_outputs(model, images)[0]
        assert (found - right).norm() < error * right.norm(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("pooling", ["class", "mean", "map", "class_mean"])
def test_output_is_independent_of_batch_and_threads(precision, pooling) -> None:
    model = model_with(*SMALL, f"pooling={pooling}")
    images = images_for(model, 5)
    alone = NativeEngine(model, precision=precision, threads=1)
    one_by_one = torch.cat([alone.forward(image[None])[1] for image in images])
    for threads in (1, 2, 3, 7):
        engine = NativeEngine(model, precision=precision, threads=threads)
        assert torch.equal(engine.forward(images)[1], one_by_one)
        assert torch.equal(engine.forward(images[3:])[1], one_by_one[3:])


def test_features_equal_those_of_forward() -> None:
    engine = NativeEngine(model_with(*SMALL))
    images = torch.randn(2, 3, 24, 40)
    assert torch.equal(engine.features(images), engine.forward(images)[0])


def test_model_without_classes_returns_features_twice() -> None:
    for pooling in ("class", "map"):
        features, logits = NativeEngine(model_with(*SMALL, f"pooling={pooling}", num_classes=0)).forward(
            torch.randn(2, 3, 24, 40)
        )
        assert torch.equal(features, logits)


def test_empty_batch() -> None:
    for pooling in ("class", "map"):
        features, logits = NativeEngine(model_with(*SMALL, f"pooling={pooling}")).forward(torch.empty(0, 3, 24, 40))
        assert (features.shape, logits.shape) == ((0, 48), (0, 7))


def test_input_layout_and_dtype_do_not_matter() -> None:
    model = model_with(*SMALL)
    images = images_for(model, 2)
    engine = NativeEngine(model)
    assert torch.equal(
        engine.features(images.to(memory_format=torch.channels_last)), engine.features(images.contiguous())
    )
    assert torch.equal(engine.features(images.half()), engine.features(images.half().float()))


def test_other_image_size_is_rejected() -> None:
    with pytest.raises(InputError, match="images are 40×24"):
        NativeEngine(model_with(*SMALL)).features(torch.zeros(1, 3, 40, 24))


def test_large_and_constant_inputs_stay_finite() -> None:
    for precision in ("fp32", "bf16", "int8"):
        for activation in ("gelu_tanh", "gelu_erf"):
            model = model_with(*SMALL, f"block.activation={activation}")
            with torch.no_grad():
                for block in model.blocks:
                    block.mlp.fc1.weight *= 1000.0
                    block.attn.qkv.weight *= 100.0
            engine = NativeEngine(model, precision=precision)
            for images in (torch.zeros(1, 3, 24, 40), torch.full((1, 3, 24, 40), 1e4), torch.randn(1, 3, 24, 40) * 1e4):
                assert engine.forward(images)[1].isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_input_gives_nonfinite_output(value) -> None:
    model = model_with(*SMALL)
    images = images_for(model, 2)
    images[1, 2, 7, 9] = value
    for precision in ("fp32", "bf16", "int8"):
        logits = NativeEngine(model, precision=precision).forward(images)[1]
        assert logits[0].isfinite().all()
        assert logits[1].isnan().all()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_nonfinite_image_does_not_affect_the_next(precision) -> None:
    """A patch of an odd number of values leaves half a word over, in memory that an earlier image has used."""
    settings = ("depth=1", "width=64", "heads=2", "mlp_dim=33")
    model = vitkit.create(
        "Ti/16", image_size=21, patch_size=7, channels=1, num_classes=3, settings=parse_assignments(settings)
    ).eval()
    engine, images = NativeEngine(model, precision=precision, threads=1), torch.randn(1, 1, 21, 21)
    before = engine.features(images)
    engine.features(torch.full_like(images, torch.nan))
    assert torch.equal(engine.features(images), before)


@pytest.mark.parametrize("name", ["blocks.0.attn.qkv.weight", "blocks.1.mlp.fc1.weight", "patch_embed.proj.weight"])
def test_nonfinite_weight_gives_nonfinite_output(name) -> None:
    """One weight of a key alone must do it: the softmax of what is not a number is none either."""
    for bits in (0x7FC00000, 0x7FFFFFFF):  # the usual NaN, and one that rounding to bfloat16 would carry to a number
        model = model_with(*SMALL)
        with torch.no_grad():
            weight = model.get_parameter(name)
            weight[60 if "qkv" in name else 5].view(-1)[3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        images = images_for(model, 2)
        assert model_outputs(model, images)[1].isnan().all()
        for precision in ("fp32", "bf16", "int8"):
            assert NativeEngine(model, precision=precision).forward(images)[1].isnan().all(), precision


@pytest.mark.skipif(platform.machine() != "x86_64", reason="denormal numbers are slow on x86, and not elsewhere")
def test_denormals_are_flushed_inside_the_engine_only() -> None:
    settings = (*SMALL, "pooling=mean", "positions.kind=none", "tokens.class_token=false")
    model = vitkit.create(
        "Ti/16", image_size=16, patch_size=8, num_classes=3, settings=parse_assignments(settings)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    images = torch.full((5, 3, 16, 16), 1e-39) * torch.randn(5, 3, 16, 16)
    assert model_outputs(model, images)[0].any()
    assert not NativeEngine(model, threads=2).features(images).any()
    assert (torch.tensor([1e-39]) * 0.5).item() > 0  # the caller's own arithmetic is as it was


def test_meta_model_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no weights"):
        NativeEngine(vitkit.create("Ti/16", device="meta"))


@pytest.mark.parametrize("pooling", ["class", "map"])
def test_engine_does_not_depend_on_the_model_object(pooling) -> None:
    model = model_with(*SMALL, f"pooling={pooling}", "head.pre_logits=20", "head.norm=after_pooling")
    images = images_for(model, 2)
    engine = NativeEngine(model)
    before = engine.forward(images)

    def is_as_before() -> bool:
        return all(map(torch.equal, engine.forward(images), before))

    with torch.no_grad():
        for parameter in model.train().parameters():
            parameter.add_(1.0)
    assert is_as_before()
    model.to("meta")  # to another device, as to a GPU
    assert is_as_before()
    del model
    assert is_as_before()


@pytest.mark.parametrize("pooling", ["class", "map"])
def test_half_precision_model_runs_in_float32(pooling) -> None:
    model = model_with(*SMALL, f"pooling={pooling}").bfloat16()
    images = images_for(model, 2)
    assert torch.equal(NativeEngine(model).forward(images)[1], NativeEngine(model.float()).forward(images)[1])


def test_lower_precision_needs_less_memory() -> None:
    model = model_with("depth=2", "width=256", "heads=4", "mlp_dim=1024")
    numbers = sum(parameter.numel() for parameter in model.parameters())
    engines = [NativeEngine(model, precision=precision) for precision in ("fp32", "bf16", "int8")]
    of_integers = 1 if "VNNI" in engines[-1].name else 2
    assert [round(engine.weight_bytes / numbers) for engine in engines] == [4, 2, of_integers]


def test_unsupported_models_have_a_reason() -> None:
    def reason(name: str, *settings: str) -> str:
        return (
            unsupported_reason(vitkit.create(name, settings=parse_assignments(settings), device="meta"), "fp32")
            or "none"
        )

    assert "hybrids" in reason("R50+B/16")
    assert "ResNets" in reason("BiT-R50x1")
    assert "axial" in reason("Axial-B/16")
    assert "relative" in reason("Ti/16", "positions.kind=relative")
    poster = vitkit.create("Ti/16", image_size=160, patch_size=160, device="meta")
    assert unsupported_reason(poster, "fp32") is None
    assert "76,800 values in int8" in (unsupported_reason(poster, "int8") or "")  # its sums could pass 32 bits
    assert {reason(name) for name in ("Ti/16", "S/32", "B/8", "L/16", "H/14")} == {"none"}
    with pytest.raises(ConfigError, match="hybrids"):
        NativeEngine(vitkit.create("R+Ti/16", device="meta"))


# By the name that is given as the reason: what the kernels would read past its end, or not find, or take for another.
EXCHANGED: dict[str, tuple[str, nn.Module | None]] = {
    "head": ("head", nn.Identity()),
    "head.bias": ("head", nn.Linear(48, 3)),
    "head.0": ("head", nn.Sequential(nn.Linear(48, 7))),
    "norm": ("norm", nn.Identity()),
    "blocks.0.norm1": ("blocks.0.norm1", nn.Identity()),
    "blocks.0.norm2": ("blocks.0.norm2", nn.LayerNorm(48, eps=0.1)),
    "blocks.1.norm1.bias": ("blocks.1.norm1", nn.LayerNorm(48, eps=1e-6, elementwise_affine=False)),
    "blocks.1.norm2": ("blocks.1.norm2", nn.RMSNorm(48)),
    "blocks.1.attn.qkv": ("blocks.1.attn.qkv", nn.Sequential(nn.Linear(48, 144))),
    "blocks.0.mlp.fc1.bias": ("blocks.0.mlp.fc1", nn.Linear(48, 80, bias=False)),
    "blocks.0.mlp.fc2.bias": ("blocks.0.mlp.fc2", nn.Linear(80, 48, bias=False)),
    "blocks.0.mlp.fc2": ("blocks.0.mlp.fc2", nn.Sequential(nn.Linear(80, 48))),
    "blocks.0.mlp": ("blocks.0.mlp", nn.Sequential(nn.Linear(48, 48), nn.ReLU())),
    "blocks.0.ls1": ("blocks.0.ls1", nn.Identity()),
    "pos_embed": ("pos_embed", None),
}


@pytest.mark.parametrize("reason", EXCHANGED)
def test_model_with_replaced_layer_falls_back_to_torch(reason) -> None:
    name, part = EXCHANGED[reason]
    for layer in part.modules() if part else ():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()  # with this test's seed: the error of int8 depends on the weights
    model = model_with(*SMALL, "block.layer_scale=0.1")
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, part)
    message = f"a model whose {reason.removesuffix('.0')} was replaced after construction"
    assert (unsupported_reason(model, "fp32") or "").endswith(message)
    with pytest.raises(ConfigError, match="replaced"):
        NativeEngine(model)
    images = images_for(model, 16)
    right = model_outputs(model, images)[1]
    for precision, error in (("fp32", 1e-5), ("int8", 0.04)):  # as above
        engine, fallback_reason = select_engine(model, precision=precision)
        assert fallback_reason == unsupported_reason(model, precision)
        assert (engine.forward(images)[1] - right).norm() < error * right.norm()


def test_loaded_and_weight_sharing_models_are_supported() -> None:
    model = model_with(*SMALL)
    assert unsupported_reason(ViT(model.config)) is None
    model.blocks[1] = model.blocks[0]
    images = images_for(model, 2)
    assert (NativeEngine(model).forward(images)[1] - model_outputs(model, images)[1]).abs().max() < 1e-5


@pytest.mark.parametrize("how", ["together", "apart", "both"])
def test_concurrent_callers_get_their_own_output(how) -> None:
    model = model_with(*SMALL)
    batches = [images_for(model, count) for count in (1, 2, 3, 4)]
    engine = NativeEngine(model, threads=2)
    alone = [engine.features(batch) for batch in batches]
    apart = engine.with_threads(1)
    engines = {"together": [engine] * 4, "apart": [apart] * 4, "both": [engine, apart] * 2}[how]
    right = [False] * len(batches)

    def ask(number: int) -> None:
        right[number] = all(torch.equal(engines[number].features(batches[number]), alone[number]) for _ in range(20))

    callers = [threading.Thread(target=ask, args=(number,)) for number in range(len(batches))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(right)


def test_shared_engine_keeps_the_weights_alive() -> None:
    engine = NativeEngine(model_with(*SMALL))
    images = torch.randn(2, 3, 24, 40)
    right, one = engine.features(images), engine.with_threads(1)
    del engine
    gc.collect()
    assert torch.equal(one.features(images), right)


def _answer_in_child(engine: NativeEngine, images: torch.Tensor, answers) -> None:
    answers.put(engine.features(images).tolist())


def test_engine_works_after_fork() -> None:
    model = model_with(*SMALL)
    images = images_for(model, 3)
    engine = NativeEngine(model, threads=2)
    before = engine.features(images)
    forking = multiprocessing.get_context("fork")
    answers = forking.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads: our subject
        child = forking.Process(target=_answer_in_child, args=(engine, images, answers))
        child.start()
    assert answers.get(timeout=600) == before.tolist()
    child.join(60)
    assert child.exitcode == 0
    assert torch.equal(engine.features(images), before)


def test_process_can_exit_while_a_thread_runs() -> None:
    script = (
        "import threading, torch, vitkit\n"
        "from vitkit.inference.native.encoder import NativeEngine\n"
        "model = vitkit.create('Ti/16', image_size=64, patch_size=4, settings={'depth': 4}).eval()\n"
        "engine, images, busy = NativeEngine(model, threads=2), torch.rand(8, 3, 64, 64), threading.Event()\n"
        "features = torch.empty(8, 192)\n"
        "def ask():\n"
        "    while True:\n"
        "        engine._call(images, features=features)  # of torch's own calls, some abort a process that ends\n"
        "        busy.set()\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        "busy.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, b"")


def test_idle_threads_sleep() -> None:
    script = (
        "import time, torch, vitkit\n"
        "from vitkit.inference.native.encoder import NativeEngine\n"
        "model = vitkit.create('Ti/16', image_size=32, settings={'depth': 1}).eval()\n"
        "NativeEngine(model, threads=3).features(torch.rand(4, 3, 32, 32))\n"
        "time.sleep(0.1); before = time.process_time(); time.sleep(0.5); print(time.process_time() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    assert float(done.stdout) < 0.1  # two threads that went on spinning would have used half a second or more


@pytest.mark.parametrize("machine", [("-march=x86-64",), ("-march=x86-64-v3",), ("-march=native",)])
def test_other_instruction_sets_give_equal_output(machine, tmp_path: Path) -> None:
    """The same sources for older machines, and the order of words that bfloat16 hardware wants, done by hand."""
    compiler = find_compiler()
    assert compiler is not None
    library = tmp_path / "native.so"
    try:
        compile_library(library, compiler=compiler, machine_flags=(*machine, "-O1", "-DVITKIT_EMULATE_BF16"))
    except VitkitError:
        pytest.skip(f"the compiler does not know {machine[0]}")
    for name in ("plain", "odd sizes", "queries and keys normed", "erf", "gated, odd sizes"):
        model = model_with(*MODELS[name])
        images = images_for(model, 3)
        for precision, error in (("fp32", 1e-5), ("bf16", 0.02), ("int8", 0.04)):
            engine = NativeEngine(model, precision=precision, threads=2, library_path=library)
            found, right = engine.features(images), model_outputs(model, images)[0]
            assert (found - right).norm() < error * right.norm(), (name, precision)
