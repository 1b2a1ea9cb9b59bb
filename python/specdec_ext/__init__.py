"""Speculative decoding over a paged KV cache: identical output, fewer forward passes.

Names are loaded when they are first used, so that `import specdec_ext` and `specdec --help` cost
milliseconds and configurations can be checked without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._version import __version__ as __version__
    from .config import KvCacheConfig as KvCacheConfig
    from .config import LookaheadDecodingConfig as LookaheadDecodingConfig
    from .config import NGramDecodingConfig as NGramDecodingConfig
    from .config import SchedulerConfig as SchedulerConfig
    from .config import max_draft_len as max_draft_len
    from .drafter_config import DraftTargetDecodingConfig as DraftTargetDecodingConfig
    from .drafter_config import MedusaDecodingConfig as MedusaDecodingConfig
    from .drafter_config import ReDrafterDecodingConfig as ReDrafterDecodingConfig
    from .drafter_config import UserDrafterConfig as UserDrafterConfig
    from .errors import CapacityError as CapacityError
    from .errors import ConfigError as ConfigError
    from .errors import EngineError as EngineError
    from .errors import ModelError as ModelError
    from .errors import RequestError as RequestError
    from .errors import SpecdecError as SpecdecError
    from .errors import UnsupportedConfigError as UnsupportedConfigError
    from .errors import UnsupportedModelError as UnsupportedModelError
    from .errors import UnsupportedRequestError as UnsupportedRequestError
    from .external_draft import ExternalDraftTokensConfig as ExternalDraftTokensConfig
    from .installation import build_info as build_info
    from .installation import get_num_threads as get_num_threads
    from .installation import set_num_threads as set_num_threads
    from .llm import LLM as LLM
    from .models.default import default_model as default_model
    from .outputs import CompletionOutput as CompletionOutput
    from .outputs import RequestOutput as RequestOutput
    from .sampling_params import SamplingParams as SamplingParams

# Public name -> module that defines it.
_EXPORTS = {
    "CapacityError": "errors",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "DraftTargetDecodingConfig": "drafter_config",
    "EngineError": "errors",
    "Executor": "_core",
    "ExternalDraftTokensConfig": "external_draft",
    "KvCacheConfig": "config",
    "LLM": "llm",
    "LookaheadDecodingConfig": "config",
    "MedusaDecodingConfig": "drafter_config",
    "ModelError": "errors",
    "NGramDecodingConfig": "config",
    "ReDrafterDecodingConfig": "drafter_config",
    "RequestError": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "SchedulerConfig": "config",
    "SpecdecError": "errors",
    "UnsupportedConfigError": "errors",
    "UnsupportedModelError": "errors",
    "UnsupportedRequestError": "errors",
    "UserDrafterConfig": "drafter_config",
    "__version__": "_version",
    "build_info": "installation",
    "default_model": "models.default",
    "get_num_threads": "installation",
    "max_draft_len": "config",
    "set_num_threads": "installation",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_EXPORTS))
