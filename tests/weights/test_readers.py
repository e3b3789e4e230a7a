"""Readers and writers of weight files against the libraries of each file type."""

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
from vitkit.core.errors import WeightsError
from vitkit.weights.convert import ConvertedTensors
from vitkit.weights.formats.registry import get_format
from vitkit.weights.io.readers import TensorFile, open_tensors
from vitkit.weights.io.writers import save_npz, save_safetensors, save_torch

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "weights"


def tensors() -> dict[str, Tensor]:
    """Make one tensor of each dtype, including a scalar."""
    created = {
        f"blocks.{i}.{str(t).removeprefix('torch.')}": torch.randint(0, 2, (2, 3)).to(t) for i, t in enumerate(DTYPES)
    }
    return created | {
        "step": torch.tensor(7),
        "patch_embed.proj.weight": torch.randn(4, 3, 2, 2),
        "größe": torch.ones(1),
    }


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
def test_file_type_is_detected_by_content(tmp_path, writer, suffix) -> None:
    write, kind = WRITERS[writer]
    path = tmp_path / f"weights{suffix}"
    write(path, tensors() if suffix == "" else {"head.bias": torch.ones(3)})
    with open_tensors(path) as result:
        assert result.metadata.file_type == kind
        assert result.metadata.container is None
        assert result.notes == ()
        if suffix == "":
            torch.manual_seed(2020)
            assert same(result, tensors())
            assert result.shapes == {name: tuple(tensor.shape) for name, tensor in result.items()}
            assert result.dtypes == {name: tensor.dtype for name, tensor in result.items()}
            assert "step" in result
            assert "steps" not in result


@pytest.mark.parametrize("container", [None, "model"])
def test_libraries_read_our_files(tmp_path, container) -> None:
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
    with open_tensors(tmp_path / "a.pth") as result:
        assert result.metadata.container == container
        assert same(result, state)


@pytest.mark.parametrize("save", [save_npz, save_safetensors, save_torch])
def test_files_are_converted_between_types(tmp_path, save) -> None:
    state = tensors()
    for name, (write, _) in WRITERS.items():
        write(tmp_path / "from", state)
        with open_tensors(tmp_path / "from") as result:
            save(tmp_path / "to", result)
        with open_tensors(tmp_path / "to") as result:
            assert same(result, state), name


class LazyTensors(Mapping[str, Tensor]):
    """Tensors made on access; counts how many are alive at once."""

    def __init__(self, count: int) -> None:
        self.names = [f"blocks.{number}.weight" for number in range(count)]
        self.alive = self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        array = np.full((64, 64), self.names.index(name), dtype=np.float32)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(array, self.release)  # the tensor holds the array as its memory
        return torch.from_numpy(array)

    def release(self) -> None:
        self.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@pytest.mark.parametrize("save", [save_npz, save_safetensors, save_torch])
def test_writer_holds_one_tensor_at_a_time(tmp_path, save) -> None:
    lazy = LazyTensors(20)
    save(tmp_path / "a", lazy)
    assert (lazy.most, lazy.alive) == (1, 0)
    with open_tensors(tmp_path / "a") as result:
        assert all(result[name].unique().tolist() == [number] for number, name in enumerate(lazy.names))


def test_conversion_makes_one_tensor_at_a_time(tmp_path) -> None:
    model = vitkit.create(
        "B/16", image_size=32, num_classes=2, settings={"depth": 4, "width": 64, "heads": 1, "mlp_dim": 64}
    )
    sizes = [parameter.nbytes for parameter in model.parameters()]
    for name in ("google", "huggingface", "timm"):
        to = get_format(name)
        tensors = ConvertedTensors(to.rules(model.config, None), model.state_dict())
        assert max(tensor.nbytes for tensor in tensors.values()) <= max(sizes)
        assert sum(tensor.nbytes for tensor in tensors.values()) == sum(sizes)


@pytest.mark.parametrize(("save", "name"), [(save_safetensors, "a.safetensors"), (save_torch, "a.pth")])
def test_changing_a_mapped_tensor_keeps_the_file(tmp_path, save, name) -> None:
    save(tmp_path / name, {"a": torch.ones(300_000)})
    before = (tmp_path / name).read_bytes()
    with open_tensors(tmp_path / name) as result:
        tensor = result["a"]
    if Path("/proc/self/maps").exists():
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(name)]
        spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
        assert any(start <= tensor.data_ptr() < end for start, end in spans)
    tensor.zero_()
    assert (tmp_path / name).read_bytes() == before


def test_array_is_unpacked_on_access(tmp_path) -> None:
    path = tmp_path / "model.npz"
    save_npz(path, {"a": torch.ones(10_000), "b": torch.ones(10_000)})
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x03\x04", 4) + 30_000] ^= 1  # in the numbers of b
    path.write_bytes(content)
    with open_tensors(path) as result:
        assert result.shapes == {"a": (10_000,), "b": (10_000,)}
        assert torch.equal(result["a"], torch.ones(10_000))
        with pytest.raises(WeightsError, match=r"model.npz: b.npy cannot be unpacked: Bad CRC"):
            result["b"]


@pytest.mark.parametrize("writer", ["safetensors", "torch"])
def test_mapped_tensor_shows_the_file(tmp_path, writer) -> None:
    path = tmp_path / "model"
    numbers = torch.arange(4096, dtype=torch.float32)
    WRITERS[writer][0](path, {"a": numbers})
    directory = path.read_bytes().index(numbers.numpy().tobytes())
    with open_tensors(path) as result, path.open("r+b") as file:
        file.seek(directory)
        file.write(struct.pack("<f", -5.0))  # after it was opened, before it was read
        file.flush()
        tensor = result["a"]
        assert tensor[:2].tolist() == [-5.0, 1.0]
        tensor[1] = 9.0
        file.seek(directory + 4)
        assert struct.unpack("<f", file.read(4)) == (1.0,)
    assert tensor[:3].tolist() == [-5.0, 9.0, 2.0]  # it outlives the file


def test_huge_file_opens_without_reading(tmp_path) -> None:
    side, header = 1 << 15, {"a": {"dtype": "F32", "shape": [1 << 15, 1 << 15], "data_offsets": [0, 4 << 30]}}
    line = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(line)) + line)
        file.truncate(8 + len(line) + 4 * side * side)  # 4 GiB that take no room on the disk
    with open_tensors(tmp_path) as result:
        assert result["a"].shape == (side, side)


@pytest.mark.parametrize("container", ["model", "state_dict", "teacher", "student", "module", "ema"])
@pytest.mark.parametrize("new", [True, False])
def test_state_dict_is_found_in_its_container(tmp_path, container, new) -> None:
    state = {"head.bias": torch.ones(3), "head.weight": torch.ones(3, 2)}
    extra = {"epoch": 3, "best": torch.tensor(0.8), "optimizer": {"state": {0: {"step": torch.ones(2)}}}}
    whole = {"epoch": 3} if container == "ema" else extra
    torch.save(whole | {container: OrderedDict(state)}, tmp_path / "a.pth", _use_new_zipfile_serialization=new)
    with open_tensors(tmp_path / "a.pth") as result:
        assert result.metadata.container == container
        assert same(result, state)
        assert result.notes == (f"ignored: {', '.join(whole)}",)


def test_dino_teacher_is_preferred(tmp_path) -> None:
    state = {"student": {"module.a": torch.zeros(1)}, "teacher": {"a": torch.ones(1)}}
    torch.save(state, tmp_path / "a.pth")
    with open_tensors(tmp_path / "a.pth") as result:
        assert result.metadata.container == "teacher"
        assert result["a"].item() == 1
        assert result.notes == ("ignored: student",)


@pytest.mark.parametrize("save", [save_npz, save_safetensors, save_torch])
def test_wrapper_prefixes_are_removed_with_a_note(tmp_path, save) -> None:
    save(tmp_path / "a", {"module._orig_mod.norm": torch.ones(1), "module._orig_mod.module.b": torch.ones(1)})
    with open_tensors(tmp_path / "a") as result:
        assert list(result) == ["norm", "module.b"] or list(result) == ["module.b", "norm"]
        assert result.notes == ("removed the prefix 'module._orig_mod.' from all names",)


def test_views_and_tied_tensors_equal_torch_load(tmp_path) -> None:
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
        expected = torch.load(tmp_path / "a.pth", weights_only=True)
        with open_tensors(tmp_path / "a.pth") as result:
            assert all(torch.equal(result[name], expected[name]) for name in state)
            assert all(result[name].stride() == expected[name].stride() for name in state)


def test_module_state_dict_is_read(tmp_path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for new in (True, False):
        torch.save(module.state_dict(), tmp_path / "a.pth", _use_new_zipfile_serialization=new)
        with open_tensors(tmp_path / "a.pth") as result:
            assert same(result, dict(module.state_dict()))


def test_other_values_of_a_checkpoint_are_ignored(tmp_path) -> None:
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
        with open_tensors(tmp_path / "a.pth") as result:
            assert same(result, {"a": torch.ones(2)})
            assert result.notes == ("ignored: args, accuracy, array, dtype, size",)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_array_order_and_endianness(tmp_path, order, layout) -> None:
    numbers = np.arange(24, dtype=f"{order}f4").reshape(2, 3, 4)
    np.savez(tmp_path / "a.npz", a=np.asarray(numbers, order=layout))  # type: ignore[call-overload]
    with open_tensors(tmp_path / "a.npz") as result:
        assert torch.equal(result["a"], torch.arange(24.0).reshape(2, 3, 4))
        assert result["a"].is_contiguous()


def test_config_json_is_read_with_the_file(tmp_path) -> None:
    save_torch(tmp_path / "pytorch_model.bin", {"a": torch.ones(2)})
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch16_224", "num_classes": 3}')
    for path in (tmp_path, tmp_path / "pytorch_model.bin", str(tmp_path)):
        with open_tensors(path) as result:
            assert result.metadata.file_type == "torch"
            assert result.metadata.config["num_classes"] == 3


def test_directory_prefers_safetensors(tmp_path) -> None:
    save_npz(tmp_path / "Ti_16.npz", {"a": torch.ones(1)})
    with open_tensors(tmp_path) as result:
        assert result.metadata.file_type == "npz"
    save_torch(tmp_path / "pytorch_model.bin", {"a": torch.ones(2)})
    with open_tensors(tmp_path) as result:
        assert result.metadata.file_type == "torch"
    save_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(3)})
    with open_tensors(tmp_path) as result:
        assert result.shapes == {"a": (3,)}


@pytest.mark.parametrize(("name", "save"), [("model.safetensors", save_safetensors), ("pytorch_model.bin", save_torch)])
def test_shards_are_joined(tmp_path, name, save) -> None:
    state = tensors()
    places = {tensor: f"shard-{index % 3}" for index, tensor in enumerate(state)}
    for shard in set(places.values()):
        save(tmp_path / shard, {tensor: state[tensor] for tensor in state if places[tensor] == shard})
    (tmp_path / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    with open_tensors(tmp_path) as result:
        assert same(result, state)
        assert result.notes == ("read from 3 files",)


def test_symbolic_link_is_read(tmp_path) -> None:
    (tmp_path / "snapshot").mkdir()
    save_safetensors(tmp_path / "blob", {"a": torch.ones(2)})
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    with open_tensors(tmp_path / "snapshot") as result:
        assert result["a"].tolist() == [1, 1]


def test_unknown_name_is_a_key_error(tmp_path) -> None:
    save_npz(tmp_path / "a.npz", {"a": torch.ones(2)})
    with open_tensors(tmp_path / "a.npz") as result, pytest.raises(KeyError, match="b"):
        result["b"]


@pytest.mark.parametrize("save", [save_npz, save_safetensors])
def test_failed_write_keeps_the_old_file(tmp_path, save) -> None:
    save(tmp_path / "a", {"a": torch.ones(2)})
    before = (tmp_path / "a").read_bytes()
    for name, tensor in (("b", torch.ones(2, dtype=torch.complex64)), ("../b", torch.ones(2))):
        with pytest.raises(WeightsError, match=f"{tmp_path}/a"):
            save(tmp_path / "a", {"a": torch.zeros(2), name: tensor})
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("save", [save_npz, save_safetensors, save_torch])
def test_missing_directory_is_reported(tmp_path, save) -> None:
    with pytest.raises(WeightsError, match="nowhere/a: cannot be written: No such file"):
        save(tmp_path / "nowhere" / "a", {"a": torch.ones(2)})


@pytest.mark.parametrize("save", [save_npz, save_safetensors, save_torch])
def test_writing_is_deterministic(tmp_path, save) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, {"a": torch.ones(2), "b": torch.ones(3)})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_view_is_saved_without_its_storage(tmp_path) -> None:
    secret = torch.full((100_000,), 7.0)
    save_torch(tmp_path / "a.pth", {"a": secret[:2]})
    assert (tmp_path / "a.pth").stat().st_size < 10_000
    query, key, value = torch.arange(3000.0).chunk(3)
    save_torch(tmp_path / "b.pth", {"q": query, "k": key, "v": value})
    assert (tmp_path / "b.pth").stat().st_size < 20_000
    with open_tensors(tmp_path / "b.pth") as result:
        assert torch.equal(result["k"], key)


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared weights are not here")
def test_published_weights_equal_numpy_and_torch() -> None:
    with (
        open_tensors(REAL / "Ti_16-augreg-imagenet.npz") as result,
        np.load(REAL / "Ti_16-augreg-imagenet.npz") as arrays,
    ):
        assert same(result, {name: torch.from_numpy(arrays[name]) for name in arrays})
    expected = torch.load(REAL / "deit_tiny_patch16_224.pth", weights_only=True)["model"]
    with open_tensors(REAL / "deit_tiny_patch16_224.pth") as result:
        assert result.metadata.container == "model"
        assert same(result, expected)
