"""Requests on stdin go in, forked `vitkit` processes come out, each without the seconds that importing torch takes.

A request is one line of JSON. {"arguments", "environment", "log", "faulty_sync"} answers {"pid"}: the child is a
process group of its own that runs the command line on those arguments. {"wait": pid} answers {"code"}: a negative
signal or an exit code. `faulty_sync` [n, errno] lets the child's n-th and later calls of fsync fail, as a dying disk
does.
"""

import json
import os
import signal
import sys

import torch

import vitkit.cli.running
import vitkit.cli.train
import vitkit.cli.watching
import vitkit.recipes.table
import vitkit.train.run  # noqa: F401  the work of these imports is what forking saves
from vitkit.cli.main import main


def become(request: dict) -> None:
    """Turn this forked process into the one that was asked for."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.environ.update(request["environment"])
    if request["faulty_sync"]:
        fail_to_sync(*request["faulty_sync"])


def fail_to_sync(good: int, error: int) -> None:
    real, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= good:
            raise OSError(error, os.strerror(error))
        real(descriptor)

    os.fsync = fsync


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                become(request)
                sys.exit(main(request["arguments"]))
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    serve()
