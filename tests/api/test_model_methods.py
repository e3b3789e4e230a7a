"""Methods of models: timm's names with timm's values, changes of shape, and torch's transformations."""

import copy
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from oracles import import_timm

import vitkit
from vitkit.core.errors import ConfigError, InputError
from vitkit.core.sizes import pair
from vitkit.model.resnet import BiT
from vitkit.model.vit import ViT

timm = import_timm()
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 3},
    "vit_small_patch16_224": {"img_size": 64, "depth": 3, "global_pool": "avg", "class_token": False},
    "vit_small_patch32_224": {"img_size": (64, 96), "depth": 4},
}
SETTINGS: dict[str, dict[str, object]] = {
    "vit_tiny_patch16_224": {"depth": 3},
    "vit_small_patch16_224": {"depth": 3, "pooling": "mean", "head.norm": "after_pooling"},
    "vit_small_patch32_224": {"depth": 4},
}


@pytest.fixture(params=ARCHITECTURES)
def models(request: pytest.FixtureRequest) -> tuple[ViT, Any, torch.Tensor]:
    """Return our model and timm's with the same random weights, and images."""
    name, generator = request.param, torch.Generator().manual_seed(0)
    size = ARCHITECTURES[name]["img_size"]
    settings = {**SETTINGS[name], "block.activation": "gelu_erf"}
    ours = vitkit.create(name, image_size=size, num_classes=10, settings=settings).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(0, 0.05, generator=generator)  # activations near one, so that 1e-5 is relative
    theirs = timm.create_model(name, num_classes=10, **ARCHITECTURES[name]).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert isinstance(ours, ViT)
    return ours, theirs, torch.rand(2, 3, *pair(size), generator=generator)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_forward_methods_return_timms_values(models) -> None:
    ours, theirs, images = models
    tokens = ours.forward_features(images)
    assert_close(tokens, theirs.forward_features(images))
    assert_close(ours.forward_head(tokens), theirs.forward_head(tokens))
    assert_close(ours.forward_head(tokens, pre_logits=True), theirs.forward_head(tokens, pre_logits=True))
    assert_close(ours(images), theirs(images))


@pytest.mark.parametrize(
    "options",
    [
        {"indices": [1, -1]},
        {"indices": 2, "norm": True, "stop_early": True},
        {"indices": [0], "stop_early": True, "output_fmt": "NLC"},
        {"return_prefix_tokens": True},
    ],
)
@torch.no_grad()
def test_intermediates_are_timms(models, options: dict[str, Any]) -> None:
    ours, theirs, images = models
    final, intermediates = ours.forward_intermediates(images, **options)
    expected_final, expected = theirs.forward_intermediates(images, **options)
    assert_close(final, expected_final)
    assert len(intermediates) == len(expected)
    for one, other in zip(intermediates, expected, strict=True):
        pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        for ours_part, theirs_part in pairs:
            assert_close(ours_part, theirs_part)
    alone = ours.forward_intermediates(images, **options, intermediates_only=True)
    assert isinstance(alone, list)


def optimizer_groups(model: torch.nn.Module) -> list[tuple[float, float, int]]:
    import_module("timm.optim")
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    groups = optimizer.param_groups
    return sorted((group["lr_scale"], group["weight_decay"], len(group["params"])) for group in groups)


def test_optimizer_groups_are_timms(models) -> None:
    ours, theirs, _ = models
    assert optimizer_groups(ours) == optimizer_groups(theirs)


def test_four_steps_compose_to_the_logits(models) -> None:
    ours, _, images = models
    with torch.no_grad():
        assert_close(ours.head(ours.pool(ours.encode(ours.embed(images)))), ours(images))


@pytest.fixture
def model() -> ViT:
    model = vitkit.create("Ti/16", image_size=32, num_classes=10, settings={"depth": 2})
    assert isinstance(model, ViT)
    return model


def test_classifier_is_replaced_by_a_zero_head(model: ViT) -> None:
    model = model.to(torch.bfloat16)
    model.reset_classifier(3, labels=["a", "b", "c"])
    head = model.get_classifier()
    assert isinstance(head, torch.nn.Linear)
    assert (head.out_features, head.weight.dtype, model.num_classes) == (3, torch.bfloat16, 3)
    assert model.labels == ("a", "b", "c")
    assert not head.weight.any()
    model.reset_classifier(0)
    assert model.float()(torch.rand(2, 3, 32, 32)).shape == (2, 192)
    with pytest.raises(ConfigError, match="wrong number of labels"):
        model.reset_classifier(2, labels=["a"])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"positions.kind": "learned_2d"},
        {"positions.kind": "sincos_2d", "pooling": "mean"},
        {"positions.kind": "rotary"},
    ],
)
def test_input_size_changes_as_by_adapt(settings: dict[str, object], tmp_path: Path) -> None:
    model = vitkit.create("Ti/16", image_size=32, num_classes=4, settings={"depth": 1, **settings})
    vitkit.save(model, tmp_path / "model")
    expected = vitkit.adapt(str(tmp_path / "model"), image_size=48, patch_size=8).model
    assert isinstance(model, ViT)
    model.set_input_size(48, patch_size=8)
    assert (model.config.grid, model.preprocess.image_size) == ((6, 6), 48)
    images = torch.rand(1, 3, 48, 48)
    with torch.no_grad():
        assert torch.equal(model.eval()(images), expected(images))


def test_axial_model_changes_its_grid() -> None:
    settings = {"depth": 1, "pooling": "mean", "block.axial": True}
    model = vitkit.create("Ti/16", image_size=32, num_classes=4, settings=settings)
    model.set_input_size(48)
    assert model(torch.rand(1, 3, 48, 48)).shape == (1, 4)


def test_attention_weights_sum_to_one(model: ViT) -> None:
    weights = model.attention(torch.rand(2, 3, 32, 32), layers=[-1])
    assert list(weights) == [1]
    assert weights[1].shape == (2, 3, 5, 5)
    torch.testing.assert_close(weights[1].sum(dim=-1), torch.ones(2, 3, 5))


def test_checkpointing_gives_the_same_gradients(model: ViT) -> None:
    images = torch.rand(2, 3, 32, 32)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model.features(images).sum().backward()
        return [parameter.grad.clone() for parameter in model.blocks.parameters() if parameter.grad is not None]

    plain = gradients()
    model.set_grad_checkpointing()
    assert all(torch.equal(one, other) for one, other in zip(plain, gradients(), strict=True))


def test_preprocess_takes_images_of_any_form(model: ViT, tmp_path: Path) -> None:
    pixels = np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3)
    image = PIL.Image.fromarray(pixels)
    image.save(tmp_path / "cat.png")
    batch = model.preprocess(
        [tmp_path / "cat.png", str(tmp_path / "cat.png"), (tmp_path / "cat.png").read_bytes(), image, pixels]
    )
    assert batch.shape == (5, 3, 32, 32)
    assert torch.equal(batch, batch[:1].expand_as(batch))
    assert torch.equal(model.preprocess(torch.from_numpy(pixels).permute(2, 0, 1)), batch[:1])
    assert torch.equal(model.transforms()(image), batch[0])
    torch.manual_seed(0)
    train = model.transforms(train=True)
    assert train(image).shape == (3, 32, 32)
    assert not torch.equal(train(image), train(image))
    with pytest.raises(InputError, match="a tensor is not an image"):
        model.preprocess(torch.rand(3, 8, 8))


def test_created_model_knows_its_labels_and_size(model: ViT) -> None:
    assert model.labels == tuple(map(str, range(10)))
    assert (model.num_classes, model.num_features, model.name) == (10, 192, "ViT 192 wide, 2 deep, patches of 16")
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    model.head.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == model.num_parameters() - 1930


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # importing torch.compile's backend
def test_copies_keep_labels_and_preprocessing(model: ViT) -> None:
    model.labels = tuple("abcdefghij")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.compile(model)):
        assert (copied.labels, copied.preprocess) == (model.labels, model.preprocess)


def test_optimizer_groups_of_bit_are_timms() -> None:
    ours = vitkit.create("BiT-R50x1", device="meta")
    theirs = timm.create_model("resnetv2_50x1_bit", num_classes=1000, device="meta")
    assert optimizer_groups(ours) == optimizer_groups(theirs)
    assert ours.group_matcher(coarse=True) == theirs.group_matcher(coarse=True)


def test_bit_has_the_same_methods() -> None:
    model = vitkit.create("BiT-R50x1", image_size=64, num_classes=5, settings={"units": [1, 1]})
    assert isinstance(model, BiT)
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model.forward_head(model.forward_features(images)), model(images))
        assert torch.equal(model.forward_head(model.forward_features(images), pre_logits=True), model.features(images))
    model.reset_classifier(2)
    model.set_input_size(96)
    model.set_grad_checkpointing()
    model(images).sum().backward()
    assert (model.num_classes, model.preprocess.image_size, model.num_features) == (2, 96, 512)


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("mistake", "message", "hint"),
    [
        (
            lambda m: m(torch.rand(1, 3, 16, 16)),
            "images are 16×16, the model takes 32×32",
            "model.preprocess(image) resizes; model.set_input_size(16) changes the model",
        ),
        (
            lambda m: m(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)),
            "images are uint8, the model takes normalized floats",
            "model.preprocess.normalize(images), or model.preprocess(files)",
        ),
        (
            lambda m: m(torch.rand(1, 1, 32, 32)),
            "images have 1 channel, the model takes 3",
            "images.expand(-1, 3, -1, -1), or vitkit.adapt(model, channels=1).model",
        ),
        (
            lambda m: m([torch.rand(3, 8, 8), torch.rand(3, 9, 9)]),
            "the model takes one tensor B×3×32×32, got a list of 2",
            "model.preprocess(list) resizes and stacks images of any size",
        ),
        (
            lambda m: m(PIL.Image.new("RGB", (8, 8))),
            "the model takes one tensor B×3×32×32, got a Image",
            "model.preprocess(image) resizes and stacks images of any size",
        ),
        (
            lambda m: m.forward_head(m.features(torch.rand(1, 3, 32, 32))),
            "forward_head() takes tokens B×L×192, got 1×192",
            "model.head(features)",
        ),
        (lambda m: m.attention(torch.rand(1, 3, 32, 32), layers=1), "layers is not a list (got 1)", "use layers=[1]"),
        (
            lambda m: m.preprocess([]),
            "there are no images to preprocess",
            "pass an image, or a list of at least one",
        ),
        (
            lambda m: m.preprocess(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)),
            "a tensor is not an image (expected uint8, channels × height × width, got uint8, 2 × 3 × 8 × 8)",
            "pass list(images)",
        ),
        (
            lambda m: m.pool(m.forward_features(torch.rand(1, 3, 32, 32))),
            "pool() takes the output of encode(), got a tensor",
            "forward_head(tokens, pre_logits=True) pools normalized tokens",
        ),
    ],
)
def test_mistakes_are_explained(model: ViT, mistake: Any, message: str, hint: str) -> None:
    with pytest.raises(InputError) as raised:
        mistake(model)
    assert str(raised.value) == f"{message}\nhint: {hint}"


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("mistake", "message", "hint"),
    [
        (lambda m: m(pixel_values=0), "forward() has no argument 'pixel_values'", "use model(images)"),
        (
            lambda m: m(torch.rand(1, 3, 32, 32), output_attentions=True),
            "forward() has no argument 'output_attentions'",
            "use model.attention(images)",
        ),
        (
            lambda m: m.set_input_size(img_size=48),
            "set_input_size() has no argument 'img_size'",
            "use image_size=",
        ),
        (lambda m: ViT("B/16"), "a model takes a ViTConfig (got str)", "vitkit.create('B/16')"),
    ],
)
def test_arguments_of_other_libraries_are_explained(model: ViT, mistake: Any, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        mistake(model)
    assert str(raised.value) == f"{message}\nhint: {hint}"


def test_attributes_of_other_libraries_are_explained(model: ViT) -> None:
    with pytest.raises(AttributeError) as raised:
        model.get_intermediate_layers  # noqa: B018
    message = "'ViT' object has no attribute 'get_intermediate_layers'"
    assert str(raised.value) == f"{message}\nhint: model.forward_intermediates(images, indices)"
    with pytest.raises(AttributeError, match=r"^'ViT' object has no attribute 'nothing'$"):
        model.nothing  # noqa: B018
    model.encoder = torch.nn.Identity()
    assert isinstance(model.encoder, torch.nn.Identity)


def test_device_and_type_of_the_parameters() -> None:
    assert vitkit.create("Ti/16", device="meta", dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="this machine has no device gpu"):
        vitkit.create("Ti/16", device="gpu")
    with pytest.raises(ConfigError, match=r"use dtype=torch\.float16"):
        vitkit.create("Ti/16", dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a model to create"):
        vitkit.create(16)  # type: ignore[arg-type]
