"""Export of a model as a program for a runtime, or as weights for another library.

What is written is run before it gets its name, and compared with the model. If the outputs differ, nothing remains.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from os import PathLike
from pathlib import Path

import torch

from vitkit.core.environment import release_freed_memory
from vitkit.core.errors import UnknownNameError, did_you_mean
from vitkit.core.files import sha256, write_json, write_text
from vitkit.core.result import Result, fields_to_json
from vitkit.core.signals import ProgressFunction
from vitkit.data.fingerprint import fingerprint_contents
from vitkit.exporters import atomic_output
from vitkit.exporters.example import format_example, format_readme, preprocessing_json
from vitkit.exporters.onnx import ONNX
from vitkit.exporters.openvino import OPENVINO
from vitkit.exporters.runtime import Runtime
from vitkit.exporters.torch_export import TORCH
from vitkit.exporters.verification import EXAMPLE, VerificationImages, verify_example, verify_outputs
from vitkit.exporters.weights import FILES, PREPROCESSING, verify_weights, write_companion_files
from vitkit.inference.image_inputs import describe_data, open_data_images
from vitkit.inference.select import Report
from vitkit.typing import DataSource, ModelSource, Settings
from vitkit.weights.artifact import FORMAT_NAME, FORMAT_TITLE, LABELS
from vitkit.weights.bundle import ModelBundle
from vitkit.weights.convert import change_config, check_output, preprocessing_differences, read_back, write_format
from vitkit.weights.describe import load_described
from vitkit.weights.formats.base import Format
from vitkit.weights.formats.registry import FORMATS
from vitkit.weights.load import find_format, source_name

RUNTIMES: dict[str, Runtime] = {runtime.name: runtime for runtime in (ONNX, TORCH, OPENVINO)}
"""Export runtimes by the name that users type. A new runtime is one module and one entry here."""
README = "README.md"
FILE_SUFFIXES = {"npz": (".npz",), "torch": (".pth", ".pt", ".bin", ".ckpt")}
"""Suffixes of formats that can be written as a single file; timm's and Hugging Face's are directories."""
LOAD_COMMANDS = {
    "huggingface": 'transformers.AutoModelForImageClassification.from_pretrained("{out}")',
    "huggingface-deit": 'transformers.DeiTForImageClassificationWithTeacher.from_pretrained("{out}")',
    "timm": 'timm.create_model("local-dir:{out}", pretrained=True)',
}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExportResult(Result):
    """Files of an export, and their verification.

    `changes` lists what settings changed, `dropped` what is not part of the model, such as a decoder, or what the
    format cannot store, and `differs` what its library does differently.
    """

    path: Path
    format: str
    title: str
    model: str
    num_classes: int
    files: tuple[str, ...]
    load_command: str
    summary: str
    """The verification in one line."""
    verification: Mapping[str, object]
    changes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    already_existed: bool = False

    def highlights(self) -> dict[str, object]:
        """Return path, format and verification."""
        return {"path": str(self.path), "format": self.format, "model": self.model, "verified": self.summary}


def export_model(
    model: ModelSource,
    out: Path,
    *,
    to: str,
    images: DataSource | None,
    settings: Settings,
    overwrite: bool,
    report: Report,
    progress: ProgressFunction,
) -> ExportResult:
    """Write a model for a runtime (`RUNTIMES`) or another library and verify it. Repeating it changes nothing."""
    runtime, target = _find_target(to)
    release_freed_memory()
    if runtime is not None:
        runtime.check_installed()
    as_directory = target is None or out.suffix not in FILE_SUFFIXES.get(target.file_type, ())
    exists = not overwrite and (out.is_file() or (out.is_dir() and any(out.iterdir())))
    if not exists:
        check_output(out, source=model, overwrite=overwrite, as_directory=as_directory)
    info, bundle = load_described(model)
    report(f"read {info.file}: {info.title}, {info.model}")
    config, changes = change_config(bundle, settings, source=source_name(model))
    bundle = replace(bundle, config=config)
    request: dict[str, object] = {"to": to, "model": bundle.fingerprint(), "images": _identify_images(images)}
    verification = _find_existing(out, request) if exists else None
    already_existed = verification is not None
    if verification is None:
        check_output(out, source=model, overwrite=overwrite, as_directory=as_directory)
        selected = _open_images(images, bundle, progress=progress)

        def write(path: Path) -> dict[str, object]:
            if runtime is not None:
                return write_program(bundle, path, runtime=runtime, images=selected, report=report)
            return write_verified_weights(
                bundle, path, to=to, target=target, images=selected, as_directory=as_directory, report=report
            )

        verification = _write_output(out, write, request=request, as_directory=as_directory)
    return ExportResult(
        path=out,
        format=to,
        title=runtime.title if runtime else target.title if target else FORMAT_TITLE,
        model=bundle.name,
        num_classes=config.num_classes,
        files=list_files(out),
        load_command=load_command(to, num_classes=config.num_classes).format(out=out),
        summary=str(verification["summary"]),
        verification=verification,
        changes=tuple(changes),
        dropped=(*info.dropped, *_strings(verification.get("dropped"))),
        differs=_strings(verification.get("differs")),
        already_existed=already_existed,
    )


def _find_target(to: str) -> tuple[Runtime | None, Format | None]:
    """Return the runtime or the format of a name; neither for vitkit's own format."""
    if to in RUNTIMES:
        return RUNTIMES[to], None
    names = [*RUNTIMES, FORMAT_NAME, *FORMATS]
    if to not in names:
        hint = did_you_mean(to, names) or f"known formats: {', '.join(names)}"
        raise UnknownNameError(f"unknown export format {to}", hint=hint)
    return None, find_format(to)


def _identify_images(images: DataSource | None) -> str | None:
    """Return the path of images, or a checksum of those in memory."""
    if images is None or isinstance(images, str | PathLike):
        return images if images is None else os.fspath(images)
    return fingerprint_contents(open_data_images(images)).checksum


def _find_existing(out: Path, request: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the verification of an intact earlier export of the same request, or None."""
    verification = atomic_output.read_verification(out)
    if verification is None or verification.get("request") != request:
        return None
    if out.is_dir():
        is_intact = (
            atomic_output.VERIFICATION in atomic_output.read_checksums(out)
            and atomic_output.find_damaged_file(out) is None
        )
    else:
        is_intact = verification["sha256"] == sha256(out)
    return verification if is_intact else None


def _open_images(
    images: DataSource | None, bundle: ModelBundle, *, progress: ProgressFunction
) -> VerificationImages | None:
    if images is None:
        return None
    source, description = open_data_images(images), describe_data(images)
    selected = VerificationImages(source, preprocessing=bundle.preprocessing, description=description)
    total = len(selected)
    selected.progress = lambda count: progress("verifying", count, total)
    return selected


def _write_output(
    out: Path, write: Callable[[Path], dict[str, object]], *, request: Mapping[str, object], as_directory: bool
) -> Mapping[str, object]:
    """Let `write` fill a directory or file, add the verification that it returns, and rename both to `out`."""
    verification: dict[str, object] = {}

    def fill(path: Path) -> None:
        verification.update(write(path), request=request)
        if as_directory:
            write_json(path / atomic_output.VERIFICATION, verification)
            atomic_output.write_checksums(path)
        else:
            write_json(atomic_output.verification_path(path), {**verification, "sha256": sha256(path)})

    (atomic_output.write_directory if as_directory else atomic_output.write_file)(out, fill)
    return verification


def write_program(
    bundle: ModelBundle, directory: Path, *, runtime: Runtime, images: VerificationImages | None, report: Report
) -> dict[str, object]:
    """Write a program with labels, preprocessing, example and README, and return its verification.

    Raise WeightsError if its outputs differ from the model's.
    """
    report(f"writing {runtime.title}")
    runtime.write(bundle, directory)
    write_json(directory / LABELS, list(bundle.labels))
    write_json(directory / PREPROCESSING, preprocessing_json(bundle.preprocessing))
    num_classes = bundle.config.num_classes
    code = runtime.example_code(num_classes=num_classes)
    text = format_example(bundle.preprocessing, run_code=code, package=runtime.package, num_classes=num_classes)
    write_text(directory / EXAMPLE, text)
    report(f"running it with {runtime.version}")
    comparison, used_images = verify_outputs(runtime.load(directory), bundle, title=runtime.title, images=images)
    report(f"running {EXAMPLE}")
    example = verify_example(directory, bundle, images=images)
    summary = f"{runtime.version}, {comparison.summary()}; {EXAMPLE} agrees on {example['images']} files"
    write_text(directory / README, format_readme(bundle, runtime, verification=summary))
    return {
        "format": runtime.name,
        "runtime": runtime.version,
        "against": f"vitkit {metadata.version('vitkit')} on torch {torch.__version__}, float32",
        "summary": summary,
        **used_images,
        **fields_to_json(comparison),
        "example": example,
    }


def write_verified_weights(
    bundle: ModelBundle,
    path: Path,
    *,
    to: str,
    target: Format | None,
    images: VerificationImages | None,
    as_directory: bool,
    report: Report,
) -> dict[str, object]:
    """Write weights in a format, read them back, run their library, and return the verification."""
    if as_directory and target is not None:
        path.mkdir(exist_ok=True)
        write_format(target, path / FILES.get(target.file_type, ""), bundle)
        write_companion_files(path, bundle)
    else:
        write_format(target, path, bundle)
    stored = read_back(target, path, bundle)
    report("reading it back and running its library, if installed")
    title = target.title if target else FORMAT_TITLE
    verification = verify_weights(to, path, bundle, title=title, images=images)
    return verification | {
        "tensors": len(bundle.state),
        "summary": f"read back: {len(bundle.state):,} identical tensors; {verification['summary']}",
        "dropped": list(stored.dropped),
        "differs": [*preprocessing_differences(target, bundle), *stored.settings],
    }


def list_files(out: Path) -> tuple[str, ...]:
    """Return the file names of an export."""
    if out.is_dir():
        return tuple(sorted(path.name for path in out.iterdir()))
    verification = atomic_output.verification_path(out)
    return (out.name, *([verification.name] if verification.is_file() else []))


def load_command(to: str, *, num_classes: int) -> str:
    """Return the Python expression that loads an export, with {out} for its path.

    >>> load_command("huggingface-dinov2", num_classes=0), load_command("google", num_classes=10)
    ('transformers.AutoModel.from_pretrained("{out}")', 'vitkit.load("{out}", format="google")')
    """
    if to in RUNTIMES:
        return RUNTIMES[to].load_command
    if to.startswith("huggingface") and not num_classes:
        return 'transformers.AutoModel.from_pretrained("{out}")'
    return LOAD_COMMANDS.get(to, f'vitkit.load("{{out}}", format="{to}")')


def _strings(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
