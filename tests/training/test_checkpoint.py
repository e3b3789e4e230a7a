"""Checkpoints: atomic, bit-exact, and verified when loaded."""

import shutil

import pytest
import torch
from torch import nn

from vitkit.core.errors import TrainingError, WeightsError
from vitkit.training.checkpoint import PROGRESS_FILE, TENSORS_FILE, Checkpoints, Progress, TrainState
from vitkit.training.config import OptimizerConfig
from vitkit.training.optim import EMA, build_optimizer, set_learning_rate, trainable_parameters
from vitkit.weights import artifact as artifact_io


def make_state(*, name: str = "adam", ema_decay: float | None = 0.9, seed: int = 0) -> tuple[nn.Module, TrainState]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    trainable = trainable_parameters(model)
    state = TrainState(
        parameters=dict(model.named_parameters()),
        optimizer=build_optimizer(trainable, OptimizerConfig(name=name), depth=1),
        ema=None if ema_decay is None else EMA.of(trainable, ema_decay),
    )
    set_learning_rate(state.optimizer, 0.1)
    return model, state


def train_steps(model: nn.Module, state: TrainState, *, steps: int) -> None:
    for _ in range(steps):
        torch.manual_seed(state.progress.step)
        model(torch.randn(5, 4)).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        if state.ema:
            state.ema.update(state.parameters, updates=state.progress.step)
        state.progress.step += 1


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_restored_state_continues_exactly(tmp_path, name, ema_decay) -> None:
    model, state = make_state(name=name, ema_decay=ema_decay)
    train_steps(model, state, steps=3)
    state.progress.skipped = 2
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state.gather_tensors(), state.progress)
    saved = {key: tensor.clone() for key, tensor in state.gather_tensors().items()}

    other, restored = make_state(name=name, ema_decay=ema_decay, seed=1)
    loaded = checkpoints.load_newest()
    assert loaded is not None
    restored.restore(loaded.tensors, loaded.progress)
    assert equal(restored.gather_tensors(), saved)
    assert restored.progress == Progress(step=3, skipped=2)
    train_steps(model, state, steps=3)
    train_steps(other, restored, steps=3)
    assert equal(restored.gather_tensors(), state.gather_tensors())


def test_save_before_the_first_step(tmp_path) -> None:
    _, state = make_state()
    Checkpoints(tmp_path).save(state.gather_tensors(), state.progress)
    loaded = Checkpoints(tmp_path).load_newest()
    assert loaded is not None
    assert loaded.step == 0


def test_checkpoint_of_another_model_is_rejected() -> None:
    _, state = make_state()
    tensors = state.gather_tensors()
    tensors["model.extra"] = torch.zeros(1)
    with pytest.raises(WeightsError, match="extra"):
        state.restore(tensors, Progress())


@pytest.fixture
def two(tmp_path) -> Checkpoints:
    """Checkpoints of steps 2 and 4."""
    model, state = make_state()
    checkpoints = Checkpoints(tmp_path)
    for _ in range(2):
        train_steps(model, state, steps=2)
        checkpoints.save(state.gather_tensors(), state.progress)
    return checkpoints


def assert_falls_back(checkpoints: Checkpoints, file: str) -> None:
    loaded = checkpoints.load_newest()
    assert loaded is not None
    assert loaded.step == loaded.progress.step == 2
    assert len(loaded.damaged) == 1
    assert "step-00000004" in loaded.damaged[0]
    # A damaged checksum is reported as damage of the file that no longer matches it.
    assert file in loaded.damaged[0] or file == "checksums.json"


@pytest.mark.parametrize("file", [TENSORS_FILE, PROGRESS_FILE, "checksums.json"])
def test_damaged_checkpoint_falls_back_to_previous(two, file) -> None:
    path = two.path(4) / file
    whole = path.read_bytes()
    for part in range(20):
        path.write_bytes(whole[: len(whole) * part // 20])
        assert_falls_back(two, file)
    for part in range(20):
        flipped = bytearray(whole)
        flipped[len(whole) * part // 20] ^= 1 << (part % 7)
        path.write_bytes(flipped)
        assert_falls_back(two, file)
    path.unlink()
    assert_falls_back(two, file)
    path.write_bytes(whole)
    loaded = two.load_newest()
    assert loaded is not None
    assert (loaded.step, loaded.damaged) == (4, ())


def test_renamed_checkpoint_is_skipped_and_named(two) -> None:
    two.path(4).rename(two.path(9))
    loaded = two.load_newest()
    assert loaded is not None
    assert loaded.step == loaded.progress.step == 2
    assert loaded.damaged == (f"{two.path(9)}: its state is of step 4, not of that in its name",)


def test_large_sparse_checkpoint_is_not_hashed(two, monkeypatch) -> None:
    with (two.path(4) / TENSORS_FILE).open("r+b") as file:
        file.truncate(1 << 32)
    sha256 = artifact_io.sha256
    monkeypatch.setattr(
        artifact_io, "sha256", lambda path: sha256(path) if path.parent != two.path(4) else pytest.fail("it is hashed")
    )
    assert_falls_back(two, TENSORS_FILE)


def test_all_damaged_checkpoints_are_named(two) -> None:
    for step in (2, 4):
        (two.path(step) / TENSORS_FILE).write_bytes(b"")
    loaded = two.load_newest()
    assert loaded is not None
    assert (loaded.step, loaded.tensors, len(loaded.damaged)) == (-1, {}, 2)


def test_no_checkpoints_load_none(tmp_path) -> None:
    assert Checkpoints(tmp_path / "nowhere").load_newest() is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["model", "optimizer", "ema"])
def test_non_finite_tensors_are_not_saved(two, bad, part) -> None:
    model, state = make_state()
    train_steps(model, state, steps=6)
    tensors = {name: tensor.clone() for name, tensor in state.gather_tensors().items()}
    name = next(name for name in tensors if name.startswith(part) and tensors[name].numel() > 1)
    tensors[name].view(-1)[-1] = bad
    with pytest.raises(TrainingError, match="not finite") as caught:
        two.save(tensors, state.progress)
    assert name in str(caught.value)
    assert two.steps() == [2, 4]


def test_last_and_best_checkpoints_are_kept(tmp_path) -> None:
    _, state = make_state()
    checkpoints = Checkpoints(tmp_path, last=2)
    for step in range(1, 8):
        checkpoints.save(state.gather_tensors(), Progress(step=step), best_step=3 if step >= 3 else None)
    assert checkpoints.steps() == [3, 6, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000006", "step-00000007"]


def test_kill_before_rename_leaves_previous_checkpoint(two) -> None:
    shutil.copytree(two.path(4), two.directory / ".step-00000006.123.tmp")
    loaded = two.load_newest()
    assert loaded is not None
    assert (loaded.step, loaded.damaged) == (4, ())
    two.remove_after(4)
    assert sorted(path.name for path in two.directory.iterdir()) == ["step-00000002", "step-00000004"]


def test_remove_after_removes_later_checkpoints(two) -> None:
    two.remove_after(2)
    assert two.steps() == [2]
    two.remove_after(-1)
    assert two.steps() == []


def test_saving_a_step_twice_changes_nothing(two) -> None:
    before = (two.path(4) / TENSORS_FILE).stat()
    _, state = make_state(seed=9)
    two.save(state.gather_tensors(), Progress(step=4))
    assert (two.path(4) / TENSORS_FILE).stat().st_mtime_ns == before.st_mtime_ns


def test_ema_weights_are_swapped_back_after_an_error() -> None:
    model, state = make_state()
    train_steps(model, state, steps=3)
    before = {name: tensor.clone() for name, tensor in state.gather_tensors().items()}
    with pytest.raises(RuntimeError), state.ema_weights():  # noqa: PT012  the error is raised inside the context
        assert torch.equal(state.parameters["2.weight"], before["ema.2.weight"])
        raise RuntimeError
    assert equal(state.gather_tensors(), before)
