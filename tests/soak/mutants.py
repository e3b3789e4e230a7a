"""Thirty faults are put into copies of the server, one at a time; how many of them the tests notice comes out.

python tests/soak/mutants.py [--only NUMBER,…] [--out FILE.json]

A fault counts as noticed where a test fails or hangs. First the test that it should fall to is run, then, if that
passes, all of them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = ("app", "limits", "kserve", "batching", "fuzz")
WANTED = 27
PATIENCE = 300
"""Seconds after which a run of tests hangs."""


@dataclass(frozen=True)
class Mutant:
    """One fault: in which file which text becomes which, what it is in words, and the tests that come first."""

    what: str
    file: str
    old: str
    new: str
    first: str


MUTANTS = (
    Mutant(
        "no token is asked for",
        "gate",
        "if self.token is not None and route not in PUBLIC:",
        "if False:",
        "limits::test_the_token_is_needed_for_all_but_the_page_and_health",
    ),
    Mutant(
        "half a token is enough",
        "gate",
        'not hmac.compare_digest(said.strip(), self.token or b"")',
        'not (self.token or b"").startswith(said.strip())',
        "limits::test_a_token_that_is_nearly_right_is_wrong",
    ),
    Mutant(
        "any host will do",
        "gate",
        "if host is None or not self.hosts.know(host):",
        "if host is None:",
        "limits::test_a_name_that_is_not_the_servers_is_refused",
    ),
    Mutant(
        "encoded bodies are taken",
        "gate",
        '.lower() != b"identity":',
        '.lower() == b"never":',
        "limits::test_an_encoded_body_and_a_form_are_refused",
    ),
    Mutant(
        "bodies without end are taken",
        "gate",
        "if len(body) > self.limits.bytes:",
        "if False:",
        "limits::test_an_endless_body_is_cut_off",
    ),
    Mutant(
        "any length is believed",
        "gate",
        "if length is not None and int(length) > self.limits.bytes:",
        "if False:",
        "limits::test_a_body_that_is_too_large_is_refused_by_its_length",
    ),
    Mutant(
        "too large is a failure of the server",
        "gate",
        'Refusal(413, f"the body',
        'Refusal(500, f"the body',
        "limits::test_a_body_that_is_too_large_is_refused_by_its_length",
    ),
    Mutant(
        "browsers may guess types",
        "gate",
        '(b"x-content-type-options", b"nosniff"),',
        "",
        "app::test_every_answer_forbids_what_a_page_could_be_tricked_into",
    ),
    Mutant(
        "other sites may send images",
        "gate",
        'if headers.get(b"sec-fetch-site") == b"cross-site":',
        "if False:",
        "limits::test_a_page_of_another_site_cannot_send_images",
    ),
    Mutant(
        "numbers need no token",
        "gate",
        'PUBLIC = frozenset({"/", ',
        'PUBLIC = frozenset({"/metrics", "/", ',
        "limits::test_the_token_is_needed_for_all_but_the_page_and_health",
    ),
    Mutant(
        "errors have another key",
        "answers",
        'encoded({"error": error}',
        'encoded({"message": error}',
        "app::test_what_is_no_image_is_refused",
    ),
    Mutant(
        "forms are taken for images",
        "app",
        'if kind.startswith("multipart/"):',
        "if False:",
        "limits::test_an_encoded_body_and_a_form_are_refused",
    ),
    Mutant(
        "layers are not counted",
        "app",
        'if (layer or 0) >= about["layers"] or (which or 0) >= about["heads"]:',
        "if False:",
        "app::test_a_question_that_makes_no_sense_is_refused_with_a_reason",
    ),
    Mutant(
        "alive in another word",
        "app",
        "b'{\"live\": true}'",
        "b'{\"alive\": true}'",
        "fuzz::test_made_up_questions_are_answered_as_the_description_says",
    ),
    Mutant(
        "models lack a field",
        "app",
        'not in ("labels", "preprocessing")',
        'not in ("labels", "preprocessing", "grid")',
        "app::test_models_are_listed_and_described",
    ),
    Mutant(
        "the length of JSON may be words",
        "app",
        'if not re.fullmatch(r"[0-9]{1,9}", text):',
        "if False:",
        "fuzz::test_a_body_that_lies_about_itself_is_refused",
    ),
    Mutant(
        "labels in the wrong order",
        "work",
        "in job.served.predictor.likeliest(numbers, top=top)]",
        "in reversed(job.served.predictor.likeliest(numbers, top=top))]",
        "app::test_a_raw_image_is_answered_as_the_predictor_answers",
    ),
    Mutant(
        "bad images are failures of the server",
        "work",
        "raise Refusal(status, error, hint=hint)",
        "raise Refusal(500, error, hint=hint)",
        "app::test_what_is_no_image_is_refused",
    ),
    Mutant(
        "the limit of pixels is forgotten",
        "work",
        "channels=how.channels, gate=gate)",
        "channels=how.channels)",
        "limits::test_pixels_beyond_the_limit_are_refused_by_the_header",
    ),
    Mutant(
        "errors in a list are left out",
        "work",
        '[{"error": error} if error is not None else next(found) for error in job.errors]',
        "list(found)",
        "app::test_a_list_is_answered_in_its_order_and_a_broken_image_alone_has_an_error",
    ),
    Mutant(
        "JSON that is no list is a failure",
        "work",
        "raise Refusal(400, 'expected a JSON list",
        "raise Refusal(500, 'expected a JSON list",
        "app::test_json_that_is_no_list_of_images_is_refused",
    ),
    Mutant(
        "logits for probabilities",
        "work",
        "for row in logits.softmax(dim=1)]",
        "for row in logits]",
        "app::test_a_raw_image_is_answered_as_the_predictor_answers",
    ),
    Mutant(
        "raw sizes are believed",
        "kserve",
        "if type(size) is not int or size != len(raw):",
        "if False:",
        "fuzz::test_a_raw_size_that_is_not_so_is_refused",
    ),
    Mutant(
        "pixels may be no numbers",
        "kserve",
        "if not np.isfinite(found).all():",
        "if False:",
        "kserve::test_what_breaks_the_protocol_is_a_bad_request",
    ),
    Mutant(
        "shapes may be anything",
        "kserve",
        "all(type(side) is int and side > 0 for side in shape)",
        "True",
        "kserve::test_what_breaks_the_protocol_is_a_bad_request",
    ),
    Mutant(
        "base64 may be anything",
        "kserve",
        "validate=True",
        "validate=False",
        "kserve::test_what_breaks_the_protocol_is_a_bad_request",
    ),
    Mutant(
        "brackets take the reader down",
        "kserve",
        "except (ValueError, RecursionError) as error:",
        "except ValueError as error:",
        "fuzz::test_a_body_that_lies_about_itself_is_refused",
    ),
    Mutant(
        "inference by another name",
        "kserve",
        '{"model_name": model',
        '{"model": model',
        "kserve::test_files_in_base64_are_answered_in_json",
    ),
    Mutant(
        "a line without end",
        "batching",
        "return self.held + cost <= self.room() or self.held == 0",
        "return True",
        "batching",
    ),
    Mutant(
        "places are not given back",
        "batching",
        "    def _settle(self, ticket: Ticket, answer: Answered) -> None:\n        self._release(ticket)\n",
        "    def _settle(self, ticket: Ticket, answer: Answered) -> None:\n",
        "batching",
    ),
)


def changed(mutant: Mutant, source: Path) -> None:
    """Put the fault into a copy of the source."""
    path = source / "vitkit" / "serve" / f"{mutant.file}.py"
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.what}: {path.name} has {text.count(mutant.old)} times {mutant.old!r}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def passes(name: str, source: Path) -> tuple[bool, str]:
    """Whether a file of tests passes on a source; else the first test that does not."""
    file, _, test = name.partition("::")
    tests = ["-k", test or "not bomb"] if test or file == "fuzz" else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    environment = os.environ | {"PYTHONPATH": str(source)}
    try:
        run = subprocess.run(
            [*command, f"tests/serve/test_{file}.py"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, "it hangs"
    lines = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    if run.returncode and not lines:  # a server that does not start proves nothing about the test
        return True, "no test could be run: " + run.stdout[-300:]
    return run.returncode == 0, lines[0] if lines else "nothing failed"


def noticed(mutant: Mutant) -> tuple[bool, str]:
    """Whether a test fails on the mutant, and which."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        changed(mutant, source)
        for name in (mutant.first, *FILES):
            passed, said = passes(name, source)
            if not passed:
                return True, said
    return False, "nothing failed"


def main() -> int:
    """Try the mutants; 1 where too few are noticed."""
    parser = argparse.ArgumentParser(description="Put faults into copies of the server, and see whether tests notice.")
    parser.add_argument("--only", default="", help="numbers of faults, by commas")
    parser.add_argument("--out", type=Path, help="write what was seen to this file as JSON")
    arguments = parser.parse_args()
    numbers = [int(text) for text in arguments.only.split(",") if text] or range(1, len(MUTANTS) + 1)
    seen = []
    for number in numbers:
        mutant, began = MUTANTS[number - 1], time.monotonic()
        caught, said = noticed(mutant)
        seen.append({"number": number, "what": mutant.what, "noticed": caught, "by": said})
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{number:2} {'noticed' if caught else 'MISSED'} {mutant.what}: {said[:150]} ({took})", flush=True)
    count = sum(bool(each["noticed"]) for each in seen)
    print(f"{count} of {len(seen)} noticed")
    if arguments.out:
        arguments.out.write_text(json.dumps(seen, indent=2) + "\n", encoding="utf-8")
    return int(count < WANTED * len(seen) / len(MUTANTS))


if __name__ == "__main__":
    raise SystemExit(main())
