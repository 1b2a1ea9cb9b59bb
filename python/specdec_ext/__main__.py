"""`python -m specdec_ext` is the `specdec` command."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
