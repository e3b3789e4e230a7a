"""`vitkit weights`: files of any origin are described, converted, compared and adapted, and mistakes are explained."""

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cli.tiny_runs import Shell, photos, tree
from PIL import Image

from vitkit.checkpoints import foreign, native
from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.files import writers
from vitkit.checkpoints.files.readers import open_tensors, save_npz
from vitkit.checkpoints.native import Artefact
from vitkit.data.transforms import preprocessing
from vitkit.zoo.lookup import configure, create

KEYS = {"format", "model", "classes", "image_size", "missing", "extra", "preprocessing"}
LABELS = ("cat", "dog\x1b[31m", "owl")
SETTINGS = ["width=64", "heads=1", "depth=2", "mlp_dim=64"]


def small() -> Artefact:
    """A model of Google's kind whose every tensor has numbers of its own, the head too."""
    config = configure("Ti/16", image_size=32, patch_size=8, classes=3, settings=SETTINGS)
    state = create(config).state_dict()
    generator = torch.Generator().manual_seed(0)
    return Artefact(
        name="small",
        config=config,
        state={name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()},
        preprocessing=preprocessing("paper", image_size=32),
        labels=LABELS,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as an artefact, and as a file of Google's."""
    place = tmp_path_factory.mktemp("weights")
    native.save(place / "small", small())
    write_as(foreign.format_called("google"), place / "small.npz", small())
    return place


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("small", "small.npz"):
        (tmp_path / name).symlink_to(made / name)
    return Shell(capsys)


def rewritten(path: Path, *, without: str = "", extra: str = "") -> Path:
    """A copy of the file of Google's with a tensor less, or one more."""
    with open_tensors("small.npz") as tensors:
        kept = {name: tensors[name] for name in tensors if name != without}
    save_npz(path, kept | ({extra: torch.zeros(3)} if extra else {}))
    return path


# info


@pytest.mark.parametrize(("file", "name"), [("small", "vitkit"), ("small.npz", "google")])
def test_info_has_what_scripts_rely_on(shell, file, name):
    said = shell("weights", "info", file, "--json")
    assert said.code == 0
    assert said.json.keys() >= KEYS
    assert (said.json["format"], said.json["classes"], said.json["image_size"]) == (name, 3, 32)
    assert said.json["missing"] == said.json["extra"] == []
    assert said.json["preprocessing"]["resize"] == "squash"
    assert said.json["parameters"] == sum(tensor.numel() for tensor in small().state.values())


def test_info_says_in_words_what_a_person_asks(shell):
    said = shell("weights", "info", "small")
    assert said.code == 0
    for part in ("2 layers, 64 wide, 1 head", "4×4 patches of 8×8", "cat, dog\\x1b[31m, owl", "squash to 32×32"):
        assert part in said.out
    assert "\x1b" not in said.out


def test_a_file_with_a_tensor_missing_is_still_described_and_not_loaded(shell):
    file = rewritten(Path("less.npz"), without="head/bias")
    said = shell("weights", "info", file, "--json")
    assert (said.code, said.json["missing"], said.json["extra"]) == (0, ["head/bias"], [])
    said = shell("weights", "info", file)
    assert (said.code, "head/bias" in said.out, "warning: " in said.talk) == (0, True, True)
    said = shell("weights", "convert", file, "out", "--to", "vitkit")
    assert said.errors == ["error: the file has no head/bias"]
    assert not Path("out").exists()


def test_a_file_with_a_tensor_too_many_is_still_described(shell):
    said = shell("weights", "info", rewritten(Path("more.npz"), extra="odd"), "--json")
    assert (said.code, said.json["missing"], said.json["extra"]) == (0, [], ["odd"])


def test_a_file_of_no_known_format_is_an_error_with_a_hint(shell):
    save_npz("odd.npz", {"something": torch.zeros(2)})
    said = shell("weights", "info", "odd.npz")
    assert (said.code, said.out) == (1, "")
    assert "of no known format" in said.errors[0]
    assert "--format" in said.hints[0]


def test_the_file_of_weights_in_an_artefact_stands_for_the_artefact(shell):
    said = shell("weights", "info", "small/model.safetensors", "--json")
    assert (said.json["format"], said.json["labels"]) == ("vitkit", list(LABELS))


def test_a_name_on_the_hub_is_read_from_the_cache(shell, tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    repository, commit = tmp_path / "cache" / "models--owner--name", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    (repository / "snapshots").mkdir()
    write_as(foreign.format_called("huggingface"), repository / "snapshots" / commit, small())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = shell("weights", "info", "hub:owner/name", "--json")
    assert said.code == 0, said.talk
    assert (said.json["file"], said.json["format"]) == ("hub:owner/name", "huggingface")
    assert shell("weights", "diff", "hub:owner/name", "small", "--json").json["max_difference"] == 0.0


def test_the_guide_names_every_format_and_no_other():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "weights.md").read_text(encoding="utf-8")
    table = guide.partition("| format |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `([a-z0-9_-]+)` \|", table, flags=re.MULTILINE)
    assert sorted(named) == sorted(["vitkit", *(known.name for known in foreign.FORMATS)])


# convert


def logits(path: object) -> torch.Tensor:
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return foreign.load(str(path)).model()(images)


@pytest.mark.parametrize("to", ["vitkit", "google", "big_vision", "timm", "huggingface"])
def test_a_model_keeps_its_answers_in_every_format_that_can_hold_it(shell, to):
    said = shell("weights", "convert", "small.npz", "out", "--to", to, "--json")
    assert said.code == 0
    assert (said.json["from"], said.json["to"], said.json["changes"]) == ("google", to, [])
    assert shell("weights", "info", "out", "--json").json["format"] == to
    assert torch.equal(logits("out"), logits("small.npz"))


def test_talk_and_result_go_their_own_ways(shell):
    said = shell("weights", "convert", "small", "out.npz", "--to", "google")
    assert said.talk == "read small: vitkit's own, small\n"
    assert said.out.startswith("Written: out.npz\n")


def test_what_a_format_has_no_place_for_is_told(shell):
    said = shell("weights", "convert", "small", "out.npz", "--to", "google", "--json")
    assert said.json["lost"] == ["the names of 3 classes"]
    assert shell("weights", "convert", "small", "out", "--to", "huggingface", "--json").json["lost"] == []


def test_a_format_that_cannot_hold_the_model_is_an_error_with_the_reason(shell):
    said = shell("weights", "convert", "small.npz", "out.pth", "--to", "torchvision")
    assert said.code == 1
    assert said.errors == ["error: torchvision cannot hold this model: the tanh form of GELU"]
    assert "these can: vitkit, google, big_vision" in said.hints[0]
    assert not Path("out.pth").exists()


def test_a_setting_changes_what_is_computed_and_says_so(shell):
    arguments = ("weights", "convert", "small.npz", "out.pth", "--to", "torchvision", "block.activation=gelu_erf")
    said = shell(*arguments, "--json")
    assert said.json["changes"] == ["block.activation gelu_tanh → gelu_erf: logits change"]
    assert "block.activation gelu_tanh → gelu_erf: logits change" in " ".join(shell(*arguments, "--force").out.split())
    erf = replace(small(), config=configure(small().config, settings=["block.activation=gelu_erf"]))
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Sums of the same numbers in the same order: exact.
        assert torch.equal(logits("out.pth"), erf.model()(images))


def test_a_setting_that_asks_for_other_tensors_is_refused(shell):
    said = shell("weights", "convert", "small.npz", "out", "--to", "vitkit", "depth=3")
    assert said.code == 1
    assert "a model of other tensors" in said.errors[0]
    assert "vitkit weights adapt" in said.hints[0]
    said = shell("weights", "convert", "small.npz", "out", "--to", "vitkit", "block.activaton=gelu_erf")
    assert said.hints == ["hint: did you mean activation?"]
    assert not Path("out").exists()


def test_what_is_there_is_not_written_over_without_force(shell):
    native.save("out", small())
    before = tree(Path("out"))
    said = shell("weights", "convert", "small.npz", "out", "--to", "timm")
    assert said.errors == ["error: out is there already"]
    assert said.hints == ["hint: --force writes over it"]
    assert tree(Path("out")) == before
    assert shell("weights", "convert", "small.npz", "out", "--to", "timm", "--force").code == 0
    assert shell("weights", "info", "out", "--json").json["format"] == "timm"


def test_a_model_is_not_written_over_itself(shell):
    before = tree(Path("small"))
    said = shell("weights", "adapt", "small", "small", "--classes", "2", "--force")
    assert said.errors == ["error: small is what is read"]
    assert tree(Path("small")) == before


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("info", "smal1"), "smal1: no such file", "did you mean small?"),
        (("info", "nowhere/at-all"), "nowhere/at-all: no such file", "check the path"),
        (("info", "small.npz", "--format", "gogle"), "no format of weights is called gogle", "did you mean google?"),
        (
            ("convert", "small", "x", "--to", "vitkitt"),
            "no format of weights is called vitkitt",
            "did you mean vitkit?",
        ),
        (("convert", "small", "a/b", "--to", "timm"), "a: no such folder", "make it first: mkdir -p a"),
        (("convert", "nothing", "x", "--to", "timm"), "nothing: no such file", "check the path"),
        (("diff", "small", "smal1.npz"), "smal1.npz: no such file", "did you mean small.npz?"),
        (("adapt", "small", "x", "--labels", "no.txt"), "no.txt: no such file", "--labels names a file"),
        (("verify", "smal1"), "smal1: no such file", "did you mean small?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_explained_in_two_lines(shell, arguments, error, hint, stand_in):
    said = shell("weights", *arguments)
    assert (said.code, said.out) == (1, "")
    assert said.errors == [f"error: {error}"]
    assert said.hints[0].startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "small", "x"),
        ("adapt", "small", "x", "--classes", "2", "--labels", "labels.txt"),
        ("adapt", "small", "x", "--image-size", "large"),
        ("adapt", "small", "x", "--pooling", "max"),
        ("infoo", "small"),
    ],
    ids=" ".join,
)
def test_wrong_use_has_exit_code_2(shell, arguments):
    assert shell("weights", *arguments).code == 2


# diff


def test_the_same_model_in_two_formats_differs_in_no_tensor(shell):
    shell("weights", "convert", "small.npz", "theirs", "--to", "huggingface")
    found = shell("weights", "diff", "small", "theirs", "--json").json
    assert found["max_difference"] == 0.0
    assert found["same_weights"]
    assert (found["only_a"], found["only_b"]) == ([], [])
    assert {each["name"] for each in found["tensors"]} == set(small().state)
    assert (found["a"]["format"], found["b"]["format"]) == ("vitkit", "huggingface")


def test_a_difference_is_named_and_measured(shell):
    changed = small()
    changed.state["norm.bias"][3] += 0.5
    native.save("changed", changed)
    found = shell("weights", "diff", "small.npz", "changed", "--json").json
    assert found["max_difference"] == pytest.approx(0.5, abs=1e-6)  # one rounding of a float32 near 1
    assert [each["name"] for each in found["tensors"] if each["max_difference"]] == ["norm.bias"]
    said = shell("weights", "diff", "small.npz", "changed")
    assert (said.code, "norm.bias" in said.out) == (0, True)


def test_models_of_other_shapes_can_be_compared(shell):
    shell("weights", "adapt", "small", "large", "--image-size", "48", "--pooling", "mean")
    found = shell("weights", "diff", "small", "large", "--json").json
    assert found["only_a"] == ["cls_token"]
    assert found["config"]["image_size"] == {"a": 32, "b": 48}
    assert found["config"]["pooling"] == {"a": "class", "b": "mean"}
    assert found["preprocessing"]["image_size"] == {"a": 32, "b": 48}
    assert (found["reshaped"], found["same_weights"]) == (["pos_embed"], False)
    said = shell("weights", "diff", "small", "large").out
    assert "where shapes agree" in said
    assert "1 × 17 × 64 ≠ 1 × 36 × 64" in said


def test_the_formats_of_both_files_can_be_named(shell):
    found = shell(
        "weights", "diff", "small.npz", "small", "--format-a", "google", "--format-b", "vitkit", "--json"
    ).json
    assert (found["a"]["format"], found["b"]["format"], found["max_difference"]) == ("google", "vitkit", 0.0)
    said = shell("weights", "diff", "small.npz", "small", "--format-b", "gogle")
    assert said.errors == ["error: no format of weights is called gogle"]


# adapt


def test_adapting_to_the_same_shape_is_the_identity_and_says_so(shell):
    said = shell("weights", "adapt", "small", "out", "--image-size", "32", "--classes", "3", "--channels", "3")
    assert said.out.splitlines()[0] == "nothing to change: it has this shape already"
    assert shell("weights", "diff", "small", "out", "--json").json["same"]
    said = shell("weights", "adapt", "small", "out", "--pooling", "class", "--force", "--json")
    assert (said.json["changes"], said.json["identical"]) == ([], True)


def test_each_change_is_printed_and_made(shell):
    options = ("--image-size", "48x64", "--patch-size", "4", "--channels", "1", "--classes", "7")
    said = shell("weights", "adapt", "small.npz", "out", *options, "--json")
    assert said.json["changes"] == [
        "patch embedding: patches of 8×8 → 4×4",
        "first kernel: 3 channels → 1",
        "position embeddings: grid 4×4 → 12×16",
        "head: new, for 7 classes instead of 3",
        "preprocessing: images of 32×32 → 48×64",
        "preprocessing: 3 channels → 1, of one mean and deviation",
    ]
    made = native.load("out")
    assert (made.preprocessing.image_size, made.preprocessing.channels) == ((48, 64), 1)
    assert made.labels == tuple("0123456")
    assert made.model()(torch.rand(1, 1, 48, 64)).shape == (1, 7)


def test_classes_of_the_same_name_keep_their_weights(shell):
    Path("labels.txt").write_text("owl\nfox\n", encoding="utf-8")
    said = shell("weights", "adapt", "small", "out", "--labels", "labels.txt", "--json")
    assert said.json["changes"] == ["head: 1 of 2 classes kept by name, 1 new and zero, 2 left out"]
    made = native.load("out")
    assert made.labels == ("owl", "fox")
    assert torch.equal(made.state["head.weight"][0], small().state["head.weight"][2])
    assert not made.state["head.weight"][1].any()


def test_labels_may_name_classes_that_had_numbers(shell):
    Path("labels.json").write_text('["cat", "dog", "owl"]', encoding="utf-8")
    said = shell("weights", "adapt", "small.npz", "out", "--labels", "labels.json", "--json")
    assert said.json["changes"] == ["labels: names for 3 classes that had numbers"]
    assert native.load("out").labels == ("cat", "dog", "owl")
    assert torch.equal(logits("out"), logits("small.npz"))


def test_other_labels_under_a_hidden_layer_get_a_new_head(shell):
    """The rows of the last layer would be kept, but those of the layer before it mean nothing by themselves."""
    config = configure(small().config, settings=["head.pre_logits=16"])
    state = small().state | {"head.weight": torch.randn(3, 16)}
    drawn = create(config).state_dict()
    state |= {name: tensor for name, tensor in drawn.items() if name not in state}
    native.save("hidden", replace(small(), config=config, state=state))
    Path("labels.txt").write_text("owl\nfox\ncat\n", encoding="utf-8")
    said = shell("weights", "adapt", "hidden", "out", "--labels", "labels.txt", "--json")
    assert said.json["changes"] == ["head: new, for 3 classes instead of 3"]
    made = native.load("out")
    assert made.config.head.pre_logits is None
    assert not made.state["head.weight"].any()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no labels in it"),
        ("cat\ndog\ncat\n", "two classes are called cat"),
        ("[1, 2]", "not a list of names"),
        ("[1,", "not a JSON list"),
    ],
)
def test_labels_that_are_none_are_refused(shell, text, error):
    Path("labels.txt").write_text(text, encoding="utf-8")
    said = shell("weights", "adapt", "small", "out", "--labels", "labels.txt")
    assert said.code == 1
    assert error in said.errors[0]


def test_pooling_by_the_mean_and_back_gives_a_token_that_is_new(shell):
    shell("weights", "adapt", "small", "mean", "--pooling", "mean")
    assert "cls_token" not in native.load("mean").state
    said = shell("weights", "adapt", "mean", "back", "--pooling", "class", "--json")
    assert said.json["changes"] == ["pooling: mean → class; the class token is new, and zero"]
    assert native.load("back").config == small().config


def test_an_image_that_patches_do_not_fill_is_refused(shell):
    said = shell("weights", "adapt", "small", "out", "--image-size", "33")
    assert (said.code, len(said.errors), Path("out").exists()) == (1, 1, False)


def test_a_resnet_has_no_patches_to_adapt(shell):
    config = configure("BiT-R50x1", image_size=32, classes=3, settings=["units=[1]"])
    native.save("resnet", replace(small(), config=config, state=create(config).state_dict()))
    said = shell("weights", "adapt", "resnet", "out", "--patch-size", "8")
    assert said.errors == ["error: a ResNet has no patches and no class token"]
    assert shell("weights", "adapt", "resnet", "out", "--image-size", "64").code == 0


def test_no_classes_are_no_head(shell):
    said = shell("weights", "adapt", "small", "bare", "--classes", "0", "--json")
    assert said.json["changes"] == ["head: left out, with its 3 classes; the model gives features"]
    made = native.load("bare")
    assert made.labels == ()
    assert made.model()(torch.rand(1, 3, 32, 32)).shape == (1, 64)


def test_labels_are_taken_from_a_run_or_from_a_folder_of_images(shell):
    photos(Path("photos"), ["newt", "owl"], each=2, side=8)
    said = shell("weights", "adapt", "small", "out", "--labels", "photos", "--json")
    assert said.json["changes"] == ["head: 1 of 2 classes kept by name, 1 new and zero, 2 left out"]
    assert native.load("out").labels == ("newt", "owl")
    assert torch.equal(native.load("out").state["head.bias"][1], small().state["head.bias"][2])
    said = shell("weights", "adapt", "small.npz", "named", "--labels", "small", "--json")
    assert said.json["changes"] == ["labels: names for 3 classes that had numbers"]
    assert native.load("named").labels == LABELS


def test_images_without_classes_give_no_labels(shell):
    photos(Path("photos"), ["newt"], each=2, side=8)
    said = shell("weights", "adapt", "small", "out", "--labels", "photos/newt")
    assert said.errors == ["error: photos/newt: its images have no classes"]
    assert not Path("out").exists()


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (4, "RGBA")])
def test_weights_of_three_channels_are_fine_tuned_on_others_and_it_is_said(shell, channels, mode):
    photos(Path("photos"), each=6, side=16)
    for path in Path("photos").rglob("*.png"):
        Image.open(path).convert(mode).save(path)
    said = shell.finetune("small", "photos", "run", channels=channels, steps=1)
    assert said.code == 0, said.talk
    assert f"first kernel: 3 channels → {channels}" in said.talk
    assert f"preprocessing: 3 channels → {channels}" in said.talk
    made = native.load("run")
    assert (made.config.channels, made.preprocessing.channels, made.config.classes) == (channels, channels, 2)
    assert shell("weights", "verify", "run").code == 0


def test_weights_of_imagenets_means_are_fine_tuned_on_grey_images(shell):
    """A mean for each channel becomes one, and the kernel takes up the difference."""
    native.save("deit", replace(small(), preprocessing=preprocessing("deit", image_size=32)))
    photos(Path("photos"), each=6, side=16)
    said = shell.finetune("deit", "photos", "run", channels=1, steps=1)
    assert said.code == 0, said.talk
    assert native.load("run").preprocessing.mean == pytest.approx([(0.485 + 0.456 + 0.406) / 3])


def test_what_was_adapted_can_be_fine_tuned(shell):
    photos(Path("photos"), each=6, side=16)
    shell("weights", "adapt", "small.npz", "start", "--image-size", "16")
    said = shell.finetune("start", "photos", "run", "--json", steps=2)
    assert said.code == 0, said.talk
    assert shell("weights", "info", "run", "--json").json["labels"] == ["cat", "dog"]


# Interrupted, or in the wrong place


@pytest.mark.parametrize(
    "arguments",
    [
        ("adapt", "small", "out", "--classes", "2"),
        ("convert", "small", "out", "--to", "vitkit"),
        ("convert", "small", "out", "--to", "timm"),
        ("convert", "small", "out.npz", "--to", "google"),
    ],
    ids=" ".join,
)
def test_an_interruption_while_writing_leaves_nothing(shell, arguments, monkeypatch):
    plain, count = writers.plain, iter(range(100))

    def interrupted(*given, **named):
        if next(count) == 5:
            raise KeyboardInterrupt
        return plain(*given, **named)

    monkeypatch.setattr(writers, "plain", interrupted)
    said = shell("weights", *arguments)
    assert (said.code, said.out) == (130, "")
    assert sorted(path.name for path in Path().iterdir()) == ["small", "small.npz"]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("info", "small.npz", "--format", "timm"), "small.npz: not read as timm", "it looks like google; leave"),
        (("verify", "small.npz", "--format", "deit"), "small.npz: not read as deit", "it looks like google; leave"),
        (("convert", "small", "x.safetensors", "--to", "vitkit"), "x.safetensors: this would be a folder", "name it x"),
        (("adapt", "small", "x.npz", "--classes", "2"), "x.npz: this would be a folder", "name it x"),
        (("info", "text.npz"), "text.npz: does not begin as a file of weights does", "fetch it again"),
        (("info", "empty.npz"), "empty.npz: is empty", "fetch it again"),
        (("adapt", "folder", "x"), "folder: has no weights", "name the file in it"),
        (("verify", "folder"), "folder: has no weights", "name the file in it"),
        (("convert", "small", "a/b", "--to", "google"), "a: no such folder", "make it first"),
        (("convert", "small", "text.npz", "--to", "google"), "text.npz is there already", "--force writes over it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_files_and_places_are_explained_in_two_lines(shell, arguments, error, hint):
    Path("text.npz").write_text("these are no weights", encoding="utf-8")
    Path("empty.npz").touch()
    Path("folder").mkdir()
    said = shell("weights", *arguments)
    assert (said.code, said.out) == (1, "")
    assert len(said.errors) == 1
    assert said.errors[0].startswith(f"error: {error}")
    assert said.hints[0].startswith(f"hint: {hint}")


def test_help_names_every_format_and_no_other(shell):
    for verb, before in (("convert", "One of "), ("info", "found wrong: ")):
        said = " ".join(shell("weights", verb, "--help").out.split()).replace("- ", "-")
        named = said.partition(before)[2].partition(".")[0].split(", ")
        assert sorted(named) == sorted(["vitkit", *(known.name for known in foreign.FORMATS)])


# verify


def test_an_adapted_model_is_verified_by_logits_of_its_own(shell):
    shell("weights", "adapt", "small", "out", "--image-size", "48x16", "--channels", "5", "--pooling", "mean")
    said = shell("weights", "verify", "out", "--json")
    assert (said.code, said.json["agrees"], said.json["format"]) == (0, True, "vitkit")
    assert said.json["max_difference"] == 0.0  # the same machine, the same kernels
    assert "vitkit's own (vitkit)" in shell("weights", "verify", "out").out


def test_a_damaged_artefact_is_named(shell):
    native.save("out", small())
    with Path("out/model.safetensors").open("ab") as file:
        file.write(b"x")
    said = shell("weights", "verify", "out")
    assert (said.code, said.out) == (1, "")
    assert said.errors[0].startswith("error: out/model.safetensors: damaged")


@dataclass(frozen=True)
class Verification:
    """What the library says of a file."""

    max_difference: float | None
    against: str
    tolerance: float
    agrees: bool
    format: str = "google"
    model: str = "Ti/16"


AGREES = Verification(2e-7, "stored reference logits", 1e-5, True)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, Verification]:
    """A library that says what the test tells it to: how it finds out is tested elsewhere."""
    answer = {"next": AGREES}
    module = ModuleType("vitkit.checkpoints.verify")
    module.verify = lambda path, *, format=None: answer["next"]  # noqa: A006
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return answer


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (AGREES, 0, ["stored reference logits", "2e-07", "agrees"]),
        (replace(AGREES, max_difference=0.3, agrees=False), 1, ["0.3", "does not agree"]),
        (replace(AGREES, max_difference=float("nan"), agrees=False), 1, ["not a finite number"]),
        (Verification(None, "nothing to compare with", 1e-5, False), 1, ["nothing to compare with"]),
    ],
    ids=["agrees", "differs", "broken", "unknown"],
)
def test_verify_prints_the_difference_and_fails_where_there_is_one(shell, stand_in, answer, code, words):
    stand_in["next"] = answer
    said = shell("weights", "verify", "small")
    assert said.code == code
    assert all(word in said.out for word in (*words, "Google's vision_transformer (google)", "Ti/16"))
    said = shell("weights", "verify", "small", "--json")
    assert said.code == code
    assert said.json.keys() >= {"max_difference", "against", "tolerance", "agrees"}


def test_json_is_all_there_is_on_stdout(shell, stand_in):
    for arguments in (
        ("info", "small"),
        ("convert", "small", "c", "--to", "google"),
        ("diff", "small", "small.npz"),
        ("adapt", "small", "a", "--image-size", "16"),
        ("verify", "small"),
    ):
        json.loads(shell("weights", *arguments, "--json").out)
