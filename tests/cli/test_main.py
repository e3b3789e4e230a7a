"""The command line as users and scripts meet it: help, exit codes, and errors of two lines."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import click
import pytest
from rich.console import Console

from vitkit.cli import main as command_line
from vitkit.cli import output
from vitkit.cli.main import COMMANDS, Entry, main
from vitkit.core.errors import VitkitError

HELP = [sys.executable, "-m", "vitkit", "--help"]
EXPENSIVE = ("torch", "numpy", "rich", "pydantic", "PIL", "safetensors", "einops", "jaxtyping")

Register = Callable[[Callable[[], object]], None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Add a command called `try` to the table that does what it is given."""

    def add(action: Callable[[], object]) -> None:
        module = ModuleType("a_module_for_this_test")
        module.command = click.Command("try", callback=action)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(COMMANDS, "try", Entry("Tests", f"{module.__name__}:command", "Try it."))

    return add


def raiser(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def test_help_shows_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert f"  {name} " in shown
        assert entry.summary in " ".join(shown.split())
        assert f"{entry.section}:" in shown


def test_help_costs_at_most_three_tenths_of_a_cpu_second() -> None:
    def cpu_seconds() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    costs = []
    for _ in range(4):
        before = cpu_seconds()
        subprocess.run(HELP, check=True, capture_output=True)
        costs.append(cpu_seconds() - before)
    assert min(costs) <= 0.3  # the best of four, since a busy machine also charges for its waiting


def test_help_imports_no_command_and_nothing_expensive() -> None:
    program = "import json, sys; from vitkit.cli.main import main; main(['--help']); print(json.dumps([*sys.modules]))"
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    modules = set(json.loads(run.stdout.splitlines()[-1]))
    assert "vitkit.cli.main" in modules
    assert modules.isdisjoint(EXPENSIVE)
    assert modules.isdisjoint(entry.target.partition(":")[0] for entry in COMMANDS.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_the_table_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: vitkit {name}")
    assert "-v, --verbose" in shown


def test_the_shell_completes_names_without_importing_commands() -> None:
    program = "import sys; sys.modules['rich'] = sys.modules['torch'] = None; import vitkit.cli.main as m; m.main()"
    request = {"_VITKIT_COMPLETE": "bash_complete", "COMP_WORDS": "vitkit do", "COMP_CWORD": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | request, capture_output=True, text=True, check=True
    )
    assert run.stdout == "plain,doctor\n"


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vitkit ")


def test_no_command_prints_the_help_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "doctor" in captured.err


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["docter"], ["error: no such command 'docter'", "hint: did you mean doctor?"]),
        (["xyzzy"], ["error: no such command 'xyzzy'", "hint: run vitkit --help"]),
        (["doctor", "--jsn"], ["error: no such option '--jsn'", "hint: did you mean --json?"]),
        (["doctor", "B/16"], ["error: got unexpected extra argument (B/16)", "hint: run vitkit doctor --help"]),
        (["\x1b[31mred"], [r"error: no such command '\x1b[31mred'", "hint: run vitkit --help"]),
    ],
)
def test_wrong_use_is_two_lines_and_exit_code_2(
    arguments: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == lines
    assert captured.out == ""


def test_an_expected_error_is_two_lines_and_exit_code_1(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(raiser(VitkitError("wrong grid", expected="14×14", got="24×24", hint="pass --image-size 224")))
    assert main(["try"]) == 1
    lines = ["error: wrong grid (expected 14×14, got 24×24)", "hint: pass --image-size 224"]
    assert capsys.readouterr().err.splitlines() == lines


def test_an_error_without_a_hint_is_one_line(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(raiser(VitkitError("no images")))
    assert main(["try"]) == 1
    assert capsys.readouterr().err == "error: no images\n"


def test_an_unexpected_error_names_its_type_and_how_to_see_more(
    register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(raiser(RuntimeError("two\n\tlines")))
    assert main(["try"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: RuntimeError: two lines"
    assert hint.startswith("hint: ")
    assert "-v" in hint


@pytest.mark.parametrize("arguments", [["-v", "try"], ["try", "-v"], ["try", "--verbose"]])
@pytest.mark.parametrize("kind", [VitkitError, ValueError])
def test_verbose_before_or_after_the_command_shows_the_traceback(
    arguments: list[str], kind: type[Exception], register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(raiser(kind("no images")))
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert "in action" in shown
    assert shown.splitlines()[-1].startswith("error: ")


def test_one_verbose_run_does_not_make_the_next_one_verbose(
    register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(raiser(VitkitError("no images")))
    main(["try", "-v"])
    capsys.readouterr()
    main(["try"])
    assert capsys.readouterr().err == "error: no images\n"


@pytest.mark.parametrize("arguments", [["try"], ["try", "-v"]])
def test_terminal_codes_in_an_error_do_not_reach_the_terminal(
    arguments: list[str], register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(raiser(VitkitError("cannot read cat\x1b]0;owned\x07.jpg", hint="rename \x9b31m")))
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert r"cat\x1b]0;owned\x07.jpg" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_an_interrupt_is_one_word_and_exit_code_130(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(raiser(KeyboardInterrupt()))
    assert main(["try"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_what_a_command_returns_is_no_exit_code(register: Register) -> None:
    register(lambda: 7)
    assert main(["try"]) == 0


def test_a_command_chooses_its_exit_code_through_its_context(register: Register) -> None:
    register(lambda: click.get_current_context().exit(3))
    assert main(["try"]) == 3


def test_a_reader_that_leaves_is_no_error_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(HELP, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert run.stderr == ""
    assert run.returncode == 1


def test_a_broken_pipe_to_elsewhere_ends_quietly_too(register: Register, capfd: pytest.CaptureFixture[str]) -> None:
    register(raiser(OSError(errno.EPIPE, "gone")))
    with pytest.raises(SystemExit, match="1"):
        main(["try"])
    assert capfd.readouterr().err == ""


def test_characters_the_terminal_lacks_are_no_reason_to_fail() -> None:
    program = (
        "from vitkit.cli.main import main; from vitkit.cli.output import result_console;"
        "main(['--version']); result_console().print('×')"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.endswith("\\xd7\n")


def test_errors_have_no_colour_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    command_line.print_error("no images")
    assert capsys.readouterr().err == "error: no images\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Käse 猫 🐈.jpg", "Käse 猫 🐈.jpg"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x1b[2J\x7f\x9b", r"\x1b[2J\x7f\x9b"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"),
        ("cat\udce9", r"cat\udce9"),
    ],
)
def test_safe_text_escapes_what_steers_a_terminal_and_nothing_else(text: str, shown: str) -> None:
    assert output.safe_text(text) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (86_567_656, "86.6 M"), (999_960, "1.0 M"), (1.2e17, "120000.0 T")],
)
def test_counts_are_short(count: float, shown: str) -> None:
    assert output.format_count(count) == shown


@pytest.mark.parametrize(("size", "shown"), [(0, "0 B"), (1_204_000_000, "1.2 GB"), (999.7, "1.0 kB")])
def test_sizes_are_short(size: float, shown: str) -> None:
    assert output.format_bytes(size) == shown


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"name": "猫\udce9"})
    assert json.loads(capsys.readouterr().out) == {"name": "猫\udce9"}
    with pytest.raises(ValueError, match="JSON"):
        output.print_json(float("nan"))


def test_consoles_write_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    for console in (output.result_console(), output.talk_console()):
        assert isinstance(console, Console)
        console.print("vitkit[serve] :cat:")
    assert capsys.readouterr() == ("vitkit[serve] :cat:\n", "vitkit[serve] :cat:\n")


def test_sections_wrap_values_inside_their_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output.print_sections({"Model": [("name", "B/16"), ("note", "word " * 12)], "Empty": [], "Last": [("a\x1b", "b")]})
    assert capsys.readouterr().out.splitlines() == [
        "Model",
        "  name   B/16",
        "  note   word word word word word word",
        "         word word word word word word",
        "",
        "Last",
        r"  a\x1b  b",
    ]
