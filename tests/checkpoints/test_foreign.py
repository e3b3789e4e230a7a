"""Weights of any origin: what stands beside them counts, and what is no model is told."""

from pathlib import Path

import pytest
from model_cases import randomised

from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.foreign import format_called, labels_in, load
from vitkit.checkpoints.native import Artefact
from vitkit.core.errors import UnknownNameError, WeightsError
from vitkit.data.transforms import preprocessing
from vitkit.zoo.lookup import configure, create

CONFIG = configure(
    "Ti/16",
    image_size=32,
    patch_size=8,
    classes=3,
    settings=("width=64", "depth=1", "heads=1", "mlp_dim=64", "block.activation=gelu_erf"),
)
MODEL = Artefact(
    name="small",
    config=CONFIG,
    state=randomised(create(CONFIG)).state_dict(),
    preprocessing=preprocessing("deit", image_size=32),
    labels=("cat", "dog", "owl"),
)


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_a_folder_keeps_its_preprocessing_and_its_labels(to: str, tmp_path: Path) -> None:
    write_as(format_called(to), tmp_path / "out", MODEL)
    again = load(tmp_path / "out")
    assert (again.preprocessing, again.labels) == (MODEL.preprocessing, MODEL.labels)


def test_without_a_word_beside_it_a_file_is_fed_as_its_origin_does(tmp_path: Path) -> None:
    write_as(format_called("deit"), tmp_path / "model.pth", MODEL)
    again = load(tmp_path / "model.pth")
    assert (again.preprocessing, again.labels) == (preprocessing("deit", image_size=32), ("0", "1", "2"))


def test_labels_that_are_not_numbered_are_refused() -> None:
    with pytest.raises(WeightsError, match="id2label"):
        labels_in({"id2label": {"cat": 0, "dog": 1}}, classes=2)


def test_a_format_that_is_not_known_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        format_called("gogle")
    assert "google" in str(caught.value.hint)
