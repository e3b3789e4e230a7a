"""`hub:` names: which are names, what they find in a cache that this test makes, and that no network is touched."""

import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from PIL import Image
from safetensors.torch import save as as_safetensors

import vitkit
from vitkit.checkpoints import hub, native
from vitkit.checkpoints.convert import write_as
from vitkit.checkpoints.files.readers import save_npz
from vitkit.checkpoints.foreign import format_called, load
from vitkit.checkpoints.hub import HubName, located, parse, resolve
from vitkit.checkpoints.native import Artefact
from vitkit.cli.main import main
from vitkit.core.errors import WeightsError
from vitkit.data.transforms import preprocessing
from vitkit.zoo.lookup import create

COMMIT, OLDER = "0123456789abcdef" * 2 + "01234567", "f" * 40
TINY = ["depth=1", "width=32", "heads=2", "mlp_dim=64", "block.activation=gelu_erf", "block.norm_eps=1e-12"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a socket or asking for an address fails the test."""

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("the network was touched")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


def fill(cache: Path, repository: str, files: dict[str, bytes], *, commit: str = COMMIT, ref: str = "main") -> Path:
    """Files in a cache, as huggingface_hub lays them out; the snapshot's folder."""
    home = cache / f"models--{repository.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (home / "refs" / ref).write_text(commit)
    for name, content in files.items():
        blob = home / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    return snapshot


def tree(cache: Path, repository: str, files: list[str]) -> None:
    """What huggingface_hub notes of the files that a repository has."""
    place = cache / f"models--{repository.replace('/', '--')}" / "trees" / f"{COMMIT}.json"
    place.parent.mkdir(parents=True)
    listed = {name: {"size": 1, "blob_id": "0" * 40} for name in files}
    place.write_text(json.dumps({"format_version": 1, "files": listed}))


def tiny() -> Artefact:
    model = create("B/16", image_size=32, classes=3, settings=TINY, generator=torch.Generator().manual_seed(0))
    return Artefact(
        name="tiny",
        config=model.config,
        state=dict(model.state_dict()),
        preprocessing=preprocessing("paper", image_size=32),
        labels=("cat", "dog", "owl"),
    )


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Names


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hub:google/vit-base-patch16-224", HubName(repository="google/vit-base-patch16-224")),
        ("hub:timm/vit_tiny.in1k", HubName(repository="timm/vit_tiny.in1k")),
        ("hub:a/b@main", HubName(repository="a/b")),
        ("hub:a/b@v1.0", HubName(repository="a/b", revision="v1.0")),
        ("hub:a/b@refs/pr/7", HubName(repository="a/b", revision="refs/pr/7")),
        (f"hub:a/b@{COMMIT}", HubName(repository="a/b", revision=COMMIT)),
        ("hub:a/b/B_16.npz", HubName(repository="a/b", file="B_16.npz")),
        ("hub:a/b/old/B_16-lr_0.03.npz@x", HubName(repository="a/b", file="old/B_16-lr_0.03.npz", revision="x")),
    ],
)
def test_a_name_has_an_owner_a_repository_and_perhaps_a_file_and_a_revision(name: str, parts: HubName) -> None:
    assert parse(name) == parts
    assert parse(str(parts)) == parts


@pytest.mark.parametrize(
    "name",
    [
        *("", "hub:", "hub:name", "google/vit", "hub:/name", "hub:owner/", "HUB:a/b", "hub: a/b", "hub:a/b "),
        *("hub:../b", "hub:a/..", "hub:a/../c/model.npz", "hub:a/b/../../x.npz", "hub:a/b/..npz", "hub:a//b"),
        *("hub:.a/b", "hub:a/.b", "hub:-a/b", "hub:a/b-", "hub:a--b/c", "hub:a/b--c", "hub:a..b/c"),
        *("hub:a/b@", "hub:a/b@..", "hub:a/b@../x", "hub:a/b@/x", "hub:a/b@x@y", "hub:a/b@x y", "hub:a/b@-x"),
        *("hub:a/b/model.py", "hub:a/b/model.npz.exe", "hub:a/b/config.json", "hub:a/b/.npz", "hub:a/b//x.npz"),
        *("hub:a/b\n", "hub:a\\b", "hub:a/b\0", "hub:a/ü", "hub:https://huggingface.co/a/b", "hub:" + "a" * 300 + "/b"),
    ],
)
def test_anything_else_is_refused_before_anything_is_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "library", lambda module: pytest.fail("something was looked up"))
    with pytest.raises(WeightsError) as raised:
        resolve(name)
    assert raised.value.expected


def test_a_path_is_left_as_it_is(tmp_path: Path) -> None:
    assert located(tmp_path) == tmp_path
    assert located("hubble/model.npz") == Path("hubble/model.npz")


# What the cache holds


def test_a_repository_is_its_folder_in_the_cache(cache: Path) -> None:
    snapshot = fill(cache, "owner/name", {"model.safetensors": b"w", "config.json": b"{}"})
    assert resolve("hub:owner/name") == snapshot
    assert located("hub:owner/name") == located(Path("hub:owner/name")) == snapshot


def test_a_revision_is_a_branch_a_tag_or_a_commit(cache: Path) -> None:
    new = fill(cache, "owner/name", {"model.safetensors": b"new"})
    old = fill(cache, "owner/name", {"model.safetensors": b"old"}, commit=OLDER, ref="v1")
    assert resolve("hub:owner/name@v1") == resolve(f"hub:owner/name@{OLDER}") == old
    assert resolve("hub:owner/name") == resolve(f"hub:owner/name@{COMMIT}") == new


def test_one_file_is_its_path_in_the_cache(cache: Path) -> None:
    snapshot = fill(cache, "owner/name", {"B_16.npz": b"w", "old/B_16.npz": b"v"})
    assert resolve("hub:owner/name/B_16.npz") == snapshot / "B_16.npz"
    assert resolve("hub:owner/name/old/B_16.npz").read_bytes() == b"v"


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model-00001-of-00002.safetensors"])
def test_weights_may_be_pickled_tensors_or_in_parts(cache: Path, weights: str) -> None:
    snapshot = fill(cache, "owner/name", {weights: b"w", "config.json": b"{}"})
    assert resolve("hub:owner/name") == snapshot


def test_weights_that_another_program_fetched_will_do_without_the_rest(cache: Path) -> None:
    snapshot = fill(cache, "owner/name", {"pytorch_model.bin": b"w", "config.json": b"{}"})
    tree(cache, "owner/name", ["model.safetensors", "pytorch_model.bin", "config.json", "preprocessor_config.json"])
    assert resolve("hub:owner/name") == snapshot


def test_the_cache_is_where_the_environment_says_now(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(cache / "other", "owner/name", {"model.safetensors": b"w"})
    monkeypatch.setenv("HF_HUB_CACHE", str(cache / "other"))
    assert resolve("hub:owner/name") == snapshot


# What is missing


@pytest.mark.parametrize(
    ("name", "missing", "command"),
    [
        ("hub:owner/name", "the weights", "hf download owner/name model.safetensors config.json"),
        ("hub:owner/name@v2", "the weights", "hf download owner/name model.safetensors config.json --revision v2"),
        ("hub:owner/name/B_16.npz", "B_16.npz", "hf download owner/name B_16.npz"),
        ("hub:owner/here/L_16.npz", "L_16.npz", "hf download owner/here L_16.npz"),
        (f"hub:owner/here@{OLDER}", "the weights", f"--revision {OLDER}"),
    ],
)
def test_what_is_not_in_the_cache_is_named_with_how_to_fetch_it(
    cache: Path, name: str, missing: str, command: str
) -> None:
    fill(cache, "owner/here", {"model.safetensors": b"w"})
    with pytest.raises(WeightsError) as raised:
        resolve(name)
    assert str(raised.value) == f"{name}: {missing} not in {cache}, and HF_HUB_OFFLINE is set"
    assert raised.value.hint is not None
    assert command in raised.value.hint


def test_a_repository_without_weights_is_told_by_what_it_has(cache: Path) -> None:
    fill(cache, "owner/name", {"config.json": b"{}", "B_16.npz": b"w"})
    with pytest.raises(WeightsError, match="no weights under the usual names") as raised:
        resolve("hub:owner/name")
    assert raised.value.got == "B_16.npz, config.json"
    assert raised.value.hint is not None
    assert "hub:owner/name/model.npz" in raised.value.hint


def test_without_the_library_the_extra_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WeightsError) as raised:
        resolve("hub:owner/name")
    assert raised.value.hint == "pip install 'vitkit[hub]'"


# What leads elsewhere


def test_a_link_out_of_the_cache_is_refused(cache: Path, tmp_path: Path) -> None:
    snapshot = fill(cache, "owner/name", {"model.safetensors": b"w"})
    (tmp_path / "secret.npz").write_bytes(b"s")
    (snapshot / "config.json").symlink_to(tmp_path / "secret.npz")
    (snapshot / "B_16.npz").symlink_to(tmp_path / "secret.npz")
    for name in ("hub:owner/name", "hub:owner/name/B_16.npz"):
        with pytest.raises(WeightsError, match="leads out of the cache"):
            resolve(name)


def test_a_branch_that_points_out_of_the_cache_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.safetensors").write_bytes(b"w")
    fill(cache, "owner/name", {"model.safetensors": b"w"})
    (cache / "models--owner--name" / "refs" / "main").write_text("../../../elsewhere")
    with pytest.raises(WeightsError, match="leads out of the cache"):
        resolve("hub:owner/name")


# With a network: what is asked of it, and what it may answer


def asked(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., str]) -> list[dict[str, Any]]:
    """The calls to huggingface_hub, which answers as told."""
    calls: list[dict[str, Any]] = []

    def called(*arguments: str, **options: Any) -> str:
        calls.append({"arguments": arguments, **options})
        return answer(**options)

    modules = {name: ModuleType(name) for name in ("huggingface_hub", "huggingface_hub.constants")}
    vars(modules["huggingface_hub"]).update(snapshot_download=called, hf_hub_download=called)
    vars(modules["huggingface_hub.constants"]).update(HF_HUB_OFFLINE=False)
    modules["huggingface_hub.errors"] = import_module("huggingface_hub.errors")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "library", modules.__getitem__)
    return calls


def test_only_weights_and_what_describes_them_are_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(cache, "owner/name", {"model.safetensors": b"w"})
    calls = asked(monkeypatch, lambda **_: str(snapshot))
    assert resolve("hub:owner/name@v1") == snapshot
    (call,) = calls
    assert call["arguments"] == ("owner/name",)
    assert (call["revision"], call["cache_dir"], call["local_files_only"]) == ("v1", cache, False)
    assert all(name.endswith((".json", ".safetensors")) for name in call["allow_patterns"])


def test_one_file_is_asked_for_alone_and_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(cache, "owner/name", {"B_16.npz": b"w", "model.safetensors": b"w"})
    calls = asked(monkeypatch, lambda **_: str(snapshot))
    assert resolve("hub:owner/name/B_16.npz") == snapshot / "B_16.npz"
    assert [call["allow_patterns"] for call in calls] == [["B_16.npz"]]


def test_pickled_tensors_are_fetched_only_where_there_is_nothing_safer(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = fill(cache, "owner/name", {"config.json": b"{}"})

    def answer(**options: Any) -> str:
        if "pytorch_model.bin" in options["allow_patterns"]:
            fill(cache, "owner/name", {"pytorch_model.bin": b"w"})
        return str(snapshot)

    calls = asked(monkeypatch, answer)
    assert resolve("hub:owner/name") == snapshot
    assert ["pytorch_model.bin" in call["allow_patterns"] for call in calls] == [False, True]


def test_without_a_connection_the_hub_is_asked_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = import_module("huggingface_hub.errors")

    def answer(**_: object) -> NoReturn:
        raise errors.LocalEntryNotFoundError("no connection")

    calls = asked(monkeypatch, answer)
    with pytest.raises(WeightsError, match="and the hub cannot be reached"):
        resolve("hub:owner/name")
    assert [call["local_files_only"] for call in calls] == [False, True, True, True]


def raised_by_the_hub(kind: str) -> Exception:
    """An error of huggingface_hub without the response that comes with it."""
    named = getattr(import_module("huggingface_hub.errors"), kind)
    return named.__new__(named, "the library's own words\nin two lines")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "the owner asks who you are"),
        ("RepositoryNotFoundError", "the hub has no such repository"),
        ("RevisionNotFoundError", "the repository has no revision v1"),
        ("RemoteEntryNotFoundError", "the repository has no file B_16.npz"),
        ("HfHubHTTPError", "cannot be fetched"),
    ],
)
def test_what_the_hub_answers_is_told_in_a_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    def answer(**_: object) -> NoReturn:
        raise raised_by_the_hub(kind)

    asked(monkeypatch, answer)
    with pytest.raises(WeightsError) as raised:
        resolve("hub:owner/name/B_16.npz@v1")
    assert str(raised.value).startswith(f"hub:owner/name/B_16.npz@v1: {message}")
    assert "\n" not in str(raised.value)


# Loading


def test_a_model_of_hugging_face_is_loaded_by_its_name(cache: Path, tmp_path: Path) -> None:
    artefact = tiny()
    write_as(format_called("huggingface"), tmp_path / "written", artefact)
    fill(cache, "owner/name", read_all(tmp_path / "written"))
    found = load("hub:owner/name")
    assert found.labels == ("cat", "dog", "owl")
    assert found.state.keys() == artefact.state.keys()
    assert all(torch.equal(found.state[name], tensor) for name, tensor in artefact.state.items())


def test_our_own_artefact_is_loaded_by_its_name(cache: Path, tmp_path: Path) -> None:
    artefact = tiny()
    native.save(tmp_path / "written", artefact)
    fill(cache, "owner/name", read_all(tmp_path / "written"))
    found = load("hub:owner/name")
    assert (found.config, found.preprocessing, found.labels) == (
        artefact.config,
        artefact.preprocessing,
        artefact.labels,
    )


def test_a_file_that_is_no_weights_is_refused_by_name(cache: Path, tmp_path: Path) -> None:
    save_npz(tmp_path / "odd.npz", {"something": torch.zeros(2)})
    files = {"odd.npz": (tmp_path / "odd.npz").read_bytes(), "odd.safetensors": as_safetensors({"x": torch.zeros(1)})}
    fill(cache, "owner/name", files)
    for name in files:
        with pytest.raises(WeightsError, match="the names in it are of no known format"):
            load(f"hub:owner/name/{name}")


# Commands


@pytest.fixture
def published(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model in the cache, as Hugging Face writes it, with photos of its classes beside."""
    write_as(format_called("huggingface"), tmp_path / "written", tiny())
    fill(cache, "google/vit-tiny", read_all(tmp_path / "written"))
    for number, label in enumerate(("cat", "dog", "owl") * 4):
        place = tmp_path / "photos" / label / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (20 * number, 0, 0)).save(place)
    monkeypatch.chdir(tmp_path)
    return "hub:google/vit-tiny"


SHORT = ("steps=1", "batch_size=4", "workers=0")


@pytest.mark.parametrize(
    "arguments",
    [
        ("weights", "info", "NAME"),
        ("weights", "convert", "NAME", "out", "--to", "vitkit"),
        ("weights", "diff", "NAME", "written"),
        ("weights", "diff", "written", "NAME"),
        ("weights", "adapt", "NAME", "out", "--classes", "5"),
        ("weights", "verify", "NAME"),
        ("export", "NAME", "out", "--to", "huggingface"),
        ("eval", "NAME", "photos", "--workers", "0"),
        ("finetune", "NAME", "photos", "--out", "run", *SHORT),
        ("train", "photos", "--out", "run", "model.name=none", "model.weights=NAME", *SHORT),
    ],
    ids=lambda arguments: " ".join(word for word in arguments[:2] if word.isalpha() and word != "NAME"),
)
def test_every_command_that_takes_weights_takes_a_name(
    published: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([word.replace("NAME", published) for word in arguments])
    assert code == 0, capsys.readouterr().err


def test_python_takes_a_name_too(published: str) -> None:
    assert vitkit.load(published).labels == ("cat", "dog", "owl")


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_name_that_is_not_in_the_cache_is_told_by_every_command(
    cache: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", command, "hub:google/vit-base-patch16-224"]) == 1
    said = capsys.readouterr().err
    assert "not in" in said
    assert "hf download google/vit-base-patch16-224" in said


def test_the_file_says_how_many_classes_weights_of_imagenet_21k_have_and_a_new_model_has_a_thousand(
    cache: Path, tmp_path: Path
) -> None:
    headless = create("B/16", image_size=32, classes=0, settings=TINY)
    artefact = replace(tiny(), config=headless.config, state=dict(headless.state_dict()), labels=())
    write_as(format_called("huggingface"), tmp_path / "written", artefact)
    fill(cache, "google/vit-base-patch16-224-in21k", read_all(tmp_path / "written"))
    assert vitkit.load("hub:google/vit-base-patch16-224-in21k").config.classes == 0
    assert create("google/vit-base-patch16-224-in21k", device="meta").config.classes == 1000
    assert create("google/vit-base-patch16-224-in21k", classes=21_843, device="meta").config.classes == 21_843
