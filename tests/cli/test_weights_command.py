"""Tests of the `vitkit weights` command: info, convert, diff, adapt and verify, and their error messages."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli.tiny_runs import Shell, photos, tree
from PIL import Image

import vitkit
from vitkit.data.preprocessing import get_preprocessing
from vitkit.weights import artifact as artifact_io
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import write_format
from vitkit.weights.formats.registry import FORMATS, get_format
from vitkit.weights.io import writers
from vitkit.weights.io.readers import open_tensors
from vitkit.weights.io.writers import save_npz
from vitkit.weights.load import load_bundle
from vitkit.weights.verify import VerificationResult
from vitkit.zoo.registry import configure, create

KEYS = {"format", "model", "classes", "image_size", "missing", "extra", "preprocessing"}
LABELS = ("cat", "dog\x1b[31m", "owl")
SETTINGS = {"width": 64, "heads": 1, "depth": 2, "mlp_dim": 64}


def small() -> ModelBundle:
    """A model that Google's format can hold, with random values in every tensor."""
    config = configure("Ti/16", image_size=32, patch_size=8, num_classes=3, settings=SETTINGS)
    state = create(config).state_dict()
    generator = torch.Generator().manual_seed(0)
    return ModelBundle(
        name="small",
        config=config,
        state={name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()},
        preprocessing=get_preprocessing("paper", image_size=32),
        labels=LABELS,
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as an artifact and as a file in Google's format."""
    path = tmp_path_factory.mktemp("weights")
    artifact_io.write_artifact(path / "small", small())
    write_format(get_format("google"), path / "small.npz", small())
    return path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("small", "small.npz"):
        (tmp_path / name).symlink_to(model_dir / name)
    return Shell(capsys)


def copy_npz(path: Path, *, without: str = "", extra: str = "") -> Path:
    """Copy the file in Google's format without a tensor, or with an extra one."""
    with open_tensors("small.npz") as tensors:
        copied = {name: tensors[name] for name in tensors if name != without}
    save_npz(path, copied | ({extra: torch.zeros(3)} if extra else {}))
    return path


# info


@pytest.mark.parametrize(("file", "name"), [("small", "vitkit"), ("small.npz", "google")])
def test_info_json_has_stable_keys(shell, file, name):
    result = shell("weights", "info", file, "--json")
    assert result.code == 0
    assert result.json.keys() >= KEYS
    assert (result.json["format"], result.json["classes"], result.json["image_size"]) == (name, 3, 32)
    assert result.json["missing"] == result.json["extra"] == []
    assert result.json["preprocessing"]["resize"] == "squash"
    assert result.json["parameters"] == sum(tensor.numel() for tensor in small().state.values())


def test_info_prints_sizes_labels_and_preprocessing(shell):
    result = shell("weights", "info", "small")
    assert result.code == 0
    for part in ("2 layers, 64 wide, 1 head", "4×4 patches of 8×8", "cat, dog\\x1b[31m, owl", "squash to 32×32"):
        assert part in result.out
    assert "\x1b" not in result.out


def test_missing_tensor_is_listed_and_prevents_loading(shell):
    file = copy_npz(Path("less.npz"), without="head/bias")
    result = shell("weights", "info", file, "--json")
    assert (result.code, result.json["missing"], result.json["extra"]) == (0, ["head/bias"], [])
    result = shell("weights", "info", file)
    assert (result.code, "head/bias" in result.out, "warning: " in result.stderr) == (0, True, True)
    result = shell("weights", "convert", file, "out", "--to", "vitkit")
    assert result.errors == ["error: the file has no head/bias"]
    assert not Path("out").exists()


def test_extra_tensor_is_listed(shell):
    result = shell("weights", "info", copy_npz(Path("more.npz"), extra="odd"), "--json")
    assert (result.code, result.json["missing"], result.json["extra"]) == (0, [], ["odd"])


def test_unknown_format_is_an_error_with_a_hint(shell):
    save_npz("odd.npz", {"something": torch.zeros(2)})
    result = shell("weights", "info", "odd.npz")
    assert (result.code, result.out) == (1, "")
    assert "unknown weight format" in result.errors[0]
    assert "--format" in result.hints[0]


def test_resnet_of_big_vision_is_named(shell):
    save_npz("resnet.npz", {"root_block/conv_root/kernel": torch.zeros(7, 7, 3, 64)})
    result = shell("weights", "info", "resnet.npz")
    assert "a ResNet with big_vision's names is not supported" in result.errors[0]
    assert "Big Transfer" in result.hints[0]


def test_weight_file_of_an_artifact_means_the_artifact(shell):
    result = shell("weights", "info", "small/model.safetensors", "--json")
    assert (result.json["format"], result.json["labels"]) == ("vitkit", list(LABELS))


def test_hub_name_is_read_from_the_cache(shell, tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    repository, commit = tmp_path / "cache" / "models--owner--name", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    (repository / "snapshots").mkdir()
    write_format(get_format("huggingface"), repository / "snapshots" / commit, small())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = shell("weights", "info", "hub:owner/name", "--json")
    assert result.code == 0, result.stderr
    assert (result.json["file"], result.json["format"]) == ("hub:owner/name", "huggingface")
    assert shell("weights", "diff", "hub:owner/name", "small", "--json").json["max_difference"] == 0.0


def test_guide_lists_every_format():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "weights.md").read_text(encoding="utf-8")
    table = guide.partition("| format |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `([a-z0-9_-]+)` \|", table, flags=re.MULTILINE)
    assert sorted(named) == sorted(["vitkit", *FORMATS])


# convert


def logits(path: object, *, format: str | None = None) -> torch.Tensor:  # noqa: A002
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return load_bundle(str(path), format=format).build_model()(images)


@pytest.mark.parametrize("to", ["vitkit", "google", "big_vision", "timm", "huggingface"])
def test_convert_keeps_logits(shell, to):
    result = shell("weights", "convert", "small.npz", "out", "--to", to, "--json")
    assert result.code == 0
    assert (result.json["source_format"], result.json["format"], result.json["changes"]) == ("google", to, [])
    assert shell("weights", "info", "out", "--json").json["format"] == to
    assert torch.equal(logits("out"), logits("small.npz"))


def test_convert_prints_only_the_result_to_stdout(shell):
    result = shell("weights", "convert", "small", "out.npz", "--to", "google")
    assert result.stderr == "read small: vitkit artifact, small\n"
    assert result.out.startswith("Written: out.npz\n")


def test_convert_reports_dropped_labels(shell):
    result = shell("weights", "convert", "small", "out.npz", "--to", "google", "--json")
    assert result.json["dropped"] == ["the names of 3 classes"]
    assert shell("weights", "convert", "small", "out", "--to", "huggingface", "--json").json["dropped"] == []


def test_convert_to_unsuitable_format_fails_with_reason(shell):
    result = shell("weights", "convert", "small.npz", "out.pth", "--to", "torchvision")
    assert result.code == 1
    assert result.errors == ["error: torchvision cannot represent this model: tanh GELU"]
    assert "formats that can: vitkit, google, big_vision" in result.hints[0]
    assert not Path("out.pth").exists()


def test_convert_applies_settings_and_reports_them(shell):
    arguments = ("weights", "convert", "small.npz", "out.pth", "--to", "torchvision", "block.activation=gelu_erf")
    result = shell(*arguments, "--json")
    assert result.json["changes"] == ["block.activation gelu_tanh → gelu_erf: logits change"]
    assert "block.activation gelu_tanh → gelu_erf: logits change" in " ".join(shell(*arguments, "--force").out.split())
    erf = replace(small(), config=configure(small().config, settings={"block.activation": "gelu_erf"}))
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Sums of the same numbers in the same order: exact.
        assert torch.equal(logits("out.pth", format="torchvision"), erf.build_model()(images))


def test_convert_refuses_settings_that_change_tensors(shell):
    result = shell("weights", "convert", "small.npz", "out", "--to", "vitkit", "depth=3")
    assert result.code == 1
    assert "change the model's tensors" in result.errors[0]
    assert "vitkit weights adapt" in result.hints[0]
    result = shell("weights", "convert", "small.npz", "out", "--to", "vitkit", "block.activaton=gelu_erf")
    assert result.hints == ["hint: did you mean activation?"]
    assert not Path("out").exists()


def test_convert_overwrites_only_with_force(shell):
    artifact_io.write_artifact("out", small())
    before = tree(Path("out"))
    result = shell("weights", "convert", "small.npz", "out", "--to", "timm")
    assert result.errors == ["error: out already exists"]
    assert result.hints == ["hint: --force (overwrite=True) replaces it"]
    assert tree(Path("out")) == before
    assert shell("weights", "convert", "small.npz", "out", "--to", "timm", "--force").code == 0
    assert shell("weights", "info", "out", "--json").json["format"] == "timm"


def test_source_is_never_overwritten(shell):
    before = tree(Path("small"))
    result = shell("weights", "adapt", "small", "small", "--num-classes", "2", "--force")
    assert result.errors == ["error: small is the source itself"]
    assert tree(Path("small")) == before


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("info", "smal1"), "smal1: no such file or directory", "did you mean small?"),
        (
            ("info", "nowhere/at-all"),
            "nowhere/at-all: no such file or directory, and no published model of that name",
            "for Hugging Face",
        ),
        (("info", "small.npz", "--format", "gogle"), "unknown weight format gogle", "did you mean google?"),
        (
            ("convert", "small", "x", "--to", "vitkitt"),
            "unknown weight format vitkitt",
            "did you mean vitkit?",
        ),
        (("convert", "small", "a/b", "--to", "timm"), "a: no such directory", "create it first: mkdir -p a"),
        (("convert", "nothing", "x", "--to", "timm"), "nothing: no such file or directory", "name a run"),
        (("diff", "small", "smal1.npz"), "smal1.npz: no such file or directory", "did you mean small.npz?"),
        (("adapt", "small", "x", "--labels", "no.txt"), "no.txt: no such file or directory", "labels are a file"),
        (("verify", "smal1"), "smal1: no such file or directory", "did you mean small?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_arguments_give_error_and_hint(shell, arguments, error, hint):
    result = shell("weights", *arguments)
    assert (result.code, result.out) == (1, "")
    assert result.errors == [f"error: {error}"]
    assert result.hints[0].startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "small", "x"),
        ("adapt", "small", "x", "--num-classes", "2", "--labels", "labels.txt"),
        ("adapt", "small", "x", "--image-size", "large"),
        ("adapt", "small", "x", "--pooling", "max"),
        ("infoo", "small"),
    ],
    ids=" ".join,
)
def test_usage_errors_have_exit_code_2(shell, arguments):
    assert shell("weights", *arguments).code == 2


# diff


def test_diff_of_two_formats_of_one_model_is_zero(shell):
    shell("weights", "convert", "small.npz", "theirs", "--to", "huggingface")
    result = shell("weights", "diff", "small", "theirs", "--json").json
    assert result["max_difference"] == 0.0
    assert result["same_weights"]
    assert (result["only_a"], result["only_b"]) == ([], [])
    assert {each["name"] for each in result["tensors"]} == set(small().state)
    assert (result["a"]["format"], result["b"]["format"]) == ("vitkit", "huggingface")


def test_diff_names_and_measures_a_change(shell):
    changed = small()
    changed.state["norm.bias"][3] += 0.5
    artifact_io.write_artifact("changed", changed)
    actual = shell("weights", "diff", "small.npz", "changed", "--json").json
    assert actual["max_difference"] == pytest.approx(0.5, abs=1e-6)  # one rounding of a float32 near 1
    assert [each["name"] for each in actual["tensors"] if each["max_difference"]] == ["norm.bias"]
    result = shell("weights", "diff", "small.npz", "changed")
    assert (result.code, "norm.bias" in result.out) == (0, True)


def test_diff_of_different_shapes(shell):
    shell("weights", "adapt", "small", "large", "--image-size", "48", "--pooling", "mean")
    actual = shell("weights", "diff", "small", "large", "--json").json
    assert actual["only_a"] == ["cls_token"]
    assert actual["config"]["image_size"] == {"a": 32, "b": 48}
    assert actual["config"]["pooling"] == {"a": "class", "b": "mean"}
    assert actual["preprocessing"]["image_size"] == {"a": 32, "b": 48}
    assert (actual["reshaped"], actual["same_weights"]) == (["pos_embed"], False)
    result = shell("weights", "diff", "small", "large").out
    assert "where shapes agree" in result
    assert "1 × 17 × 64 ≠ 1 × 36 × 64" in result


def test_diff_accepts_formats_of_both_files(shell):
    actual = shell(
        "weights", "diff", "small.npz", "small", "--format-a", "google", "--format-b", "vitkit", "--json"
    ).json
    assert (actual["a"]["format"], actual["b"]["format"], actual["max_difference"]) == ("google", "vitkit", 0.0)
    result = shell("weights", "diff", "small.npz", "small", "--format-b", "gogle")
    assert result.errors == ["error: unknown weight format gogle"]


# adapt


def test_adapt_to_the_same_shape_changes_nothing(shell):
    result = shell("weights", "adapt", "small", "out", "--image-size", "32", "--num-classes", "3", "--channels", "3")
    assert result.out.splitlines()[0] == "no change: the model has this shape"
    assert shell("weights", "diff", "small", "out", "--json").json["same"]
    result = shell("weights", "adapt", "small", "out", "--pooling", "class", "--force", "--json")
    assert (result.json["changes"], result.json["identical"]) == ([], True)


def test_adapt_applies_and_reports_each_change(shell):
    options = ("--image-size", "48x64", "--patch-size", "4", "--channels", "1", "--num-classes", "7")
    result = shell("weights", "adapt", "small.npz", "out", *options, "--json")
    assert result.json["changes"] == [
        "patch embedding: patches of 8×8 → 4×4",
        "first kernel: 3 channels → 1",
        "position embeddings: grid 4×4 → 12×16",
        "head: new, for 7 classes instead of 3",
        "preprocessing: image size 32×32 → 48×64",
        "preprocessing: 3 channels → 1, one mean and std",
    ]
    created = artifact_io.read_artifact("out")
    assert (created.preprocessing.image_size, created.preprocessing.channels) == ((48, 64), 1)
    assert created.labels == tuple("0123456")
    assert created.build_model()(torch.rand(1, 1, 48, 64)).shape == (1, 7)


def test_adapt_keeps_weights_of_classes_by_name(shell):
    Path("labels.txt").write_text("owl\nfox\n", encoding="utf-8")
    result = shell("weights", "adapt", "small", "out", "--labels", "labels.txt", "--json")
    assert result.json["changes"] == ["head: 1 of 2 classes kept by name, 1 new (zeros), 2 removed"]
    created = artifact_io.read_artifact("out")
    assert created.labels == ("owl", "fox")
    assert torch.equal(created.state["head.weight"][0], small().state["head.weight"][2])
    assert not created.state["head.weight"][1].any()


def test_adapt_names_numbered_classes(shell):
    Path("labels.json").write_text('["cat", "dog", "owl"]', encoding="utf-8")
    result = shell("weights", "adapt", "small.npz", "out", "--labels", "labels.json", "--json")
    assert result.json["changes"] == ["labels: names for 3 numbered classes"]
    assert artifact_io.read_artifact("out").labels == ("cat", "dog", "owl")
    assert torch.equal(logits("out"), logits("small.npz"))


def test_adapt_replaces_a_head_with_hidden_layer(shell):
    """Rows of the last layer mean nothing without the hidden layer before it."""
    config = configure(small().config, settings={"head.pre_logits": 16})
    state = small().state | {"head.weight": torch.randn(3, 16)}
    drawn = create(config).state_dict()
    state |= {name: tensor for name, tensor in drawn.items() if name not in state}
    artifact_io.write_artifact("hidden", replace(small(), config=config, state=state))
    Path("labels.txt").write_text("owl\nfox\ncat\n", encoding="utf-8")
    result = shell("weights", "adapt", "hidden", "out", "--labels", "labels.txt", "--json")
    assert result.json["changes"] == ["head: new, for 3 classes instead of 3"]
    created = artifact_io.read_artifact("out")
    assert created.config.head.pre_logits is None
    assert not created.state["head.weight"].any()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "contains no labels"),
        ("cat\ndog\ncat\n", "label cat is repeated"),
        ("[1, 2]", "not a list of strings"),
        ("[1,", "invalid JSON list"),
    ],
)
def test_adapt_refuses_invalid_labels(shell, text, error):
    Path("labels.txt").write_text(text, encoding="utf-8")
    result = shell("weights", "adapt", "small", "out", "--labels", "labels.txt")
    assert result.code == 1
    assert error in result.errors[0]


def test_adapt_to_mean_pooling_and_back_gives_a_new_token(shell):
    shell("weights", "adapt", "small", "mean", "--pooling", "mean")
    assert "cls_token" not in artifact_io.read_artifact("mean").state
    result = shell("weights", "adapt", "mean", "back", "--pooling", "class", "--json")
    assert result.json["changes"] == ["pooling: mean → class; class token new (zeros)"]
    assert artifact_io.read_artifact("back").config == small().config


def test_adapt_refuses_image_size_not_divisible_by_patches(shell):
    result = shell("weights", "adapt", "small", "out", "--image-size", "33")
    assert (result.code, len(result.errors), Path("out").exists()) == (1, 1, False)


def test_adapt_refuses_patch_size_of_a_resnet(shell):
    config = configure("BiT-R50x1", image_size=32, num_classes=3, settings={"units": [1]})
    artifact_io.write_artifact("resnet", replace(small(), config=config, state=create(config).state_dict()))
    result = shell("weights", "adapt", "resnet", "out", "--patch-size", "8")
    assert result.errors == ["error: a ResNet has no patches and no class token"]
    assert shell("weights", "adapt", "resnet", "out", "--image-size", "64").code == 0


def test_adapt_to_zero_classes_removes_the_head(shell):
    result = shell("weights", "adapt", "small", "bare", "--num-classes", "0", "--json")
    assert result.json["changes"] == ["head: removed, with its 3 classes; the model returns features"]
    created = artifact_io.read_artifact("bare")
    assert created.labels == ()
    assert created.build_model()(torch.rand(1, 3, 32, 32)).shape == (1, 64)


def test_adapt_reads_labels_of_a_run_or_dataset(shell):
    photos(Path("photos"), ["newt", "owl"], each=2, side=8)
    result = shell("weights", "adapt", "small", "out", "--labels", "photos", "--json")
    assert result.json["changes"] == ["head: 1 of 2 classes kept by name, 1 new (zeros), 2 removed"]
    assert artifact_io.read_artifact("out").labels == ("newt", "owl")
    assert torch.equal(artifact_io.read_artifact("out").state["head.bias"][1], small().state["head.bias"][2])
    result = shell("weights", "adapt", "small.npz", "named", "--labels", "small", "--json")
    assert result.json["changes"] == ["labels: names for 3 numbered classes"]
    assert artifact_io.read_artifact("named").labels == LABELS


def test_adapt_refuses_dataset_without_classes(shell):
    photos(Path("photos"), ["newt"], each=2, side=8)
    result = shell("weights", "adapt", "small", "out", "--labels", "photos/newt")
    assert result.errors == ["error: photos/newt: the images have no classes"]
    assert not Path("out").exists()


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (4, "RGBA")])
def test_finetune_adapts_and_reports_channels(shell, channels, mode):
    photos(Path("photos"), each=6, side=16)
    for path in Path("photos").rglob("*.png"):
        Image.open(path).convert(mode).save(path)
    result = shell.finetune("small", "photos", "run", channels=channels, steps=1)
    assert result.code == 0, result.stderr
    assert f"first kernel: 3 channels → {channels}" in result.stderr
    assert f"preprocessing: 3 channels → {channels}" in result.stderr
    created = artifact_io.read_artifact("run")
    assert (created.config.channels, created.preprocessing.channels, created.config.num_classes) == (
        channels,
        channels,
        2,
    )
    assert shell("weights", "verify", "run").code == 0


def test_finetune_on_gray_images_averages_the_mean(shell):
    artifact_io.write_artifact("deit", replace(small(), preprocessing=get_preprocessing("deit", image_size=32)))
    photos(Path("photos"), each=6, side=16)
    result = shell.finetune("deit", "photos", "run", channels=1, steps=1)
    assert result.code == 0, result.stderr
    assert artifact_io.read_artifact("run").preprocessing.mean == pytest.approx([(0.485 + 0.456 + 0.406) / 3])


def test_adapted_model_can_be_fine_tuned(shell):
    photos(Path("photos"), each=6, side=16)
    shell("weights", "adapt", "small.npz", "start", "--image-size", "16")
    result = shell.finetune("start", "photos", "run", "--json", steps=2)
    assert result.code == 0, result.stderr
    assert shell("weights", "info", "run", "--json").json["labels"] == ["cat", "dog"]


# Interruption and wrong files


@pytest.mark.parametrize(
    "arguments",
    [
        ("adapt", "small", "out", "--num-classes", "2"),
        ("convert", "small", "out", "--to", "vitkit"),
        ("convert", "small", "out", "--to", "timm"),
        ("convert", "small", "out.npz", "--to", "google"),
    ],
    ids=" ".join,
)
def test_interrupted_write_leaves_nothing(shell, arguments, monkeypatch):
    convert, count = writers.as_bytes, iter(range(100))

    def interrupt(*given, **named):
        if next(count) == 5:
            raise KeyboardInterrupt
        return convert(*given, **named)

    monkeypatch.setattr(writers, "as_bytes", interrupt)
    result = shell("weights", *arguments)
    assert (result.code, result.out) == (130, "")
    assert sorted(path.name for path in Path().iterdir()) == ["small", "small.npz"]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("info", "small.npz", "--format", "timm"), "small.npz: cannot be read as timm", "it looks like google"),
        (("verify", "small.npz", "--format", "deit"), "small.npz: cannot be read as deit", "it looks like google"),
        (
            ("convert", "small", "x.safetensors", "--to", "vitkit"),
            "x.safetensors: the output is a directory",
            "name it",
        ),
        (("adapt", "small", "x.npz", "--num-classes", "2"), "x.npz: the output is a directory", "name it"),
        (("info", "text.npz"), "text.npz: is not a weight file", "download it again"),
        (("info", "empty.npz"), "empty.npz: is empty", "download it again"),
        (("adapt", "folder", "x"), "folder: no model in this directory", "name the --out directory"),
        (("verify", "folder"), "folder: no model in this directory", "name the --out directory"),
        (("convert", "small", "a/b", "--to", "google"), "a: no such directory", "create it first"),
        (("convert", "small", "text.npz", "--to", "google"), "text.npz already exists", "--force"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_files_give_error_and_hint(shell, arguments, error, hint):
    Path("text.npz").write_text("these are no weights", encoding="utf-8")
    Path("empty.npz").touch()
    Path("folder").mkdir()
    result = shell("weights", *arguments)
    assert (result.code, result.out) == (1, "")
    assert len(result.errors) == 1
    assert result.errors[0].startswith(f"error: {error}")
    assert result.hints[0].startswith(f"hint: {hint}")


def test_help_lists_every_format(shell):
    for verb, before in (("convert", "One of "), ("info", "detected wrongly: ")):
        result = " ".join(shell("weights", verb, "--help").out.split()).replace("- ", "-")
        named = result.partition(before)[2].partition(".")[0].split(", ")
        assert sorted(named) == sorted(["vitkit", *FORMATS])


# verify


def test_verify_uses_the_stored_logits_of_an_adapted_model(shell):
    shell("weights", "adapt", "small", "out", "--image-size", "48x16", "--channels", "5", "--pooling", "mean")
    result = shell("weights", "verify", "out", "--json")
    assert (result.code, result.json["agrees"], result.json["format"]) == (0, True, "vitkit")
    assert result.json["max_difference"] == 0.0  # the same machine, the same kernels
    assert "vitkit artifact (vitkit)" in shell("weights", "verify", "out").out


def test_verify_names_a_damaged_file(shell):
    artifact_io.write_artifact("out", small())
    with Path("out/model.safetensors").open("ab") as file:
        file.write(b"x")
    result = shell("weights", "verify", "out")
    assert (result.code, result.out) == (1, "")
    assert result.errors[0].startswith("error: out/model.safetensors: damaged")


AGREES = VerificationResult(
    max_difference=2e-7, against="stored reference logits", tolerance=1e-5, format="google", model="Ti/16"
)


@pytest.fixture
def verification(monkeypatch: pytest.MonkeyPatch) -> dict[str, VerificationResult]:
    """The result that `verify` returns, whatever the file."""
    results = {"next": AGREES}
    monkeypatch.setattr(vitkit, "verify", lambda source, *, format=None: results["next"])  # noqa: A006
    return results


@pytest.mark.parametrize(
    ("result", "code", "words"),
    [
        (AGREES, 0, ["stored reference logits", "2e-07", "agrees"]),
        (replace(AGREES, max_difference=0.3), 1, ["0.3", "does not agree"]),
        (replace(AGREES, max_difference=float("nan")), 1, ["not finite"]),
        (replace(AGREES, max_difference=None, against="nothing to compare with"), 1, ["nothing to compare with"]),
    ],
    ids=["agrees", "differs", "broken", "unknown"],
)
def test_verify_prints_the_difference_and_sets_exit_code(shell, verification, result, code, words):
    verification["next"] = result
    completed = shell("weights", "verify", "small")
    assert completed.code == code
    assert all(word in completed.out for word in (*words, "Google's vision_transformer (google)", "Ti/16"))
    completed = shell("weights", "verify", "small", "--json")
    assert completed.code == code
    assert completed.json.keys() >= {"max_difference", "against", "tolerance", "agrees"}


def test_json_is_the_only_output_on_stdout(shell):
    for arguments in (
        ("info", "small"),
        ("convert", "small", "c", "--to", "google"),
        ("diff", "small", "small.npz"),
        ("adapt", "small", "a", "--image-size", "16"),
        ("verify", "small"),
    ):
        json.loads(shell("weights", *arguments, "--json").out)
