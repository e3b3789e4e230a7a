"""Mutation tests of the server: thirty faults, one at a time, each of which some test should detect.

python tests/soak/mutants.py [--only NUMBER,…] [--out FILE.json]

A mutant is detected if a test fails or hangs. The test named by the mutant runs first, then all of them.
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
FILES = ("routes", "connections", "kserve", "queue", "fuzz")
MIN_DETECTED = 27
TIMEOUT = 300
"""Seconds after which a test run counts as hanging."""


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, the text `old` is replaced by `new`. The test `first` should detect it."""

    name: str
    file: str
    old: str
    new: str
    first: str


MUTANTS = (
    Mutant(
        "token not required",
        "middleware",
        "if self.token is not None and route not in PUBLIC_ROUTES:",
        "if False:",
        "connections::test_all_routes_but_page_and_health_need_the_token",
    ),
    Mutant(
        "prefix of the token accepted",
        "middleware",
        "not hmac.compare_digest(token.strip(), self.token)",
        "not self.token.startswith(token.strip())",
        "connections::test_wrong_token_is_rejected",
    ),
    Mutant(
        "any host accepted",
        "middleware",
        "if host is None or not self.hosts.matches(host):",
        "if host is None:",
        "connections::test_unknown_host_is_rejected",
    ),
    Mutant(
        "compressed bodies accepted",
        "middleware",
        '.lower() != b"identity":',
        '.lower() == b"never":',
        "connections::test_compressed_bodies_and_forms_are_rejected",
    ),
    Mutant(
        "endless bodies accepted",
        "queue",
        "self.check_body(len(body), buffered=self.buffered)",
        "self.check_body(0, buffered=self.buffered)",
        "connections::test_endless_body_is_cut_off",
    ),
    Mutant(
        "Content-Length not checked",
        "middleware",
        "self.queue.check_body(length, buffered",
        "self.queue.check_body(0, buffered",
        "connections::test_large_body_is_rejected_by_its_length",
    ),
    Mutant(
        "large body is a server error",
        "queue",
        "HTTPError(413, ",
        "HTTPError(500, ",
        "connections::test_large_body_is_rejected_by_its_length",
    ),
    Mutant(
        "content sniffing allowed",
        "middleware",
        '(b"x-content-type-options", b"nosniff"),',
        "",
        "routes::test_every_response_has_security_headers",
    ),
    Mutant(
        "cross-site requests accepted",
        "middleware",
        'if headers.get(b"sec-fetch-site") == b"cross-site":',
        "if False:",
        "connections::test_pages_of_other_sites_cannot_send_images",
    ),
    Mutant(
        "metrics public",
        "middleware",
        'PUBLIC_ROUTES = frozenset({"/", ',
        'PUBLIC_ROUTES = frozenset({"/metrics", "/", ',
        "connections::test_all_routes_but_page_and_health_need_the_token",
    ),
    Mutant(
        "errors with another key",
        "ipc",
        'content = {"error": self.message}',
        'content = {"message": self.message}',
        "routes::test_invalid_image_is_rejected",
    ),
    Mutant(
        "forms accepted as images",
        "routes",
        'if content_type.startswith("multipart/"):',
        "if False:",
        "connections::test_compressed_bodies_and_forms_are_rejected",
    ),
    Mutant(
        "layers not checked",
        "routes",
        "if (layer or 0) >= layers or (head_index or 0) >= heads:",
        "if False:",
        "routes::test_invalid_query_is_rejected_with_a_reason",
    ),
    Mutant(
        "liveness with another key",
        "routes",
        '{"live": True}',
        '{"alive": True}',
        "fuzz::test_generated_requests_follow_the_description",
    ),
    Mutant(
        "model summary lacks a key",
        "routes",
        'del each["labels"], each["preprocessing"]',
        'del each["labels"], each["preprocessing"], each["grid"]',
        "routes::test_models_are_listed_and_described",
    ),
    Mutant(
        "JSON length not checked",
        "routes",
        'if text is not None and not re.fullmatch(r"[0-9]{1,9}", text):',
        "if False:",
        "fuzz::test_inconsistent_body_is_rejected",
    ),
    Mutant(
        "labels in reverse order",
        "handlers",
        "for index, score in row] for row",
        "for index, score in reversed(row)] for row",
        "routes::test_raw_image_is_classified_as_by_the_predictor",
    ),
    Mutant(
        "invalid image is a server error",
        "handlers",
        "raise HTTPError(status, message, hint=hint)",
        "raise HTTPError(500, message, hint=hint)",
        "routes::test_invalid_image_is_rejected",
    ),
    Mutant(
        "pixel limit not passed",
        "handlers",
        "channels=preprocessing.channels, limits=decode_limits)",
        "channels=preprocessing.channels)",
        "routes::test_pixels_beyond_the_limit_are_rejected",
    ),
    Mutant(
        "errors of a list omitted",
        "handlers",
        '[{"error": error} if error is not None else next(remaining) for error in job.errors]',
        "list(remaining)",
        "routes::test_broken_image_in_a_list_is_an_error_entry",
    ),
    Mutant(
        "invalid JSON is a server error",
        "handlers",
        "raise HTTPError(400, 'expected a JSON list",
        "raise HTTPError(500, 'expected a JSON list",
        "routes::test_json_without_a_list_of_images_is_rejected",
    ),
    Mutant(
        "logits instead of probabilities",
        "handlers",
        'for row in _top_classes(job, logits.softmax(dim=1), "probability", top)]',
        'for row in _top_classes(job, logits, "probability", top)]',
        "routes::test_raw_image_is_classified_as_by_the_predictor",
    ),
    Mutant(
        "binary size not checked",
        "kserve",
        "if type(size) is not int or size != len(raw):",
        "if False:",
        "fuzz::test_wrong_binary_size_is_rejected",
    ),
    Mutant(
        "infinite pixels accepted",
        "kserve",
        "if not np.isfinite(pixels).all():",
        "if False:",
        "kserve::test_invalid_request_is_400",
    ),
    Mutant(
        "shape not checked",
        "kserve",
        "all(type(side) is int and side > 0 for side in shape)",
        "True",
        "kserve::test_invalid_request_is_400",
    ),
    Mutant(
        "base64 not validated",
        "kserve",
        "validate=True",
        "validate=False",
        "kserve::test_invalid_request_is_400",
    ),
    Mutant(
        "nested JSON crashes the parser",
        "kserve",
        "except (ValueError, RecursionError) as error:",
        "except ValueError as error:",
        "fuzz::test_inconsistent_body_is_rejected",
    ),
    Mutant(
        "KServe response with another key",
        "kserve",
        '{"model_name": model',
        '{"model": model',
        "kserve::test_base64_files_get_json_tensors",
    ),
    Mutant(
        "unbounded queue",
        "queue",
        "return self.size == 0 or self.size + images <= self.limit",
        "return True",
        "queue",
    ),
    Mutant(
        "completed requests not released",
        "queue",
        "            self.images_in_flight -= request.images\n            self._release(request)\n",
        "            self.images_in_flight -= request.images\n",
        "queue",
    ),
)


def apply(mutant: Mutant, source: Path) -> None:
    """Apply a mutant to a copy of the source."""
    path = source / "vitkit" / "server" / f"{mutant.file}.py"
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {path.name} contains {mutant.old!r} {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def run_tests(name: str, source: Path) -> tuple[bool, str]:
    """Return whether a test file passes, and the first failure."""
    file, _, test = name.partition("::")
    tests = ["-k", test or "not bomb"] if test or file == "fuzz" else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    environment = os.environ | {"PYTHONPATH": str(source)}
    try:
        run = subprocess.run(
            [*command, f"tests/server/test_{file}.py"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, "timeout"
    lines = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    if run.returncode and not lines:  # a server that does not start proves nothing
        return True, "no test ran: " + run.stdout[-300:]
    return run.returncode == 0, lines[0] if lines else "nothing failed"


def detect(mutant: Mutant) -> tuple[bool, str]:
    """Return whether a test fails on the mutant, and which."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        apply(mutant, source)
        for name in (mutant.first, *FILES):
            passed, message = run_tests(name, source)
            if not passed:
                return True, message
    return False, "nothing failed"


def main() -> int:
    """Run the mutants; return 1 if too few are detected."""
    parser = argparse.ArgumentParser(description="Run the server's tests against mutants of its source.")
    parser.add_argument("--only", default="", help="numbers of mutants, separated by commas")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    numbers = [int(text) for text in arguments.only.split(",") if text] or range(1, len(MUTANTS) + 1)
    results = []
    for number in numbers:
        mutant, start = MUTANTS[number - 1], time.monotonic()
        detected, message = detect(mutant)
        results.append({"number": number, "name": mutant.name, "detected": detected, "by": message})
        seconds = f"{time.monotonic() - start:.0f} s"
        print(
            f"{number:2} {'detected' if detected else 'MISSED'} {mutant.name}: {message[:150]} ({seconds})", flush=True
        )
    count = sum(bool(each["detected"]) for each in results)
    print(f"{count} of {len(results)} detected")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(count < MIN_DETECTED * len(results) / len(MUTANTS))


if __name__ == "__main__":
    raise SystemExit(main())
