"""A run may begin from a share of what was learned, the rest drawn anew."""

import pytest
import torch

from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import ConfigError
from vitkit.data.transforms import Preprocessing
from vitkit.train.config import DataConfig, ModelChoice, RunConfig
from vitkit.train.make import make_model
from vitkit.train.parallel import Ranks
from vitkit.train.run import run
from vitkit.train.watch import Watcher
from vitkit.zoo.lookup import configure, create

CONFIG = configure(
    "Ti/16",
    image_size=16,
    patch_size=8,
    classes=3,
    settings=["width=16", "heads=2", "depth=1", "mlp_dim=16", "positions.kind=sincos_2d"],
)


def learned() -> Artefact:
    model = create(CONFIG, generator=torch.Generator().manual_seed(7))
    model.head.weight.data.normal_(generator=torch.Generator().manual_seed(8))
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Artefact(
        name="learned", config=CONFIG, state=state, preprocessing=Preprocessing(image_size=16), labels=tuple("abc")
    )


def begun(shrink: float, *, seed: int = 0) -> dict[str, torch.Tensor]:
    run = RunConfig(seed=seed, model=ModelChoice(weights="learned", shrink=shrink))
    ranks = Ranks(device=torch.device("cpu"))
    return make_model(run, CONFIG, pretrained=learned(), ranks=ranks, watcher=Watcher()).state_dict()


def test_all_of_the_weights_are_the_weights() -> None:
    assert all(torch.equal(tensor, learned().state[name]) for name, tensor in begun(1.0).items())


def test_what_is_not_kept_is_drawn_anew_in_the_size_of_a_fresh_model() -> None:
    kept, drawn = learned().state, create(CONFIG, generator=torch.Generator().manual_seed(1)).state_dict()
    for name, tensor in begun(0.25).items():
        rest = (tensor - 0.25 * kept[name]) / 0.75
        if name == "pos_embed":  # fixed positions are the same in both
            torch.testing.assert_close(tensor, kept[name])
        elif drawn[name].std() == 0:  # norms begin at 1, biases of norms and the head at 0
            torch.testing.assert_close(rest, drawn[name], atol=1e-6, rtol=0)
        elif tensor.numel() > 200:
            assert 0.8 < float(rest.std() / drawn[name].std()) < 1.25
            assert abs(float(torch.corrcoef(torch.stack([rest.flatten(), kept[name].flatten()]))[0, 1])) < 0.3


def test_the_draw_follows_from_the_seed_and_is_not_that_of_the_weights_own_start() -> None:
    name = "blocks.0.mlp.fc1.weight"
    assert torch.equal(begun(0.5)[name], begun(0.5)[name])
    assert not torch.equal(begun(0.5)[name], begun(0.5, seed=1)[name])
    # Weights that learned nothing since the same seed drew them are not left as they are.
    assert not torch.allclose(begun(0.5, seed=7)[name], learned().state[name], atol=1e-3)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_is_more_than_nothing_and_at_most_all(share: float) -> None:
    with pytest.raises(ConfigError, match=r"model\.shrink is not a share"):
        ModelChoice(shrink=share)


def test_without_weights_there_is_nothing_to_keep_a_share_of(tmp_path) -> None:
    config = RunConfig(model=ModelChoice(name="Ti/16", image_size=16, shrink=0.5), data=DataConfig(path="nowhere"))
    with pytest.raises(ConfigError, match="a share of trained weights, and there are none"):
        run(config, tmp_path / "run")
