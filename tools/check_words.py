"""Check names and prose against the vocabulary of CONTRIBUTING.md.

Identifiers are checked by AST: functions, classes and variables must not be named by a bare participle or a vague
noun, retired identifiers must not return, and a public class name is defined once in the package. Docstrings must not
open with an interrogative or a pronoun. Prose is checked only for listed phrases, so that ordinary sentences are never
flagged.

Run `python tools/check_words.py [PATH...]`; without paths, everything that git tracks is checked.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PARTICIPLES = frozenset(
    "answers asked claimed compared described fed found given joined kept known listed lit looked made named opened "
    "painted placed said seen shaped shown told wanted written".split()
)
VAGUE = frozenset("about how place places whoever".split())
RETIRED_WORDS = frozenset(
    "artefact barred beware contender crew doubt entrant goodness greeting heated impatient judge judged judgement "
    "judging judgment judgments looks mend mended refed riddle rhythm shelf sharpened standings wish".split()
)
OPENINGS = re.compile(r"(What|How|Who|Whoever|It|Its|So|As|All of|Some of)\b")
PHRASES = re.compile(
    r"goes in\b.*comes? out|in a rush|the weather|going on from|whoever|starting point|data problems|"
    r"says of images|ship it elsewhere|data that lies|speaks in riddles",
    re.IGNORECASE,
)
PROSE_SUFFIXES = {".md", ".py", ".js", ".html", ".h", ".cpp", ".toml", ".css"}
MAX_TEST_NAME = 66
"""About 60 characters without the `test_` prefix."""


def main(arguments: list[str]) -> int:
    """Print every violation and return the exit code."""
    files = _files(arguments)
    violations = [*(line for path in files for line in _check(path)), *_repeated_classes(files)]
    for line in violations:
        print(line)
    print(f"{len(violations)} violations" if violations else "vocabulary: no violations")
    return int(bool(violations))


def _files(arguments: list[str]) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "--", *arguments], capture_output=True, text=True, check=True).stdout
    paths = (Path(line) for line in listed.splitlines())
    return [path for path in paths if path.suffix in PROSE_SUFFIXES and path != Path("tools/check_words.py")]


def _check(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if match := PHRASES.search(line):
            yield f"{path}:{number}: phrase {match.group(0)!r}"
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            yield from (f"{path}:{getattr(node, 'lineno', 1)}: {problem}" for problem in _problems(node, path))


def _repeated_classes(paths: list[Path]) -> Iterator[str]:
    first: dict[str, Path] = {}
    for path in paths:
        if path.suffix == ".py" and path.parts[0] == "src":
            classes = (
                node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
            )
            for node in classes:
                if not node.name.startswith("_") and first.setdefault(node.name, path) != path:
                    yield f"{path}:{node.lineno}: the class {node.name} is also defined in {first[node.name]}"


def _problems(node: ast.AST, path: Path) -> Iterator[str]:
    is_test = path.parts[0] == "tests"
    name, is_definition = _bound_name(node)
    if name:
        bare = name.strip("_")
        if (bare in PARTICIPLES or bare in VAGUE) and (is_definition or not is_test):
            yield f"name {name!r} is a participle or a vague word"
        if retired := RETIRED_WORDS & set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())):
            yield f"name {name!r} uses the retired word {min(retired)!r}"
        if is_definition and is_test and name.startswith("test_") and len(name) > MAX_TEST_NAME:
            yield f"test name of {len(name)} characters, at most {MAX_TEST_NAME}: {name}"
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node) or ""
        if OPENINGS.match(docstring) and not is_test:
            yield f"docstring opens with {docstring.split()[0]!r}"


def _bound_name(node: ast.AST) -> tuple[str, bool]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name, True
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id, False
    if isinstance(node, ast.arg):
        return node.arg, False
    return "", False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
