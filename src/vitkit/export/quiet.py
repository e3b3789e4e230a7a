"""Nothing goes in; while other people's exporters run, nothing of what they print, log or warn comes out."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

TALKATIVE = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "torch._dynamo", "torch._export")
"""Loggers with remarks on how they work, which say nothing of the result. What went wrong is raised."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep a block from writing to stdout, stderr, the log and the list of warnings.

    >>> with quietly():
    ...     print("obtaining a graph …")
    """
    loggers = [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
