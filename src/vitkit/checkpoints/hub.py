"""A name such as `hub:google/vit-base-patch16-224` goes in, the folder or file of weights on this disk comes out.

huggingface_hub fetches and keeps the files; what it keeps is used where there is no network. Only weights and the small
files that describe them are fetched: no code of a repository ever reaches the disk, and none is run.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

from vitkit.core.errors import WeightsError

PREFIX = "hub:"
FORM = "hub:owner/name, hub:owner/name@revision or hub:owner/name/file"
CONFIG = "config.json"
DESCRIBING = (CONFIG, "preprocessor_config.json", "labels.json", "checksums.json")
"""What says how weights are meant: of Hugging Face, of timm, and of our own artefacts."""
SAFE = ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-?????-of-?????.bin")
"""Fetched only where there is nothing safer."""
SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")
TRUE = ("1", "on", "yes", "true")
"""What huggingface_hub takes for a yes, in any case."""

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_PART = r"[A-Za-z0-9_][A-Za-z0-9._+=-]{0,199}"
_NAME = re.compile(rf"(?P<repository>{_WORD}/{_WORD})(?:/(?P<file>{_PART}(?:/{_PART})*))?(?:@(?P<revision>[^@]+))?")
_REVISION = re.compile(rf"{_PART}(?:/{_PART})*")


class NotHereError(WeightsError):
    """What a name stands for is not on this disk, and cannot be fetched now."""


@dataclass(frozen=True, kw_only=True)
class HubName:
    """What a `hub:` name says: a repository, one file in it or None for all that a model needs, and a revision."""

    repository: str
    file: str | None = None
    revision: str = "main"

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{PREFIX}{self.repository}{file}{revision}"


def parse(name: str) -> HubName:
    """The parts of a `hub:` name; one that could lead anywhere else is refused before anything is looked up.

    >>> parse("hub:google/vit-base-patch16-224@main").repository
    'google/vit-base-patch16-224'
    >>> parse("hub:owner/name/B_16.npz").file
    'B_16.npz'
    """
    found = _NAME.fullmatch(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    # The hub has no such names, and its cache would read `--` as a slash.
    if not found or any(odd in found["repository"] for odd in ("..", "--")):
        raise WeightsError("this is no name on the hub", expected=FORM, got=repr(name[:200]))
    file, revision = found["file"], found["revision"] or "main"
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise WeightsError(f"{name[:200]}: no revision is called so", expected="a branch, a tag or a commit")
    if file is not None and (".." in file or not file.endswith(SUFFIXES)):
        raise WeightsError(f"{name[:200]}: not a file of weights", expected=f"a name in {', '.join(SUFFIXES)}")
    return HubName(repository=found["repository"], file=file, revision=revision)


def located(path_or_name: Path | str) -> Path:
    """The path itself, or for a `hub:` name the place of its files on this disk.

    >>> located("runs/flowers").name
    'flowers'
    """
    text = str(path_or_name)
    return resolve(text) if text.startswith(PREFIX) else Path(path_or_name)


def resolve(name: str) -> Path:
    """The folder of a `hub:` name, or its file where the name has one: from the cache, or fetched into it.

    With HF_HUB_OFFLINE=1, or without a network, it is what the cache holds or an error that says what is missing.
    """
    wanted = parse(name)
    hub = library("huggingface_hub")
    cache = cache_folder()
    place = _folder(hub, wanted, cache) if wanted.file is None else _file(hub, wanted, wanted.file, cache)
    _check_inside(place, wanted, cache)
    return place


def library(module: str) -> ModuleType:
    """A module of huggingface_hub, which is an extra of ours."""
    try:
        return import_module(module)
    except ImportError as error:
        raise WeightsError("hub: names need huggingface_hub", hint="pip install 'vitkit[hub]'") from error


def cache_folder() -> Path:
    """Where huggingface_hub keeps files, by the environment of now: the library reads it only when it is imported."""
    kept = os.environ.get("HF_HUB_CACHE") or library("huggingface_hub.constants").HF_HUB_CACHE
    return Path(kept).expanduser().resolve()


def offline() -> bool:
    """Whether the user has asked to leave the network alone."""
    asked = os.environ.get("HF_HUB_OFFLINE", "").lower() in TRUE
    return asked or bool(library("huggingface_hub.constants").HF_HUB_OFFLINE)


def _folder(hub: ModuleType, wanted: HubName, cache: Path) -> Path:
    """The folder with the weights of a repository: in safetensors, or else as torch pickles them."""
    fetch = partial(hub.snapshot_download, wanted.repository, revision=wanted.revision)
    place, missing = Path(), None
    for weights in (SAFE, PICKLED):
        # Other programs may have fetched weights without all that describes them; config.json alone will do.
        for describing in (DESCRIBING, (CONFIG,)):
            local = missing is not None or offline()
            try:
                place = _fetched(partial(fetch, allow_patterns=[*describing, *weights]), wanted, cache, local=local)
            except NotHereError as error:
                missing = missing or error
                continue
            if any(next(place.glob(name), None) for name in weights if name.endswith(SUFFIXES)):
                return place
            break
    if missing:
        raise missing
    raise WeightsError(
        f"{wanted}: no weights under the usual names in {place}",
        expected=f"{SAFE[0]} or {PICKLED[0]}",
        got=", ".join(sorted(entry.name for entry in place.iterdir())[:5]) or "nothing",
        hint=f"{_how_to_fetch(wanted)}; or name a file of it, as in {PREFIX}{wanted.repository}/model.npz",
    )


def _file(hub: ModuleType, wanted: HubName, file: str, cache: Path) -> Path:
    """One file of a repository.

    The library's way to a file tries an unreachable network for half a minute before it looks into the cache; its way
    to a folder tries once. So the folder comes first, and the file's own way is left to say why it is not in it.
    """
    folder = partial(hub.snapshot_download, wanted.repository, revision=wanted.revision, allow_patterns=[file])
    place = _fetched(folder, wanted, cache, local=offline()) / file
    if place.exists():
        return place
    if offline():  # in some of its versions the library's way to a file would ask the hub all the same
        raise _not_here(wanted, cache)
    alone = partial(hub.hf_hub_download, wanted.repository, file, revision=wanted.revision)
    return _fetched(alone, wanted, cache, local=False)


def _not_here(wanted: HubName, cache: Path) -> NotHereError:
    missing = wanted.file or "the weights"
    reason = "and HF_HUB_OFFLINE is set" if offline() else "and the hub cannot be reached"
    return NotHereError(f"{wanted}: {missing} not in {cache}, {reason}", hint=_how_to_fetch(wanted))


def _fetched(fetch: Callable[..., str], wanted: HubName, cache: Path, *, local: bool) -> Path:
    """The place that huggingface_hub gives; what it raises, in our words."""
    errors = library("huggingface_hub.errors")
    try:
        return Path(fetch(cache_dir=cache, local_files_only=local))
    except errors.LocalEntryNotFoundError as error:
        raise _not_here(wanted, cache) from error
    except errors.GatedRepoError as error:
        hint = f"accept its terms at https://huggingface.co/{wanted.repository}, then hf auth login"
        raise WeightsError(f"{wanted}: the owner asks who you are", hint=hint) from error
    except errors.RepositoryNotFoundError as error:
        hint = "check the name; if it is private, hf auth login"
        raise WeightsError(f"{wanted}: the hub has no such repository", hint=hint) from error
    except errors.RevisionNotFoundError as error:
        raise WeightsError(f"{wanted}: the repository has no revision {wanted.revision}") from error
    except errors.EntryNotFoundError as error:
        raise WeightsError(f"{wanted}: the repository has no file {wanted.file}") from error
    except Exception as error:  # of its HTTP library, which changes from version to version
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise WeightsError(f"{wanted}: cannot be fetched: {first[:200]}", hint=_how_to_fetch(wanted)) from error


def _how_to_fetch(wanted: HubName) -> str:
    files = wanted.file or f"{SAFE[0]} {CONFIG}"
    revision = "" if wanted.revision == "main" else f" --revision {wanted.revision}"
    return f"with a network, without HF_HUB_OFFLINE, run: hf download {wanted.repository} {files}{revision}"


def _check_inside(place: Path, wanted: HubName, cache: Path) -> None:
    """Refuse what leads out of the cache, by a link or by a commit that is no commit."""
    for path in (place, *place.rglob("*")) if place.is_dir() else (place,):
        if not path.resolve().is_relative_to(cache):
            raise WeightsError(
                f"{wanted}: {path.name} leads out of the cache",
                expected=f"a file in {cache}",
                got=path.resolve(),
                hint="delete the repository's folder in the cache and fetch it again",
            )
