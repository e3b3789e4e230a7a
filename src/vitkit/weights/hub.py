"""Resolution of `hub:owner/name` to files in the Hugging Face cache, downloading them if necessary.

huggingface_hub downloads and caches the files; without a network, cached files are used. Only weights and the small
files that describe them are downloaded: no code of a repository ever reaches the disk.
"""

import logging
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

from vitkit.core.errors import MissingDependencyError, WeightsError
from vitkit.core.formatting import format_bytes, safe_text

PREFIX = "hub:"
SYNTAX = "hub:owner/name, hub:owner/name@revision or hub:owner/name/file"
CONFIG = "config.json"
METADATA_FILES = (CONFIG, "preprocessor_config.json", "labels.json", "reference.json", "checksums.json")
"""Files that describe weights: of Hugging Face, of timm, and of vitkit's artifacts."""
SAFETENSORS_FILES = ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors")
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-?????-of-?????.bin")
"""Downloaded only if there are no safetensors."""
SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")
REQUEST_SECONDS = 10.0
"""Longest wait for the list of files of a repository; without it, a hub that does not answer would block for ever."""
TRUE_VALUES = ("1", "on", "yes", "true")
"""Values that huggingface_hub reads as true, in any case."""

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_PART = r"[A-Za-z0-9_][A-Za-z0-9._+=-]{0,199}"
_NAME = re.compile(rf"(?P<repository>{_WORD}/{_WORD})(?:/(?P<file>{_PART}(?:/{_PART})*))?(?:@(?P<revision>[^@]+))?")
_REVISION = re.compile(rf"{_PART}(?:/{_PART})*")

logger = logging.getLogger(__name__)


class NotCachedError(WeightsError):
    """Files are not in the cache and cannot be downloaded now."""


@dataclass(frozen=True, kw_only=True)
class HubName:
    """Parsed `hub:` name: a repository, a revision, and a file or None for all files of the model."""

    repository: str
    file: str | None = None
    revision: str = "main"

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{PREFIX}{self.repository}{file}{revision}"


def parse_hub_name(name: str) -> HubName:
    """Parse a `hub:` name. One that could lead outside the cache is refused before anything is looked up."""
    match = _NAME.fullmatch(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    # The hub has no such names, and its cache would read `--` as a slash.
    if not match or any(sequence in match["repository"] for sequence in ("..", "--")):
        raise WeightsError("invalid hub name", expected=SYNTAX, got=repr(name[:200]))
    file, revision = match["file"], match["revision"] or "main"
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise WeightsError(f"{name[:200]}: invalid revision", expected="a branch, a tag or a commit")
    if file is not None and (".." in file or not file.endswith(SUFFIXES)):
        raise WeightsError(f"{name[:200]}: not a weight file", expected=f"a name in {', '.join(SUFFIXES)}")
    return HubName(repository=match["repository"], file=file, revision=revision)


def is_hub_name(name: str) -> bool:
    """Return whether a name is one that `resolve_hub_name` accepts."""
    try:
        parse_hub_name(name)
    except WeightsError:
        return False
    return True


def resolve_hub_name(name: str, *, local: bool = False) -> Path:
    """Return the directory of a `hub:` name, or its file if the name has one; download what is not cached.

    With `local`, HF_HUB_OFFLINE=1 or without a network, only the cache is used, and a missing file is an error that
    names it.
    """
    parsed = parse_hub_name(name)
    hub = import_hub_library("huggingface_hub")
    cache = hub_cache_dir()
    if parsed.file is None:
        path = _fetch_repository(hub, parsed, cache, local=local)
    else:
        path = _fetch_file(hub, parsed, parsed.file, cache, local=local)
    _check_inside(path, parsed, cache)
    return path


def import_hub_library(module: str) -> ModuleType:
    """Import a module of huggingface_hub, which is an optional dependency."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")  # its tqdm, in notebooks
            return import_module(module)
    except ImportError as error:
        raise MissingDependencyError("hub: names need huggingface_hub", hint="pip install 'vitkit[hub]'") from error


def hub_cache_dir() -> Path:
    """Return huggingface_hub's cache directory by the current environment: the library reads it only when imported."""
    path = os.environ.get("HF_HUB_CACHE") or import_hub_library("huggingface_hub.constants").HF_HUB_CACHE
    return Path(path).expanduser().resolve()


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in TRUE_VALUES:
        return True
    return bool(import_hub_library("huggingface_hub.constants").HF_HUB_OFFLINE)


def _fetch_repository(hub: ModuleType, name: HubName, cache: Path, *, local: bool) -> Path:
    """Return the directory with the weights of a repository: safetensors, or else pickles of torch."""
    fetch = partial(hub.snapshot_download, name.repository, revision=name.revision)
    path, missing = Path(), None
    is_local = local or not _announce_download(hub, name, cache)
    for weights in (SAFETENSORS_FILES, PICKLE_FILES):
        # Other programs may have cached weights without all metadata; config.json alone is enough.
        for metadata in (METADATA_FILES, (CONFIG,)):
            cached_only = missing is not None or is_local
            try:
                path = _download(partial(fetch, allow_patterns=[*metadata, *weights]), name, cache, local=cached_only)
            except NotCachedError as error:
                missing = missing or error
                continue
            if any(next(path.glob(pattern), None) for pattern in weights if pattern.endswith(SUFFIXES)):
                return path
            break
    if missing:
        raise missing
    raise WeightsError(
        f"{name}: no weights under the usual names in {path}",
        expected=f"{SAFETENSORS_FILES[0]} or {PICKLE_FILES[0]}",
        got=", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing",
        hint=f"{_download_hint(name)}; or name a file of it, as in {PREFIX}{name.repository}/model.npz",
    )


def _fetch_file(hub: ModuleType, name: HubName, file: str, cache: Path, *, local: bool) -> Path:
    """Return one file of a repository.

    hf_hub_download retries an unreachable network for half a minute before it reads the cache, snapshot_download tries
    once. So the snapshot is tried first, and hf_hub_download only reports why the file is not in it.
    """
    snapshot = partial(hub.snapshot_download, name.repository, revision=name.revision, allow_patterns=[file])
    is_local = local or not _announce_download(hub, name, cache)
    path = _download(snapshot, name, cache, local=is_local) / file
    if path.exists():
        return path
    if is_local:  # some versions of hf_hub_download would contact the hub all the same
        raise _not_cached(name, cache)
    single = partial(hub.hf_hub_download, name.repository, file, revision=name.revision)
    return _download(single, name, cache, local=False)


def announce_download(name: str) -> bool:
    """Log weights, size and license of what is not in the cache. Return False if the hub cannot be reached."""
    return _announce_download(import_hub_library("huggingface_hub"), parse_hub_name(name), hub_cache_dir())


def _announce_download(hub: ModuleType, name: HubName, cache: Path) -> bool:
    """Log weights, size and license of what is not in the cache. Return False if the hub cannot be reached."""
    if is_offline():
        return False
    errors = import_hub_library("huggingface_hub.errors")
    try:
        info = hub.model_info(name.repository, revision=name.revision, files_metadata=True, timeout=REQUEST_SECONDS)
    except errors.HfHubHTTPError:  # reported by the download
        return True
    except Exception:  # of its HTTP library, which differs between versions
        return False
    files = {each.rfilename: each.size or 0 for each in info.siblings}
    choices = ((name.file,),) if name.file else (SAFETENSORS_FILES, PICKLE_FILES)
    matches = ([file for file in files if any(fnmatchcase(file, each) for each in patterns)] for patterns in choices)
    weights = next(filter(None, matches), [])
    snapshot = cache / f"models--{name.repository.replace('/', '--')}" / "snapshots" / str(info.sha)
    if missing := [file for file in weights if not (snapshot / file).exists()]:
        size = format_bytes(sum(files[file] for file in missing))
        license_name = safe_text(str(getattr(info.card_data, "license", None) or "not stated"))
        logger.info("downloading %s: %s, license %s", name, size, license_name)
    return True


def _not_cached(name: HubName, cache: Path) -> NotCachedError:
    missing = name.file or "the weights"
    reason = "and HF_HUB_OFFLINE is set" if is_offline() else "and the hub cannot be reached"
    return NotCachedError(f"{name}: {missing} not in {cache}, {reason}", hint=_download_hint(name))


def _download(fetch: Callable[..., str], name: HubName, cache: Path, *, local: bool) -> Path:
    """Call huggingface_hub and translate its exceptions, which replace its own messages."""
    errors = import_hub_library("huggingface_hub.errors")
    library = logging.getLogger("huggingface_hub")
    level = library.level
    library.setLevel(logging.CRITICAL)
    try:
        return Path(fetch(cache_dir=cache, local_files_only=local))
    except errors.LocalEntryNotFoundError as error:
        raise _not_cached(name, cache) from error
    except errors.GatedRepoError as error:
        hint = f"accept its terms at https://huggingface.co/{name.repository}, then run hf auth login"
        raise WeightsError(f"{name}: access must be requested", hint=hint) from error
    except errors.RepositoryNotFoundError as error:
        hint = "check the name; if it is private, run hf auth login"
        raise WeightsError(f"{name}: no such repository on the hub", hint=hint) from error
    except errors.RevisionNotFoundError as error:
        raise WeightsError(f"{name}: the repository has no revision {name.revision}") from error
    except errors.EntryNotFoundError as error:
        raise WeightsError(f"{name}: the repository has no file {name.file}") from error
    except Exception as error:  # of its HTTP library, which differs between versions
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise WeightsError(f"{name}: download failed: {reason[:200]}", hint=_download_hint(name)) from error
    finally:
        library.setLevel(level)


def _download_hint(name: HubName) -> str:
    files = name.file or f"{SAFETENSORS_FILES[0]} {CONFIG}"
    revision = "" if name.revision == "main" else f" --revision {name.revision}"
    return f"with a network and without HF_HUB_OFFLINE, run: hf download {name.repository} {files}{revision}"


def _check_inside(path: Path, name: HubName, cache: Path) -> None:
    """Raise an error if a symbolic link or an invalid commit leads out of the cache."""
    for entry in (path, *path.rglob("*")) if path.is_dir() else (path,):
        if not entry.resolve().is_relative_to(cache):
            raise WeightsError(
                f"{name}: {entry.name} leads out of the cache",
                expected=f"a file in {cache}",
                got=entry.resolve(),
                hint="delete the repository's directory in the cache and download it again",
            )
