"""The name of a device goes in, the device comes out, or a sentence that says why it cannot be had."""

import torch

from vitkit.core.errors import ConfigError


def choose_device(name: str, *, local_rank: int = 0) -> torch.device:
    """The named device, or the best there is; on several GPUs, that of this process.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank}"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"this machine has no device {name}", hint="vitkit doctor shows what it has") from error
