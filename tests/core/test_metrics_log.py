"""Metrics log: format, damage, truncation."""

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitkit.core.errors import VitkitError
from vitkit.core.metrics_log import MetricsLog, MetricsRecord, Value, read_metrics, truncate_metrics

SPELLED_AS_TEXT = {"nan", "inf", "-inf"}
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text().filter(lambda text: text not in SPELLED_AS_TEXT)
)
names = st.text().filter(lambda name: name not in ("step", "self"))
records = st.fixed_dictionaries({"step": st.integers()}) | st.builds(
    lambda step, fields: {"step": step, **fields},
    st.integers(),
    st.dictionaries(names, scalars | st.lists(scalars)),
)


def write(path: Path, *records: MetricsRecord) -> None:
    with MetricsLog(path) as log:
        for record in records:
            log.write(**record)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@given(written=st.lists(records))
def test_values_round_trip_with_their_types(
    tmp_path_factory: pytest.TempPathFactory, written: list[MetricsRecord]
) -> None:
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    write(path, *written)
    assert repr(read_metrics(path)) == repr(written)


def test_record_is_one_line_of_json_starting_with_the_step(path: Path) -> None:
    write(path, {"step": 1, "note": "two\nlines", "loss": math.nan}, {"step": 2})
    lines = path.read_text(encoding="ascii").splitlines()
    assert lines == ['{"step": 1, "note": "two\\nlines", "loss": "nan"}', '{"step": 2}']


def refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def test_nan_and_infinity_are_strings_in_the_file(path: Path) -> None:
    write(path, {"step": 1, "high": math.inf, "low": -math.inf, "list": [math.nan, 1.0]})
    json.loads(path.read_bytes(), parse_constant=refuse_constant)
    [record] = read_metrics(path)
    assert record["high"] == math.inf
    assert record["low"] == -math.inf
    assert repr(record["list"]) == "[nan, 1.0]"


def test_tuple_is_read_as_a_list(path: Path) -> None:
    values: Value = (1, 2)
    write(path, {"step": 1, "values": values})
    assert read_metrics(path) == [{"step": 1, "values": [1, 2]}]


def test_second_log_appends_to_the_first(path: Path) -> None:
    write(path, {"step": 1})
    write(path, {"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_two_open_logs_do_not_overwrite_each_other(path: Path) -> None:
    with MetricsLog(path) as one, MetricsLog(path) as other:
        for step in range(0, 10, 2):
            one.write(step=step)
            other.write(step=step + 1)
    assert [record["step"] for record in read_metrics(path)] == list(range(10))


def test_line_is_visible_immediately(path: Path) -> None:
    with MetricsLog(path) as log:
        log.write(step=1)
        assert read_metrics(path) == [{"step": 1}]


def test_log_cut_at_any_byte_can_be_read_and_continued(path: Path) -> None:
    write(path, {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25})
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}][: content[:length].count(b"\n")]
        assert read_metrics(path) == whole
        write(path, {"step": 3})
        assert read_metrics(path) == [*whole, {"step": 3}]


def test_killed_run_leaves_a_readable_log(path: Path) -> None:
    program = """
import sys
from itertools import count
from vitkit.core.metrics_log import MetricsLog
with MetricsLog(sys.argv[1]) as log:
    for step in count():
        log.write(step=step, text="x" * 1000)
        if step == 100:
            print("written", flush=True)
"""
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "written\n"
        run.kill()
    steps = [record["step"] for record in read_metrics(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > 100


@pytest.mark.parametrize(
    "damaged",
    [b'{"step": 2, "lo', b"", b"[]", b'{"loss": 1}', b'{"step": 2.0}', b'{"step": true}', b"\xff", b"\0" * 8],
)
def test_damage_in_the_middle_names_the_line(path: Path, damaged: bytes) -> None:
    path.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    with pytest.raises(VitkitError, match=r"metrics\.jsonl: line 2 is damaged"):
        read_metrics(path)
    with pytest.raises(VitkitError, match="line 2"):
        truncate_metrics(path, 1)
    assert path.read_bytes().count(b"\n") == 3


def test_full_disk_is_an_error_and_closes_the_log(path: Path) -> None:
    write(path, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsLog(path) as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
        try:
            with pytest.raises(VitkitError, match=r"the line of step 2 was cut off .*got 5"):
                log.write(step=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(ValueError, match="closed"):
            log.write(step=3)
    assert read_metrics(path) == [{"step": 1}]


def test_truncating_keeps_earlier_steps_byte_for_byte(path: Path) -> None:
    path.write_bytes(b'{"step":1, "loss": 1e0}\n{"step": 2}\n{"step": 2, "top1": 0}\n{"step": 3}\n{"step": 4, "lo')
    truncate_metrics(path, 2)
    assert path.read_bytes() == b'{"step":1, "loss": 1e0}\n{"step": 2}\n{"step": 2, "top1": 0}\n'


@pytest.mark.parametrize(("step", "kept"), [(-1, []), (0, [0]), (15, [0, 10]), (99, [0, 10, 20])])
def test_truncating_at_steps_that_were_never_logged(path: Path, step: int, kept: list[int]) -> None:
    write(path, {"step": 0}, {"step": 10}, {"step": 20})
    truncate_metrics(path, step)
    assert [record["step"] for record in read_metrics(path)] == kept


def test_failed_truncation_leaves_the_log_unchanged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    write(path, {"step": 1}, {"step": 2})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space left"):
            truncate_metrics(path, 1)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    truncate_metrics(path, 1)
    assert read_metrics(path) == [{"step": 1}]
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_closing_twice_is_allowed(path: Path) -> None:
    log = MetricsLog(path)
    log.close()
    log.close()
    assert read_metrics(path) == []
