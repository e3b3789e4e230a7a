"""`vitkit export`: a run is written for another library, which loads it with its labels; or why it cannot be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.tiny_runs import Shell, photos
from oracles import import_timm, import_torchvision, import_transformers
from packaging.version import Version
from PIL import Image

import vitkit
from vitkit.core.config import parse_assignments
from vitkit.data.preprocessing import Preprocessing, get_preprocessing
from vitkit.exporters import weights
from vitkit.exporters.atomic_output import read_verification
from vitkit.exporters.exporter import RUNTIMES
from vitkit.model.config import BiTConfig, ViTConfig
from vitkit.model.resnet import BiT
from vitkit.weights import convert
from vitkit.weights.convert import suggest_settings
from vitkit.weights.formats.registry import FORMATS, get_format
from vitkit.zoo.registry import configure

SIZES = ("width=64", "depth=1", "heads=1", "mlp_dim=128")
SQUASHED = Preprocessing(image_size=32)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Skip the run of example.py, which test_export_weights.py covers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights, "verify_example", lambda *_, **__: {"skipped": "not in this test"})
    save("run")
    return Shell(capsys)


def save(name: str, *settings: str, how: Preprocessing = SQUASHED) -> None:
    model = vitkit.create(
        "Ti/16", image_size=32, patch_size=8, num_classes=2, settings=parse_assignments((*SIZES, *settings))
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    vitkit.save(model, name, labels=["cat", "dog"], preprocessing=how)


@torch.no_grad()
def logits_of(path: str = "run", *, format: str | None = None) -> torch.Tensor:  # noqa: A002
    return vitkit.load(path, format=format)(batch())


def batch() -> torch.Tensor:
    return torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def close(theirs: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(theirs, expected, rtol=1e-5, atol=1e-5)  # other float32 kernels


def photo() -> Image.Image:
    """Return shapes with edges and noise, larger than the model input."""
    generator = np.random.default_rng(0)
    shapes = Image.fromarray(generator.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize((240, 180))
    noise = generator.integers(-9, 10, (180, 240, 3))
    return Image.fromarray(np.clip(np.asarray(shapes) + noise, 0, 255).astype(np.uint8))


def test_transformers_loads_the_directory_with_labels(shell) -> None:
    transformers = import_transformers()
    result = shell("export", "run", "out", "--to", "huggingface")
    assert result.code == 0
    assert result.out.splitlines()[-1] == 'transformers.AutoModelForImageClassification.from_pretrained("out")'
    theirs, report = transformers.ViTForImageClassification.from_pretrained("out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert close(theirs.eval()(batch()).logits, logits_of())
    assert theirs.config.id2label == {0: "cat", 1: "dog"}
    assert vitkit.load("out").labels == ("cat", "dog")


@pytest.mark.parametrize(
    "how",
    [
        SQUASHED,
        Preprocessing(image_size=32, interpolation="bicubic", mean=(0.48, 0.46, 0.41), std=(0.23, 0.22, 0.23)),
        get_preprocessing("deit", image_size=32),
    ],
    ids=["squash", "bicubic", "crop"],
)
def test_transformers_image_processor_gives_equal_pixels(shell, how) -> None:
    transformers = import_transformers()
    if Version(transformers.__version__) < Version("5.4"):
        pytest.skip("before transformers 5.4, the backend of an image processor cannot be chosen")
    save("other", how=how)
    assert shell("export", "other", "out", "--to", "huggingface").code == 0
    theirs = transformers.AutoImageProcessor.from_pretrained("out", backend="pil")
    pixels = theirs(photo(), return_tensors="pt")["pixel_values"]
    expected = vitkit.load("other").preprocess(photo())
    assert pixels.shape == expected.shape
    assert (pixels - expected).abs().max() <= 1e-6  # another order of rounding


def test_torchvision_processor_is_within_one_level(shell) -> None:
    """transformers uses torchvision if it is installed, which rounds differently from Pillow."""
    import_torchvision()
    transformers = import_transformers()
    shell("export", "run", "out", "--to", "huggingface")
    theirs = transformers.ViTImageProcessor.from_pretrained("out")
    pixels = theirs(photo(), return_tensors="pt")["pixel_values"]
    assert (pixels - vitkit.load("run").preprocess(photo())).abs().max() <= 2 / 255 + 1e-6


def test_timm_loads_the_directory_and_preprocesses_equally(shell) -> None:
    timm = import_timm()
    result = shell("export", "run", "out", "--to", "timm")
    assert result.code == 0
    assert result.out.splitlines()[-1] == 'timm.create_model("local-dir:out", pretrained=True)'
    theirs = timm.create_model("local-dir:out", pretrained=True).eval()
    with torch.no_grad():
        assert close(theirs(batch()), logits_of())
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    assert (transform(photo())[None] - vitkit.load("run").preprocess(photo())).abs().max() <= 1e-6


def test_finetuned_run_loads_in_timm_and_transformers(shell, tmp_path) -> None:
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
    of_onnx = RUNTIMES["onnx"].load(Path("onnx"))(pixels.numpy())["logits"]
    assert (of_timm - expected).abs().max() <= 2e-6  # another order of summation
    assert (of_transformers - expected).abs().max() <= 2e-6
    assert np.abs(of_onnx - expected.numpy()).max() <= 1e-4


def test_json_has_files_dropped_items_and_verification(shell) -> None:
    result = shell("export", "run", "model.npz", "--to", "google", "--json")
    assert result.code == 0
    assert {key: result.json[key] for key in ("format", "files", "num_classes", "changes", "differs")} == {
        "format": "google",
        "files": ["model.npz", "model.npz.verification.json"],
        "num_classes": 2,
        "changes": [],
        "differs": [],
    }
    assert result.json["dropped"] == [
        "the names of 2 classes",
        "the preprocessing: squash to 32×32, bilinear, mean 0.5, std 0.5",
    ]
    assert result.json["summary"].startswith("read back: 20 identical tensors; read by vitkit, 25 images")
    verification = result.json["verification"]
    assert verification["top1_agreement"] == 1
    assert verification["largest_difference"] == 0  # the same weights and code
    assert verification["library"].get("images") in (None, 25)


def test_different_preprocessing_of_a_library_is_reported(shell) -> None:
    save("paper", how=get_preprocessing("paper", image_size=32))
    for to, library in (("huggingface", "transformers"), ("timm", "timm")):
        result = shell("export", "paper", f"for-{to}", "--to", to, "--json").json
        assert result["dropped"] == []
        assert result["differs"][0].startswith(f"resizing without antialias: {library} always uses antialiasing")
        assert result["differs"][1:] == [f"positions.origin google → {to}"]
    save("cropped", how=get_preprocessing("deit", image_size=32))
    assert "shift it by one pixel" in shell("export", "cropped", "out", "--json").json["differs"][0]


def test_image_size_that_is_not_stored_is_reported(shell) -> None:
    model = BiT(BiTConfig(units=(1,), num_classes=2, image_size=64))
    vitkit.save(model, "resnet", labels=["cat", "dog"])
    result = shell("export", "resnet", "out.npz", "--to", "bit", "--json")
    assert result.code == 0
    assert result.json["differs"] == ["image_size 64 → 224"]


def test_changed_weights_are_an_error(shell, monkeypatch) -> None:
    def damage(path: Path, tensors: Any, metadata: dict[str, str]) -> None:
        save_safetensors(path, {name: tensors[name] + (name == "vit.layernorm.bias") for name in tensors}, metadata)

    save_safetensors = convert.save_safetensors
    monkeypatch.setattr(convert, "save_safetensors", damage)
    result = shell("export", "run", "out")
    assert result.code == 1
    assert result.errors == ["error: out: norm.bias is not what was written"]


def test_changed_configuration_is_an_error(shell, monkeypatch) -> None:
    hub = get_format("huggingface")
    changed = replace(hub, make_config=lambda *given: hub.make_config(*given) | {"hidden_act": "gelu"})
    monkeypatch.setitem(FORMATS, "huggingface", changed)
    result = shell("export", "run", "out")
    assert result.code == 1
    assert "logits differ from those of the model that was written" in result.errors[0]
    assert "block.activation gelu_tanh → gelu_erf" in result.errors[0]


def test_repeated_weight_export_changes_nothing(shell) -> None:
    for out, to in (("hf", "huggingface"), ("model.npz", "google")):
        assert shell("export", "run", out, "--to", to).code == 0
        before = Path(out).stat().st_mtime_ns
        again = shell("export", "run", out, "--to", to)
        assert again.code == 0
        assert f"already complete: {out}" in again.stderr
        assert Path(out).stat().st_mtime_ns == before
        assert again.out.startswith("Already complete")
    verification = read_verification(Path("hf"))
    assert verification is not None
    assert verification["top1_agreement"] == 1
    save("run", "block.norm_eps=1e-5")
    assert shell("export", "run", "hf", "--to", "huggingface").errors == ["error: hf already exists"]


def test_unsupported_model_is_rejected_with_a_reason(shell) -> None:
    save("averaging", "pooling=mean")
    result = shell("export", "averaging", "out", "--to", "huggingface")
    assert result.code == 1
    assert result.errors == ["error: Hugging Face ViT cannot represent this model: mean pooling"]
    assert result.hints == ["hint: formats that can: vitkit, google, big_vision, timm"]
    assert not Path("out").exists()


def test_suggested_setting_makes_the_export_possible(shell) -> None:
    refused = shell("export", "run", "out.pth", "--to", "torchvision")
    assert refused.errors == ["error: torchvision cannot represent this model: tanh GELU"]
    assert refused.hints[0].endswith("; or add block.activation=gelu_erf, which changes the logits")
    result = shell("export", "run", "out.pth", "--to", "torchvision", "block.activation=gelu_erf", "--json")
    assert result.json["changes"] == ["block.activation gelu_tanh → gelu_erf: logits change"]
    theirs = import_torchvision().models.VisionTransformer(32, 8, 1, 1, 64, 128, num_classes=2)
    theirs.load_state_dict(torch.load("out.pth", weights_only=True), strict=True)
    with torch.no_grad():
        answer = theirs.eval()(batch())
    assert close(answer, logits_of("out.pth", format="torchvision"))
    assert not close(answer, logits_of())


def test_several_settings_are_suggested_at_once(shell) -> None:
    save("tiny-eps", "block.norm_eps=1e-12")
    refused = shell("weights", "convert", "tiny-eps", "out.pth", "--to", "torchvision")
    assert "block.activation=gelu_erf block.norm_eps=1e-06" in refused.hints[0]
    settings = ("block.activation=gelu_erf", "block.norm_eps=1e-6")
    result = shell("weights", "convert", "tiny-eps", "out.pth", "--to", "torchvision", *settings, "--json")
    assert result.json["changes"] == [
        "block.activation gelu_tanh → gelu_erf: logits change",
        "block.norm_eps 1e-12 → 1e-06: logits change",
    ]
    config = vitkit.load("out.pth", format="torchvision").config
    assert isinstance(config, ViTConfig)
    assert (config.block.activation, config.block.norm_eps) == ("gelu_erf", 1e-6)
    assert not torch.equal(logits_of("out.pth", format="torchvision"), logits_of("tiny-eps"))


@pytest.mark.parametrize(
    ("name", "to", "settings"),
    [
        ("B/16", "timm", {}),
        ("B/16", "google", {}),
        ("B/16", "deit", {"block.activation": "gelu_erf"}),
        ("R50+B/16", "timm", {"backbone.origin": "timm"}),
        ("R50+B/16", "huggingface", {}),
        ("BiT-R50x1", "timm", {"origin": "timm"}),
        ("BiT-R50x1", "google", {}),
    ],
)
def test_suggestion_has_the_fewest_settings(name, to, settings) -> None:
    expected, config = get_format(to), configure(name)
    assert suggest_settings(expected, config) == settings
    if settings:
        assert expected.unsupported_reason(config)
        assert expected.unsupported_reason(configure(config, settings=settings)) is None


def test_existing_files_need_force(shell) -> None:
    Path("out").mkdir()
    Path("out/mine.txt").write_text("mine")
    for out, error in (
        ("out", "already exists"),
        ("run", "is the source itself"),
        ("out/mine.txt", "cannot be written"),
    ):
        result = shell("export", "run", out)
        assert result.code == 1
        assert error in result.errors[0]
    assert [path.name for path in Path("out").iterdir()] == ["mine.txt"]
    assert shell("export", "run", "out", "--force").code == 0
    assert torch.equal(logits_of("out"), logits_of())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("run", "out", "--to", "hugingface"), "unknown export format hugingface"),
        (("nowhere", "out"), "nowhere"),
        (("run", "out", "depth=2"), "change the model's tensors"),
    ],
)
def test_invalid_arguments_are_reported(shell, arguments, error) -> None:
    result = shell("export", *arguments)
    assert result.code == 1
    assert error in result.errors[0]
    assert not Path("out").exists()
