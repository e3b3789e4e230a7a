"""Slow connections of every kind, and when the server closed each."""

import asyncio
import contextlib
import itertools
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from soak.load import message

Kind = Literal["silent", "half a line", "slow head", "slow body", "slow chunks", "slow reader", "hasty"]
KINDS: tuple[Kind, ...] = ("silent", "half a line", "slow head", "slow body", "slow chunks", "slow reader", "hasty")
PATH = "/v1/predict"
FIRST: dict[Kind, bytes] = {
    "silent": b"",
    "half a line": b"POST /v1/pre",
    "slow head": f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ".encode(),
    "slow body": message(PATH, b"x" * 50_000)[:-49_990],
    "slow chunks": f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode(),
}
UNREAD: dict[Kind, int] = {"slow reader": 6, "hasty": 60}
"""Number of responses that are requested at once and not read."""
DRIP: dict[Kind, bytes] = {"slow head": b"x", "slow body": b"x", "slow chunks": b"1\r\nx\r\n"}


@dataclass
class SlowConnection(asyncio.Protocol):
    """A slow connection."""

    kind: Kind
    opened: float = 0.0
    closed: float = math.inf
    port: int = 0
    received: bytes = b""
    is_over: bool = False
    """Whether the measurement has ended."""
    transport: asyncio.Transport = field(init=False)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport, self.opened = transport, time.monotonic()
        self.port = transport.get_extra_info("sockname")[1]

    def data_received(self, data: bytes) -> None:
        self.received += data[: 64 - len(self.received)]

    def eof_received(self) -> None:
        self.end()

    def connection_lost(self, _: Exception | None) -> None:
        self.end()

    def end(self) -> None:
        if not self.is_over:
            self.closed = min(self.closed, time.monotonic())

    @property
    def seconds(self) -> float:
        """Seconds until the server closed it."""
        return self.closed - self.opened


async def open_slow_connections(
    port: int,
    *,
    count: int,
    seconds: float,
    large: bytes,
    server_side: Callable[[], set[int]],
    kinds: tuple[Kind, ...] = KINDS,
    every: float = 1.0,
) -> list[SlowConnection]:
    """Open slow connections and wait until the server has closed them all, or for `seconds`.

    `large` requests a response that exceeds the client's receive buffer; it is sent several times and nothing is read.
    Such a client does not notice that it was disconnected, because data stays in the kernel: `server_side` returns the
    client ports for which the server still has a socket.
    """
    loop, everyone = asyncio.get_running_loop(), []
    for number, kind in zip(range(count), itertools.cycle(kinds), strict=False):
        everyone.append(await _open(loop, port, kind, large=large))
        if number % 10 == 9:
            await asyncio.sleep(0.02)  # a thousand within a second or two
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(math.isinf(each.closed) for each in everyone):
        await asyncio.sleep(every)
        for each in everyone:
            if each.kind in DRIP and math.isinf(each.closed) and not each.transport.is_closing():
                each.transport.write(DRIP[each.kind])
        readers = [each for each in everyone if each.kind in UNREAD and math.isinf(each.closed)]
        if readers:
            open_ports = await asyncio.to_thread(server_side)
            for each in readers:
                if each.port not in open_ports:
                    each.end()
    for each in everyone:
        each.is_over = True
        each.transport.abort()
    await asyncio.sleep(0)
    return everyone


async def _open(loop: asyncio.AbstractEventLoop, port: int, kind: Kind, *, large: bytes) -> SlowConnection:
    plug = socket.socket()
    if kind in UNREAD:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plug.setblocking(False)
    await loop.sock_connect(plug, ("127.0.0.1", port))
    transport, slow = await loop.create_connection(lambda: SlowConnection(kind), sock=plug)
    with contextlib.suppress(RuntimeError):
        if kind in UNREAD:
            transport.pause_reading()
    transport.write(large * UNREAD[kind] if kind in UNREAD else FIRST[kind])
    return slow
