"""Rendezvous of ranks on a store with keys of an earlier start."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from vitkit.core.errors import TrainingError
from vitkit.training.distributed import rendezvous_store


def rendezvous_all(store: Store, *, world_size: int) -> list[Store]:
    with ThreadPoolExecutor(world_size) as threads:
        return list(
            threads.map(
                lambda rank: rendezvous_store(store, rank=rank, world_size=world_size, timeout=600.0), range(world_size)
            )
        )


def test_each_start_has_a_prefix_of_its_own():
    store = HashStore()
    store.set_timeout(timedelta(seconds=600))
    first = rendezvous_all(store, world_size=3)
    first[2].set("address", "of a dead rank")
    assert first[0].get("address") == b"of a dead rank"
    second = rendezvous_all(store, world_size=3)
    assert not any(prefixed.check(["address"]) for prefixed in second)
    second[1].set("address", "new")
    assert {prefixed.get("address") for prefixed in second} == {b"new"}


def test_tokens_of_dead_ranks_are_ignored():
    store = HashStore()
    store.set("token/1", "of a rank that was killed")
    with pytest.raises(TrainingError, match=r"rank 1 did not start within 0\.2 s"):
        rendezvous_store(store, rank=0, world_size=2, timeout=0.2)
    store.set_timeout(timedelta(seconds=600))
    main, other = rendezvous_all(store, world_size=2)
    main.set("found", "yes")
    assert other.get("found") == b"yes"


def test_missing_rank_0_is_reported():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TrainingError, match="rank 0 did not start") as caught:
        rendezvous_store(store, rank=1, world_size=2, timeout=0.2)
    assert "start all nodes" in str(caught.value.hint)


def test_single_rank_does_not_wait():
    assert not rendezvous_store(HashStore(), rank=0, world_size=1, timeout=0.0).check(["anything"])
