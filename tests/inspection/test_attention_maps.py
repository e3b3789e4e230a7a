"""Maps of attention against slow readings of their definitions, against transformers, and where the answer is known."""

import pytest
import torch
from model_cases import CASES, images_for, random_vit, small
from oracles import import_transformers
from torch import Tensor

import vitkit
from vitkit.core.errors import InputError
from vitkit.inspection import deletion_curve, head_maps, relevance, rollout
from vitkit.inspection.attention import NotApplicableError
from vitkit.model.config import BiTConfig, TokenConfig, ViTConfig
from vitkit.model.encoder import Capture
from vitkit.model.vit import ViT
from vitkit.zoo.registry import create

EXACT = {"rtol": 0.0, "atol": 1e-11}  # float64: only the order of summation differs
HEADED = {name: config for name, config in CASES.items() if config.num_classes}


def slow_start(model: ViT, tokens: Tensor) -> list[float]:
    """What pooling takes of each token of one image, read from the configuration."""
    config, count = model.config, tokens.shape[0]
    if config.pooling == "class":
        return [1 / config.class_tokens if index < config.class_tokens else 0.0 for index in range(count)]
    if config.pooling == "mean":
        return [1 / config.patches if index >= config.prefix else 0.0 for index in range(count)]
    if config.pooling == "class_mean":
        of_patch = 0.5 / config.patches
        return [0.5 if index == 0 else of_patch if index >= config.prefix else 0.0 for index in range(count)]
    assert model.attn_pool is not None
    pool, taken = model.attn_pool, torch.zeros(count, dtype=tokens.dtype)
    keys, _ = pool.kv(model.norm(tokens)).chunk(2, dim=-1)
    share = config.width // config.heads
    for head in range(config.heads):
        part = slice(head * share, (head + 1) * share)
        query = pool.q(pool.latent)[0, 0, part]
        taken += (keys[:, part] @ query / share**0.5).softmax(dim=0) / config.heads
    return taken.tolist()


def slow_rollout(model: ViT, images: Tensor) -> Tensor:
    """Section 4.5's words, one image at a time: average the heads, add the identity, renormalise, multiply through."""
    depth, maps = len(model.blocks), []
    for image in images:
        encoded = model.encode(model.embed(image[None]), capture=Capture(attention=range(depth)))
        joint = torch.eye(encoded.tokens.shape[1], dtype=images.dtype)
        for layer in range(depth):
            mixed = sum(encoded.attention[layer][0, head] for head in range(model.config.heads)) / model.config.heads
            mixed = mixed + torch.eye(len(mixed), dtype=images.dtype)
            joint = (mixed / mixed.sum(dim=1, keepdim=True)) @ joint
        start = torch.tensor(slow_start(model, encoded.tokens[0]), dtype=images.dtype)
        maps.append((start @ joint)[model.config.prefix :].reshape(model.config.grid))
    return torch.stack(maps)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_rollout_equals_its_definition(case: str) -> None:
    model = random_vit(CASES[case], dtype=torch.float64)
    images = images_for(CASES[case], dtype=torch.float64)
    torch.testing.assert_close(rollout(model, images), slow_rollout(model, images), **EXACT)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_head_maps_are_attention_rows(case: str) -> None:
    model = random_vit(CASES[case], dtype=torch.float64)
    images = images_for(CASES[case], dtype=torch.float64)
    encoded = model.encode(model.embed(images), capture=Capture(attention=[0, -1]))
    maps = head_maps(model, images, layers=[0, -1])
    for image in range(len(images)):
        start = torch.tensor(slow_start(model, encoded.tokens[image]), dtype=torch.float64)
        for place, layer in enumerate((0, len(model.blocks) - 1)):
            seen = torch.einsum("l,alk->ak", start, encoded.attention[layer][image])[:, model.config.prefix :]
            torch.testing.assert_close(maps[image, place].flatten(1), seen, **EXACT)


def slow_relevance(model: ViT, images: Tensor, classes: list[int]) -> Tensor:
    """The same by one backward pass through a model that computes every layer from weights that can be seen."""
    maps = []
    for image, chosen in zip(images, classes, strict=True):
        tokens, kept = model.embed(image[None]), []
        for layer in range(len(model.blocks)):
            tokens, weights = model.encode_layer_with_weights(tokens, layer=layer)
            weights.retain_grad()
            kept.append(weights)
        logits = model.head(model.pool_layer(tokens))
        logits[0, chosen].backward()
        joint = torch.eye(tokens.shape[1], dtype=images.dtype)
        for weights in kept:
            assert weights.grad is not None
            joint = joint + (weights * weights.grad)[0].clamp(min=0).mean(dim=0) @ joint
        start = torch.tensor(slow_start(model, tokens[0].detach()), dtype=images.dtype)
        maps.append((start @ joint)[model.config.prefix :].reshape(model.config.grid).detach())
    return torch.stack(maps)


@pytest.mark.parametrize("case", HEADED)
def test_relevance_equals_one_backward_pass(case: str) -> None:
    model = random_vit(HEADED[case], dtype=torch.float64)
    images = images_for(HEADED[case], dtype=torch.float64)
    ours = relevance(model, images, classes=torch.tensor([2, 4]))
    torch.testing.assert_close(ours, slow_relevance(model, images, [2, 4]), rtol=1e-9, atol=1e-11)


def test_relevance_defaults_to_the_predicted_class() -> None:
    model, images = random_vit(CASES["learned_1d-stem"]), images_for(CASES["learned_1d-stem"])
    predicted = model(images).argmax(dim=1)
    assert torch.equal(relevance(model, images), relevance(model, images, classes=predicted))


def test_relevance_leaves_no_gradients() -> None:
    model, images = random_vit(CASES["learned_1d-stem"]), images_for(CASES["learned_1d-stem"])
    relevance(model, images)
    assert all(parameter.grad is None for parameter in model.parameters())


def planted(config: ViTConfig, *, patch: int) -> ViT:
    """A model in which every token looks at one patch, known by its position alone, and nothing else differs."""
    model = random_vit(config)
    width = config.width
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.pos_embed[0, config.prefix + patch] = torch.linspace(-9, 9, width)
        model.pos_embed[0, : config.prefix] = torch.linspace(1, -1, width).square()
        for block in model.blocks:
            block.norm1.weight.fill_(1)
            # Every query is the same; the planted patch's key lies along it, all others' are short or across.
            block.attn.qkv.bias[:width] = torch.linspace(-9, 9, width)
            block.attn.qkv.weight[width : 2 * width] = torch.eye(width)
    return model


@pytest.mark.parametrize("patch", [0, 7, 23])
def test_rollout_finds_a_planted_patch(patch: int) -> None:
    model = planted(small(heads=1), patch=patch)
    images = images_for(model.config)
    (map_of_heads,) = head_maps(model, images)[0]
    for found in (rollout(model, images)[0], map_of_heads[0]):
        assert int(found.argmax()) == patch
        assert float(found.max()) > 5 * float(found.flatten().sort().values[-2])


@torch.no_grad()
def test_attention_equals_transformers(tmp_path) -> None:
    transformers = import_transformers()
    about = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=48,
        patch_size=8,
        num_labels=5,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    theirs = transformers.ViTForImageClassification(about).eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    theirs.save_pretrained(tmp_path)
    ours = vitkit.load(tmp_path)
    images = torch.randn(2, 3, 48, 48)
    seen = theirs(images, output_attentions=True).attentions
    kept = ours.encode(ours.embed(images), capture=Capture(attention=range(3))).attention
    for layer in range(3):
        torch.testing.assert_close(kept[layer], seen[layer], rtol=0, atol=1e-5)
    row = torch.zeros(2, 1, 37)
    row[:, :, 0] = 1
    for layer in reversed(range(3)):
        row = row @ (seen[layer].mean(dim=1) + torch.eye(37)) / 2
    torch.testing.assert_close(rollout(ours, images).flatten(1), row[:, 0, 1:], rtol=0, atol=1e-5)


def test_resnet_has_no_attention() -> None:
    model = create(BiTConfig(units=(1, 1), num_classes=5))
    for part in (rollout, head_maps, relevance):
        with pytest.raises(NotApplicableError, match="a ResNet has no attention"):
            part(model, torch.rand(1, 3, 64, 64))


def test_headless_model_has_no_relevance() -> None:
    config = CASES["headless"]
    with pytest.raises(NotApplicableError, match="the model has no classes"):
        relevance(random_vit(config), images_for(config))


def test_deleting_decisive_patches_lowers_probability() -> None:
    """A mean-pooled model without attention whose logits are the sum of its patches' brightness: the map is known."""
    config = small(pooling="mean", tokens=TokenConfig(class_token=False), depth=1, num_classes=2)
    model = random_vit(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.patch_embed.proj.weight[0] = 1 / 192
        model.patch_embed.proj.weight[1] = -1 / 192
        model.norm.weight.fill_(1)
        model.head.weight[0, 0] = 4
    images = torch.full((1, 3, 32, 48), -1.0)
    images[:, :, :8, :24] = 1.0
    bright = torch.nn.functional.avg_pool2d(images.mean(dim=1, keepdim=True), 8)[:, 0]
    classes = torch.tensor([0])
    falling = deletion_curve(model, images, bright, classes=classes, steps=8)[0]
    rising = deletion_curve(model, images, -bright, classes=classes, steps=8)[0]
    assert falling[0] == rising[0]
    assert falling[1] < falling[0] < rising[1]
    assert falling.mean() < rising.mean()
    with pytest.raises(InputError, match="in that many steps"):
        deletion_curve(model, images, bright, steps=25)
