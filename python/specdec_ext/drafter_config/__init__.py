"""Configurations of the methods whose drafts come from Python; checked without torch."""

from .base import DrafterConfig
from .user import UserDrafterConfig

__all__ = ["DRAFTER_CONFIGS", "DrafterConfig", "UserDrafterConfig"]

# By canonical method name.
DRAFTER_CONFIGS: dict[str, type[DrafterConfig]] = {cls.method: cls for cls in (UserDrafterConfig,)}
