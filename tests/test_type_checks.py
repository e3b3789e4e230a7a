"""Checks of shapes and types in tests reject wrong arguments and results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor
from type_checks import check_when_called


def transpose(matrix: Float[Tensor, "rows columns"], *, correct: bool = True) -> Float[Tensor, "columns rows"]:
    return matrix.T if correct else matrix


@pytest.fixture
def checked() -> Callable[..., Any]:
    return jaxtyped(transpose, typechecker=check_when_called)


def test_correct_call_is_accepted(checked: Callable[..., Any]) -> None:
    for size in (2, 3):
        assert checked(torch.ones(size, 4)).shape == (4, size)


def test_wrong_argument_is_rejected(checked: Callable[..., Any]) -> None:
    with pytest.raises(TypeCheckError, match="parameters"):
        checked(torch.ones(2))
    with pytest.raises(TypeCheckError, match="parameters"):
        checked(torch.ones(2, 3), correct="no")


def test_result_must_have_the_axes_of_the_arguments(checked: Callable[..., Any]) -> None:
    with pytest.raises(TypeCheckError, match="return value"):
        checked(torch.ones(2, 3), correct=False)


def test_result_must_have_its_type() -> None:
    def count(text: str) -> int:
        return text  # type: ignore[return-value]

    with pytest.raises(TypeCheckError, match="return value"):
        jaxtyped(count, typechecker=check_when_called)("four")
