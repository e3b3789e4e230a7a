"""A small JSON head and bytes go in, a frame between the server's two processes comes out, and back.

Nothing is pickled: the process that decodes what strangers send is not one to take objects from.
"""

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

AT_ONCE = 1 << 16
HEAD = struct.Struct("<IQ")
Message = dict[str, Any]


def frame(head: Message, size: int = 0) -> bytes:
    """What goes in front of `size` bytes.

    >>> list(Frames().feed(frame({"id": 7}, 2) + b"ok"))
    [({'id': 7}, b'ok')]
    """
    text = json.dumps(head, separators=(",", ":")).encode()
    return HEAD.pack(len(text), size) + text


class Frames:
    """Bytes as they arrive go in, whole messages come out."""

    def __init__(self) -> None:
        self.held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """The messages that are whole now."""
        self.held += data
        while len(self.held) >= HEAD.size:
            text, size = HEAD.unpack_from(self.held)
            begin = HEAD.size + text
            if len(self.held) < begin + size:
                return
            head = json.loads(bytes(self.held[HEAD.size : begin]))
            if not isinstance(head, dict):
                raise ValueError(head)
            with memoryview(self.held) as view:
                payload = bytes(view[begin : begin + size])
            del self.held[: begin + size]
            yield head, payload


def messages(sock: socket.socket) -> Iterator[tuple[Message, bytes]]:
    """The messages of a blocking socket, until the other side goes; a large one is read into its place, not copied."""
    with sock.makefile("rb", buffering=AT_ONCE) as file:
        while len(start := file.read(HEAD.size)) == HEAD.size:
            text, size = HEAD.unpack(start)
            head, payload = file.read(text), file.read(size)
            if len(payload) < size:
                return
            yield json.loads(head), payload
