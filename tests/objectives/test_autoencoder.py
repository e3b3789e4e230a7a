"""The masked autoencoder: what its encoder sees, what is asked, and that both are MAE's."""

import pytest
import torch
from oracles import import_transformers
from torch import Tensor

from vitkit.core.errors import ConfigError
from vitkit.data.transforms import Preprocessing
from vitkit.model.config import TokenConfig, ViTConfig
from vitkit.model.encoder import BlockConfig
from vitkit.model.heads import HeadConfig
from vitkit.model.masked import AutoencoderConfig, MaskedAutoencoder
from vitkit.model.positions import PositionConfig
from vitkit.model.resnet import BackboneConfig
from vitkit.model.vit import ViT
from vitkit.objectives.autoencoder import FillingIn, FillingTask
from vitkit.objectives.objective import Chance, Unlabelled

SIZES = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "classes": 0}
VIT = ViTConfig(**SIZES)
DECODER = AutoencoderConfig(width=16, depth=1, heads=2)
FED = Preprocessing(image_size=16, mean=(0.485, 0.456, 0.406), deviation=(0.229, 0.224, 0.225))
GREY = Preprocessing(image_size=16, channels=1, mean=(0.5,), deviation=(0.5,))


def made(config: ViTConfig = VIT, decoder: AutoencoderConfig = DECODER) -> tuple[MaskedAutoencoder, FillingIn]:
    fed = FED if config.channels == 3 else GREY
    return MaskedAutoencoder(ViT(config), decoder), FillingIn(decoder, config, fed=fed)


def drawn(count: int, *, fed: Preprocessing = FED) -> tuple[Tensor, Tensor]:
    pixels = torch.randint(0, 256, (count, fed.channels, 16, 16), dtype=torch.uint8)
    return fed.normalise(pixels), pixels


def test_three_quarters_are_hidden_and_every_patch_is_one_or_the_other() -> None:
    _, objective = made()
    images, pixels = drawn(50)
    task = objective.set_task(images, pixels, chance=Chance(seed=0, use=0))
    assert (task.visible.shape, task.places.shape) == ((50, 4), (50, 12))
    both = torch.cat([task.visible, task.places], dim=1).sort(dim=1).values
    assert torch.equal(both, torch.arange(16).expand(50, -1))
    # 200 visible places among 16: five binomial deviations of 12.5 are 17.
    assert torch.bincount(task.visible.flatten(), minlength=16).max() < 12.5 + 17


def test_the_encoder_sees_only_visible_patches() -> None:
    model, objective = made()
    images, pixels = drawn(3)
    task = objective.set_task(images, pixels, chance=Chance(seed=0, use=0))
    changed = images.clone()
    for image in range(3):
        for place in task.places[image].tolist():
            top, left = place // 4 * 4, place % 4 * 4
            changed[image, :, top : top + 4, left : left + 4] = torch.randn(3, 4, 4) * 100
    model.eval()
    with torch.no_grad():
        before, after = (model.encode_visible(each, task.visible) for each in (images, changed))
        answers = [model(each, task.visible, task.places) for each in (images, changed)]
    assert before.shape == (3, 1 + 4, 32)  # the class token and a quarter of the patches
    assert torch.equal(before, after)
    assert torch.equal(*answers)
    top, left = (int(task.visible[0, 0]) // 4 * 4, int(task.visible[0, 0]) % 4 * 4)
    changed[0, :, top : top + 4, left : left + 4] += 1.0
    with torch.no_grad():
        assert not torch.equal(model.encode_visible(changed, task.visible)[0], before[0])


@pytest.mark.parametrize("normalise", [True, False])
def test_the_loss_equals_a_slow_loop(normalise: bool) -> None:
    decoder = AutoencoderConfig(width=16, depth=1, heads=2, normalise=normalise)
    model, objective = made(decoder=decoder)
    images, pixels = drawn(2)
    task = objective.set_task(images, pixels, chance=Chance(seed=3, use=1))
    said = model(images, task.visible, task.places)
    losses = []
    for image in range(2):
        for asked, place in enumerate(task.places[image].tolist()):
            top, left = place // 4 * 4, place % 4 * 4
            numbers = [
                float(images[image, channel, top + down, left + across])
                for down in range(4)
                for across in range(4)
                for channel in range(3)
            ]
            if normalise:
                mean = sum(numbers) / 48
                variance = sum((number - mean) ** 2 for number in numbers) / 47
                numbers = [(number - mean) / (variance + 1e-6) ** 0.5 for number in numbers]
            guesses = said[image, asked].tolist()
            losses.append(sum((one - other) ** 2 for one, other in zip(guesses, numbers, strict=True)) / 48)
    # float32 against Python's float64: 1e-7 of each number
    assert objective(model, images, task).loss.item() == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert objective(model, images, task).sums == {}


def test_the_loss_is_that_of_transformers() -> None:
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
    settings = AutoencoderConfig(width=16, depth=2, heads=2)
    ours, objective = MaskedAutoencoder(ViT(vit), settings).eval(), FillingIn(settings, vit, fed=FED)
    ours.load_state_dict(in_our_names(theirs.state_dict()))

    images, _ = drawn(4)
    noise = torch.rand(4, 16, generator=generator)
    with torch.no_grad():
        expected = theirs(images, noise=noise)
        task = objective.task(images, noise)
        said = ours(images, task.visible, task.places)
        loss = objective(ours, images, task).loss
    hidden = torch.zeros(4, 16).scatter(1, task.places, 1.0)
    assert torch.equal(hidden, expected.mask)
    asked = expected.logits.gather(1, task.places[:, :, None].expand(-1, -1, 48))
    torch.testing.assert_close(said, asked, rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-5)


def in_our_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of transformers' model in ours; the decoder's own names are MAE's, with a prefix."""
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


def test_noise_hides_the_same_patches_as_the_released_code() -> None:
    _, objective = made()
    noise = torch.tensor([[0.9, 0.1, 0.8, 0.2, 0.3, 0.4] + [0.5] * 9 + [0.0]])
    task = objective.task(torch.zeros(1, 3, 16, 16), noise)
    assert task.visible.tolist() == [[1, 3, 4, 15]]


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
def test_all_that_learns_receives_a_gradient(changes) -> None:
    model, objective = made(ViTConfig(**(SIZES | changes)))
    images, pixels = drawn(8, fed=objective.fed)
    objective(model, images, objective.set_task(images, pixels, chance=Chance(seed=0, use=0))).loss.backward()
    learning = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert [name for name, each in learning.items() if each.grad is None or not each.grad.any()] == []
    assert "mask_token" in learning
    assert "decoder_pos_embed" not in learning


def test_hidden_patches_are_learned_from_visible_ones() -> None:
    grey = ViTConfig(**(SIZES | {"channels": 1}))
    decoder = AutoencoderConfig(width=16, depth=1, heads=2, normalise=False)
    model, objective = made(grey, decoder)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(80):
        pixels = (torch.randint(0, 2, (32, 1, 1, 1)) * 255).expand(-1, 1, 16, 16).to(torch.uint8)
        images = GREY.normalise(pixels)
        outcome = objective(model, images, objective.set_task(images, pixels, chance=Chance(seed=0, use=step)))
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        losses.append(outcome.loss.item())
    assert losses[0] > 0.8  # black and white are −1 and 1: who knows nothing is wrong by 1
    assert sum(losses[-10:]) / 10 < 0.05


def test_a_picture_of_the_right_answers_is_the_image() -> None:
    _, objective = made()
    images, pixels = drawn(2)
    task = objective.set_task(images, pixels, chance=Chance(seed=0, use=0))

    class Knows(torch.nn.Module):
        def forward(self, images: Tensor, visible: Tensor, places: Tensor) -> Tensor:
            return task.answers

    shown = objective.reconstruct(Knows(), images, pixels, task)
    # Two normalisations undone in float32, at most 255: some 1e-4
    torch.testing.assert_close(shown.predicted, pixels.float(), rtol=0, atol=1e-2)
    assert shown.hidden.float().mean() == 0.75


def test_an_image_has_the_same_task_in_any_batch() -> None:
    _, objective = made()
    images, pixels = drawn(5)
    together = objective.set_task(images, pixels, chance=Chance(seed=0, use=1))
    apart = objective.set_task(images[3:], pixels[3:], chance=Chance(seed=0, use=1, first=3))
    assert all(torch.equal(one[3:], other) for one, other in zip(together, apart, strict=True))
    assert isinstance(together, FillingTask)
    assert isinstance(objective, Unlabelled)


def test_what_cannot_be_hidden_is_refused() -> None:
    with pytest.raises(ConfigError, match="left out only where"):
        made(ViTConfig(**SIZES, positions=PositionConfig(kind="rotary")))
    hybrid = SIZES | {"image_size": 32, "patch_size": 1}
    with pytest.raises(ConfigError, match="neighbours"):
        made(ViTConfig(**hybrid, backbone=BackboneConfig(units=(1,), root_width=32)))
    with pytest.raises(ConfigError, match="nothing seen"):
        made(ViTConfig(**(SIZES | {"patch_size": 8})), AutoencoderConfig(width=16, depth=1, heads=2, hidden=0.9))
    with pytest.raises(ConfigError, match="multiple of 4"):
        AutoencoderConfig(width=18, heads=2)
