"""Models and weights: sources, pretrained weights in other shapes, artifacts, results and errors."""

import json
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.cli.main import main
from vitkit.core.errors import ArgumentError, ConfigError, UnknownNameError, WeightsError
from vitkit.core.result import Result
from vitkit.model.vit import ViT
from vitkit.weights import artifact as artifact_io
from vitkit.zoo.pretrained import get_pretrained_names

TINY = {"width": 64, "depth": 1, "heads": 1, "mlp_dim": 64}


def make_model(num_classes: int = 3) -> ViT:
    model = vitkit.create("Ti/16", image_size=32, num_classes=num_classes, settings=TINY)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    assert isinstance(model, ViT)
    return model


# Sources


def wrap_in_ddp(model: ViT) -> torch.nn.Module:
    wrapper = torch.nn.Module()
    wrapper.module = model
    return wrapper


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # importing torch.compile's backend
def test_model_is_a_source_with_and_without_wrappers(tmp_path: Path) -> None:
    model = make_model()
    for source in (model, torch.compile(model), wrap_in_ddp(model), torch.compile(wrap_in_ddp(model))):
        loaded = vitkit.load(source)
        assert not loaded.training
        assert vitkit.diff_weights(loaded, model).is_same
        path = vitkit.save(source, tmp_path / "model")
        assert vitkit.load(path).num_classes == 3
    assert model.training
    with torch.no_grad():
        loaded.head.weight.zero_()
    assert model.head.weight.any()


def test_other_modules_are_refused() -> None:
    with pytest.raises(WeightsError, match="Linear is not a model of vitkit"):
        vitkit.load(torch.nn.Linear(2, 2))


@pytest.mark.usefixtures("hub")
def test_published_names_are_sources() -> None:
    base = vitkit.load("google/vit-base-patch16-224")
    assert (base.num_classes, base.config.width, base.labels[1]) == (1000, 768, "class 1")
    assert vitkit.load("hub:me/cats@main").labels == ("cat", "dog", "owl")
    for name in ("Ti/16", "vit_tiny_patch16_224", "vit_tiny_patch16_224.augreg_in21k_ft_in1k"):
        assert vitkit.describe_weights(name).model == "Ti/16"
    assert vitkit.describe_weights("Ti/16").file == "Ti/16"


def test_every_name_is_listed_with_weights_on_the_hub() -> None:
    names = vitkit.list_models(pretrained=True)
    assert {"B/16", "vit_base_patch16_224", "google/vit-base-patch16-224"} < set(names)
    assert list(names) == list(get_pretrained_names())
    assert all(row.source.startswith("hub:") for row in get_pretrained_names().values())
    assert str(names).splitlines()[0].split() == ["name", "model", "pixels", "top-1", "source"]
    assert "<td style='text-align:left'>B/16</td>" in vitkit.list_models("b/*")._repr_html_()


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        (
            "me/cats",
            "me/cats: no such file or directory, and no published model of that name",
            'for Hugging Face: vitkit.load("hub:me/cats")',
        ),
        (
            "vit_base_patch16_22",
            "vit_base_patch16_22: no such file or directory",
            "did you mean vit_base_patch16_224?",
        ),
        ("b.npz", "b.npz: no such file or directory", "name a run, a weight file, hub:owner/name or embedded"),
    ],
)
def test_unknown_source_is_an_error_and_no_lookup(source: str, message: str, hint: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError) as raised:
        vitkit.load(source)
    assert str(raised.value) == f"{message}\nhint: {hint}"


@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_training_frameworks_are_removed(prefix: str, tmp_path: Path) -> None:
    model = vitkit.create("Ti/16", image_size=32, num_classes=3, settings={"depth": 1})
    state = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    for name, content in (("plain.pt", state), ("lit.ckpt", {"state_dict": state, "epoch": 3, "hyper_parameters": {}})):
        torch.save(content, tmp_path / name)
        assert vitkit.load(tmp_path / name, format="timm:vit_tiny_patch16_224").num_classes == 3


# Pretrained weights


@pytest.mark.usefixtures("hub")
def test_pretrained_weights_get_a_new_head(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="vitkit"):
        model = vitkit.create("vit_tiny_patch16_224", pretrained=True, num_classes=10, image_size=64)
    assert model.training
    assert (model.num_classes, model.config.image_size, model.preprocess.image_size) == (10, 64, 64)
    assert model.labels == tuple(map(str, range(10)))
    assert not model.head.weight.any()
    assert model.config.block.activation == "gelu_erf"  # as the weights were trained
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert "head: new, for 10 classes instead of 1000" in caplog.text
    assert "position embeddings: grid 14×14 → 4×4" in caplog.text
    whole = vitkit.load("Ti/16")
    assert torch.equal(model.blocks[3].attn.qkv.weight, whole.blocks[3].attn.qkv.weight)
    assert vitkit.create("Ti/16", pretrained=True).num_classes == 1000


def test_pretrained_takes_any_source() -> None:
    source = make_model()
    source.labels = ("cat", "dog", "owl")
    same = vitkit.create("Ti/16", pretrained=source, image_size=32, settings=TINY, dtype=torch.bfloat16)
    assert (same.labels, same.dtype, same.training) == (source.labels, torch.bfloat16, True)
    other = vitkit.create(source.config, pretrained=source, num_classes=5, patch_size=8, channels=1)
    assert other(torch.rand(1, 1, 32, 32)).shape == (1, 5)
    mean = vitkit.create("Ti/16", pretrained=source, image_size=32, settings=TINY | {"pooling": "mean"})
    assert mean.config.pooling == "mean"
    assert source.num_classes == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "S/16", "pretrained": make_model}, WeightsError, "the weights are of another model"),
        ({"model": "vit_b_16", "pretrained": True}, UnknownNameError, "vit_b_16 has no default weights on the hub"),
        ({"model": "B/61", "pretrained": True}, UnknownNameError, "unknown model B/61"),
        ({"model": "Ti/16", "classes": 10}, ArgumentError, "use num_classes=10"),
        ({"model": "Ti/16", "settings": {"depht": 2}}, ConfigError, "did you mean depth"),
    ],
)
def test_wrong_arguments_of_create(arguments, error, message) -> None:
    values = {key: value() if callable(value) else value for key, value in arguments.items()}
    with pytest.raises(error, match=message):
        vitkit.create(**values)
    if values.get("pretrained") is True:
        with pytest.raises(ConfigError, match="needs the name of a model"):
            vitkit.create(make_model().config, pretrained=True)


def test_offline_error_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(WeightsError) as raised:
        vitkit.create("B/16", pretrained=True)
    message = f"vit_base_patch16_224: not in the hub cache ({tmp_path}), and the hub cannot be reached"
    assert raised.value.message == message
    assert raised.value.hint == 'unset HF_HUB_OFFLINE and connect once, or pass pretrained="path/to/weights"'


# Artifacts


def test_save_replaces_an_artifact_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = vitkit.save(make_model(), str(tmp_path / "new" / "model"))
    assert path == tmp_path / "new" / "model"
    vitkit.save(make_model(5), path)
    assert vitkit.load(path).num_classes == 5

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(artifact_io, "write_checksums", fail)
    for target in (path, tmp_path / "other"):
        with pytest.raises(OSError, match="disk full"):
            vitkit.save(make_model(2), target)
    assert vitkit.load(path).num_classes == 5
    assert sorted(entry.name for entry in tmp_path.rglob("*") if entry.is_dir()) == ["model", "new"]


def test_save_refuses_other_directories(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    (tmp_path / "file").touch()
    vitkit.save(make_model(), tmp_path / "run")
    (tmp_path / "run" / "config.toml").touch()
    for name, message in (("photos", "cat.jpg"), ("run", "config.toml"), ("file", "is a file")):
        with pytest.raises(WeightsError, match=message):
            vitkit.save(make_model(), tmp_path / name)
    assert vitkit.load(tmp_path / "run").num_classes == 3


# Conversion


def test_broken_link_cannot_become_a_directory(tmp_path: Path) -> None:
    out, model = tmp_path / "out", make_model()
    out.symlink_to("nowhere")
    calls = (
        lambda: vitkit.convert(model, out, to="timm"),
        lambda: vitkit.convert(model, out, to="vitkit"),
        lambda: vitkit.adapt(model, out, num_classes=2),
        lambda: vitkit.export(model, out, to="timm"),
    )
    for call in calls:
        with pytest.raises(WeightsError, match="out: a broken link"):
            call()
    assert out.is_symlink()


def test_convert_names_the_tensors_that_a_format_cannot_hold(tmp_path: Path, capsys) -> None:
    settings = {"width": 64, "depth": 1, "heads": 1, "mlp_dim": 64} | {
        "block": {"activation": "gelu_erf", "layer_scale": 0.5}
    }
    model = vitkit.create("Ti/16", image_size=32, num_classes=3, settings=settings)
    source = vitkit.save(model, tmp_path / "model")
    with pytest.raises(WeightsError, match="cannot represent this model") as raised:
        vitkit.convert(model, tmp_path / "out.pth", to="dinov2")
    assert raised.value.hint is not None
    assert raised.value.hint.endswith("--allow-loss (allow_loss=True), which leaves out head.bias, head.weight")
    arguments = ["weights", "convert", str(source), str(tmp_path / "out.pth"), "--to", "dinov2"]
    assert main(arguments) == 1
    assert not (tmp_path / "out.pth").exists()
    result = vitkit.convert(model, tmp_path / "out.pth", to="dinov2", allow_loss=True)
    assert result.dropped[:2] == ("head.bias", "head.weight")
    assert vitkit.load(tmp_path / "out.pth", format="dinov2").num_classes == 0
    capsys.readouterr()
    assert main([*arguments, "--allow-loss", "--force", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(result.to_dict() | {"source": str(source)}))


def test_unsupported_encoder_is_an_error_whatever_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot represent this model"):
        vitkit.convert(make_model(), tmp_path / "out.pth", to="bit", allow_loss=True)


# Results


def test_results_are_one_line_and_escaped(tmp_path: Path) -> None:
    model = make_model()
    model.name = "<b>"
    path = vitkit.save(model, tmp_path / "model")
    results = [
        vitkit.describe_weights(model),
        vitkit.diff_weights(model, path),
        vitkit.convert(model, tmp_path / "timm", to="timm"),
        vitkit.adapt(model, image_size=48),
        vitkit.verify(path),
        vitkit.cost("Ti/16"),
        vitkit.table6(),
    ]
    for result in results:
        assert isinstance(result, Result)
        assert result.warnings == ()
        assert "\n" not in repr(result)
        assert "<b>" not in result._repr_html_()
        json.dumps(result.to_dict(), allow_nan=False)


def test_cost_is_drawn_by_part() -> None:
    figure = vitkit.cost("Ti/16", image_size=32).plot()
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
