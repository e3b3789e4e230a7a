"""Names of ImageNet's classes, and where they are used."""

import shutil
from pathlib import Path

import pytest
from oracles import import_timm

import vitkit
from vitkit.core.errors import ConfigError
from vitkit.weights.adapt import read_labels
from vitkit.zoo.imagenet import has_imagenet_names, imagenet_names, imagenet_wnids
from vitkit.zoo.pretrained import PRETRAINED

SETTINGS = {"width": 64, "depth": 1, "heads": 1, "mlp_dim": 64}


def test_names_are_unique_lemmas_of_their_synsets() -> None:
    info = Path(import_timm().data.__file__).parent / "_info" / "imagenet_synset_to_lemma.txt"
    lemmas = dict(line.split("\t") for line in info.read_text().splitlines())
    for wnid, name in zip(imagenet_wnids(), imagenet_names(), strict=True):
        assert name.partition(" (")[0] in lemmas[wnid]
    assert len({name.lower() for name in imagenet_names()}) == 1000
    assert has_imagenet_names(imagenet_names())
    assert not has_imagenet_names(imagenet_names()[::-1])


@pytest.mark.parametrize("space", [" ", "_"])
def test_usual_list_with_two_cranes_is_accepted(tmp_path: Path, space: str) -> None:
    usual = [name.partition(" (")[0].replace(" ", space) for name in imagenet_names()]
    (tmp_path / "names.txt").write_text("\n".join(usual), encoding="utf-8")
    names = read_labels(tmp_path / "names.txt")
    assert (names[134], names[517], names[0]) == ("crane (bird)", "crane (machine)", "tench")
    (tmp_path / "names.txt").write_text("crane\ncrane", encoding="utf-8")
    with pytest.raises(ConfigError, match="crane is repeated"):
        read_labels(tmp_path / "names.txt")


def test_numbered_classes_get_names_of_imagenet(tmp_path: Path) -> None:
    model = vitkit.create("Ti/16", image_size=32, num_classes=1000, settings=SETTINGS)
    vitkit.convert(model, tmp_path / "mine.npz", to="google")
    assert vitkit.load(tmp_path / "mine.npz").labels[:2] == ("0", "1")
    assert vitkit.adapt(tmp_path / "mine.npz", labels="imagenet").model.labels == imagenet_names()


def test_published_files_have_names_of_imagenet(tmp_path: Path) -> None:
    rows = (row for row in PRETRAINED if row.format == "google" and row.num_classes == 1000)
    published = tmp_path / next(rows).source.rpartition("/")[2]
    model = vitkit.create("Ti/16", image_size=32, num_classes=1000, settings=SETTINGS)
    vitkit.convert(model, published, to="google")
    assert vitkit.describe_weights(published).labels == imagenet_names()
    shutil.move(published, tmp_path / "mine.npz")
    assert vitkit.describe_weights(tmp_path / "mine.npz").labels[0] == "0"
