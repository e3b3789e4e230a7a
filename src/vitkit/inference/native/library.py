"""The shared library of the native kernels: compilation, once per machine, and ctypes declarations.

The library is stored in the cache under a name derived from the sources, the CPU, the compiler and its flags. A damaged
library is rebuilt, and one that another user could have written is never loaded.
"""

import contextlib
import ctypes
import hashlib
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vitkit.core.cache_dir import cache_dir, create_cache_dir, is_private, mark_used, trim_cache
from vitkit.core.errors import VitkitError, summarize
from vitkit.core.files import atomic_write, file_lock, write_text
from vitkit.core.formatting import format_bytes

SOURCES = Path(__file__).parent
NATIVE_FLAGS = ("-march=native",)
"""Left out if the compiler does not know them, and if the CPU cannot be identified: two machines that share a cache
could not tell their libraries apart."""
FLOAT_FLAGS = ("-ffp-contract=fast", "-fno-math-errno")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", *FLOAT_FLAGS, "-pthread", "-fvisibility=hidden", "-w")
COMPILERS = ("c++", "g++", "clang++")
SYSCTL = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
COMPILE_TIMEOUT = 300.0
DIGEST_BYTES = 32
BUILD_BYTES = 32 * 10**6
"""Free space that is needed to compile: the library and temporary files of the compiler."""
STORAGE_HINT = "set VITKIT_CACHE to a directory of your own that is writable, not mounted noexec, and has free space"
FLOATS = ctypes.POINTER(ctypes.c_float)


class EngineError(VitkitError):
    """The native engine cannot be built or run. Models still run on torch, slower."""


def build_library() -> Path:
    """Return the path of the compiled library, which can be loaded; compile it if needed.

    Safe to call from several processes at once. A failure of the compiler is remembered in the cache, because an
    attempt takes up to a minute.
    """
    path = _library_path()
    if _is_intact(path):
        mark_used(path)
        _check_executable(path)
        return path
    compiler = find_compiler()
    if compiler is None:
        expected = f"one of {', '.join(COMPILERS)}, or its path in CXX"
        hint = "install one (Debian: apt install g++; macOS: xcode-select --install)"
        raise EngineError("no C++ compiler to build the native engine", expected=expected, hint=hint)
    if obstacle := storage_obstacle():
        raise EngineError(f"the native engine cannot be stored: {obstacle}", hint=STORAGE_HINT)
    try:
        create_cache_dir("kernels")
        with file_lock(path):
            if not _is_intact(path):  # another process may have built it meanwhile
                _compile_or_recall(path, compiler)
                trim_cache(keep=path)
    except OSError as error:
        raise EngineError(f"the native engine cannot be stored: {error}", hint=STORAGE_HINT) from error
    _check_executable(path)
    return path


def _compile_or_recall(path: Path, compiler: Sequence[str]) -> None:
    """Compile the library, or raise the error of an earlier attempt with the same sources, compiler and cache."""
    failure = path.with_suffix(".failed")
    if failure.is_file():
        reason = failure.read_text(encoding="utf-8", errors="replace")
        raise EngineError(
            f"{reason} (in an earlier attempt)", hint="vitkit cache clear makes the next command try again"
        )
    with atomic_write(path) as temporary:
        try:
            compile_library(temporary, compiler=compiler, machine_flags=_machine_flags())
        except EngineError as error:
            with contextlib.suppress(OSError):
                write_text(failure, summarize(error))
            raise
        _append_checksum(temporary)


def _check_executable(path: Path) -> None:
    """Raise EngineError if code must not be run from a file, as on a file system mounted noexec."""
    if not hasattr(mmap, "PROT_EXEC"):  # Windows
        return
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC):
            return
    except OSError as error:
        raise EngineError(f"the native engine cannot be loaded from {path}: {error}", hint=STORAGE_HINT) from error


def storage_obstacle() -> str | None:
    """Return why the cache cannot hold a library: programs must not run from there, or it is full; None if it can."""
    directory = cache_dir("kernels").absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if hasattr(os, "statvfs") and os.statvfs(existing).f_flag & getattr(os, "ST_NOEXEC", 0):
        return f"{directory} is on a file system mounted noexec"
    if (free := shutil.disk_usage(existing).free) < BUILD_BYTES:
        return f"{directory} has {format_bytes(free)} of free space, and compiling takes {format_bytes(BUILD_BYTES)}"
    return None


def is_built() -> bool:
    """Return whether the library is in the cache."""
    with contextlib.suppress(VitkitError, OSError):  # without a compiler or a cache directory
        return _is_intact(_library_path())
    return False


def find_compiler() -> tuple[str, ...] | None:
    """Return the command of the C++ compiler: CXX, or the first of the usual names on the PATH."""
    try:
        command = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        hint = f"{error}: set it to g++, for example"
        raise EngineError("CXX is not a command", got=os.environ["CXX"], hint=hint) from error
    if command:
        return tuple(command) if shutil.which(command[0]) else None
    return next(((name,) for name in COMPILERS if shutil.which(name)), None)


def compile_library(path: Path, *, compiler: Sequence[str], machine_flags: Sequence[str] = NATIVE_FLAGS) -> None:
    """Compile the sources into a shared library."""
    source, result = str(SOURCES / "engine.cpp"), None
    # A compiler that does not know -march=native still knows its architecture.
    for flags in (machine_flags, ()) if tuple(machine_flags) == NATIVE_FLAGS else (machine_flags,):
        command = [*compiler, *FLAGS, *flags, source, "-o", str(path)]
        try:
            # The compiler's temporary files go next to the library: /tmp may be small.
            with tempfile.TemporaryDirectory(prefix=".build.", dir=path.parent) as temporary:
                variables = os.environ | {"TMPDIR": temporary}
                result = subprocess.run(
                    command, capture_output=True, timeout=COMPILE_TIMEOUT, env=variables, check=False
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"the compiler could not be run: {error}") from error
        if result.returncode == 0:
            return
    output = (result.stderr if result else b"").decode(errors="replace").strip().splitlines()
    raise EngineError(
        f"{compiler[0]} could not compile the native engine",
        got=next((line for line in output if "error:" in line), output[-1] if output else "no message"),
        hint="use GCC 9, Clang 10 or later (C++17); CXX selects the compiler",
    )


def _library_path() -> Path:
    """Return the library's path. Without a compiler, that of a library which an earlier compiler built, if any."""
    sources = [path.read_bytes() for path in [*sorted(SOURCES.glob("*.h")), SOURCES / "engine.cpp"]]
    machine = (platform.system(), platform.machine(), platform.processor(), _cpu())
    target = _digest(*sources, "\n".join(machine).encode())
    compiler, directory = find_compiler(), cache_dir("kernels")
    if compiler is None:
        existing = sorted(directory.glob(f"native-{target}-*.so"))
        return existing[0] if existing else directory / f"native-{target}-none.so"
    try:
        version = _command_output([*compiler, "--version"])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"the compiler could not be run: {error}") from error
    toolchain = _digest(version.encode(), " ".join((*compiler, *FLAGS, *_machine_flags())).encode())
    return directory / f"native-{target}-{toolchain}.so"


def _machine_flags() -> tuple[str, ...]:
    return NATIVE_FLAGS if _cpu() else ()


@cache
def _cpu() -> str:
    """Return a text that identifies the CPU model, or an empty one if the system does not provide it."""
    if platform.system() == "Windows":
        return platform.processor()
    try:
        if platform.system() == "Darwin":
            return _command_output(SYSCTL).strip()
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(fields)}))


def _command_output(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT, check=False)
    return result.stdout.decode(errors="replace")


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def _append_checksum(path: Path) -> None:
    """Append the SHA-256 of the content, which dynamic loaders ignore, so that damage is detected before loading."""
    content = path.read_bytes()
    path.write_bytes(content + hashlib.sha256(content).digest())
    path.chmod(0o755)  # independent of the umask: a library that others can write is not loaded


def _is_intact(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    if not all(is_private(each) for each in (path, *path.parents[:2])):
        return False
    body, checksum = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return len(body) > 0 and hashlib.sha256(body).digest() == checksum


# Functions of engine.cpp and structures of model.h


def _fields(names: str, ctype: type) -> list[tuple[str, type]]:
    return [(name, ctype) for name in names.split()]


class _Structure(ctypes.Structure):
    """A structure that rejects unknown field names: ctypes would store them as plain attributes without an error."""

    def __init__(self, **values: object) -> None:
        if unknown := values.keys() - {field[0] for field in self._fields_}:
            raise TypeError(f"{type(self).__name__} has no field {min(unknown)}")
        super().__init__(**values)


class Sizes(_Structure):
    """`VitkitSizes` of model.h."""

    _fields_ = (
        *_fields("channels image_height image_width patch_height patch_width", ctypes.c_int32),
        *_fields("width depth heads mlp_dim prefix class_tokens", ctypes.c_int32),
        *_fields("pooling activation norm_first pre_logits num_classes", ctypes.c_int32),
        ("norm_epsilon", ctypes.c_float),
    )


class LayerWeights(_Structure):
    """`VitkitLayer` of model.h."""

    _fields_ = (
        *_fields("positions norm1_weight norm1_bias qkv_weight qkv_bias", FLOATS),
        *_fields("q_norm_weight q_norm_bias k_norm_weight k_norm_bias", FLOATS),
        *_fields("proj_weight proj_bias scale1 norm2_weight norm2_bias", FLOATS),
        *_fields("fc1_weight fc1_bias fc2_weight fc2_bias scale2", FLOATS),
    )


class ModelWeights(_Structure):
    """`VitkitWeights` of model.h."""

    _fields_ = (
        *_fields("cosine sine initial_tokens patch_weight norm_weight norm_bias", FLOATS),
        *_fields("pre_logits_weight pre_logits_bias head_weight head_bias", FLOATS),
    )


@cache
def load_library(path: Path) -> ctypes.CDLL:
    """Load the compiled library and declare its functions. ctypes releases the GIL during calls."""
    pointer = ctypes.c_void_p
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineError(f"the native engine cannot be loaded: {error}", hint=STORAGE_HINT) from error
    structures = (ctypes.POINTER(each) for each in (Sizes, ModelWeights, LayerWeights))
    functions: dict[str, tuple[Any, ...]] = {
        "vitkit_create": (pointer, *structures, ctypes.c_int),
        "vitkit_run": (ctypes.c_int, pointer, pointer, ctypes.c_size_t, pointer, pointer, pointer, ctypes.c_int),
        "vitkit_bytes": (ctypes.c_size_t, pointer),
        "vitkit_destroy": (None, pointer),
        "vitkit_instructions": (ctypes.c_char_p,),
    }
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
