"""Messages between the front-end process and the worker process, and the HTTP errors that both return.

A message is a small JSON header followed by bytes. Nothing is pickled: the worker decodes untrusted files, so the front
end does not accept objects from it.
"""

import json
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

READ_SIZE = 1 << 16
PREFIX = struct.Struct("<IQ")
Message = dict[str, Any]
Body = bytes | bytearray
JSON = "application/json"
JSON_SIZE_HEADER = "Inference-Header-Content-Length"
"""KServe's header for the length of the JSON before binary tensors."""


class HTTPError(Exception):
    """An error response: status, message, hint and additional headers."""

    def __init__(
        self, status: int, message: str, *, hint: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.hint, self.headers = status, message, hint, dict(headers or {})

    def to_response(self) -> "WorkerResponse":
        """Encode the error as JSON."""
        content = {"error": self.message} | ({"hint": self.hint} if self.hint else {})
        return WorkerResponse(self.status, {"content-type": JSON} | self.headers, encode_json(content))


def not_found() -> HTTPError:
    """Return the error for a path without a route."""
    return HTTPError(404, "no such route", hint="GET /docs lists all routes")


def encode_json(value: object) -> bytes:
    """Encode a value as strict JSON, without NaN and infinity."""
    return json.dumps(value, allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class WorkerResponse:
    """A response of the worker, passed to the client as it is, or an encoded error."""

    status: int
    headers: dict[str, str]
    body: bytes

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers as ASGI takes them, with the length of the body."""
        headers = self.headers | {"content-length": str(len(self.body))}
        return [(name.encode(), value.encode()) for name, value in headers.items()]


def encode_frame(header: Message, body_size: int = 0) -> bytes:
    """Encode everything that precedes a body of `body_size` bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return PREFIX.pack(len(text), body_size) + text


class FrameDecoder:
    """Incremental decoder for a stream of messages."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """Add received bytes and yield the messages that are complete."""
        self.buffer += data
        while len(self.buffer) >= PREFIX.size:
            header_size, body_size = PREFIX.unpack_from(self.buffer)
            start = PREFIX.size + header_size
            if len(self.buffer) < start + body_size:
                return
            header = json.loads(bytes(self.buffer[PREFIX.size : start]))
            if not isinstance(header, dict):
                raise ValueError(header)
            with memoryview(self.buffer) as view:
                body = bytes(view[start : start + body_size])
            del self.buffer[: start + body_size]
            yield header, body


def read_messages(sock: socket.socket) -> Iterator[tuple[Message, bytes]]:
    """Yield the messages of a blocking socket until the peer closes it. Large bodies are not copied."""
    with sock.makefile("rb", buffering=READ_SIZE) as file:
        while len(prefix := file.read(PREFIX.size)) == PREFIX.size:
            header_size, body_size = PREFIX.unpack(prefix)
            header, body = file.read(header_size), file.read(body_size)
            if len(body) < body_size:
                return
            yield json.loads(header), body
