"""A single-device model goes in, the same model spread over ranks comes out; all that knows of ranks is here.

torchrun starts the ranks and says in the environment who is who; a process it did not start is alone.
"""

import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
from torch import distributed, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from vitkit.core.errors import ConfigError, TrainingError
from vitkit.core.shapes import Tensor
from vitkit.core.stopping import Stopped
from vitkit.engine.devices import choose_device
from vitkit.model.encoder import Block
from vitkit.train.config import ParallelConfig

Result = TypeVar("Result")

LAST_PATIENCE = 5.0
"""Seconds that a rank waits for the others' last words: torchrun must not wait long to start all of them again."""

ALL_MUST_START = "start all nodes, within parallel.timeout of each other; the guide on scaling out has the command"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who this process is among its equals, and the device that is its own."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    timeout: float = 600.0

    @property
    def leads(self) -> bool:
        """Whether this rank writes files and talks."""
        return self.rank == 0

    def total(self, numbers: Sequence[int | float]) -> list[float]:
        """The sums of these numbers over all ranks, in float64."""
        if self.ranks == 1:
            return [float(number) for number in numbers]
        summed = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        distributed.all_reduce(summed)
        totals, held = summed.tolist(), weakref.ref(summed)
        del summed
        # A thread of gloo's lets go of the tensor a little later, and needs the interpreter to do so. Were it the last
        # thing before the end, destroying the group would wait for that thread, and never let it have the interpreter.
        end = time.monotonic() + 1.0
        while self.device.type == "cpu" and held() is not None and time.monotonic() < end:
            time.sleep(0)
        return totals

    def wait(self) -> None:
        """Go on when all ranks have come here."""
        self.total([0])

    def agree(self, value: int) -> int:
        """The leader's number, on every rank."""
        return int(self.total([value if self.leads else 0])[0])


@contextmanager
def joined(config: ParallelConfig) -> Iterator[Ranks]:
    """Join the other ranks, where torchrun started this process, and leave them at the end.

    Several runs of one process must share an outer `joined`: ranks that left cannot be sure to find each other again.
    """
    device = choose_device(config.device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    if config.threads:
        torch.set_num_threads(config.threads)
    if "RANK" not in os.environ:
        if config.mode != "auto":
            raise ConfigError(
                f"parallel.mode={config.mode} needs more than one process",
                hint="start with: torchrun --nproc-per-node N -m vitkit train …, or leave out parallel.mode",
            )
        yield Ranks(device=device)
        return
    if distributed.is_initialized():  # inside another run's, or a sweep's
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        yield Ranks(device=device, rank=rank, ranks=ranks, timeout=config.timeout)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, ranks = next(rendezvous("env://", timeout=timedelta(seconds=config.timeout)))
    store = meet(store, rank=rank, ranks=ranks, timeout=config.timeout)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("ranks", store),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=config.timeout),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Ranks(device=device, rank=rank, ranks=ranks, timeout=config.timeout)
    except RuntimeError as error:
        if not lost_each_other(error):
            raise
        raise TrainingError(
            who_is_missing(store, rank=rank, ranks=ranks, timeout=config.timeout),
            hint="its own words, or its machine, say why; the last checkpoint is good: run the same command again",
        ) from error
    finally:
        distributed.destroy_process_group()


def meet(store: Store, *, rank: int, ranks: int, timeout: float) -> Store:
    """A corner of the store for these processes alone, which they enter together.

    torchrun keeps its store when it starts the ranks again, and in it the addresses of those that are gone; and nodes
    count their restarts each for itself. So everyone greets with a word of their own, and the leader answers each
    greeting with the corner's name until all are there: what the dead have left is answered too, and nobody listens.
    """
    if rank != 0:
        greeting = uuid.uuid4().hex
        store.set(f"greeting/{rank}", greeting)
        try:
            corner = PrefixStore(store.get(f"corner/{greeting}").decode(), store)
        except RuntimeError as error:
            raise TrainingError(f"rank 0 did not come within {timeout:g} s, or ended", hint=ALL_MUST_START) from error
        corner.set(f"here/{rank}", "")
        return corner
    name = uuid.uuid4().hex
    corner = PrefixStore(name, store)
    missing, end = list(range(1, ranks)), time.monotonic() + timeout
    while missing:
        for other in missing:
            if store.check([f"greeting/{other}"]):
                store.set(f"corner/{store.get(f'greeting/{other}').decode()}", name)
        time.sleep(0.01)
        missing = [other for other in missing if not corner.check([f"here/{other}"])]
        if missing and time.monotonic() > end:
            raise TrainingError(f"{in_words(missing)} did not come within {timeout:g} s", hint=ALL_MUST_START)
    return corner


def lost_each_other(error: RuntimeError) -> bool:
    """Whether the error is that ranks waited for each other in vain; gloo says so in words alone.

    >>> lost_each_other(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:3421"))
    True
    """
    known = ("Timed out waiting", "Connection closed", "Connection reset", "Broken pipe", "Socket closed")
    return isinstance(error, distributed.DistError) or any(words in str(error) for words in known)


def who_is_missing(store: Store, *, rank: int, ranks: int, timeout: float) -> str:
    """Name the ranks that do not answer, as those that still live can tell by meeting once more, at the store.

    A leader with work of its own joins the others up to a quarter of the timeout later, and so gives up later.
    """
    patience = min(timeout / 4 + 1.0, LAST_PATIENCE)
    end = time.monotonic() + patience
    missing = [other for other in range(ranks) if other != rank]
    try:
        store.set_timeout(timedelta(seconds=patience))
        store.set(f"gave up/{rank}", "")
        while missing and time.monotonic() < end:
            missing = [other for other in missing if not store.check([f"gave up/{other}"])]
            time.sleep(0.05)
    except RuntimeError:
        return "the ranks lost each other, and the store where they meet is gone"
    if not missing:
        return "the ranks lost each other, though all of them live"
    return f"{in_words(missing)} did not answer within {timeout:g} s, or ended"


def in_words(ranks: Sequence[int]) -> str:
    """Which ranks they are.

    >>> in_words([1]), in_words([1, 3])
    ('rank 1', 'ranks 1, 3')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def spread(model: nn.Module, config: ParallelConfig, ranks: Ranks) -> nn.Module:
    """The model to call in training: checkpointed, compiled and spread over ranks as the configuration says.

    `model` itself stays what owns the parameters: its names are those of a single device.
    """
    if config.activation_checkpointing:
        recompute_activations(model)
    if config.compile:
        model.compile()
    if ranks.ranks == 1 and config.mode != "fsdp2":
        return model
    if config.mode == "fsdp2":
        for block in blocks_of(model):
            fully_shard(block)
        # By itself the root would stay whole after an evaluation, and miss that its average was swapped out again.
        fully_shard(model, reshard_after_forward=True)
        return model
    return DistributedDataParallel(model, device_ids=[ranks.device] if ranks.device.type == "cuda" else None)


def recompute_activations(model: nn.Module) -> None:
    """Keep only each block's input for the backward pass, and compute the rest again when it is needed."""
    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a ViT, and those of a decoder around it."""
    return [module for module in model.modules() if isinstance(module, Block)]


@contextmanager
def last_of_several(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Let ranks exchange gradients only after the last of a step's micro-batches."""
    if isinstance(model, DistributedDataParallel):
        with nullcontext() if last else model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds only a part of the tensor."""
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """A tensor in full, on the CPU, wherever its parts are; every rank must ask."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """A full tensor placed on the devices that hold `like`."""
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value.to(like.device)


def on_leader(ranks: Ranks, work: Callable[[Callable[[], None]], Result]) -> Result | None:
    """Let the leader do something while the others wait, and let all of them fail where it does.

    `work` is given a function to call now and then: it tells the others, who would lose patience, to wait on.
    """
    working, done, stopped, failed = 0.0, 1.0, 2.0, 3.0
    if not ranks.leads:
        while (news := ranks.total([0])[0]) == working:
            pass
        if news == stopped:
            raise Stopped
        if news == failed:
            raise TrainingError("rank 0 could not go on", hint="its message says why")
        return None
    told = time.monotonic()

    def still_working() -> None:
        nonlocal told
        if time.monotonic() - told > ranks.timeout / 4:
            ranks.total([working])
            told = time.monotonic()

    try:
        result = work(still_working)
    except BaseException as error:
        ranks.total([stopped if isinstance(error, Stopped) else failed])
        raise
    ranks.total([done])
    return result
