"""Masked autoencoder: visible patches, targets, and the loss of transformers."""

import pytest
import torch
from oracles import import_transformers
from torch import Tensor

from vitkit.core.errors import ConfigError
from vitkit.data.preprocessing import Preprocessing
from vitkit.model.config import BackboneConfig, BlockConfig, HeadConfig, PositionConfig, TokenConfig, ViTConfig
from vitkit.model.pretraining import MaskedAutoencoder
from vitkit.model.pretraining_config import MAEConfig
from vitkit.model.vit import ViT
from vitkit.objectives.base import PerImageRNG, SelfSupervised
from vitkit.objectives.mae import MAEObjective, MAETargets

SIZES = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "num_classes": 0}
VIT = ViTConfig(**SIZES)
DECODER = MAEConfig(width=16, depth=1, heads=2)
PREPROCESSING = Preprocessing(image_size=16, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
GRAY = Preprocessing(image_size=16, channels=1, mean=(0.5,), std=(0.5,))


def make(config: ViTConfig = VIT, decoder: MAEConfig = DECODER) -> tuple[MaskedAutoencoder, MAEObjective]:
    preprocessing = PREPROCESSING if config.channels == 3 else GRAY
    return MaskedAutoencoder(ViT(config), decoder), MAEObjective(decoder, config, preprocessing=preprocessing)


def draw_images(count: int, *, preprocessing: Preprocessing = PREPROCESSING) -> tuple[Tensor, Tensor]:
    pixels = torch.randint(0, 256, (count, preprocessing.channels, 16, 16), dtype=torch.uint8)
    return preprocessing.normalize(pixels), pixels


def test_three_quarters_of_the_patches_are_hidden() -> None:
    _, objective = make()
    images, pixels = draw_images(50)
    targets = objective.make_targets(images, pixels, rng=PerImageRNG(seed=0, use=0))
    assert (targets.visible.shape, targets.hidden.shape) == ((50, 4), (50, 12))
    both = torch.cat([targets.visible, targets.hidden], dim=1).sort(dim=1).values
    assert torch.equal(both, torch.arange(16).expand(50, -1))
    # 200 visible places among 16: five binomial deviations of 12.5 are 17.
    assert torch.bincount(targets.visible.flatten(), minlength=16).max() < 12.5 + 17


def test_encoder_sees_only_visible_patches() -> None:
    model, objective = make()
    images, pixels = draw_images(3)
    targets = objective.make_targets(images, pixels, rng=PerImageRNG(seed=0, use=0))
    changed = images.clone()
    for image in range(3):
        for place in targets.hidden[image].tolist():
            top, left = place // 4 * 4, place % 4 * 4
            changed[image, :, top : top + 4, left : left + 4] = torch.randn(3, 4, 4) * 100
    model.eval()
    with torch.no_grad():
        before, after = (model.encode_visible(each, targets.visible) for each in (images, changed))
        answers = [model(each, targets.visible, targets.hidden) for each in (images, changed)]
    assert before.shape == (3, 1 + 4, 32)  # the class token and a quarter of the patches
    assert torch.equal(before, after)
    assert torch.equal(*answers)
    top, left = (int(targets.visible[0, 0]) // 4 * 4, int(targets.visible[0, 0]) % 4 * 4)
    changed[0, :, top : top + 4, left : left + 4] += 1.0
    with torch.no_grad():
        assert not torch.equal(model.encode_visible(changed, targets.visible)[0], before[0])


@pytest.mark.parametrize("normalize", [True, False])
def test_loss_equals_a_slow_loop(normalize: bool) -> None:
    decoder = MAEConfig(width=16, depth=1, heads=2, normalize=normalize)
    model, objective = make(decoder=decoder)
    images, pixels = draw_images(2)
    targets = objective.make_targets(images, pixels, rng=PerImageRNG(seed=3, use=1))
    said = model(images, targets.visible, targets.hidden)
    losses = []
    for image in range(2):
        for asked, place in enumerate(targets.hidden[image].tolist()):
            top, left = place // 4 * 4, place % 4 * 4
            numbers = [
                float(images[image, channel, top + down, left + across])
                for down in range(4)
                for across in range(4)
                for channel in range(3)
            ]
            if normalize:
                mean = sum(numbers) / 48
                variance = sum((number - mean) ** 2 for number in numbers) / 47
                numbers = [(number - mean) / (variance + 1e-6) ** 0.5 for number in numbers]
            guesses = said[image, asked].tolist()
            losses.append(sum((one - other) ** 2 for one, other in zip(guesses, numbers, strict=True)) / 48)
    # float32 against Python's float64: 1e-7 of each number
    assert objective(model, images, targets).loss.item() == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert objective(model, images, targets).metrics == {}


def test_loss_equals_transformers() -> None:
    transformers = import_transformers()
    sizes = {
        "image_size": 16,
        "patch_size": 4,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    decoder = {
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 64,
    }
    config = transformers.ViTMAEConfig(**sizes, **decoder, layer_norm_eps=1e-6, mask_ratio=0.75, norm_pix_loss=True)
    theirs = transformers.ViTMAEForPreTraining(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, each in theirs.named_parameters():
            if "pos_embed" not in name and "position_embeddings" not in name:
                each.normal_(0.0, 0.1, generator=generator)
    positions = PositionConfig(kind="sincos_2d", sincos="mae")
    vit = ViTConfig(**SIZES, positions=positions, block=BlockConfig(activation="gelu_erf"))
    settings = MAEConfig(width=16, depth=2, heads=2)
    ours, objective = (
        MaskedAutoencoder(ViT(vit), settings).eval(),
        MAEObjective(settings, vit, preprocessing=PREPROCESSING),
    )
    ours.load_state_dict(convert_names(theirs.state_dict()))

    images, _ = draw_images(4)
    noise = torch.rand(4, 16, generator=generator)
    with torch.no_grad():
        expected = theirs(images, noise=noise)
        targets = objective.targets_from_noise(images, noise)
        said = ours(images, targets.visible, targets.hidden)
        loss = objective(ours, images, targets).loss
    hidden = torch.zeros(4, 16).scatter(1, targets.hidden, 1.0)
    assert torch.equal(hidden, expected.mask)
    asked = expected.logits.gather(1, targets.hidden[:, :, None].expand(-1, -1, 48))
    torch.testing.assert_close(said, asked, rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-5)


def convert_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' model to ours."""
    renamed: dict[str, Tensor] = {}
    whole = {
        "vit.embeddings.cls_token": "encoder.cls_token",
        "vit.embeddings.position_embeddings": "encoder.pos_embed",
        "vit.embeddings.patch_embeddings.projection.": "encoder.patch_embed.proj.",
        "vit.layernorm.": "encoder.norm.",
        "decoder.mask_token": "mask_token",
        "decoder.decoder_pos_embed": "decoder_pos_embed",
        "decoder.decoder_embed.": "decoder_embed.",
        "decoder.decoder_norm.": "decoder_norm.",
        "decoder.decoder_pred.": "decoder_pred.",
    }
    blocks = {
        "layernorm_before.": "norm1.",
        "layernorm_after.": "norm2.",
        "attention.output.dense.": "attn.proj.",
        "attention.o_proj.": "attn.proj.",
        "intermediate.dense.": "mlp.fc1.",
        "output.dense.": "mlp.fc2.",
        "mlp.fc1.": "mlp.fc1.",
        "mlp.fc2.": "mlp.fc2.",
    }
    stacks = {
        "vit.encoder.layer.": "encoder.blocks.",
        "vit.layers.": "encoder.blocks.",
        "decoder.decoder_layers.": "decoder_blocks.",
    }
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        stack = next((start for start in stacks if name.startswith(start)), None)
        if stack is None:
            start = next(start for start in whole if name.startswith(start))
            renamed[whole[start] + name.removeprefix(start)] = tensor
            continue
        number, _, inside = name.removeprefix(stack).partition(".")
        ours = f"{stacks[stack]}{number}."
        letter = next(
            (each for each in ("query", "key", "value", "q_proj", "k_proj", "v_proj") if f".{each}." in name), ""
        )
        if letter:
            kind = inside.rpartition(".")[2]
            parts.setdefault(f"{ours}attn.qkv.{kind}", {})[letter[0]] = tensor
            continue
        start = next(start for start in blocks if inside.startswith(start))
        renamed[ours + blocks[start] + inside.removeprefix(start)] = tensor
    return renamed | {name: torch.cat([found[letter] for letter in "qkv"]) for name, found in parts.items()}


def test_noise_hides_the_patches_of_the_released_code() -> None:
    _, objective = make()
    noise = torch.tensor([[0.9, 0.1, 0.8, 0.2, 0.3, 0.4] + [0.5] * 9 + [0.0]])
    targets = objective.targets_from_noise(torch.zeros(1, 3, 16, 16), noise)
    assert targets.visible.tolist() == [[1, 3, 4, 15]]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pooling": "mean"},
        {"pooling": "map"},
        {"tokens": TokenConfig(registers=2)},
        {"head": HeadConfig(norm="after_pooling"), "pooling": "mean"},
        {"head": HeadConfig(pre_logits=8)},
        {"positions": PositionConfig(kind="learned_2d")},
        {"channels": 1},
    ],
    ids=str,
)
def test_every_trainable_parameter_has_a_gradient(changes) -> None:
    model, objective = make(ViTConfig(**(SIZES | changes)))
    images, pixels = draw_images(8, preprocessing=objective.preprocessing)
    objective(model, images, objective.make_targets(images, pixels, rng=PerImageRNG(seed=0, use=0))).loss.backward()
    learning = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert [name for name, each in learning.items() if each.grad is None or not each.grad.any()] == []
    assert "mask_token" in learning
    assert "decoder_pos_embed" not in learning


def test_hidden_patches_are_learned_from_visible_ones() -> None:
    gray = ViTConfig(**(SIZES | {"channels": 1}))
    decoder = MAEConfig(width=16, depth=1, heads=2, normalize=False)
    model, objective = make(gray, decoder)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(80):
        pixels = (torch.randint(0, 2, (32, 1, 1, 1)) * 255).expand(-1, 1, 16, 16).to(torch.uint8)
        images = GRAY.normalize(pixels)
        output = objective(model, images, objective.make_targets(images, pixels, rng=PerImageRNG(seed=0, use=step)))
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        losses.append(output.loss.item())
    assert losses[0] > 0.8  # black and white are −1 and 1: without knowledge the error is 1
    assert sum(losses[-10:]) / 10 < 0.05


def test_reconstruction_of_the_targets_is_the_image() -> None:
    _, objective = make()
    images, pixels = draw_images(2)
    targets = objective.make_targets(images, pixels, rng=PerImageRNG(seed=0, use=0))

    class Perfect(torch.nn.Module):
        def forward(self, images: Tensor, visible: Tensor, places: Tensor) -> Tensor:
            return targets.values

    shown = objective.reconstruct(Perfect(), images, pixels, targets)
    # Two normalizations undone in float32, at most 255: some 1e-4
    torch.testing.assert_close(shown.predicted, pixels.float(), rtol=0, atol=1e-2)
    assert shown.hidden.float().mean() == 0.75


def test_targets_do_not_depend_on_the_batch() -> None:
    _, objective = make()
    images, pixels = draw_images(5)
    together = objective.make_targets(images, pixels, rng=PerImageRNG(seed=0, use=1))
    apart = objective.make_targets(images[3:], pixels[3:], rng=PerImageRNG(seed=0, use=1, first=3))
    assert all(torch.equal(one[3:], other) for one, other in zip(together, apart, strict=True))
    assert isinstance(together, MAETargets)
    assert isinstance(objective, SelfSupervised)


def test_unsupported_models_are_rejected() -> None:
    with pytest.raises(ConfigError, match="can be removed only if"):
        make(ViTConfig(**SIZES, positions=PositionConfig(kind="rotary")))
    hybrid = SIZES | {"image_size": 32, "patch_size": 1}
    with pytest.raises(ConfigError, match="independent of each other"):
        make(ViTConfig(**hybrid, backbone=BackboneConfig(units=(1,), root_width=32)))
    with pytest.raises(ConfigError, match="leaves no patch to see"):
        make(ViTConfig(**(SIZES | {"patch_size": 8})), MAEConfig(width=16, depth=1, heads=2, mask_ratio=0.9))
    with pytest.raises(ConfigError, match="multiple of 4"):
        MAEConfig(width=18, heads=2)
