"""`vitkit export` of weights: what goes along with them, and how the library that they are for proves them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.tiny_runs import Shell, photos
from oracles import import_timm, import_transformers

import vitkit
from vitkit.checkpoints import foreign, verify
from vitkit.data.transforms import Preprocessing
from vitkit.export.placing import stored_proof
from vitkit.model.resnet import BiT, BiTConfig

SIZES = ("width=64", "depth=1", "heads=1", "mlp_dim=128")
SQUASHED = Preprocessing(image_size=32)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    save("run")
    return Shell(capsys)


def save(name: str, *settings: str, classes: int = 2, channels: int = 3, patch_size: int = 8) -> None:
    model = vitkit.create(
        "Ti/16", image_size=32, patch_size=patch_size, classes=classes, channels=channels, settings=(*SIZES, *settings)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    how = SQUASHED if channels == 3 else Preprocessing(image_size=32, channels=channels, mean=(0.5,), deviation=(0.5,))
    vitkit.save(model, name, labels=["cat", "dog"][:classes], preprocessing=how)


def proof_at(place: str) -> dict[str, Any]:
    found = stored_proof(Path(place))
    assert found is not None
    return dict(found)


@pytest.mark.parametrize(("to", "library"), [("timm", "timm"), ("huggingface", "transformers"), ("google", "timm")])
def test_weights_go_with_labels_preprocessing_an_example_and_the_librarys_own_answers(
    shell, tmp_path, to, library
) -> None:
    {"timm": import_timm, "transformers": import_transformers}[library]()
    photos(tmp_path / "photos", each=5)
    said = shell("export", "run", "out", "--to", to, "--images", "photos", "--json").json
    assert said["lost"] == []
    assert {"labels.json", "preprocessing.json", "example.py", "proof.json", "SHA256SUMS"} <= set(said["files"])
    theirs, tried = (proof_at("out")[part] for part in ("library", "example"))
    assert theirs["against"].startswith(library)
    assert (theirs["images"], theirs["top1_agreement"]) == (10, 1.0)
    assert theirs["largest_difference"] <= 1e-4
    assert tried["images"] == 8
    assert tried["largest_difference"] <= 1e-4
    again = vitkit.load("out")
    assert (again.labels, again.preprocess.preprocessing) == (("cat", "dog"), SQUASHED)


def test_weights_that_their_library_answers_otherwise_with_are_refused(shell, monkeypatch) -> None:
    import_timm()
    theirs = verify.MODELS["timm"]

    def other(*given: Any) -> verify.Ask:
        ask = theirs(*given)
        return lambda pixels: ask(pixels) + 0.001

    monkeypatch.setitem(verify.MODELS, "timm", other)
    for out in ("out", "out.npz"):
        said = shell("export", "run", out, "--to", "google")
        assert said.code == 1
        assert said.errors[0].startswith("error: timm ")
        assert "does not give the model's logits" in said.errors[0]
    assert sorted(path.name for path in Path().iterdir()) == ["run"]


def test_what_its_library_cannot_load_has_no_example_and_says_so(shell) -> None:
    """timm reads Google's files of one and three channels only."""
    import_timm()
    save("four", channels=4)
    said = shell("export", "four", "out", "--to", "google")
    assert said.code == 0
    assert "not by its library: timm cannot run it" in " ".join(said.out.split())
    assert not Path("out", "example.py").exists()
    assert "cannot run it" in proof_at("out")["example"]["skipped"]


def test_the_proof_says_where_an_example_runs_only_with_help(shell) -> None:
    import_timm()
    plain = subprocess.run([sys.executable, "-c", "import timm"], capture_output=True, check=False).returncode == 0
    shell("export", "run", "out", "--to", "timm")
    assert ("remark" in proof_at("out")["example"]) is not plain


def test_models_without_classes_are_proved_by_their_features(shell) -> None:
    import_timm(), import_transformers()
    save("eyes", classes=0)
    for to in ("timm", "huggingface"):
        assert shell("export", "eyes", to, "--to", to).code == 0
        found = proof_at(to)
        assert found["library"]["top1_agreement"] is None
        assert found["library"]["largest_difference"] <= 1e-4
        assert found["example"]["images"] == 8
    save("distilled", "tokens.distillation=true", "block.activation=gelu_erf", classes=0)
    said = shell("export", "distilled", "deit", "--to", "huggingface-deit")
    assert said.code == 0
    assert "of one token" in proof_at("deit")["library"]["skipped"]


def test_weights_in_a_folder_are_still_known_for_what_they_are(shell) -> None:
    save("erf", "block.activation=gelu_erf")
    for to, run in (("deit", "erf"), ("google", "run")):
        assert shell("export", run, f"for-{to}", "--to", to).code == 0
        with foreign.open_tensors(Path(f"for-{to}")) as tensors:
            assert foreign.identify(tensors).format.name == to
        again = vitkit.load(f"for-{to}")
        assert (again.labels, again.preprocess.preprocessing) == (("cat", "dog"), SQUASHED)


def test_a_model_for_images_of_any_size_comes_back_for_those_that_it_had(shell) -> None:
    vitkit.save(BiT(BiTConfig(units=(1,), classes=2, image_size=64)), "resnet", labels=["cat", "dog"])
    said = shell("export", "resnet", "out", "--to", "bit", "--json")
    assert said.code == 0
    assert said.json["differs"] == []
    assert vitkit.load("out").config.image_size == 64


# One file


def test_a_file_has_its_proof_beside_it_and_is_known_by_it(shell) -> None:
    assert shell("weights", "convert", "run", "model.npz", "--to", "google").code == 0
    assert shell("export", "run", "model.npz", "--to", "google").errors == ["error: model.npz is there already"]
    assert shell("export", "run", "model.npz", "--to", "google", "--force").code == 0
    found = json.loads(Path("model.npz.proof.json").read_bytes())
    assert found["top1_agreement"] == 1
    again = shell("export", "run", "model.npz", "--to", "google", "--json")
    assert again.json["already"]
    assert again.json["proof"] == found
    photos(Path("photos"), each=5)
    assert shell("export", "run", "model.npz", "--to", "google", "--images", "photos").code == 1
    Path("model.npz").write_bytes(Path("model.npz").read_bytes() + b" ")
    assert shell("export", "run", "model.npz", "--to", "google").code == 1


@pytest.mark.parametrize(("to", "out"), [("google", "model.pth"), ("torchvision", "model.npz"), ("timm", "model.npz")])
def test_a_name_that_tells_of_another_kind_of_file_is_refused(shell, to, out) -> None:
    save("erf", "block.activation=gelu_erf")
    said = shell("export", "erf", out, "--to", to)
    assert said.code == 1
    assert "this would be a folder" in said.errors[0]


def test_the_folder_that_one_stands_in_will_do(shell, monkeypatch) -> None:
    Path("new").mkdir()
    monkeypatch.chdir("new")
    assert shell("export", "../run", ".", "--to", "google").code == 0
    assert Path("model.npz").is_file()
