"""Reader of plain pickles: equal to pickle for plain values, and an error for all others."""

import builtins
import functools
import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitkit.core.errors import DataError
from vitkit.data.layouts.cifar import read_pickle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


class Runs:
    """Anything whose pickle calls something."""

    def __init__(self, called: object, *arguments: object) -> None:
        self.parts = (called, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.parts  # type: ignore[return-value]


@given(value=PLAIN, protocol=st.integers(0, 5))
def test_plain_values_are_what_pickle_gives(value: object, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol=protocol), where="x") == value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_bytes_are_what_pickle_gives(protocol: int, order: str) -> None:
    array = np.asarray(np.arange(24, dtype=np.uint8).reshape(4, 6), order=order)  # type: ignore[call-overload]
    found = read_pickle(pickle.dumps({b"data": array}, protocol=protocol), where="x")
    assert isinstance(found, dict)
    np.testing.assert_array_equal(found[b"data"], array)


def test_what_python_2_wrote_is_read() -> None:
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01K\x01K\x03\x86" + dtype
    content = b"\x80\x02}(U\x04data" + array + b"\x89U\x03\x01\xff\x03tbU\x06labels](K\x06K\x09eu."
    found = read_pickle(content, where="x")
    assert isinstance(found, dict)
    assert found[b"labels"] == [6, 9]
    assert found[b"data"].tolist() == [[1, 255, 3]]


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize(
    ("called", "arguments"),
    [
        (os.system, ("touch {}",)),
        (builtins.eval, ("open('{}', 'w')",)),
        (builtins.exec, ("open('{}', 'w')",)),
        (builtins.getattr, (os, "system")),
        (subprocess.Popen, (["touch", "{}"],)),
        (functools.partial, (os.system, "touch {}")),
        (Path, ("{}",)),
        (np.load, ("{}",)),
        (np.fromfile, ("{}",)),
        (builtins.open, ("{}", "w")),
    ],
)
def test_a_pickle_that_calls_anything_is_refused_and_nothing_runs(
    called: object, arguments: tuple[object, ...], protocol: int, tmp_path: Path
) -> None:
    target = str(tmp_path / "ran")
    filled = tuple(item.replace("{}", target) if isinstance(item, str) else item for item in arguments)
    if os in filled:  # modules are not pickled; name a chain as an attacker would write it
        content = b"cbuiltins\ngetattr\n(cos\n__dict__\nS'system'\ntR(S'touch " + target.encode() + b"'\ntR."
    else:
        content = pickle.dumps({b"data": Runs(called, *filled)}, protocol=protocol)
    with pytest.raises(DataError, match="not a plain pickle"):
        read_pickle(content, where="data_batch_1")
    assert not Path(target).exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"garbage",
        b"\x80\x04N",
        b"\x80\x02cnumpy\ndtype\n)R.",  # a dtype of nothing
        b"\x80\x02cnumpy\nndarray\n)R.",  # the array type called
        b"\x80\x02cnumpy\nndarray\n}b.",  # a state for a name
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(K\x00tU\x01btR.",  # of another type
        b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00punyct R.",
        b"\x80\x02]r\xff\xff\xff\x7fh\x00.",  # a far memory cell, and one that is empty
        b"\x80\x02K\x01K\x02a.",  # appends to a number
        b"\x80\x02K\x01(K\x02K\x03u.",
        b"\x80\x02P1\n.",
        b"\x80\x02\x82\x01.",  # the extension registry
        b"\x80\x02(cos\nsystem\nS'true'\no.",  # OBJ
        b"(S'true'\nios\nsystem\n.",  # INST
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"\x80\x02}(]K\x01u.",  # a list as key
        b"\x80\x02}" + b")" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",  # a key that takes for ever to hash
        b"\x80\x04\x8f.",  # a set
        b"\x80\x02\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20) + b".",  # a number of a megabyte
        b"\x80\x02K\x00Q.",  # a persistent id
        b"\x80\x02" + b"N" * 2_000_001 + b".",
        b"(" * 100_000,
    ],
)
def test_damaged_and_crafted_pickles_are_refused(content: bytes) -> None:
    with pytest.raises(DataError, match="not a plain pickle"):
        read_pickle(content, where="x")


@given(content=st.binary(max_size=200))
def test_noise_is_refused_or_plain(content: bytes) -> None:
    try:
        read_pickle(content, where="x")
    except DataError:
        return


def test_an_array_of_objects_or_of_the_wrong_length_is_refused() -> None:
    for array in (np.array([{}], dtype=object), np.zeros(3, np.float32)):
        with pytest.raises(DataError, match="not a plain pickle"):
            read_pickle(pickle.dumps(array, protocol=2), where="x")
    content = pickle.dumps(np.zeros((2, 3), np.uint8), protocol=4).replace(b"K\x02K\x03\x86", b"K\x02K\x7f\x86")
    with pytest.raises(DataError, match="do not fill"):
        read_pickle(content, where="x")
