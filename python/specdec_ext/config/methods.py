"""Configurations of the methods whose drafts come from Python; checked without torch."""

from .draft_target import DraftTargetDecodingConfig
from .drafter import DrafterConfig
from .eagle3 import Eagle3DecodingConfig
from .medusa import MedusaDecodingConfig
from .medusa_choices import published_trees
from .redrafter import ReDrafterDecodingConfig
from .user import UserDrafterConfig

__all__ = [
    "DRAFTER_CONFIGS",
    "DraftTargetDecodingConfig",
    "DrafterConfig",
    "Eagle3DecodingConfig",
    "MedusaDecodingConfig",
    "ReDrafterDecodingConfig",
    "UserDrafterConfig",
    "published_trees",
]

# By canonical method name.
DRAFTER_CONFIGS: dict[str, type[DrafterConfig]] = {
    cls.method: cls
    for cls in (
        DraftTargetDecodingConfig,
        Eagle3DecodingConfig,
        MedusaDecodingConfig,
        ReDrafterDecodingConfig,
        UserDrafterConfig,
    )
}
