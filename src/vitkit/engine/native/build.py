"""The kernels' sources go in, a library compiled with this machine's own instructions comes out, once for each machine.

The library is kept in the cache folder under a name that changes with the sources, the machine, the compiler and its
flags, with an empty lock beside it. Nothing else is written. A file there that is damaged is made anew, and one that
others than this user and root could have written is never loaded.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from vitkit.core.errors import VitkitError
from vitkit.core.files import one_at_a_time, written_aside
from vitkit.engine.cache import is_private, make_private, private_folder

SOURCES = Path(__file__).parent
MACHINE = ("-march=native",)
"""What makes the library fit this machine and no other. Left out where the compiler does not know it, and where the
system does not say which CPU this is: another machine with the same cache folder could not tell the library apart."""
FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-pthread",
    "-fvisibility=hidden",
    "-w",
)
COMPILERS = ("c++", "g++", "clang++")
SYSCTL = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
"""What asks macOS for the name of its CPU."""
PATIENCE = 300.0
"""Seconds after which a compiler that does not come back is given up."""


class EngineError(VitkitError):
    """The native engine cannot be made here: there is no compiler, or it fails. Others run the same models slower."""


def library() -> Path:
    """The compiled library, which is compiled now if it has not been; several processes may ask at once.

    >>> import ctypes
    >>> ctypes.CDLL(str(library())).vitkit_create is None
    False
    """
    path = _place()
    if _is_whole(path):
        return path
    compiler = find_compiler()
    if compiler is None:
        raise EngineError(
            "no C++ compiler to make the native engine with",
            expected=f"one of {', '.join(COMPILERS)}, or its path in CXX",
            hint="install one (Debian: apt install g++; macOS: xcode-select --install)",
        )
    try:
        make_private(path.parent)
        with one_at_a_time(path):
            if not _is_whole(path):  # another process may have been sooner
                with written_aside(path) as aside:
                    compile_to(aside, compiler=compiler, machine=_flags())
                    _seal(aside)
    except OSError as error:
        raise EngineError(
            f"the native engine cannot be kept: {error}",
            hint="set VITKIT_CACHE to a folder of your own that can be written to, with a few megabytes of room",
        ) from error
    return path


def is_built() -> bool:
    """Whether the library is there already."""
    return _is_whole(_place())


def find_compiler() -> tuple[str, ...] | None:
    """The C++ compiler's command: what CXX says, or the first of the usual names that is there."""
    try:
        command = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise EngineError("CXX is not a command", got=os.environ["CXX"], hint=f"{error}: set it to g++, say") from error
    if command:
        return tuple(command) if shutil.which(command[0]) else None
    return next(((name,) for name in COMPILERS if shutil.which(name)), None)


def compile_to(path: Path, *, compiler: Sequence[str], machine: Sequence[str] = MACHINE) -> None:
    """Compile the sources into a library, for the machine that flags name."""
    source = str(SOURCES / "engine.cpp")
    failed = None
    # A compiler that does not know the machine's name for itself still knows its architecture.
    for flags in (machine, ()) if tuple(machine) == MACHINE else (machine,):
        command = [*compiler, *FLAGS, *flags, source, "-o", str(path)]
        try:
            failed = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"the compiler could not be run: {error}") from error
        if failed.returncode == 0:
            return
    said = (failed.stderr if failed else b"").decode(errors="replace").strip().splitlines()
    raise EngineError(
        f"{compiler[0]} could not compile the native engine",
        got=next((line for line in said if "error" in line), said[-1] if said else "no message"),
        hint="a C++17 compiler is needed: GCC 9 or Clang 10, or later; CXX chooses another one",
    )


def _place() -> Path:
    """Where the library is or will be. Without a compiler, one that an earlier compiler has left for this machine."""
    sources = [path.read_bytes() for path in [*sorted(SOURCES.glob("*.h")), SOURCES / "engine.cpp"]]
    made_for = _digest(*sources, _machine().encode())
    compiler, folder = find_compiler(), private_folder()
    if compiler is None:
        left = sorted(folder.glob(f"native-{made_for}-*.so"))
        return left[0] if left else folder / f"native-{made_for}-none.so"
    made_with = _digest(_version(compiler).encode(), " ".join((*compiler, *FLAGS, *_flags())).encode())
    return folder / f"native-{made_for}-{made_with}.so"


def _flags() -> tuple[str, ...]:
    """What to compile with for this machine."""
    return MACHINE if _cpu() else ()


def _machine() -> str:
    """What tells this machine from others."""
    return "\n".join((platform.system(), platform.machine(), platform.processor(), _cpu()))


@cache
def _cpu() -> str:
    """What tells this CPU from others of its architecture; nothing where the system does not say."""
    if platform.system() == "Windows":
        return platform.processor()
    try:
        if platform.system() == "Darwin":
            return _said(SYSCTL).strip()
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    telling = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(telling)}))


def _version(compiler: Sequence[str]) -> str:
    try:
        return _said([*compiler, "--version"])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"the compiler could not be run: {error}") from error


def _said(command: Sequence[str]) -> str:
    """What a command prints."""
    said = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    return said.stdout.decode(errors="replace")


def _digest(*parts: bytes) -> str:
    """A short name for some contents."""
    together = hashlib.sha256()
    for part in parts:
        together.update(hashlib.sha256(part).digest())
    return together.hexdigest()[:16]


def _seal(path: Path) -> None:
    """Put the content's SHA-256 behind it, which loaders do not read: a damaged library must never be loaded."""
    content = path.read_bytes()
    path.write_bytes(content + hashlib.sha256(content).digest())
    path.chmod(0o755)  # whatever the umask: what others can write is not loaded


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    if not (is_private(path) and is_private(path.parent)):
        return False
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]
