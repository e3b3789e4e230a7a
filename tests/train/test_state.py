"""Checkpoints: whole or not there, bit-exact, and never silently a damaged one."""

import shutil

import pytest
import torch
from torch import nn

from vitkit.core.errors import TrainingError, WeightsError
from vitkit.train.config import OptimizerConfig
from vitkit.train.optim import Average, optimizer, set_learning_rate, trainable
from vitkit.train.state import REST, TENSORS, Checkpoints, Progress, State


def made(*, name: str = "adam", average: float | None = 0.9, seed: int = 0) -> tuple[nn.Module, State]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    learning = trainable(model)
    state = State(
        parameters=dict(model.named_parameters()),
        optimizer=optimizer(learning, OptimizerConfig(name=name), depth=1),
        average=None if average is None else Average.of(learning, average),
    )
    set_learning_rate(state.optimizer, 0.1)
    return model, state


def learn(model: nn.Module, state: State, *, steps: int) -> None:
    for _ in range(steps):
        torch.manual_seed(state.progress.step)
        model(torch.randn(5, 4)).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        if state.average:
            state.average.update(state.parameters, updates=state.progress.step)
        state.progress.step += 1


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("average", [None, 0.9])
def test_a_restored_state_goes_on_as_if_it_had_not_stopped(tmp_path, name, average) -> None:
    model, state = made(name=name, average=average)
    learn(model, state, steps=3)
    state.progress.skipped = 2
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state.tensors(), state.progress)
    saved = {key: tensor.clone() for key, tensor in state.tensors().items()}

    other, restored = made(name=name, average=average, seed=1)
    found = checkpoints.newest()
    assert found is not None
    restored.restore(found.tensors, found.progress)
    assert equal(restored.tensors(), saved)
    assert restored.progress == Progress(step=3, skipped=2)
    learn(model, state, steps=3)
    learn(other, restored, steps=3)
    assert equal(restored.tensors(), state.tensors())


def test_a_new_run_can_be_saved_before_its_first_step(tmp_path) -> None:
    _, state = made()
    Checkpoints(tmp_path).save(state.tensors(), state.progress)
    found = Checkpoints(tmp_path).newest()
    assert found is not None
    assert found.step == 0


def test_another_models_checkpoint_is_refused_by_the_tensors_name() -> None:
    _, state = made()
    tensors = state.tensors()
    tensors["model.extra"] = torch.zeros(1)
    with pytest.raises(WeightsError, match="extra"):
        state.restore(tensors, Progress())


@pytest.fixture
def two(tmp_path) -> Checkpoints:
    """Checkpoints of steps 2 and 4."""
    model, state = made()
    checkpoints = Checkpoints(tmp_path)
    for _ in range(2):
        learn(model, state, steps=2)
        checkpoints.save(state.tensors(), state.progress)
    return checkpoints


def falls_back(checkpoints: Checkpoints, file: str) -> None:
    found = checkpoints.newest()
    assert found is not None
    assert found.step == found.progress.step == 2
    assert len(found.damaged) == 1
    assert "step-00000004" in found.damaged[0]
    # Where a checksum itself is damaged, the file that it no longer fits is the one named.
    assert file in found.damaged[0] or file == "checksums.json"


@pytest.mark.parametrize("file", [TENSORS, REST, "checksums.json"])
def test_a_damaged_or_missing_file_is_named_and_the_checkpoint_before_is_used(two, file) -> None:
    path = two.path(4) / file
    whole = path.read_bytes()
    for share in range(20):
        path.write_bytes(whole[: len(whole) * share // 20])
        falls_back(two, file)
    for place in range(20):
        flipped = bytearray(whole)
        flipped[len(whole) * place // 20] ^= 1 << (place % 7)
        path.write_bytes(flipped)
        falls_back(two, file)
    path.unlink()
    falls_back(two, file)
    path.write_bytes(whole)
    found = two.newest()
    assert found is not None
    assert (found.step, found.damaged) == (4, ())


def test_where_all_are_damaged_each_is_named_and_none_is_loaded(two) -> None:
    for step in (2, 4):
        (two.path(step) / TENSORS).write_bytes(b"")
    found = two.newest()
    assert found is not None
    assert (found.step, found.tensors, len(found.damaged)) == (-1, {}, 2)


def test_no_checkpoints_are_none(tmp_path) -> None:
    assert Checkpoints(tmp_path / "nowhere").newest() is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["model", "optimizer", "average"])
def test_what_is_not_finite_is_never_saved(two, bad, part) -> None:
    model, state = made()
    learn(model, state, steps=6)
    tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
    name = next(name for name in tensors if name.startswith(part) and tensors[name].numel() > 1)
    tensors[name].view(-1)[-1] = bad
    with pytest.raises(TrainingError, match="not finite") as caught:
        two.save(tensors, state.progress)
    assert name in str(caught.value)
    assert two.steps() == [2, 4]


def test_the_last_few_and_the_best_are_kept(tmp_path) -> None:
    _, state = made()
    checkpoints = Checkpoints(tmp_path, last=2)
    for step in range(1, 8):
        checkpoints.save(state.tensors(), Progress(step=step), best=3 if step >= 3 else None)
    assert checkpoints.steps() == [3, 6, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000006", "step-00000007"]


def test_a_kill_between_writing_and_renaming_leaves_the_one_before(two) -> None:
    shutil.copytree(two.path(4), two.folder / ".step-00000006.123.tmp")
    found = two.newest()
    assert found is not None
    assert (found.step, found.damaged) == (4, ())
    two.set_aside(4)
    assert sorted(path.name for path in two.folder.iterdir()) == ["step-00000002", "step-00000004"]


def test_setting_aside_removes_what_a_resumed_run_will_write_again(two) -> None:
    two.set_aside(2)
    assert two.steps() == [2]
    two.set_aside(-1)
    assert two.steps() == []


def test_saving_a_step_again_changes_nothing(two) -> None:
    before = (two.path(4) / TENSORS).stat()
    _, state = made(seed=9)
    two.save(state.tensors(), Progress(step=4))
    assert (two.path(4) / TENSORS).stat().st_mtime_ns == before.st_mtime_ns


def test_parameters_are_their_average_for_a_while_even_when_something_fails() -> None:
    model, state = made()
    learn(model, state, steps=3)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    with pytest.raises(RuntimeError), state.averaged():  # noqa: PT012  what fails is inside the context
        assert torch.equal(state.parameters["2.weight"], before["average.2.weight"])
        raise RuntimeError
    assert equal(state.tensors(), before)
