"""Documentation: examples run and print what they show; tables and links are complete."""

import ast
import dataclasses
import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
import vitkit.training.auto
import vitkit.training.run
from vitkit.api.plans import plan_finetuning, plan_training
from vitkit.cli import finetune, train
from vitkit.cli.main import COMMANDS, main
from vitkit.core.config import apply_overrides, parse_assignments
from vitkit.core.errors import VitkitError
from vitkit.core.signals import EXIT_INTERRUPTED
from vitkit.data.config import AugmentConfig, FractalConfig, augreg_config
from vitkit.data.layouts.registry import EMBEDDED, LAYOUTS
from vitkit.model.config import (
    POSITION_KINDS,
    AttentionConfig,
    BackboneConfig,
    BiTConfig,
    BlockConfig,
    DropoutConfig,
    HeadConfig,
    PositionConfig,
    TokenConfig,
    ViTConfig,
)
from vitkit.model.positions import KERNELS
from vitkit.model.pretraining_config import MAEConfig, MaskedConfig
from vitkit.objectives.config import DistillationConfig, FeatureDistillationConfig
from vitkit.report import figures
from vitkit.training.auto_state import AutoRequest
from vitkit.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelChoice,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    ReportConfig,
    RunConfig,
    ScheduleConfig,
)
from vitkit.zoo.cost import count_table6
from vitkit.zoo.variants import VARIANTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *(path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts)]
EXAMPLES = [ROOT / "README.md", *sorted(DOCS.glob("guides/*.md")), DOCS / "table6.md"]
OTHER_PROGRAMS = {"make", "pip", "git", "."}
TRAINING_COMMANDS = {"train", "finetune", "demo"}
"""Commands that take minutes; here they take one step."""
SELF_CONTAINED = {"weights.md"}
"""Pages without external data, of which every command must run."""
CONFIGS = (
    ViTConfig,
    PositionConfig,
    TokenConfig,
    BlockConfig,
    AttentionConfig,
    DropoutConfig,
    HeadConfig,
    BackboneConfig,
    BiTConfig,
)
RUN_SECTIONS = {
    "RunConfig": RunConfig,
    "model": ModelChoice,
    "data": DataConfig,
    "data.fractals": FractalConfig,
    "augment": AugmentConfig,
    "objective": ObjectiveConfig,
    "objective.masked": MaskedConfig,
    "objective.mae": MAEConfig,
    "objective.distillation": DistillationConfig,
    "objective.feature_distillation": FeatureDistillationConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "parallel": ParallelConfig,
    "evaluation": EvaluationConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "report": ReportConfig,
}

examples = pytest.mark.parametrize("page", EXAMPLES, ids=lambda path: path.name)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks in one of these languages."""
    fenced = re.findall(r"^```(\S*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [code for language, code in fenced if language in languages]


def prose(text: str) -> str:
    """Return the page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def section(text: str, heading: str) -> str:
    """Return the text under a heading of the second level."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of every table row, without headings and rules."""
    lines = text.splitlines()
    rules = {number for number, line in enumerate(lines) if re.fullmatch(r"[|:\- ]+", line)}
    heads = {number - 1 for number in rules}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for number, line in enumerate(lines)
        if line.startswith("|") and number not in rules | heads
    ]


# Python


def run_python(code: str, names: dict[str, Any], *, where: str) -> None:
    """Run a block; the value of a line that ends in `# → text` must print as this text."""
    lines, arrows = code.splitlines(), 0
    for statement in ast.parse(code).body:
        _, arrow, expected = lines[statement.end_lineno - 1].partition("  # → ")
        if isinstance(statement, ast.Expr) and arrow:
            value = eval(compile(ast.Expression(statement.value), where, "eval"), names)
            assert str(value) == expected, f"{where}: {lines[statement.end_lineno - 1]}"
            arrows += 1
        else:
            exec(compile(ast.Module([statement], []), where, "exec"), names)
    assert arrows == code.count("# →"), f"{where}: an arrow belongs after an expression, with two spaces before it"


# The command line


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield every command of the console and shell blocks, with the output shown below it."""
    for code in blocks(text, "sh", "console"):
        if not code.startswith("$ "):
            yield from ((line, "") for line in code.replace("\\\n", " ").splitlines() if line)
            continue
        for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def mask_numbers(text: str) -> str:
    """Replace all numbers by 0 and collapse spaces."""
    return re.sub(" +", " ", re.sub(r"\d+(?:[.,]\d+)*", "0", text))


def assert_shown(output: str, shown: str, *, where: str) -> None:
    """Assert that the output consists of the shown lines; `…` stands for any number of lines."""
    lines = (line.rstrip() for line in shown.splitlines())
    pattern = "".join(r"(?:.*\n)*" if line == "…" else re.escape(line) + r"\n" for line in lines)
    actual = "".join(f"{line.rstrip()}\n" for line in output.splitlines())
    assert re.fullmatch(pattern, actual), f"{where} shows\n{shown}\nbut it printed\n{actual}"


def resolve_run(arguments: Sequence[str]) -> RunConfig:
    """Return the configuration of a `train` or `finetune` command without running it."""
    name, *rest = arguments
    command = {"train": train, "finetune": finetune}[name]
    params = command.command.make_context(name, list(rest)).params
    if name == "train":
        plan = plan_training(
            params["data"],
            init=params["init"],
            minutes=params["minutes"],
            recipe=params["recipe"],
            settings=parse_assignments(params["settings"]),
        )
    else:
        plan = plan_finetuning(
            params["model"], params["data"], recipe=params["recipe"], settings=parse_assignments(params["settings"])
        )
    return plan.configure(Path("out"))


def can_run(config: RunConfig) -> bool:
    """Return whether the images and weights of a run exist here; those of most recipes do not."""
    weights = config.model.init
    has_weights = weights in (None, "embedded") or Path(weights).exists()
    return has_weights and (config.data.path in EMBEDDED or Path(config.data.path).exists())


@pytest.fixture
def folder_with_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory of the examples, with the photos that the pages use."""
    rng = np.random.default_rng(0)
    for place, number, label in np.ndindex(2, 7, 2):
        name = tmp_path / ("photos", "new-photos")[place] / ("cat", "dog")[label] / f"{number}.jpg"
        name.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(name)
    (tmp_path / "three.txt").write_text("dog\nfox\ncat\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def one_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten every run to one step on one thread, and draw small pictures."""
    run = vitkit.training.run.run_training
    short = ["schedule.epochs=none", "schedule.steps=1", "schedule.batch_size=8", "data.workers=0"]
    few = ["data.fractals.num_classes=10", "data.fractals.per_class=20"]

    def run_one_step(config: RunConfig, *arguments: Any, **options: Any) -> vitkit.training.run.RunResult:
        return run(apply_overrides(config, short + few), *arguments, **options)

    def run_within_budget(request: AutoRequest, *arguments: Any, **options: Any) -> vitkit.training.run.RunResult:
        names = ("dataset", "decisions", "callback", "stop")
        settings = {"model.init": request.sources[0]} if request.sources else {}
        return run_one_step(request.tuned.override(settings), *arguments, **{name: options[name] for name in names})

    monkeypatch.setattr(vitkit.training.run, "run_training", run_one_step)
    monkeypatch.setattr(vitkit.training.auto, "run_within_budget", run_within_budget)
    monkeypatch.setattr(figures, "PNG_DPI", figures.POINTS_PER_INCH // 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@examples
@pytest.mark.usefixtures("folder_with_photos", "one_step", "forked_examples")
def test_commands_run_and_print_what_is_shown(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    for line, shown in commands(read(page)):
        program, *arguments = shlex.split(line, comments=True)
        if program in OTHER_PROGRAMS:
            continue
        if program == "torchrun":
            assert resolve_run(arguments[arguments.index("vitkit") + 1 :])
            continue
        assert program == "vitkit"
        if arguments[0] in TRAINING_COMMANDS - {"demo"} and not can_run(resolve_run(arguments)):
            assert page.name not in SELF_CONTAINED, f"{line}: its images or weights do not exist here"
            continue
        assert main(arguments) == 0, capsys.readouterr().err
        output = capsys.readouterr().out
        if not shown or arguments == ["doctor"]:  # the report depends on the machine
            continue
        if arguments[0] in TRAINING_COMMANDS:
            assert_shown(mask_numbers(output), mask_numbers(shown), where=page.name)
        else:
            assert_shown(output, shown, where=f"{page.name}: {line}")


@examples
@pytest.mark.usefixtures("folder_with_photos", "one_step")
def test_python_examples_run_and_print_what_they_show(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    for number, code in enumerate(blocks(read(page), "python"), start=1):
        run_python(code, names, where=f"{page.name}, Python block {number}")


def test_mistakes_in_commands_that_are_not_run_are_detected() -> None:
    assert resolve_run(["train", "imagenet-b16", "--out", "x", "data=imagenet/"]).data.path == "imagenet/"
    with pytest.raises(click.UsageError):
        resolve_run(["train", "imagenet-b16", "--output", "x"])
    with pytest.raises(VitkitError):
        resolve_run(["train", "imagenet-b16", "--out", "x", "schedule.batchsize=8"])


# Clusters


def test_slurm_script_is_valid() -> None:
    [script] = blocks(read(DOCS / "guides" / "scaling-out.md"), "bash")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    [command] = re.findall(r"exec vitkit (.+)'", script)
    assert resolve_run(shlex.split(command))
    assert f'"$code" -eq {EXIT_INTERRUPTED}' in script


def test_kubernetes_manifest_is_valid() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the comparison tools")
    [manifest] = blocks(read(DOCS / "guides" / "scaling-out.md"), "yaml")
    service, job = yaml.safe_load_all(manifest)
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    command = pod["containers"][0]["command"]
    assert f"--nnodes={job['spec']['completions']}" in command
    assert resolve_run(command[command.index("vitkit") + 1 :])


@pages
def test_commands_mentioned_in_prose_exist(page: Path) -> None:
    mentioned = re.findall(r"`vitkit ([a-z]\w*)", prose(read(page)))
    assert set(mentioned) <= COMMANDS.keys()


# Links and names


@pages
def test_links_point_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(read(page)))
    local = {link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)} - {""}
    missing = sorted(link for link in local if not (page.parent / link).exists())
    assert not missing


def test_readme_begins_with_the_two_make_commands() -> None:
    readme = read(ROOT / "README.md")
    first = blocks(readme, "sh", "console", "python")[0]
    assert [line.partition("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]
    assert readme.index("make demo") < readme.index("\n## ")


def test_readme_names_every_model() -> None:
    readme = read(ROOT / "README.md")
    family = section(readme, "Models and weights") or section(readme, "The family")
    mentioned = set(re.split(r"[\s,|]+", family))
    assert {variant.name.removeprefix("BiT-") for variant in VARIANTS} <= mentioned


def test_architecture_names_only_existing_modules() -> None:
    source = ROOT / "src" / "vitkit"
    files = [path.relative_to(source.parent).with_suffix("").parts for path in source.rglob("*.py")]
    modules = {".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in files}
    mentions = set(re.findall(r"\bvitkit(?:\.\w+)+", read(ROOT / "ARCHITECTURE.md")))
    assert mentions <= modules | {f"vitkit.{name}" for name in vitkit.__all__}


def test_changelog_has_this_version() -> None:
    assert f"\n## {version('vitkit')}" in read(ROOT / "CHANGELOG.md")


def test_decisions_are_indexed_and_have_three_sections() -> None:
    index = read(DOCS / "decisions" / "index.md")
    records = sorted(DOCS.glob("decisions/[0-9]*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    for path in records:
        assert f"\n{path.stem}\n" in index
        assert re.findall("^## (.+)$", read(path), flags=re.MULTILINE) == ["Context", "Decision", "Consequences"]


# Tables


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return the default of a field as the tables show it; a section has none."""
    if dataclasses.is_dataclass(field.default):
        return ""
    return (
        str(field.default).lower() if field.default is None or isinstance(field.default, bool) else str(field.default)
    )


def shows_default(shown: str, field: dataclasses.Field[Any]) -> bool:
    """Return whether a table cell shows the default of a field, perhaps rounded."""
    if shown == default_of(field):
        return True
    return bool(np.allclose(ast.literal_eval(shown), field.default, rtol=1e-4, atol=0))


def assert_fields_documented(rows: list[list[str]], config: type[Any]) -> None:
    """Assert that every field has a row with its default and a description."""
    documented = {name.strip("`"): default for name, default, *_ in rows if name.startswith("`")}
    assert documented.keys() == {field.name for field in dataclasses.fields(config)}
    for field in dataclasses.fields(config):
        assert shows_default(documented[field.name], field), field.name
    assert all(row[-1] for row in rows)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_models_page_has_every_field_with_its_default(config: type[Any]) -> None:
    assert_fields_documented(table_rows(section(read(DOCS / "guides" / "models.md"), config.__name__)), config)


@pytest.mark.parametrize(("heading", "config"), RUN_SECTIONS.items(), ids=list(RUN_SECTIONS))
def test_run_configuration_page_has_every_field_with_its_default(heading: str, config: type[Any]) -> None:
    assert_fields_documented(table_rows(section(read(DOCS / "guides" / "run-configuration.md"), heading)), config)


def test_run_configuration_page_has_every_section() -> None:
    sections = [field.name for field in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(field.default)]
    inner = {"data.fractals", "objective.masked", "objective.mae", "objective.distillation"}
    inner |= {"objective.feature_distillation"}
    assert set(sections) | {"RunConfig"} | inner == RUN_SECTIONS.keys()


def test_data_page_has_every_layout() -> None:
    headings = re.findall("^### (.+)$", section(read(DOCS / "guides" / "data.md"), "Layouts"), flags=re.MULTILINE)
    assert sorted(headings) == sorted((*LAYOUTS, *EMBEDDED))


def test_training_page_has_the_levels_of_augreg() -> None:
    rows = table_rows(section(read(DOCS / "guides" / "training.md"), "Augmentation"))
    levels = {name: augreg_config(name) for name, *_ in rows}
    assert rows == [
        [name, str(level.mixup), str(level.randaugment_layers), str(level.randaugment_magnitude)]
        for name, level in levels.items()
    ]
    assert len(rows) == 7


def test_models_page_has_every_position_kind() -> None:
    rows = table_rows(section(read(DOCS / "guides" / "models.md"), "PositionConfig"))
    documented = {kind: tuple(places.split(", ")) for kind, _, places in rows if not kind.startswith("`")}
    assert documented == {name: kind.injections for name, kind in POSITION_KINDS.items()}


def test_models_page_has_every_interpolation_kernel() -> None:
    rows = table_rows(section(read(DOCS / "guides" / "models.md"), "Another resolution"))
    assert {origin for origins, _ in rows for origin in origins.split(", ")} == KERNELS.keys()


def test_table_6_page_has_our_counts() -> None:
    def difference(count: float, paper: float) -> str:
        return f"{count / paper - 1:+.1%}".replace("-", "−").replace("%", " %")

    counted = [
        [
            row.model,
            str(row.epochs),
            f"{row.paper:.0f}",
            f"{row.counted:.1f}",
            difference(row.counted, row.paper),
            f"{row.counted_without_padding:.1f}",
            difference(row.counted_without_padding, row.paper),
        ]
        for row in count_table6().rows
    ]
    assert table_rows(read(DOCS / "table6.md")) == counted


# The picture


def test_picture_is_up_to_date() -> None:
    script = DOCS / "pictures" / "draw.py"
    specification = importlib.util.spec_from_file_location("draw_the_picture", script)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)

    def without_colors(svg: str) -> str:
        return re.sub("#[0-9a-f]{6}", "#", svg)  # another machine may round a mean color the other way

    drawn = read(script.with_name("vit.svg"))
    assert without_colors(module.draw()) == without_colors(drawn)
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
