"""Start of the worker process: reports that it is alive while torch is imported and the models are loaded.

    python -m vitkit.server.worker_start FD

Signals are handled by the front end; the worker ends when its socket closes.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from vitkit.server.ipc import encode_frame

HEARTBEAT_SECONDS = 1.0


class Heartbeat:
    """Thread that sends a message every second until it is stopped.

    Nothing else may be sent meanwhile. `phase` is "importing", then "loading": the former may hold the interpreter for
    long when files are read for the first time.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.phase = sock, "importing"
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)
        self.thread.start()

    def run(self) -> None:
        """Send messages until stopped."""
        with contextlib.suppress(OSError):  # the front end has exited
            while not self.stopped.is_set():
                self.sock.sendall(encode_frame({"starting": self.phase}))
                self.stopped.wait(HEARTBEAT_SECONDS)

    def stop(self) -> None:
        """Wait for the last message."""
        self.stopped.set()
        self.thread.join()


def exit_on_disconnect(sock: socket.socket) -> None:
    """End the process together with the front end, even while models are being loaded."""
    poll = select.poll()
    poll.register(sock, 0)  # a hangup is reported without asking for it
    poll.poll()
    os._exit(0)


def main() -> None:
    """Serve on the socket whose file descriptor is the first argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # if memory runs out, this is the process that can be replaced
        Path("/proc/self/oom_score_adj").write_text("500")
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        sock.setblocking(True)
        threading.Thread(target=exit_on_disconnect, args=(sock,), daemon=True).start()
        heartbeat = Heartbeat(sock)
        from vitkit.server.worker_process import serve  # noqa: PLC0415  imports torch

        heartbeat.phase = "loading"
        serve(sock, on_loaded=heartbeat.stop)
        os._exit(0)  # threads may still work for a front end that has exited


if __name__ == "__main__":
    main()
