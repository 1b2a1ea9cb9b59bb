"""Result files as the commands write them, small, and a browser that opens pages."""

from __future__ import annotations

from browsers import browser as browser
