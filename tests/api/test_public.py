"""Errors of all public functions."""

import pytest

from vitkit.api.public import public
from vitkit.errors import VitkitError


@pytest.mark.parametrize(
    ("error", "amount"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000 bytes."),
            "400000 bytes",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB."), "2.50 GiB"),
        (MemoryError(), None),
    ],
)
def test_model_too_large_for_the_memory_has_a_hint(error: Exception, amount: str | None) -> None:
    @public
    def build() -> None:
        raise error

    with pytest.raises(VitkitError, match=r"^out of memory") as caught:
        build()
    assert caught.value.hint.startswith("use a smaller model")
    assert caught.value.got == (amount and f"a request for {amount}")


def test_other_errors_are_raised_unchanged() -> None:
    @public
    def build() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match=r"^mat1"):
        build()
