"""The ONNX file: its metadata, and its weights inside its directory."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from exporters.programs import artifact_of
from model_cases import small

from vitkit.core.config import to_mapping
from vitkit.core.errors import WeightsError
from vitkit.exporters import onnx as onnx_exporter
from vitkit.exporters.verification import check_outputs, compare_outputs, model_runner

onnx = pytest.importorskip("onnx", reason="onnx comes with vitkit[export]")
pytest.importorskip("onnxscript", reason="onnxscript comes with vitkit[export]")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime comes with vitkit[export]")

ARTIFACT = artifact_of(small(depth=1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    onnx_exporter.write_program(ARTIFACT, folder)
    return folder


def test_file_has_names_labels_and_preprocessing(exported: Path) -> None:
    assert [path.name for path in exported.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(str(exported / "model.onnx"), providers=["CPUExecutionProvider"])
    [pixels], outputs = session.get_inputs(), session.get_outputs()
    assert (pixels.name, pixels.type, pixels.shape) == ("pixels", "tensor(float)", ["batch", 3, 32, 48])
    assert {each.name: each.shape for each in outputs} == {"logits": ["batch", 5], "features": ["batch", 16]}
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["vitkit.labels"]) == list(ARTIFACT.labels)
    assert json.loads(metadata["vitkit.preprocessing"]) == json.loads(json.dumps(to_mapping(ARTIFACT.preprocessing)))


def test_file_contains_no_local_paths(exported: Path) -> None:
    content = (exported / "model.onnx").read_bytes()
    source = Path(onnx_exporter.__file__).parents[2]
    assert str(source).encode() not in content
    assert b"site-packages" not in content
    assert b"Traceback" not in content


def test_large_weights_are_stored_in_a_relative_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_exporter, "MAX_FILE_BYTES", 1000)
    (tmp_path / "first").mkdir()
    onnx_exporter.write_program(ARTIFACT, tmp_path / "first")
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == ["model.onnx", "model.onnx.data"]
    shutil.move(tmp_path / "first", tmp_path / "moved")
    found = compare_outputs(
        onnx_exporter.load_program(tmp_path / "moved"),
        model_runner(ARTIFACT),
        [torch.rand(2, 3, 32, 48)],
    )
    check_outputs(found, title="ONNX")


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "inner/weights.bin", "..", ""])
def test_weights_outside_the_directory_are_rejected(exported: Path, tmp_path: Path, location: str) -> None:
    model = onnx.load(str(exported / "model.onnx"))
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(WeightsError, match="its weights are not in its directory"):
        onnx_exporter.check_file(tmp_path)


def test_invalid_file_is_rejected(exported: Path, tmp_path: Path) -> None:
    model = onnx.load(str(exported / "model.onnx"))
    model.graph.node[0].op_type = "NoSuchOperation"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(WeightsError, match="not valid ONNX"):
        onnx_exporter.check_file(tmp_path)
