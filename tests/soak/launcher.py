"""Process that forks `vitkit` commands and scripts on request, without the seconds that importing torch takes.

A request is one line of JSON.

{"arguments", "script", "imports", "environment", "directory", "stdout", "stderr", "mounts", "faulty_sync"} answers
{"pid"}: the child is a process group of its own that runs the command line, or a script, with those arguments.
`imports` are libraries to import before the fork, which later children share. `mounts` is a mount namespace to enter.
`faulty_sync` [n, errno] lets the child's n-th and later calls of fsync fail, as a failing disk does.

{"wait": pid} answers {"code"}: a negative signal or an exit code.
"""

import ctypes
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import numpy.ctypeslib
import numpy.ma  # noqa: F401  as is the next
import pydantic.type_adapter  # noqa: F401
import torch
import torch._dynamo  # optimizers import it
import torch.distributed.fsdp
from PIL import Image

import vitkit.api.training
import vitkit.cli.running
import vitkit.cli.train
import vitkit.evaluation.fewshot
import vitkit.inference.packed
import vitkit.objectives.supervised
import vitkit.training.auto
import vitkit.training.run  # noqa: F401  the work of these imports is what forking saves
from vitkit.cli.main import main
from vitkit.weights.verify import import_library

sys.path.append(str(Path(__file__).resolve().parents[1]))
from quick_runs import shorten_measurement


def become(request: dict) -> None:
    """Set up this forked process as requested."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["mounts"]:
        enter_mounts(request["mounts"])
    output, errors = (os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("stdout", "stderr"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(old, new)
    os.environ.update(request["environment"])
    if request["directory"]:
        os.chdir(request["directory"])
    if request["faulty_sync"]:
        fail_to_sync(*request["faulty_sync"])


def enter_mounts(path: str) -> None:
    """Enter a mount namespace; Python has os.setns from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open(path, os.O_RDONLY), 0x20000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "setns failed")


def fail_to_sync(good: int, error: int) -> None:
    real, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= good:
            raise OSError(error, os.strerror(error))
        real(descriptor)

    os.fsync = fsync


def run(request: dict) -> None:
    """Run the command line or a script, and end this process."""
    if request["script"] is None:
        sys.exit(main(request["arguments"]))
    sys.argv = [request["script"], *request["arguments"]]
    runpy.run_path(request["script"], run_name="__main__")
    sys.exit(0)


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            for name in request["imports"]:
                library = import_library(name)
                if name == "transformers":
                    assert library.ViTForImageClassification  # imported on access
            pid = os.fork()
            if pid == 0:
                become(request)
                run(request)
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    shorten_measurement()
    Image.preinit()  # imports the formats of images
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    serve()
