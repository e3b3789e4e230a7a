"""A result or a refusal goes in, the JSON that a client gets comes out; of a refusal, `{"error": …, "hint": …}`."""

import json
from collections.abc import Mapping

JSON = "application/json"


class Refusal(Exception):  # noqa: N818  an answer, not a fault of the server
    """A request that is answered with an error: its status, what was expected and came, and what to do."""

    def __init__(
        self, status: int, error: str, *, hint: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(error)
        self.status, self.error, self.hint, self.headers = status, error, hint, dict(headers or {})

    def body(self) -> bytes:
        """The JSON."""
        return error_body(self.error, self.hint)


def nothing_here() -> Refusal:
    """The refusal of an address that there is not."""
    return Refusal(404, "there is nothing at this address", hint="GET /docs lists all addresses")


def error_body(error: str, hint: str | None = None) -> bytes:
    """The JSON of an error.

    >>> error_body("no such model", "see /v1/models")
    b'{"error": "no such model", "hint": "see /v1/models"}'
    """
    return encoded({"error": error} | ({"hint": hint} if hint else {}))


def encoded(value: object) -> bytes:
    """A value as strict JSON."""
    return json.dumps(value, allow_nan=False).encode()
