"""Tests of `hub:` names with a local cache; using the network fails a test."""

import json
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from hub_cache import COMMIT, fill, read_all
from PIL import Image
from safetensors.torch import save as as_safetensors

import vitkit
from vitkit.cli.main import main
from vitkit.core.errors import MissingDependencyError, WeightsError
from vitkit.data.preprocessing import get_preprocessing
from vitkit.weights import artifact as artifact_io
from vitkit.weights import hub
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import write_format
from vitkit.weights.formats.registry import get_format
from vitkit.weights.hub import HubName, parse_hub_name, resolve_hub_name
from vitkit.weights.io.writers import save_npz
from vitkit.weights.load import load_bundle, resolve_source
from vitkit.zoo.registry import create

OLDER = "f" * 40
TINY = {"depth": 1, "width": 32, "heads": 2, "mlp_dim": 64, "block": {"activation": "gelu_erf", "norm_eps": 1e-12}}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that opens a connection or resolves an address."""

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("the network was used")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


def tree(cache: Path, repository: str, files: list[str]) -> None:
    """Write huggingface_hub's list of the files in a repository."""
    path = cache / f"models--{repository.replace('/', '--')}" / "trees" / f"{COMMIT}.json"
    path.parent.mkdir(parents=True)
    entries = {name: {"size": 1, "blob_id": "0" * 40} for name in files}
    path.write_text(json.dumps({"format_version": 1, "files": entries}))


def tiny() -> ModelBundle:
    model = create("B/16", image_size=32, num_classes=3, settings=TINY, generator=torch.Generator().manual_seed(0))
    return ModelBundle(
        name="tiny",
        config=model.config,
        state=dict(model.state_dict()),
        preprocessing=get_preprocessing("paper", image_size=32),
        labels=("cat", "dog", "owl"),
    )


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
def test_valid_names_are_parsed(name: str, parts: HubName) -> None:
    assert parse_hub_name(name) == parts
    assert parse_hub_name(str(parts)) == parts


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
def test_invalid_name_is_refused_before_any_lookup(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "import_hub_library", lambda module: pytest.fail("a lookup was made"))
    with pytest.raises(WeightsError) as raised:
        resolve_hub_name(name)
    assert raised.value.expected


def test_existing_path_is_returned_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("B/16").mkdir(parents=True)
    assert resolve_source(tmp_path) == tmp_path
    assert resolve_source("B/16") == Path("B/16")  # a path comes before the name of a published model


# Cache


def test_repository_resolves_to_its_snapshot(cache: Path) -> None:
    snapshot = fill(cache, "owner/name", {"model.safetensors": b"w", "config.json": b"{}"})
    assert resolve_hub_name("hub:owner/name") == snapshot
    assert resolve_source("hub:owner/name") == resolve_source(Path("hub:owner/name")) == snapshot


def test_revision_is_a_branch_tag_or_commit(cache: Path) -> None:
    new = fill(cache, "owner/name", {"model.safetensors": b"new"})
    old = fill(cache, "owner/name", {"model.safetensors": b"old"}, commit=OLDER, ref="v1")
    assert resolve_hub_name("hub:owner/name@v1") == resolve_hub_name(f"hub:owner/name@{OLDER}") == old
    assert resolve_hub_name("hub:owner/name") == resolve_hub_name(f"hub:owner/name@{COMMIT}") == new


def test_file_resolves_to_its_path_in_the_cache(cache: Path) -> None:
    snapshot = fill(cache, "owner/name", {"B_16.npz": b"w", "old/B_16.npz": b"v"})
    assert resolve_hub_name("hub:owner/name/B_16.npz") == snapshot / "B_16.npz"
    assert resolve_hub_name("hub:owner/name/old/B_16.npz").read_bytes() == b"v"


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model-00001-of-00002.safetensors"])
def test_pickled_and_sharded_weights_are_found(cache: Path, weights: str) -> None:
    snapshot = fill(cache, "owner/name", {weights: b"w", "config.json": b"{}"})
    assert resolve_hub_name("hub:owner/name") == snapshot


def test_weights_cached_without_metadata_are_used(cache: Path) -> None:
    snapshot = fill(cache, "owner/name", {"pytorch_model.bin": b"w", "config.json": b"{}"})
    tree(cache, "owner/name", ["model.safetensors", "pytorch_model.bin", "config.json", "preprocessor_config.json"])
    assert resolve_hub_name("hub:owner/name") == snapshot


def test_cache_follows_the_current_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(cache / "other", "owner/name", {"model.safetensors": b"w"})
    monkeypatch.setenv("HF_HUB_CACHE", str(cache / "other"))
    assert resolve_hub_name("hub:owner/name") == snapshot


# Missing files


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
def test_missing_files_are_named_with_download_command(cache: Path, name: str, missing: str, command: str) -> None:
    fill(cache, "owner/here", {"model.safetensors": b"w"})
    with pytest.raises(WeightsError) as raised:
        resolve_hub_name(name)
    assert raised.value.summary == f"{name}: {missing} not in {cache}, and HF_HUB_OFFLINE is set"
    assert raised.value.hint is not None
    assert command in raised.value.hint


def test_repository_without_weights_lists_its_files(cache: Path) -> None:
    fill(cache, "owner/name", {"config.json": b"{}", "B_16.npz": b"w"})
    with pytest.raises(WeightsError, match="no weights under the usual names") as raised:
        resolve_hub_name("hub:owner/name")
    assert raised.value.got == "B_16.npz, config.json"
    assert raised.value.hint is not None
    assert "hub:owner/name/model.npz" in raised.value.hint


def test_missing_library_names_the_extra(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError) as raised:
        resolve_hub_name("hub:owner/name")
    assert raised.value.hint == "pip install 'vitkit[hub]'"


# Links out of the cache


def test_link_out_of_the_cache_is_refused(cache: Path, tmp_path: Path) -> None:
    snapshot = fill(cache, "owner/name", {"model.safetensors": b"w"})
    (tmp_path / "secret.npz").write_bytes(b"s")
    (snapshot / "config.json").symlink_to(tmp_path / "secret.npz")
    (snapshot / "B_16.npz").symlink_to(tmp_path / "secret.npz")
    for name in ("hub:owner/name", "hub:owner/name/B_16.npz"):
        with pytest.raises(WeightsError, match="leads out of the cache"):
            resolve_hub_name(name)


def test_branch_out_of_the_cache_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.safetensors").write_bytes(b"w")
    fill(cache, "owner/name", {"model.safetensors": b"w"})
    (cache / "models--owner--name" / "refs" / "main").write_text("../../../elsewhere")
    with pytest.raises(WeightsError, match="leads out of the cache"):
        resolve_hub_name("hub:owner/name")


# Requests and responses


SIBLINGS = [SimpleNamespace(rfilename=name, size=3 << 20) for name in ("config.json", "model.safetensors", "B_16.npz")]


def fake_hub(
    monkeypatch: pytest.MonkeyPatch, respond: Callable[..., str], *, is_reachable: bool = True
) -> list[dict[str, Any]]:
    """Replace huggingface_hub and return the list of downloads from it."""
    calls: list[dict[str, Any]] = []

    def call(*arguments: str, **options: Any) -> str:
        calls.append({"arguments": arguments, **options})
        return respond(**options)

    def model_info(repository: str, *, revision: str, files_metadata: bool, timeout: float) -> SimpleNamespace:
        assert timeout == hub.REQUEST_SECONDS
        if is_reachable:
            return SimpleNamespace(sha=OLDER, siblings=SIBLINGS, card_data=SimpleNamespace(license="apache-2.0"))
        raise ConnectionError("no connection")

    modules = {name: ModuleType(name) for name in ("huggingface_hub", "huggingface_hub.constants")}
    vars(modules["huggingface_hub"]).update(snapshot_download=call, hf_hub_download=call, model_info=model_info)
    vars(modules["huggingface_hub.constants"]).update(HF_HUB_OFFLINE=False)
    modules["huggingface_hub.errors"] = import_module("huggingface_hub.errors")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "import_hub_library", modules.__getitem__)
    return calls


def test_only_weights_and_metadata_are_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(cache, "owner/name", {"model.safetensors": b"w"})
    calls = fake_hub(monkeypatch, lambda **_: str(snapshot))
    assert resolve_hub_name("hub:owner/name@v1") == snapshot
    (call,) = calls
    assert call["arguments"] == ("owner/name",)
    assert (call["revision"], call["cache_dir"], call["local_files_only"]) == ("v1", cache, False)
    assert all(name.endswith((".json", ".safetensors")) for name in call["allow_patterns"])


def test_downloads_include_every_file_of_an_artifact() -> None:
    assert set(artifact_io.FILES) < {*hub.METADATA_FILES, *hub.SAFETENSORS_FILES}


def test_single_file_is_requested_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(cache, "owner/name", {"B_16.npz": b"w", "model.safetensors": b"w"})
    calls = fake_hub(monkeypatch, lambda **_: str(snapshot))
    assert resolve_hub_name("hub:owner/name/B_16.npz") == snapshot / "B_16.npz"
    assert [call["allow_patterns"] for call in calls] == [["B_16.npz"]]


def test_pickles_are_downloaded_only_without_safetensors(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(cache, "owner/name", {"config.json": b"{}"})

    def respond(**options: Any) -> str:
        if "pytorch_model.bin" in options["allow_patterns"]:
            fill(cache, "owner/name", {"pytorch_model.bin": b"w"})
        return str(snapshot)

    calls = fake_hub(monkeypatch, respond)
    assert resolve_hub_name("hub:owner/name") == snapshot
    assert ["pytorch_model.bin" in call["allow_patterns"] for call in calls] == [False, True]


def test_unreachable_hub_is_contacted_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = import_module("huggingface_hub.errors")

    def respond(**_: object) -> NoReturn:
        raise errors.LocalEntryNotFoundError("no connection")

    calls = fake_hub(monkeypatch, respond, is_reachable=False)
    with pytest.raises(WeightsError, match="and the hub cannot be reached"):
        resolve_hub_name("hub:owner/name")
    assert {call["local_files_only"] for call in calls} == {True}


@pytest.mark.parametrize("name", ["hub:owner/name", "hub:owner/name/B_16.npz"])
def test_download_is_announced_with_size_and_license(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    snapshot = fill(cache, "owner/name", {"model.safetensors": b"w", "B_16.npz": b"w"})
    fake_hub(monkeypatch, lambda **_: str(snapshot))
    with caplog.at_level("INFO", logger="vitkit"):
        resolve_hub_name(name)
    assert caplog.messages == [f"downloading {name}: 3.1 MB, license apache-2.0"]


def test_cached_weights_are_not_announced(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = fill(cache, "owner/name", {"model.safetensors": b"w"}, commit=OLDER)
    fake_hub(monkeypatch, lambda **_: str(snapshot))
    with caplog.at_level("INFO", logger="vitkit"):
        resolve_hub_name("hub:owner/name")
    assert not caplog.messages


def make_hub_error(kind: str) -> Exception:
    """Return an error of huggingface_hub without its response."""
    error = getattr(import_module("huggingface_hub.errors"), kind)
    return error.__new__(error, "message of the library\nin two lines")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "access must be requested"),
        ("RepositoryNotFoundError", "no such repository on the hub"),
        ("RevisionNotFoundError", "the repository has no revision v1"),
        ("RemoteEntryNotFoundError", "the repository has no file B_16.npz"),
        ("HfHubHTTPError", "download failed"),
    ],
)
def test_hub_errors_are_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str) -> None:
    def respond(**_: object) -> NoReturn:
        raise make_hub_error(kind)

    fake_hub(monkeypatch, respond)
    with pytest.raises(WeightsError) as raised:
        resolve_hub_name("hub:owner/name/B_16.npz@v1")
    assert str(raised.value).startswith(f"hub:owner/name/B_16.npz@v1: {message}")
    assert "\n" not in raised.value.summary


# Loading


def test_hugging_face_model_is_loaded_by_name(cache: Path, tmp_path: Path) -> None:
    bundle = tiny()
    write_format(get_format("huggingface"), tmp_path / "written", bundle)
    fill(cache, "owner/name", read_all(tmp_path / "written"))
    loaded = load_bundle("hub:owner/name")
    assert loaded.labels == ("cat", "dog", "owl")
    assert loaded.state.keys() == bundle.state.keys()
    assert all(torch.equal(loaded.state[name], tensor) for name, tensor in bundle.state.items())


def test_artifact_is_loaded_by_name(cache: Path, tmp_path: Path) -> None:
    bundle = tiny()
    artifact_io.write_artifact(tmp_path / "written", bundle)
    fill(cache, "owner/name", read_all(tmp_path / "written"))
    loaded = load_bundle("hub:owner/name")
    assert (loaded.config, loaded.preprocessing, loaded.labels) == (
        bundle.config,
        bundle.preprocessing,
        bundle.labels,
    )


def test_file_without_a_model_is_refused(cache: Path, tmp_path: Path) -> None:
    save_npz(tmp_path / "odd.npz", {"something": torch.zeros(2)})
    files = {"odd.npz": (tmp_path / "odd.npz").read_bytes(), "odd.safetensors": as_safetensors({"x": torch.zeros(1)})}
    fill(cache, "owner/name", files)
    for name in files:
        with pytest.raises(WeightsError, match="unknown weight format"):
            load_bundle(f"hub:owner/name/{name}")


# Commands


@pytest.fixture
def published(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a cached artifact; images of its classes are in photos/."""
    artifact_io.write_artifact(tmp_path / "written", tiny())
    fill(cache, "owner/tiny", read_all(tmp_path / "written"))
    for number, label in enumerate(("cat", "dog", "owl") * 4):
        path = tmp_path / "photos" / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (20 * number, 0, 0)).save(path)
    monkeypatch.chdir(tmp_path)
    return "hub:owner/tiny"


SHORT = ("steps=1", "batch_size=4", "workers=0")


@pytest.mark.parametrize(
    "arguments",
    [
        ("weights", "info", "NAME"),
        ("weights", "convert", "NAME", "out", "--to", "vitkit"),
        ("weights", "diff", "NAME", "written"),
        ("weights", "diff", "written", "NAME"),
        ("weights", "adapt", "NAME", "out", "--num-classes", "5"),
        ("weights", "verify", "NAME"),
        ("export", "NAME", "out", "--to", "vitkit"),
        ("eval", "NAME", "photos", "--workers", "0"),
        ("finetune", "NAME", "photos", "--out", "run", *SHORT),
        ("train", "photos", "--out", "run", "model.name=none", "model.init=NAME", *SHORT),
    ],
    ids=lambda arguments: " ".join(word for word in arguments[:2] if word.isalpha() and word != "NAME"),
)
def test_every_command_accepts_hub_names(
    published: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([word.replace("NAME", published) for word in arguments])
    assert code == 0, capsys.readouterr().err


def test_load_accepts_hub_names(published: str) -> None:
    assert vitkit.load(published).labels == ("cat", "dog", "owl")


@pytest.mark.parametrize("command", ["info", "verify"])
def test_command_reports_uncached_name(cache: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", command, "hub:google/vit-base-patch16-224"]) == 1
    stderr = capsys.readouterr().err
    assert "not in" in stderr
    assert "hf download google/vit-base-patch16-224" in stderr


def test_class_count_comes_from_the_file_not_the_name(cache: Path, tmp_path: Path) -> None:
    headless = create("B/16", image_size=32, num_classes=0, settings=TINY)
    bundle = replace(tiny(), config=headless.config, state=dict(headless.state_dict()), labels=())
    write_format(get_format("huggingface"), tmp_path / "written", bundle)
    fill(cache, "google/vit-base-patch16-224-in21k", read_all(tmp_path / "written"))
    assert vitkit.load("hub:google/vit-base-patch16-224-in21k").config.num_classes == 0
    assert create("google/vit-base-patch16-224-in21k", device="meta").config.num_classes == 1000
    assert create("google/vit-base-patch16-224-in21k", num_classes=21_843, device="meta").config.num_classes == 21_843


def test_messages_of_the_library_are_replaced_by_the_error(cache):
    library, levels = logging.getLogger("huggingface_hub"), list[int]()
    before = library.level

    def fetch(**_: object) -> str:
        levels.append(library.level)
        raise OSError("connection reset")

    with pytest.raises(WeightsError, match="download failed: connection reset"):
        hub._download(fetch, parse_hub_name("hub:me/cats"), cache, local=False)
    assert (levels, library.level) == ([logging.CRITICAL], before)
