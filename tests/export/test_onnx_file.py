"""The ONNX file itself: what it says of the model, and that its weights are nowhere but in its folder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from export.programs import artefact_of
from model_cases import small

from vitkit.core.config import to_mapping
from vitkit.core.errors import WeightsError
from vitkit.export import onnx_program
from vitkit.export.program import Program
from vitkit.export.proof import check, compare, judged
from vitkit.model.resnet import BiTConfig

onnx = pytest.importorskip("onnx", reason="onnx comes with vitkit[export]")
pytest.importorskip("onnxscript", reason="onnxscript comes with vitkit[export]")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime comes with vitkit[export]")

ARTEFACT = artefact_of(small(depth=1))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    onnx_program.write(ARTEFACT, folder)
    return folder


def test_it_is_one_file_with_names_labels_and_preprocessing_in_it(written: Path) -> None:
    assert [path.name for path in written.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(str(written / "model.onnx"), providers=["CPUExecutionProvider"])
    [pixels], outputs = session.get_inputs(), session.get_outputs()
    assert (pixels.name, pixels.type, pixels.shape) == ("pixels", "tensor(float)", ["batch", 3, 32, 48])
    assert {each.name: each.shape for each in outputs} == {"logits": ["batch", 5], "features": ["batch", 16]}
    said = session.get_modelmeta().custom_metadata_map
    assert json.loads(said["vitkit.labels"]) == list(ARTEFACT.labels)
    assert json.loads(said["vitkit.preprocessing"]) == json.loads(json.dumps(to_mapping(ARTEFACT.preprocessing)))


def test_nothing_in_it_says_where_it_was_made(written: Path) -> None:
    content = (written / "model.onnx").read_bytes()
    source = Path(onnx_program.__file__).parents[2]
    assert str(source).encode() not in content
    assert b"site-packages" not in content
    assert b"Traceback" not in content


def test_large_weights_lie_in_a_file_beside_it_and_move_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_program, "LARGEST", 1000)
    (tmp_path / "first").mkdir()
    onnx_program.write(ARTEFACT, tmp_path / "first")
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == ["model.onnx", "model.onnx.data"]
    shutil.move(tmp_path / "first", tmp_path / "moved")
    found = compare(
        onnx_program.start(tmp_path / "moved"), judged(Program(ARTEFACT.model())), [torch.rand(2, 3, 32, 48)]
    )
    check(found, title="ONNX")


@pytest.mark.parametrize("place", ["../secret.bin", "/etc/passwd", "inner/weights.bin", "..", ""])
def test_weights_outside_the_folder_are_refused_before_anyone_follows_them(
    written: Path, tmp_path: Path, place: str
) -> None:
    model = onnx.load(str(written / "model.onnx"))
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=place)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(WeightsError, match="its weights are not in its folder"):
        onnx_program.check(tmp_path)


def test_a_file_that_is_not_valid_is_refused(written: Path, tmp_path: Path) -> None:
    model = onnx.load(str(written / "model.onnx"))
    model.graph.node[0].op_type = "NoSuchOperation"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(WeightsError, match="not valid ONNX"):
        onnx_program.check(tmp_path)


def test_zeros_around_a_negative_map_are_not_lost_in_pooling(tmp_path: Path) -> None:
    """BiT's stem pads with zeros, and ONNX Runtime takes any padding into the pooling behind it as no number."""
    artefact = artefact_of(BiTConfig(units=(1,), image_size=32, classes=3))
    onnx_program.write(artefact, tmp_path)
    pixels = -torch.rand(2, 3, 32, 32)
    found = compare(onnx_program.start(tmp_path), judged(Program(artefact.model())), [pixels])
    assert found.largest_difference <= 1e-4, np.format_float_scientific(found.largest_difference)
