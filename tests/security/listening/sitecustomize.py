"""Recorder of audit events in child processes.

Python imports `sitecustomize` at startup if its directory is on the path, so that a server and its worker are recorded
from their first line. `test_audit.py` sets the path of the report.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from security.audit import Audit, Event, is_fault

REPORT = Path(os.environ["VITKIT_TEST_AUDIT"])


def write(event: Event) -> None:
    """Append one line per event at once, because the process may be killed."""
    line = json.dumps(asdict(event) | {"process": os.getpid(), "fault": is_fault(event)}) + "\n"
    descriptor = os.open(REPORT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


write(Event(name="begun", arguments="", outside=False, vitkit="", line=0, done_by="", importing=False))
Audit(write)
