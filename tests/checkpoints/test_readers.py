"""Files of weights: each kind gives the tensors that its own library put in, when asked, and takes ours back."""

import argparse
import json
import struct
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

import vitkit
from vitkit.checkpoints.convert import Rewritten
from vitkit.checkpoints.files.readers import TensorFile, open_tensors, save_npz, save_safetensors, save_torch
from vitkit.checkpoints.foreign import format_called
from vitkit.core.errors import WeightsError

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "weights"


def tensors() -> dict[str, Tensor]:
    """One tensor of each type, a scalar among them."""
    made = {
        f"blocks.{i}.{str(t).removeprefix('torch.')}": torch.randint(0, 2, (2, 3)).to(t) for i, t in enumerate(DTYPES)
    }
    return made | {"step": torch.tensor(7), "patch_embed.proj.weight": torch.randn(4, 3, 2, 2), "größe": torch.ones(1)}


def same(found: TensorFile | dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


def as_array(tensor: Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view("V2") if tensor.dtype == torch.bfloat16 else tensor.numpy()


def by_numpy(path: Path, state: dict[str, Tensor]) -> None:
    with path.open("wb") as file:
        np.savez(file, **{name: as_array(tensor) for name, tensor in state.items()})


def by_numpy_packed(path: Path, state: dict[str, Tensor]) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, **{name: as_array(tensor) for name, tensor in state.items()})


def by_torch_before_2020(path: Path, state: dict[str, Tensor]) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


WRITERS = {
    "numpy": (by_numpy, "npz"),
    "numpy packed": (by_numpy_packed, "npz"),
    "safetensors": (lambda path, state: safetensors.torch.save_file(state, path), "safetensors"),
    "torch": (lambda path, state: torch.save(state, path), "torch"),
    "torch, protocol 4": (lambda path, state: torch.save(state, path, pickle_protocol=4), "torch"),
    "torch before 2020": (by_torch_before_2020, "torch"),
    "our npz": (save_npz, "npz"),
    "our safetensors": (save_safetensors, "safetensors"),
    "our torch": (save_torch, "torch"),
}


@pytest.mark.parametrize("suffix", [".npz", ".pth", ".safetensors", ""])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_was_written_is_read_whatever_the_file_is_called(tmp_path, writer, suffix) -> None:
    write, kind = WRITERS[writer]
    path = tmp_path / f"weights{suffix}"
    write(path, tensors() if suffix == "" else {"head.bias": torch.ones(3)})
    with open_tensors(path) as found:
        assert found.about.kind == kind
        assert found.about.container is None
        assert found.notes == ()
        if suffix == "":
            torch.manual_seed(2020)
            assert same(found, tensors())
            assert found.shapes == {name: tuple(tensor.shape) for name, tensor in found.items()}
            assert found.dtypes == {name: tensor.dtype for name, tensor in found.items()}
            assert "step" in found
            assert "steps" not in found


@pytest.mark.parametrize("container", [None, "model"])
def test_what_we_write_the_libraries_read(tmp_path, container) -> None:
    state = tensors()
    save_npz(tmp_path / "a.npz", state)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert list(arrays) == list(state)
        assert all(arrays[name].tobytes() == as_array(tensor).tobytes() for name, tensor in state.items())
        assert all(arrays[name].dtype == as_array(tensor).dtype for name, tensor in state.items())
    save_safetensors(tmp_path / "a.safetensors", state, {"format": "pt"})
    assert same(safetensors.torch.load_file(tmp_path / "a.safetensors"), state)
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    save_torch(tmp_path / "a.pth", state, container)
    loaded = torch.load(tmp_path / "a.pth", weights_only=True)
    assert same(loaded if container is None else loaded[container], state)
    with open_tensors(tmp_path / "a.pth") as found:
        assert found.about.container == container
        assert same(found, state)


@pytest.mark.parametrize("save", [save_npz, save_safetensors, save_torch])
def test_a_file_is_written_from_another_file_as_it_is_read(tmp_path, save) -> None:
    state = tensors()
    for name, (write, _) in WRITERS.items():
        write(tmp_path / "from", state)
        with open_tensors(tmp_path / "from") as found:
            save(tmp_path / "to", found)
        with open_tensors(tmp_path / "to") as found:
            assert same(found, state), name


class Made(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for; it knows how many were alive at once."""

    def __init__(self, count: int) -> None:
        self.names = [f"blocks.{number}.weight" for number in range(count)]
        self.alive = self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        array = np.full((64, 64), self.names.index(name), dtype=np.float32)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(array, self.gone)  # the tensor holds the array as its memory
        return torch.from_numpy(array)

    def gone(self) -> None:
        self.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@pytest.mark.parametrize("save", [save_npz, save_safetensors, save_torch])
def test_a_writer_holds_one_tensor_at_a_time(tmp_path, save) -> None:
    made = Made(20)
    save(tmp_path / "a", made)
    assert (made.most, made.alive) == (1, 0)
    with open_tensors(tmp_path / "a") as found:
        assert all(found[name].unique().tolist() == [number] for number, name in enumerate(made.names))


def test_a_file_is_rewritten_in_another_format_with_one_tensor_beside_the_model(tmp_path) -> None:
    model = vitkit.create("B/16", image_size=32, classes=2, settings=["depth=4", "width=64", "heads=1", "mlp_dim=64"])
    sizes = [parameter.nbytes for parameter in model.parameters()]
    for name in ("google", "huggingface", "timm"):
        to = format_called(name)
        tensors = Rewritten(to.rules(model.config, None), model.state_dict())
        assert max(tensor.nbytes for tensor in tensors.values()) <= max(sizes)
        assert sum(tensor.nbytes for tensor in tensors.values()) == sum(sizes)


@pytest.mark.parametrize(("save", "name"), [(save_safetensors, "a.safetensors"), (save_torch, "a.pth")])
def test_tensors_are_mapped_into_memory_and_what_is_done_to_them_stays_there(tmp_path, save, name) -> None:
    save(tmp_path / name, {"a": torch.ones(300_000)})
    before = (tmp_path / name).read_bytes()
    with open_tensors(tmp_path / name) as found:
        tensor = found["a"]
    if Path("/proc/self/maps").exists():
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(name)]
        spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
        assert any(start <= tensor.data_ptr() < end for start, end in spans)
    tensor.zero_()
    assert (tmp_path / name).read_bytes() == before


def test_an_array_is_unpacked_only_when_it_is_asked_for(tmp_path) -> None:
    path = tmp_path / "model.npz"
    save_npz(path, {"a": torch.ones(10_000), "b": torch.ones(10_000)})
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x03\x04", 4) + 30_000] ^= 1  # in the numbers of b
    path.write_bytes(content)
    with open_tensors(path) as found:
        assert found.shapes == {"a": (10_000,), "b": (10_000,)}
        assert torch.equal(found["a"], torch.ones(10_000))
        with pytest.raises(WeightsError, match=r"model.npz: b.npy cannot be unpacked: Bad CRC"):
            found["b"]


@pytest.mark.parametrize("writer", ["safetensors", "torch"])
def test_a_mapped_tensor_is_the_file_until_it_is_changed(tmp_path, writer) -> None:
    path = tmp_path / "model"
    numbers = torch.arange(4096, dtype=torch.float32)
    WRITERS[writer][0](path, {"a": numbers})
    place = path.read_bytes().index(numbers.numpy().tobytes())
    with open_tensors(path) as found, path.open("r+b") as file:
        file.seek(place)
        file.write(struct.pack("<f", -5.0))  # after it was opened, before it was read
        file.flush()
        tensor = found["a"]
        assert tensor[:2].tolist() == [-5.0, 1.0]
        tensor[1] = 9.0
        file.seek(place + 4)
        assert struct.unpack("<f", file.read(4)) == (1.0,)
    assert tensor[:3].tolist() == [-5.0, 9.0, 2.0]  # it outlives the file


def test_a_file_larger_than_anyone_would_read_opens(tmp_path) -> None:
    side, header = 1 << 15, {"a": {"dtype": "F32", "shape": [1 << 15, 1 << 15], "data_offsets": [0, 4 << 30]}}
    line = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(line)) + line)
        file.truncate(8 + len(line) + 4 * side * side)  # 4 GiB that take no room on the disk
    with open_tensors(tmp_path) as found:
        assert found["a"].shape == (side, side)


@pytest.mark.parametrize("container", ["model", "state_dict", "teacher", "student", "module", "ema"])
@pytest.mark.parametrize("new", [True, False])
def test_tensors_are_found_in_their_container(tmp_path, container, new) -> None:
    state = {"head.bias": torch.ones(3), "head.weight": torch.ones(3, 2)}
    extra = {"epoch": 3, "best": torch.tensor(0.8), "optimizer": {"state": {0: {"step": torch.ones(2)}}}}
    whole = {"epoch": 3} if container == "ema" else extra
    torch.save(whole | {container: OrderedDict(state)}, tmp_path / "a.pth", _use_new_zipfile_serialization=new)
    with open_tensors(tmp_path / "a.pth") as found:
        assert found.about.container == container
        assert same(found, state)
        assert found.notes == (f"left aside: {', '.join(whole)}",)


def test_of_dinos_two_networks_the_teacher_is_read(tmp_path) -> None:
    state = {"student": {"module.a": torch.zeros(1)}, "teacher": {"a": torch.ones(1)}}
    torch.save(state, tmp_path / "a.pth")
    with open_tensors(tmp_path / "a.pth") as found:
        assert found.about.container == "teacher"
        assert found["a"].item() == 1
        assert found.notes == ("left aside: student",)


@pytest.mark.parametrize("save", [save_npz, save_safetensors, save_torch])
def test_what_training_wrapped_around_names_is_taken_off_and_said(tmp_path, save) -> None:
    save(tmp_path / "a", {"module._orig_mod.norm": torch.ones(1), "module._orig_mod.module.b": torch.ones(1)})
    with open_tensors(tmp_path / "a") as found:
        assert list(found) == ["norm", "module.b"] or list(found) == ["module.b", "norm"]
        assert found.notes == ("took 'module._orig_mod.' off every name",)


def test_views_transposes_and_tied_tensors_are_what_torch_gives(tmp_path) -> None:
    base = torch.arange(24.0)
    state = {
        "part": base[3:9],
        "turned": base.reshape(4, 6).t(),
        "every third": base[::3],
        "tied": base,
        "parameter": torch.nn.Parameter(base.reshape(2, 12)),
    }
    for new in (True, False):
        torch.save(state, tmp_path / "a.pth", _use_new_zipfile_serialization=new)
        wanted = torch.load(tmp_path / "a.pth", weights_only=True)
        with open_tensors(tmp_path / "a.pth") as found:
            assert all(torch.equal(found[name], wanted[name]) for name in state)
            assert all(found[name].stride() == wanted[name].stride() for name in state)


def test_a_modules_state_with_its_buffers_is_read(tmp_path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for new in (True, False):
        torch.save(module.state_dict(), tmp_path / "a.pth", _use_new_zipfile_serialization=new)
        with open_tensors(tmp_path / "a.pth") as found:
            assert same(found, dict(module.state_dict()))


def test_what_scripts_leave_beside_the_weights_is_left_there(tmp_path) -> None:
    whole = {
        "model": {"a": torch.ones(2)},
        "args": argparse.Namespace(
            lr=0.1, output=tmp_path, sizes={1, 2}, nested=[{"a": (1,)}], device=torch.device("cpu")
        ),
        "accuracy": np.float64(81.8),
        "array": np.ones(3),
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
    }
    for protocol in (2, 4):
        torch.save(whole, tmp_path / "a.pth", pickle_protocol=protocol)
        with open_tensors(tmp_path / "a.pth") as found:
            assert same(found, {"a": torch.ones(2)})
            assert found.notes == ("left aside: args, accuracy, array, dtype, size",)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_arrays_of_either_order_and_endianness_are_the_same_numbers(tmp_path, order, layout) -> None:
    numbers = np.arange(24, dtype=f"{order}f4").reshape(2, 3, 4)
    np.savez(tmp_path / "a.npz", a=np.asarray(numbers, order=layout))  # type: ignore[call-overload]
    with open_tensors(tmp_path / "a.npz") as found:
        assert torch.equal(found["a"], torch.arange(24.0).reshape(2, 3, 4))
        assert found["a"].is_contiguous()


def test_a_config_beside_the_file_is_given_with_it(tmp_path) -> None:
    save_torch(tmp_path / "pytorch_model.bin", {"a": torch.ones(2)})
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch16_224", "num_classes": 3}')
    for path in (tmp_path, tmp_path / "pytorch_model.bin", str(tmp_path)):
        with open_tensors(path) as found:
            assert found.about.kind == "torch"
            assert found.about.config["num_classes"] == 3


def test_a_folder_gives_safetensors_before_pickles_and_any_single_file(tmp_path) -> None:
    save_npz(tmp_path / "Ti_16.npz", {"a": torch.ones(1)})
    with open_tensors(tmp_path) as found:
        assert found.about.kind == "npz"
    save_torch(tmp_path / "pytorch_model.bin", {"a": torch.ones(2)})
    with open_tensors(tmp_path) as found:
        assert found.about.kind == "torch"
    save_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(3)})
    with open_tensors(tmp_path) as found:
        assert found.shapes == {"a": (3,)}


@pytest.mark.parametrize(("name", "save"), [("model.safetensors", save_safetensors), ("pytorch_model.bin", save_torch)])
def test_shards_are_one_file(tmp_path, name, save) -> None:
    state = tensors()
    places = {tensor: f"shard-{index % 3}" for index, tensor in enumerate(state)}
    for shard in set(places.values()):
        save(tmp_path / shard, {tensor: state[tensor] for tensor in state if places[tensor] == shard})
    (tmp_path / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    with open_tensors(tmp_path) as found:
        assert same(found, state)
        assert found.notes == ("read from 3 files",)


def test_a_link_to_a_file_is_read_as_hub_caches_need(tmp_path) -> None:
    (tmp_path / "snapshot").mkdir()
    save_safetensors(tmp_path / "blob", {"a": torch.ones(2)})
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    with open_tensors(tmp_path / "snapshot") as found:
        assert found["a"].tolist() == [1, 1]


def test_a_name_that_is_not_there_is_a_key_error(tmp_path) -> None:
    save_npz(tmp_path / "a.npz", {"a": torch.ones(2)})
    with open_tensors(tmp_path / "a.npz") as found, pytest.raises(KeyError, match="b"):
        found["b"]


@pytest.mark.parametrize("save", [save_npz, save_safetensors])
def test_a_file_that_cannot_be_finished_is_not_begun(tmp_path, save) -> None:
    save(tmp_path / "a", {"a": torch.ones(2)})
    before = (tmp_path / "a").read_bytes()
    for name, tensor in (("b", torch.ones(2, dtype=torch.complex64)), ("../b", torch.ones(2))):
        with pytest.raises(WeightsError, match=f"{tmp_path}/a"):
            save(tmp_path / "a", {"a": torch.zeros(2), name: tensor})
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("save", [save_npz, save_safetensors, save_torch])
def test_a_folder_that_is_not_there_is_named(tmp_path, save) -> None:
    with pytest.raises(WeightsError, match="nowhere/a: cannot be written: No such file"):
        save(tmp_path / "nowhere" / "a", {"a": torch.ones(2)})


@pytest.mark.parametrize("save", [save_npz, save_safetensors, save_torch])
def test_the_same_tensors_are_the_same_bytes(tmp_path, save) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, {"a": torch.ones(2), "b": torch.ones(3)})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_part_of_a_tensor_does_not_take_the_rest_along(tmp_path) -> None:
    secret = torch.full((100_000,), 7.0)
    save_torch(tmp_path / "a.pth", {"a": secret[:2]})
    assert (tmp_path / "a.pth").stat().st_size < 10_000
    query, key, value = torch.arange(3000.0).chunk(3)
    save_torch(tmp_path / "b.pth", {"q": query, "k": key, "v": value})
    assert (tmp_path / "b.pth").stat().st_size < 20_000
    with open_tensors(tmp_path / "b.pth") as found:
        assert torch.equal(found["k"], key)


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared weights are not here")
def test_published_weights_are_what_numpy_and_torch_read() -> None:
    with (
        open_tensors(REAL / "Ti_16-augreg-imagenet.npz") as found,
        np.load(REAL / "Ti_16-augreg-imagenet.npz") as arrays,
    ):
        assert same(found, {name: torch.from_numpy(arrays[name]) for name in arrays})
    wanted = torch.load(REAL / "deit_tiny_patch16_224.pth", weights_only=True)["model"]
    with open_tensors(REAL / "deit_tiny_patch16_224.pth") as found:
        assert found.about.container == "model"
        assert same(found, wanted)
