"""Choice of initial weights for a run that names none: published weights, else those embedded in the package.

A run must start within its time and without a network, so every failure of the hub leads to the embedded weights.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Literal

from vitkit.core.errors import MissingDependencyError, VitkitError, WeightsError
from vitkit.core.signals import StopFlag
from vitkit.weights.download import download
from vitkit.weights.hub import PREFIX, NotCachedError, is_offline, resolve_hub_name
from vitkit.weights.load import EMBEDDED, load_bundle
from vitkit.zoo.pretrained import find_pretrained_name

DEFAULT_WEIGHTS = {
    "cpu": "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "gpu": "timm/vit_small_patch16_224.augreg_in21k_ft_in1k",
}
"""Names on the hub, by kind of device; 23 and 88 MB, Apache-2.0."""
DOWNLOAD_SECONDS, DOWNLOAD_FRACTION = 120.0, 0.25
"""Longest wait for a download, and the part of a time budget for it."""
STOP_SECONDS = 0.2
"""Interval at which a run that waits for a download checks whether it was asked to stop."""
EMBEDDED_TERMS = (
    "terms of the embedded weights: Apache-2.0, trained on Tiny-ImageNet, whose images are for non-commercial "
    "research; if that matters, use --from scratch or other weights"
)

Fetch = Callable[[str], Path]
"""Returns the path of the weights of a hub name, downloading them if necessary."""


class DamagedCacheError(WeightsError):
    """Weights in the hub cache that cannot be loaded."""


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Initial weights and the reason for them; `source` is None for random ones, `advice` a way to better ones."""

    source: str | None
    reason: str
    advice: str | None = None

    def describe(self) -> str:
        """Return the line that names the weights and the reason.

        >>> InitialWeights(source=None, reason="as requested").describe()
        'initial weights: random (as requested)'
        """
        return f"initial weights: {self.source or 'random'} ({self.reason})"

    def messages(self) -> tuple[str, ...]:
        """Return the lines that a run prints: the choice, the terms of embedded weights, and the way to others."""
        terms = EMBEDDED_TERMS if self.source == EMBEDDED else None
        return tuple(line for line in (self.describe(), terms, self.advice) if line)


def choose_initial_weights(
    *,
    device: Literal["cpu", "gpu"],
    model: str | None = None,
    minutes: float | None = None,
    seconds: float = DOWNLOAD_SECONDS,
    fetch: Fetch = download,
    stop: StopFlag | None = None,
) -> InitialWeights:
    """Return the default weights of the hub if they are cached or can be downloaded in time, else the embedded ones.

    A model name narrows the choice to weights of that architecture, without which the model is trained from scratch.
    `minutes` is the time budget of the run, of which a download takes a part at most. Raises `StopRequested` if a stop
    is requested meanwhile.
    """
    seconds = seconds if minutes is None else min(seconds, 60 * DOWNLOAD_FRACTION * minutes)
    weights = find_pretrained_name(model or DEFAULT_WEIGHTS[device])
    if weights is None:
        return InitialWeights(source=None, reason=f"no weights of {model} are published")
    try:
        reason = find_weights(weights.source, seconds=seconds, fetch=fetch, stop=stop or StopFlag())
        return InitialWeights(source=weights.source, reason=reason)
    except MissingDependencyError as error:
        reason = "the extra hub is not installed"
        advice = f"downloaded weights would likely do better: {error.hint}"
    except DamagedCacheError as error:
        reason = error.message
        advice = f"downloaded weights would likely do better: {error.hint}"
    except (VitkitError, OSError) as error:
        reason = error.message if isinstance(error, VitkitError) else str(error)
        connect = "unset HF_HUB_OFFLINE and connect once" if is_offline() else "connect once"
        advice = f"downloaded weights would likely do better: {connect}, or use --from WEIGHTS"
    source = EMBEDDED if model is None else None
    return InitialWeights(source=source, reason=reason, advice=advice)


def find_weights(source: str, *, seconds: float, fetch: Fetch, stop: StopFlag) -> str:
    """Return where the weights of a hub name come from, after reading them; raise if they cannot be used."""
    name = source.removeprefix(PREFIX)
    try:
        path = resolve_hub_name(source, local=True)
    except NotCachedError:
        if is_offline():
            raise NotCachedError(f"{name} is not in the hub cache, and HF_HUB_OFFLINE is set") from None
    else:
        check_weights(path)
        return "in the hub cache"
    check_weights(run_with_limit(lambda: fetch(source), seconds=seconds, name=name, stop=stop))
    return "downloaded"


def check_weights(path: Path) -> None:
    """Raise an error if a file in the hub cache cannot be loaded; the hub's library would not download it again."""
    try:
        load_bundle(path)
    except (VitkitError, OSError) as error:
        reason = error.message if isinstance(error, VitkitError) else str(error)
        raise DamagedCacheError(reason, hint=f"delete {path}, connect, and choose another --out") from error


def run_with_limit(fetch: Callable[[], Path], *, seconds: float, name: str, stop: StopFlag) -> Path:
    """Return the result of a download, raise an error after some seconds, or `StopRequested`.

    The download is not stopped: what is complete when the run ends is in the cache for the next one.
    """
    result: Future[Path] = Future()

    def work() -> None:
        try:
            result.set_result(fetch())
        except BaseException as error:  # raised again by the waiting thread
            result.set_exception(error)

    Thread(target=work, daemon=True, name="vitkit-download").start()
    end = time.monotonic() + seconds
    while not result.done():
        stop.raise_if_requested()
        if (left := end - time.monotonic()) <= 0:
            raise WeightsError(f"{name}: the download took longer than {seconds:.0f} s")
        wait([result], timeout=min(left, STOP_SECONDS))
    stop.raise_if_requested()  # Ctrl-C ends the process that downloads, too
    return result.result()
