"""Verification of exported weights: by vitkit, by the library they are for, and through an example.py."""

from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from vitkit.core.errors import WeightsError
from vitkit.core.files import write_json, write_text
from vitkit.core.result import fields_to_json
from vitkit.core.sizes import pair
from vitkit.exporters.example import format_example, preprocessing_json
from vitkit.exporters.runtime import FEATURES, LOGITS, FloatArray
from vitkit.exporters.verification import EXAMPLE, VerificationImages, model_runner, verify_example, verify_outputs
from vitkit.model.config import ViTConfig
from vitkit.weights import artifact as artifact_io
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.formats.registry import get_format
from vitkit.weights.formats.timm import TIMM
from vitkit.weights.formats.timm.config import make_timm_config
from vitkit.weights.io.readers import open_tensors
from vitkit.weights.load import identify, load_stored_bundle
from vitkit.weights.verify import build_library_model, timm_create_args, transformers_output, verify_artifact

FILES = {"npz": "model.npz", "torch": "model.pth"}
"""File names, inside a directory, of formats that are a single file."""
PREPROCESSING = "preprocessing.json"
RUN_CODE = """\
def run(pixels):
    with torch.inference_mode():
        return {call}.numpy()
"""
TIMM_CODE = f"""\
import timm
import torch

model = timm.create_model(f"local-dir:{{FOLDER}}", pretrained=True).float().eval()


{RUN_CODE.format(call="model(torch.from_numpy(pixels))")}"""


def write_companion_files(directory: Path, bundle: ModelBundle) -> None:
    """Write labels and preprocessing next to weights whose format does not store them."""
    write_json(directory / artifact_io.LABELS, list(bundle.labels))
    write_json(directory / PREPROCESSING, preprocessing_json(bundle.preprocessing))
    if not (directory / artifact_io.CONFIG).exists():
        size, channels = bundle.config.image_size, bundle.config.channels
        sizes = {"image_size": size if isinstance(size, int) else list(size), "input_size": [channels, *pair(size)]}
        write_json(directory / artifact_io.CONFIG, {"label_names": list(bundle.labels), **sizes})
        write_json(directory / artifact_io.PREPROCESSING, bundle.preprocessing.to_hub())


def verify_weights(
    to: str, path: Path, bundle: ModelBundle, *, title: str, images: VerificationImages | None
) -> dict[str, object]:
    """Return the verification of written weights. Raise WeightsError if their outputs differ from the model's."""
    stored = load_stored_bundle(path, format=None if to == artifact_io.FORMAT_NAME else to)
    run = model_runner(_with_image_size(stored, bundle))
    comparison, used_images = verify_outputs(run, bundle, title=title, images=images)
    verification: dict[str, object] = {
        "format": to,
        "runtime": f"vitkit {metadata.version('vitkit')}",
        "against": f"the model before export, on torch {torch.__version__}, float32",
        **used_images,
        **fields_to_json(comparison),
    }
    summary = [f"read by vitkit, {comparison.summary()}"]
    if to == artifact_io.FORMAT_NAME:
        result = verify_artifact(path)
        if not result.agrees:
            message = f"{path}: the outputs differ from {result.against}"
            raise WeightsError(message, got=result.max_difference, hint="report this")
        return verification | {"summary": summary[0]}
    library = compare_with_library(to, path, bundle, images=images)
    verification["library"], skipped = library, library.get("skipped")
    summary.append(
        f"not compared with its library: {skipped}" if skipped else f"by {library['against']}, {library.pop('summary')}"
    )
    if path.is_dir():
        example = add_example(to, path, bundle, skipped=skipped, images=images)
        verification["example"] = example
        summary += [f"{EXAMPLE} agrees on {example['images']} files"] if "images" in example else []
    return verification | {"summary": "; ".join(summary)}


def _with_image_size(stored: ModelBundle, bundle: ModelBundle) -> ModelBundle:
    """Set the image size of a model that takes any, whose files do not store one."""
    config = stored.config
    if isinstance(config, ViTConfig) and config.positions.is_additive:
        return stored
    return replace(stored, config=replace(config, image_size=bundle.config.image_size))


def compare_with_library(
    to: str, path: Path, bundle: ModelBundle, *, images: VerificationImages | None
) -> dict[str, object]:
    """Compare the library that the weights are for with the model; or return why this was skipped."""
    model, output = model_runner(bundle), LOGITS if bundle.config.num_classes else FEATURES
    with open_tensors(path) as tensors:
        try:
            against, forward = build_library_model(identify(tensors, format=to), tensors)
        except WeightsError as error:
            return {"skipped": error.message}

        def run_library(pixels: FloatArray) -> dict[str, FloatArray]:
            return {output: forward(torch.from_numpy(pixels)).numpy()}

        def run_model(pixels: FloatArray) -> dict[str, FloatArray]:
            return {output: model(pixels)[output]}

        title = f"{against} with the exported weights"
        comparison, _ = verify_outputs(run_library, bundle, title=title, images=images, model=run_model)
    return {"against": against, "summary": comparison.summary(), **fields_to_json(comparison)}


def add_example(
    to: str, directory: Path, bundle: ModelBundle, *, skipped: object, images: VerificationImages | None
) -> dict[str, object]:
    """Write example.py and verify it; or return why this was skipped."""
    code, library = _library_code(to, bundle), get_format(to).library or ""
    if code is None:
        return {"skipped": "no library loads this directory"}
    if skipped and find_spec(library) is not None:  # the installed library cannot load it, nor could the example
        return {"skipped": skipped}
    num_classes = bundle.config.num_classes
    text = format_example(bundle.preprocessing, run_code=code, package=library, num_classes=num_classes)
    write_text(directory / EXAMPLE, text)
    return {"skipped": skipped} if skipped else verify_example(directory, bundle, images=images, library=library)


def _library_code(to: str, bundle: ModelBundle) -> str | None:
    """Return the code of an example.py that loads the weights with their library, or None if there is none."""
    config = bundle.config
    if to == "timm":
        return TIMM_CODE
    make_config = get_format(to).make_config
    if isinstance(config, ViTConfig) and to != "huggingface-mae" and make_config is not None:
        architectures = make_config(config, ())["architectures"]
        assert isinstance(architectures, list)
        try:
            output = transformers_output(config)
        except WeightsError:
            return None
        return (
            f"import torch\nimport transformers\n\nmodel = transformers.{architectures[0]}.from_pretrained(FOLDER)"
            ".float().eval()\n\n\n" + RUN_CODE.format(call=f"model(pixel_values=torch.from_numpy(pixels)).{output}")
        )
    if to == "google" and not TIMM.unsupported_reason(config):
        architecture, args = timm_create_args(make_timm_config(config), num_classes=config.num_classes)
        lines = "\n".join(f"    {name}={value!r}," for name, value in args.items())
        return (
            f'import timm\nimport torch\n\nmodel = timm.create_model(\n    "{architecture}",\n{lines}\n).eval()\n'
            f'model.load_pretrained(str(FOLDER / "{FILES["npz"]}"))\n\n\n'
            + RUN_CODE.format(call="model(torch.from_numpy(pixels))")
        )
    return None
