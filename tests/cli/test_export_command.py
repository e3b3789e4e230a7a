"""`vitkit export`: a run is written for another library, which loads it with its labels; or why it cannot be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.tiny_runs import Shell, photos
from oracles import import_timm, import_torchvision, import_transformers
from PIL import Image

import vitkit
from vitkit.checkpoints import convert, foreign
from vitkit.cli.converting import remedy
from vitkit.data.transforms import Preprocessing, preprocessing
from vitkit.export import weights
from vitkit.export.placing import stored_proof
from vitkit.export.runtimes import RUNTIMES
from vitkit.model.config import ViTConfig
from vitkit.model.resnet import BiT, BiTConfig
from vitkit.zoo.lookup import configure

SIZES = ("width=64", "depth=1", "heads=1", "mlp_dim=128")
SQUASHED = Preprocessing(image_size=32)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """One that does not wait for an example to import its library: test_export_weights.py is about just that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights, "tried_example", lambda *_, **__: {"skipped": "not in this test"})
    save("run")
    return Shell(capsys)


def save(name: str, *settings: str, how: Preprocessing = SQUASHED) -> None:
    model = vitkit.create("Ti/16", image_size=32, patch_size=8, classes=2, settings=(*SIZES, *settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    vitkit.save(model, name, labels=["cat", "dog"], preprocessing=how)


@torch.no_grad()
def ours(place: str = "run") -> torch.Tensor:
    return vitkit.load(place)(batch())


def batch() -> torch.Tensor:
    return torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def close(theirs: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(theirs, expected, rtol=1e-5, atol=1e-5)  # float32, other kernels


def photo() -> Image.Image:
    """Shapes with edges and noise on them, larger than any model here takes."""
    generator = np.random.default_rng(0)
    shapes = Image.fromarray(generator.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize((240, 180))
    noise = generator.integers(-9, 10, (180, 240, 3))
    return Image.fromarray(np.clip(np.asarray(shapes) + noise, 0, 255).astype(np.uint8))


# What other libraries make of it


def test_transformers_loads_the_folder_with_its_labels(shell) -> None:
    transformers = import_transformers()
    said = shell("export", "run", "out", "--to", "huggingface")
    assert said.code == 0
    assert said.out.splitlines()[-1] == 'transformers.AutoModelForImageClassification.from_pretrained("out")'
    theirs, report = transformers.ViTForImageClassification.from_pretrained("out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert close(theirs.eval()(batch()).logits, ours())
    assert theirs.config.id2label == {0: "cat", 1: "dog"}
    assert vitkit.load("out").labels == ("cat", "dog")


@pytest.mark.parametrize(
    "how",
    [
        SQUASHED,
        Preprocessing(image_size=32, filter="bicubic", mean=(0.48, 0.46, 0.41), deviation=(0.23, 0.22, 0.23)),
        preprocessing("deit", image_size=32),
    ],
    ids=["squash", "bicubic", "crop"],
)
def test_the_image_processor_of_transformers_gives_our_pixels(shell, how) -> None:
    transformers = import_transformers()
    save("other", how=how)
    assert shell("export", "other", "out", "--to", "huggingface").code == 0
    theirs = transformers.AutoImageProcessor.from_pretrained("out", backend="pil")
    pixels = theirs(photo(), return_tensors="pt")["pixel_values"]
    expected = vitkit.load("other").preprocess(photo())
    assert pixels.shape == expected.shape
    assert (pixels - expected).abs().max() <= 1e-6  # rounded in another order


def test_on_torchvision_the_processor_is_at_most_one_level_of_255_off(shell) -> None:
    """Its resizing rounds otherwise than Pillow's; transformers takes it where torchvision is installed."""
    import_torchvision()
    transformers = import_transformers()
    shell("export", "run", "out", "--to", "huggingface")
    theirs = transformers.ViTImageProcessor.from_pretrained("out")
    pixels = theirs(photo(), return_tensors="pt")["pixel_values"]
    assert (pixels - vitkit.load("run").preprocess(photo())).abs().max() <= 2 / 255 + 1e-6


def test_timm_loads_the_folder_and_prepares_pictures_as_we_do(shell) -> None:
    timm = import_timm()
    said = shell("export", "run", "out", "--to", "timm")
    assert said.code == 0
    assert said.out.splitlines()[-1] == 'timm.create_model("local-dir:out", pretrained=True)'
    theirs = timm.create_model("local-dir:out", pretrained=True).eval()
    with torch.no_grad():
        assert close(theirs(batch()), ours())
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    assert (transform(photo())[None] - vitkit.load("run").preprocess(photo())).abs().max() <= 1e-6


def test_a_run_that_was_fine_tuned_is_timms_and_transformers_without_and_with_an_export(shell, tmp_path) -> None:
    timm, transformers = import_timm(), import_transformers()
    assert shell.finetune("run", photos(tmp_path / "photos", ("ant", "bee", "fly")), "tuned").code == 0
    with torch.no_grad():
        expected = vitkit.load("tuned")(batch())
    assert shell("export", "tuned", "out").code == 0
    theirs: dict[str, Any] = {
        "timm": timm.create_model("local-dir:tuned", pretrained=True),
        "wrapper": transformers.TimmWrapperForImageClassification.from_pretrained("tuned"),
        "ViT": transformers.ViTForImageClassification.from_pretrained("out"),
    }
    for name, model in theirs.items():
        with torch.no_grad():
            answer = model.eval()(batch())
        assert close(answer if name == "timm" else answer.logits, expected), name
    assert tuple(theirs["timm"].pretrained_cfg["label_names"]) == ("ant", "bee", "fly")
    for name in ("wrapper", "ViT"):
        assert theirs[name].config.id2label == {0: "ant", 1: "bee", 2: "fly"}


def test_one_batch_through_timm_transformers_and_onnx_runtime(shell) -> None:
    """U5: 0, 0 and at most 1e-4."""
    timm, transformers = import_timm(), import_transformers()
    pytest.importorskip("onnxruntime", reason="onnxruntime comes with vitkit[export]")
    for to in ("timm", "huggingface", "onnx"):
        assert shell("export", "run", to, "--to", to).code == 0
    pixels = torch.rand(7, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vitkit.load("run")(pixels)
        of_timm = timm.create_model("local-dir:timm", pretrained=True).eval()(pixels)
        of_transformers = (
            transformers.AutoModelForImageClassification.from_pretrained("huggingface").eval()(pixels).logits
        )
    of_onnx = RUNTIMES["onnx"].start(Path("onnx"))(pixels.numpy())["logits"]
    assert (of_timm - expected).abs().max() <= 2e-6  # the same numbers, added up in another order
    assert (of_transformers - expected).abs().max() <= 2e-6
    assert np.abs(of_onnx - expected.numpy()).max() <= 1e-4


# What is said


def test_json_says_what_was_written_what_is_lost_and_how_it_was_checked(shell) -> None:
    said = shell("export", "run", "model.npz", "--to", "google", "--json")
    assert said.code == 0
    assert {key: said.json[key] for key in ("format", "files", "classes", "changes", "differs")} == {
        "format": "google",
        "files": ["model.npz", "model.npz.proof.json"],
        "classes": 2,
        "changes": [],
        "differs": [],
    }
    assert said.json["lost"] == [
        "the names of 2 classes",
        "the preprocessing: squash to 32×32, bilinear, mean 0.5, deviation 0.5",
    ]
    assert said.json["checked"].startswith(
        "read back: 20 tensors, number for number the same; read by vitkit, 25 images"
    )
    proof = said.json["proof"]
    assert proof["top1_agreement"] == 1
    assert proof["largest_difference"] == 0  # the same numbers, in the same code
    assert proof["library"].get("images") in (None, 25)


def test_what_the_other_library_does_in_its_own_way_is_told(shell) -> None:
    save("paper", how=preprocessing("paper", image_size=32))
    for to, library in (("huggingface", "transformers"), ("timm", "timm")):
        said = shell("export", "paper", f"for-{to}", "--to", to, "--json").json
        assert said["lost"] == []
        assert said["differs"][0].startswith(f"resizing without antialias: {library} always smooths")
        assert said["differs"][1:] == [f"positions.origin google → {to}"]
    save("cropped", how=preprocessing("deit", image_size=32))
    assert "one pixel aside" in shell("export", "cropped", "out", "--json").json["differs"][0]


def test_an_image_size_that_a_file_cannot_say_is_told(shell) -> None:
    model = BiT(BiTConfig(units=(1,), classes=2, image_size=64))
    vitkit.save(model, "resnet", labels=["cat", "dog"])
    said = shell("export", "resnet", "out.npz", "--to", "bit", "--json")
    assert said.code == 0
    assert said.json["differs"] == ["image_size 64 → 224"]


def test_weights_that_do_not_come_back_are_an_error(shell, monkeypatch) -> None:
    def damage(path: Path, tensors: Any, metadata: dict[str, str]) -> None:
        written(path, {name: tensors[name] + (name == "vit.layernorm.bias") for name in tensors}, metadata)

    written = convert.save_safetensors
    monkeypatch.setattr(convert, "save_safetensors", damage)
    said = shell("export", "run", "out")
    assert said.code == 1
    assert said.errors == ["error: out: norm.bias is not what was written"]


def test_a_model_that_comes_back_as_another_is_an_error(shell, monkeypatch) -> None:
    told = convert.hub_config
    monkeypatch.setattr(convert, "hub_config", lambda *args, **names: told(*args, **names) | {"hidden_act": "gelu"})
    said = shell("export", "run", "out")
    assert said.code == 1
    assert "answers otherwise than the model that was written" in said.errors[0]
    assert "block.activation gelu_tanh → gelu_erf" in said.errors[0]


# What is done already


def test_weights_that_were_written_are_found_there_too(shell) -> None:
    for out, to in (("hf", "huggingface"), ("model.npz", "google")):
        assert shell("export", "run", out, "--to", to).code == 0
        before = Path(out).stat().st_mtime_ns
        again = shell("export", "run", out, "--to", to)
        assert again.code == 0
        assert f"done already: {out}" in again.talk
        assert Path(out).stat().st_mtime_ns == before
        assert again.out.startswith("Done already")
    proof = stored_proof(Path("hf"))
    assert proof is not None
    assert proof["top1_agreement"] == 1
    save("run", "block.norm_eps=1e-5")
    assert shell("export", "run", "hf", "--to", "huggingface").errors == ["error: hf is there already"]


# What cannot be held, and the settings with which it can


def test_a_format_that_cannot_hold_the_model_says_why_and_writes_nothing(shell) -> None:
    save("averaging", "pooling=mean")
    said = shell("export", "averaging", "out", "--to", "huggingface")
    assert said.code == 1
    assert said.errors == ["error: Hugging Face ViT cannot hold this model: mean pooling"]
    assert said.hints == ["hint: these can: vitkit, google, big_vision, timm"]
    assert not Path("out").exists()


def test_the_setting_that_the_hint_names_makes_the_file_and_changes_the_answers(shell) -> None:
    refused = shell("export", "run", "out.pth", "--to", "torchvision")
    assert refused.errors == ["error: torchvision cannot hold this model: the tanh form of GELU"]
    assert refused.hints[0].endswith("; or add block.activation=gelu_erf, and the model answers otherwise")
    said = shell("export", "run", "out.pth", "--to", "torchvision", "block.activation=gelu_erf", "--json")
    assert said.json["changes"] == ["block.activation gelu_tanh → gelu_erf: logits change"]
    theirs = import_torchvision().models.VisionTransformer(32, 8, 1, 1, 64, 128, num_classes=2)
    theirs.load_state_dict(torch.load("out.pth", weights_only=True), strict=True)
    with torch.no_grad():
        answer = theirs.eval()(batch())
    assert close(answer, ours("out.pth"))
    assert not close(answer, ours())


def test_several_settings_are_named_at_once_and_weights_convert_takes_them(shell) -> None:
    save("tiny-eps", "block.norm_eps=1e-12")
    refused = shell("weights", "convert", "tiny-eps", "out.pth", "--to", "torchvision")
    assert "block.activation=gelu_erf block.norm_eps=1e-6" in refused.hints[0]
    settings = ("block.activation=gelu_erf", "block.norm_eps=1e-6")
    said = shell("weights", "convert", "tiny-eps", "out.pth", "--to", "torchvision", *settings, "--json")
    assert said.json["changes"] == [
        "block.activation gelu_tanh → gelu_erf: logits change",
        "block.norm_eps 1e-12 → 1e-06: logits change",
    ]
    config = vitkit.load("out.pth").config
    assert isinstance(config, ViTConfig)
    assert (config.block.activation, config.block.norm_eps) == ("gelu_erf", 1e-6)
    assert not torch.equal(ours("out.pth"), ours("tiny-eps"))


@pytest.mark.parametrize(
    ("name", "to", "settings"),
    [
        ("B/16", "timm", []),
        ("B/16", "google", []),
        ("B/16", "deit", ["block.activation=gelu_erf"]),
        ("R50+B/16", "timm", ["backbone.origin=timm"]),
        ("R50+B/16", "huggingface", []),
        ("BiT-R50x1", "timm", ["origin=timm"]),
        ("BiT-R50x1", "google", []),
    ],
)
def test_a_remedy_is_the_fewest_settings_that_the_format_accepts(name, to, settings) -> None:
    wanted, config = foreign.format_called(to), configure(name)
    assert remedy(wanted, config) == settings
    if settings:
        assert wanted.refuses(config)
        assert wanted.refuses(configure(config, settings=settings)) is None


# Mistakes


def test_what_is_there_is_not_overwritten_without_force(shell) -> None:
    Path("out").mkdir()
    Path("out/mine.txt").write_text("mine")
    for out, error in (("out", "is there already"), ("run", "is what is read"), ("out/mine.txt", "cannot be written")):
        said = shell("export", "run", out)
        assert said.code == 1
        assert error in said.errors[0]
    assert [path.name for path in Path("out").iterdir()] == ["mine.txt"]
    assert shell("export", "run", "out", "--force").code == 0
    assert torch.equal(ours("out"), ours())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("run", "out", "--to", "hugingface"), "nothing can be exported to hugingface"),
        (("nowhere", "out"), "nowhere"),
        (("run", "out", "depth=2"), "a model of other tensors"),
    ],
)
def test_mistakes_are_named(shell, arguments, error) -> None:
    said = shell("export", *arguments)
    assert said.code == 1
    assert error in said.errors[0]
    assert not Path("out").exists()
