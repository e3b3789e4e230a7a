"""Types of the arguments of public functions. Importing this module imports no torch."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, TypeAlias, Union

from vitkit.core.sizes import Size

if TYPE_CHECKING:
    import numpy.typing
    import PIL.Image
    import torch
    import torch.nn

__all__ = ["DataSource", "ImageLike", "ModelSource", "Path", "Settings", "Size"]


# The first line of a description has no colon: Sphinx would take what is before it for a type.
# Forward references have full names, so that they are resolved in every module that uses these types.
Path: TypeAlias = str | PathLike[str]
"""A path, as a string or a path object."""
ModelSource: TypeAlias = Union[str, PathLike[str], "torch.nn.Module"]
"""A run, an artifact, a weight file, a name on the hub, the name of a published model, or a model itself.

A name on the hub is `hub:owner/name`. A `Run` is a path, too. A model is a ViT or BiT, also as wrapped by
`torch.compile` or DistributedDataParallel.
"""
ImageLike: TypeAlias = Union[
    str, PathLike[str], bytes, "PIL.Image.Image", "numpy.typing.NDArray[numpy.uint8]", "torch.Tensor"
]
"""A path, an encoded file, a Pillow image, or uint8 pixels.

Pixels are an array H × W or H × W × C, or a tensor C × H × W.
"""
DataSource: TypeAlias = (
    str | PathLike[str] | Sequence[tuple[ImageLike, str]] | Mapping[str, Sequence[tuple[ImageLike, str]]]
)
"""A path in any layout, pairs of image and label, or such pairs by split."""
Settings: TypeAlias = Mapping[str, object]
"""Settings by dotted or nested keys.

For example {"optimizer.weight_decay": 0.1}.
"""
