"""Distributed training with DDP and FSDP2; the only module that knows about ranks.

torchrun starts the ranks and describes them in environment variables. A process without these runs alone.
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

from vitkit.core.environment import limit_threads
from vitkit.core.errors import ConfigError, TrainingError
from vitkit.core.shapes import Tensor
from vitkit.core.signals import StopRequested
from vitkit.inference.engine import resolve_device
from vitkit.model.encoder import Block
from vitkit.training.config import ParallelConfig

Result = TypeVar("Result")

MAX_ROLL_CALL_SECONDS = 5.0
"""Maximal time in which ranks that lost the connection report to the store, so that torchrun can restart them soon."""

START_ALL_HINT = "start all nodes within parallel.timeout of each other; see the guide on scaling out"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Rank of this process, number of ranks, and the device of this process."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    timeout: float = 600.0

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and reports progress."""
        return self.rank == 0

    def all_reduce_sum(self, numbers: Sequence[int | float]) -> list[float]:
        """Return the sums of these numbers over all ranks, in float64."""
        if self.world_size == 1:
            return [float(number) for number in numbers]
        summed = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        distributed.all_reduce(summed)
        totals, reference = summed.tolist(), weakref.ref(summed)
        del summed
        # A gloo thread releases the tensor a little later and needs the GIL to do so. If this were the last collective,
        # destroying the group would wait for that thread while holding the GIL: a deadlock.
        end = time.monotonic() + 1.0
        while self.device.type == "cpu" and reference() is not None and time.monotonic() < end:
            time.sleep(0)
        return totals

    def barrier(self) -> None:
        """Wait until all ranks have reached this call."""
        self.all_reduce_sum([0])

    def broadcast_int(self, value: int) -> int:
        """Return the main rank's value on every rank."""
        return int(self.all_reduce_sum([value if self.is_main else 0])[0])


@contextmanager
def join_ranks(config: ParallelConfig) -> Iterator[Ranks]:
    """Initialize the process group under torchrun, and destroy it at the end; without torchrun, yield a single rank.

    A group that exists is used, and not destroyed.

    Several runs in one process must share an outer context: a group that was destroyed cannot be created again safely.
    """
    device = resolve_device(config.device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    if config.threads:
        torch.set_num_threads(config.threads)
    else:
        limit_threads()
    if distributed.is_initialized():  # by a sweep or a suite, or by the program
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        yield Ranks(device=device, rank=rank, world_size=world_size, timeout=config.timeout)
        return
    if "RANK" not in os.environ:
        if config.mode != "auto":
            raise ConfigError(
                f"parallel.mode={config.mode} needs more than one process",
                hint="start with: torchrun --nproc-per-node N -m vitkit train …, or leave out parallel.mode",
            )
        yield Ranks(device=device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=config.timeout)))
    store = rendezvous_store(store, rank=rank, world_size=world_size, timeout=config.timeout)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("ranks", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.timeout),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Ranks(device=device, rank=rank, world_size=world_size, timeout=config.timeout)
    except RuntimeError as error:
        if not is_connection_error(error):
            raise
        raise TrainingError(
            describe_missing_ranks(store, rank=rank, world_size=world_size, timeout=config.timeout),
            hint="see the output of that rank or its machine; run the same command again to resume",
        ) from error
    finally:
        distributed.destroy_process_group()


def rendezvous_store(store: Store, *, rank: int, world_size: int, timeout: float) -> Store:
    """Create a TCPStore prefix unique to this start of the ranks, and wait until all of them use it.

    torchrun reuses its store when it restarts the ranks, with the addresses of dead ranks in it, and each node counts
    restarts for itself. So every rank publishes a random token, and rank 0 answers each token with the prefix until
    all ranks are present. Tokens of dead ranks are answered too, which does no harm.
    """
    if rank != 0:
        token = uuid.uuid4().hex
        store.set(f"token/{rank}", token)
        try:
            prefixed = PrefixStore(store.get(f"prefix/{token}").decode(), store)
        except RuntimeError as error:
            raise TrainingError(f"rank 0 did not start within {timeout:g} s, or ended", hint=START_ALL_HINT) from error
        prefixed.set(f"present/{rank}", "")
        return prefixed
    prefix = uuid.uuid4().hex
    prefixed = PrefixStore(prefix, store)
    missing, end = list(range(1, world_size)), time.monotonic() + timeout
    while missing:
        for other in missing:
            if store.check([f"token/{other}"]):
                store.set(f"prefix/{store.get(f'token/{other}').decode()}", prefix)
        time.sleep(0.01)
        missing = [other for other in missing if not prefixed.check([f"present/{other}"])]
        if missing and time.monotonic() > end:
            raise TrainingError(f"{format_ranks(missing)} did not start within {timeout:g} s", hint=START_ALL_HINT)
    return prefixed


def is_connection_error(error: RuntimeError) -> bool:
    """Return whether the error is a lost connection between ranks, which gloo reports only in its message.

    >>> is_connection_error(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:3421"))
    True
    >>> is_connection_error(RuntimeError("Application timeout caused pair closure"))
    True
    """
    texts = ("Timed out", "pair closure", "Connection closed", "Connection reset", "Broken pipe", "Socket closed")
    return isinstance(error, distributed.DistError) or any(text in str(error) for text in texts)


def describe_missing_ranks(store: Store, *, rank: int, world_size: int, timeout: float) -> str:
    """Name the ranks that do not respond: those that still run report to the store once more.

    A main rank with work of its own notices up to a quarter of the timeout later than the others.
    """
    seconds = min(timeout / 4 + 1.0, MAX_ROLL_CALL_SECONDS)
    end = time.monotonic() + seconds
    missing = [other for other in range(world_size) if other != rank]
    try:
        store.set_timeout(timedelta(seconds=seconds))
        store.set(f"disconnected/{rank}", "")
        while missing and time.monotonic() < end:
            missing = [other for other in missing if not store.check([f"disconnected/{other}"])]
            time.sleep(0.05)
    except RuntimeError:
        return "the ranks lost their connections, and the store of the node of rank 0 is gone"
    if not missing:
        return "the ranks lost their connections, though all of them are running"
    return f"{format_ranks(missing)} did not respond within {timeout:g} s, or ended"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format a list of ranks.

    >>> format_ranks([1]), format_ranks([1, 3])
    ('rank 1', 'ranks 1, 3')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def parallelize(model: nn.Module, config: ParallelConfig, ranks: Ranks) -> nn.Module:
    """Return the module to call in training: with activation checkpointing, compiled, and wrapped in DDP or FSDP2.

    `model` still owns the parameters, with the names of a single device.
    """
    if config.activation_checkpointing:  # store only each block's input, and recompute its activations
        for block in find_blocks(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.compile:
        model.compile()
    if ranks.world_size == 1 and config.mode != "fsdp2":
        return model
    if config.mode == "fsdp2":
        for block in find_blocks(model):
            fully_shard(block)
        fully_shard(model)
        return model
    # By default DDP sorts its buckets anew after the first step of a process. A bucket's order decides the order of
    # additions with three or more ranks, so a resumed run would round differently. Searching for unused parameters
    # keeps the buckets as they are.
    device_ids = [ranks.device] if ranks.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=True)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a ViT, and of a decoder around it."""
    return [module for module in model.modules() if isinstance(module, Block)]


@contextmanager
def gradient_sync(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Enable or disable the exchange of gradients: ranks need it only after the last micro-batch of a step."""
    if isinstance(model, DistributedDataParallel):
        with nullcontext() if enabled else model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
    yield


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the next forward pass gathers them again from the shards.

    FSDP2 keeps the root gathered after a forward pass without a backward pass, and would miss that the shards have
    changed since. torch 2.7 does so even with `reshard_after_forward=True`.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_full(tensor: Tensor) -> Tensor:
    """Return a tensor in full, on the CPU; collective over all ranks."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def distribute_like(value: Tensor, like: Tensor) -> Tensor:
    """Shard and place a full tensor as `like` is."""
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value.to(like.device)


def run_on_main(ranks: Ranks, task: Callable[[Callable[[], None]], Result]) -> Result | None:
    """Run a task on the main rank while the others wait; if it fails, all ranks fail.

    The task gets a `heartbeat` function and calls it now and then, so that the other ranks do not time out.
    """
    working, done, stopped, failed = 0.0, 1.0, 2.0, 3.0
    if not ranks.is_main:
        while (status := ranks.all_reduce_sum([0])[0]) == working:
            pass
        if status == stopped:
            raise StopRequested
        if status == failed:
            raise TrainingError("rank 0 failed", hint="see its message")
        return None
    last_beat = time.monotonic()

    def heartbeat() -> None:
        nonlocal last_beat
        if time.monotonic() - last_beat > ranks.timeout / 4:
            ranks.all_reduce_sum([working])
            last_beat = time.monotonic()

    try:
        result = task(heartbeat)
    except BaseException as error:
        ranks.all_reduce_sum([stopped if isinstance(error, StopRequested) else failed])
        raise
    ranks.all_reduce_sum([done])
    return result
