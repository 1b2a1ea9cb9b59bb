"""Logging: a library logs to "specdec_ext" and prints nothing; the command line sets it up."""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["LEVELS", "logger", "setup_logging"]

logger = logging.getLogger("specdec_ext")
logger.addHandler(logging.NullHandler())

# Also TensorRT-LLM's names.
LEVELS = {
    "debug": logging.DEBUG,
    "verbose": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "internal_error": logging.CRITICAL,
}


def setup_logging(level: str | None = None) -> None:
    """Log to stderr from `level` on, else from $SPECDEC_LOG_LEVEL, else from "warning" on.

    May be called again. A value of $SPECDEC_LOG_LEVEL that is not in LEVELS is logged and ignored.
    """
    name = (level or os.environ.get("SPECDEC_LOG_LEVEL") or "warning").lower()
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(LEVELS.get(name, logging.WARNING))
    logger.propagate = False
    if name not in LEVELS:
        logger.warning("SPECDEC_LOG_LEVEL = %r: expected one of %s", name, ", ".join(LEVELS))
