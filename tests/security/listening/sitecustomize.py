"""Python imports this by itself in every process that has its folder on the path: audit events go in, a file comes out.

So a server and the worker that it starts are listened to from their first line. `test_audit.py` says where to write.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from security.audit import Audit, Event, is_fault

REPORT = Path(os.environ["VITKIT_TEST_AUDIT"])


def write(event: Event) -> None:
    """A line for each event, at once: a process may be killed."""
    line = json.dumps(asdict(event) | {"process": os.getpid(), "fault": is_fault(event)}) + "\n"
    descriptor = os.open(REPORT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


write(Event(name="begun", arguments="", outside=False, vitkit="", line=0, done_by="", importing=False))
Audit(write)
