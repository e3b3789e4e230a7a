"""model.shrink: initial weights mixed with untrained ones."""

import pytest
import torch

from vitkit.core.errors import ConfigError
from vitkit.data.preprocessing import Preprocessing
from vitkit.training.build import build_model
from vitkit.training.callbacks import Callback
from vitkit.training.config import DataConfig, ModelChoice, RunConfig
from vitkit.training.distributed import Ranks
from vitkit.training.run import run_training
from vitkit.weights.bundle import ModelBundle
from vitkit.zoo.registry import configure, create

CONFIG = configure(
    "Ti/16",
    image_size=16,
    patch_size=8,
    num_classes=3,
    settings={"width": 16, "heads": 2, "depth": 1, "mlp_dim": 16, "positions.kind": "sincos_2d"},
)


def pretrained_bundle() -> ModelBundle:
    model = create(CONFIG, generator=torch.Generator().manual_seed(7))
    model.head.weight.data.normal_(generator=torch.Generator().manual_seed(8))
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return ModelBundle(
        name="learned", config=CONFIG, state=state, preprocessing=Preprocessing(image_size=16), labels=tuple("abc")
    )


def initial_weights(shrink: float, *, seed: int = 0) -> dict[str, torch.Tensor]:
    run = RunConfig(seed=seed, model=ModelChoice(init="learned", shrink=shrink))
    ranks = Ranks(device=torch.device("cpu"))
    return build_model(run, CONFIG, pretrained=pretrained_bundle(), ranks=ranks, callback=Callback()).state_dict()


def test_shrink_1_keeps_the_weights() -> None:
    assert all(torch.equal(tensor, pretrained_bundle().state[name]) for name, tensor in initial_weights(1.0).items())


def test_the_rest_is_drawn_as_in_an_untrained_model() -> None:
    kept, drawn = pretrained_bundle().state, create(CONFIG, generator=torch.Generator().manual_seed(1)).state_dict()
    for name, tensor in initial_weights(0.25).items():
        rest = (tensor - 0.25 * kept[name]) / 0.75
        if name == "pos_embed":  # fixed positions are the same in both
            torch.testing.assert_close(tensor, kept[name])
        elif drawn[name].std() == 0:  # norms begin at 1, biases of norms and the head at 0
            torch.testing.assert_close(rest, drawn[name], atol=1e-6, rtol=0)
        elif tensor.numel() > 200:
            assert 0.8 < float(rest.std() / drawn[name].std()) < 1.25
            assert abs(float(torch.corrcoef(torch.stack([rest.flatten(), kept[name].flatten()]))[0, 1])) < 0.3


def test_the_draw_depends_on_the_seed() -> None:
    name = "blocks.0.mlp.fc1.weight"
    assert torch.equal(initial_weights(0.5)[name], initial_weights(0.5)[name])
    assert not torch.equal(initial_weights(0.5)[name], initial_weights(0.5, seed=1)[name])
    # Weights that learned nothing since the same seed drew them are not left as they are.
    assert not torch.allclose(initial_weights(0.5, seed=7)[name], pretrained_bundle().state[name], atol=1e-3)


@pytest.mark.parametrize("shrink", [0.0, -0.1, 1.1])
def test_shrink_must_be_a_positive_fraction(shrink: float) -> None:
    with pytest.raises(ConfigError, match=r"model\.shrink is not a fraction"):
        ModelChoice(shrink=shrink)


def test_shrink_needs_initial_weights(tmp_path) -> None:
    config = RunConfig(model=ModelChoice(name="Ti/16", image_size=16, shrink=0.5), data=DataConfig(path="nowhere"))
    with pytest.raises(ConfigError, match=r"model\.shrink needs initial weights"):
        run_training(config, tmp_path / "run")
