"""Speculative decoding over a paged KV cache: identical output, fewer forward passes.

Names are loaded when they are first used, so that `import specdec_ext` and `specdec --help` cost
milliseconds and configurations can be checked without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._version import __version__ as __version__
    from .config.engine import KvCacheConfig as KvCacheConfig
    from .config.engine import SchedulerConfig as SchedulerConfig
    from .config.lookahead import LookaheadDecodingConfig as LookaheadDecodingConfig
    from .config.lookahead import max_draft_len as max_draft_len
    from .config.methods import DraftTargetDecodingConfig as DraftTargetDecodingConfig
    from .config.methods import Eagle3DecodingConfig as Eagle3DecodingConfig
    from .config.methods import MedusaDecodingConfig as MedusaDecodingConfig
    from .config.methods import ReDrafterDecodingConfig as ReDrafterDecodingConfig
    from .config.methods import UserDrafterConfig as UserDrafterConfig
    from .config.ngram import NGramDecodingConfig as NGramDecodingConfig
    from .config.sources import CompositeDecodingConfig as CompositeDecodingConfig
    from .config.suffix import SuffixDecodingConfig as SuffixDecodingConfig
    from .errors import CapacityError as CapacityError
    from .errors import ConfigError as ConfigError
    from .errors import EngineError as EngineError
    from .errors import ModelError as ModelError
    from .errors import QueueFullError as QueueFullError
    from .errors import RequestError as RequestError
    from .errors import SpecdecError as SpecdecError
    from .errors import UnsupportedConfigError as UnsupportedConfigError
    from .errors import UnsupportedModelError as UnsupportedModelError
    from .errors import UnsupportedRequestError as UnsupportedRequestError
    from .installation import build_info as build_info
    from .installation import cmake_dir as cmake_dir
    from .installation import get_num_threads as get_num_threads
    from .installation import include_dir as include_dir
    from .installation import set_num_threads as set_num_threads
    from .llm import LLM as LLM
    from .models.default import default_model as default_model
    from .request.external_draft import ExternalDraftTokensConfig as ExternalDraftTokensConfig
    from .request.sampling_params import SamplingParams as SamplingParams
    from .text.outputs import CompletionOutput as CompletionOutput
    from .text.outputs import RequestOutput as RequestOutput

# Public name -> module that defines it.
_EXPORTS = {
    "CapacityError": "errors",
    "CompletionOutput": "text.outputs",
    "CompositeDecodingConfig": "config.sources",
    "ConfigError": "errors",
    "DraftTargetDecodingConfig": "config.methods",
    "Eagle3DecodingConfig": "config.methods",
    "EngineError": "errors",
    "Executor": "_core",
    "ExternalDraftTokensConfig": "request.external_draft",
    "KvCacheConfig": "config.engine",
    "LLM": "llm",
    "LookaheadDecodingConfig": "config.lookahead",
    "MedusaDecodingConfig": "config.methods",
    "ModelError": "errors",
    "QueueFullError": "errors",
    "NGramDecodingConfig": "config.ngram",
    "ReDrafterDecodingConfig": "config.methods",
    "RequestError": "errors",
    "RequestOutput": "text.outputs",
    "SamplingParams": "request.sampling_params",
    "SchedulerConfig": "config.engine",
    "SpecdecError": "errors",
    "SuffixDecodingConfig": "config.suffix",
    "UnsupportedConfigError": "errors",
    "UnsupportedModelError": "errors",
    "UnsupportedRequestError": "errors",
    "UserDrafterConfig": "config.methods",
    "__version__": "_version",
    "build_info": "installation",
    "cmake_dir": "installation",
    "default_model": "models.default",
    "get_num_threads": "installation",
    "include_dir": "installation",
    "max_draft_len": "config.lookahead",
    "set_num_threads": "installation",
}

__all__ = sorted(_EXPORTS)


if not TYPE_CHECKING:  # a type checker shall see no name that is not there

    def __getattr__(name: str) -> Any:
        module = _EXPORTS.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{module}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_EXPORTS))
