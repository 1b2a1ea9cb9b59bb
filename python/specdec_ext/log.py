"""Logging: a library logs to "specdec_ext" and prints nothing; the command line sets it up."""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["LEVELS", "logger", "setup_logging"]

logger = logging.getLogger("specdec_ext")
logger.addHandler(logging.NullHandler())

LEVELS = ("debug", "info", "warning", "error")


def setup_logging(level: str | None = None) -> None:
    """Log to stderr at `level`, else at $SPECDEC_LOG_LEVEL, else warnings. May be called again."""
    name = (level or os.environ.get("SPECDEC_LOG_LEVEL") or "warning").lower()
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(name.upper() if name in LEVELS else "WARNING")
    logger.propagate = False
