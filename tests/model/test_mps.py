"""Operations that must not use float64 on Apple's MPS, simulated with tensors that have a device and no data."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitkit.model.patches import resize_kernel
from vitkit.model.positions import resample_grid


class WithoutFloat64(TorchDispatchMode):
    """Raise TypeError if an operation makes a float64 tensor on MPS, as PyTorch does there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "mps" and leaf.dtype == torch.float64:
                raise TypeError("MPS has no float64")
        return result


def test_simulation_rejects_float64():
    with FakeTensorMode(), WithoutFloat64(), pytest.raises(TypeError, match="no float64"):
        torch.empty(1, device="mps").double()


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda table: resample_grid(table, old=(3, 3), new=(5, 5)), (1, 9, 8)),
        (lambda kernel: resize_kernel(kernel, (16, 16)), (4, 3, 8, 8)),
    ],
    ids=["positions", "patches"],
)
def test_resizing_needs_no_float64_on_mps(function, shape):
    with FakeTensorMode(), WithoutFloat64():
        result = function(torch.empty(shape, device="mps"))
        assert (result.device.type, result.dtype) == ("mps", torch.float32)
