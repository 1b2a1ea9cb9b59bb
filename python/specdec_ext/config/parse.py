"""Read configurations in the forms that users of vLLM, SGLang and TensorRT-LLM already have.

A configuration is an object, a dict, a JSON or YAML string, the path of a .yaml/.yml/.json file,
or a list such as "[7,7,7]" (lookahead W,N,G) and "[10,2]" / "[10,2,[0]]" (prompt lookup
K,M,[devices]). A list of methods, each in any of these forms, means several sources. The method
comes from a discriminator key (`method`, `decoding_type`, `speculative_algorithm`, ...) in any of
those projects' spellings, or from the caller. In every form an unknown key is refused with the
nearest key that exists, and a feature that this version lacks is refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, overload

from ..errors import ConfigError, UnsupportedConfigError
from .base import OPTION_ALIASES, SpeculationOptions
from .engine import KvCacheConfig, SchedulerConfig
from .lookahead import LookaheadDecodingConfig
from .methods import DRAFTER_CONFIGS, DrafterConfig, DraftTargetDecodingConfig
from .names import (
    DISCRIMINATORS,
    KV_ALIASES,
    LOOKAHEAD_ALIASES,
    NGRAM_ALIASES,
    OFF_VALUES,
    SCHEDULER_ALIASES,
    UNSUPPORTED_KEYS,
    canonical_method,
)
from .ngram import NGramDecodingConfig
from .read_text import read_text
from .sources import AutoDecodingConfig, CompositeDecodingConfig
from .suffix import SUFFIX_ALIASES, SuffixDecodingConfig
from .validate import check_int, show, unknown_key

__all__ = [
    "SpeculativeConfig",
    "is_adaptive",
    "parse_kv_cache_config",
    "parse_scheduler_config",
    "parse_speculative_config",
]

SpeculativeConfig: TypeAlias = (
    LookaheadDecodingConfig
    | NGramDecodingConfig
    | SuffixDecodingConfig
    | DrafterConfig
    | CompositeDecodingConfig
    | AutoDecodingConfig
)


def is_adaptive(config: SpeculativeConfig | None) -> bool:
    """Drafts that pay are drafted; without a method these are those of a request's prediction."""
    return config is None or config.adaptive


# Methods that draft from a request's own state, by canonical name.
_IN_SLOTS: Mapping[
    str, type[LookaheadDecodingConfig | NGramDecodingConfig | SuffixDecodingConfig]
] = {
    cls.method: cls for cls in (LookaheadDecodingConfig, NGramDecodingConfig, SuffixDecodingConfig)
}

# Other projects' keys that are no mere names of a field.
_COUNTED_OTHERWISE = (
    "draft_sample_method", "draft_tensor_parallel_size", "max_total_draft_tokens",
    "prompt_lookup_min", "rejection_sample_method", "speculative_ngram_min_match_window_size",
    "speculative_num_draft_tokens", "speculative_num_steps",
)  # fmt: skip

ConfigT = TypeVar(
    "ConfigT",
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    SuffixDecodingConfig,
    KvCacheConfig,
    SchedulerConfig,
    DrafterConfig,
    CompositeDecodingConfig,
    AutoDecodingConfig,
)


def _plain(value: object, owner: str) -> object:
    if isinstance(value, str):
        return read_text(value)
    if isinstance(value, Path):
        return read_text(str(value))
    if is_dataclass(value) and not isinstance(value, type):
        raise ConfigError(f"{owner}: got a {type(value).__name__}; pass a matching configuration")
    return value


def _build(cls: type[ConfigT], values: Mapping[Any, Any], aliases: Mapping[str, str]) -> ConfigT:
    """Construct `cls` from keys in any accepted spelling."""
    owner = cls.__name__
    names = {f.name for f in fields(cls)} | set(cls.spellings)
    if issubclass(cls, SpeculationOptions):
        aliases = {**OPTION_ALIASES, **aliases}
    given: dict[str, Any] = {}
    for raw, value in values.items():
        key = raw.lower().replace("-", "_") if isinstance(raw, str) else raw
        if key in UNSUPPORTED_KEYS and key not in names and key not in aliases:
            if any(value is off or (value == off and type(value) is type(off))
                   for off in OFF_VALUES):  # fmt: skip
                continue
            raise UnsupportedConfigError(
                f"{owner}: {raw} = {show(value)} is not supported in this version; remove it"
            )
        name = aliases.get(key, key) if isinstance(key, str) else key
        if name not in names:
            raise unknown_key(owner, str(raw), names | set(aliases), ConfigError)
        if name in given and given[name] != value:
            raise ConfigError(
                f"{owner}.{name} is given twice, as {show(given[name])} and as {show(value)} "
                f"({raw}); keep one"
            )
        given[name] = value
    return cls(**given)


def _split_method(values: Mapping[Any, Any], method: str | None) -> tuple[str, dict[Any, Any]]:
    """The canonical method and the keys that remain."""
    rest = dict(values)
    found: dict[str, str] = {}
    if method is not None:
        found["the context"] = canonical_method(method)
    for raw in list(rest):
        key = raw.lower().replace("-", "_") if isinstance(raw, str) else raw
        # Old vLLM names the method in the place of a draft model.
        as_model = key in ("model", "speculative_model") and rest[raw] in ("ngram", "[ngram]")
        if key in DISCRIMINATORS or as_model:
            found[str(raw)] = canonical_method(rest.pop(raw), str(raw))
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{k} says {v!r}" for k, v in found.items())
        raise ConfigError(f"speculative_config: the method is given twice ({listed}); keep one")
    if found:
        return next(iter(found.values())), rest
    return _guess_method(rest), rest


def _guess_method(values: Mapping[Any, Any]) -> str:
    """The method that a dict without discriminator means, if its keys leave no doubt."""
    keys = {k.lower().replace("-", "_") for k in values if isinstance(k, str)}
    if keys & {"medusa_choices", "num_medusa_heads", "medusa_num_heads"}:
        return "medusa"
    if any(key.startswith("suffix_decoding_") for key in keys):
        return "suffix"
    lookahead = {f.name for f in fields(LookaheadDecodingConfig)} | set(LOOKAHEAD_ALIASES)
    ngram = {f.name for f in fields(NGramDecodingConfig)} | set(NGRAM_ALIASES)
    draft_model = {"model", *DraftTargetDecodingConfig.spellings} | {
        key for key, name in DraftTargetDecodingConfig.aliases.items() if name == "model"
    }
    if keys & draft_model:  # vLLM and transformers name the model and no method
        return "draft_target"
    is_lookahead = bool(keys & (lookahead - ngram - {"num_speculative_tokens"}))
    is_ngram = bool(keys & (ngram - lookahead - {"max_draft_len", "num_speculative_tokens"}))
    if is_lookahead != is_ngram:
        return "lookahead" if is_lookahead else "ngram"
    _refuse_unknown(keys)
    raise ConfigError(
        f"speculative_config: no method given (keys: {', '.join(sorted(keys)) or 'none'}); "
        'add one, for example "method": "ngram"'
    )


def _refuse_unknown(keys: Iterable[str]) -> None:
    """Raise for a key that no method has: with it, a method's name would not help."""
    known: set[str] = {*DISCRIMINATORS, *UNSUPPORTED_KEYS, *OPTION_ALIASES, "sources"}
    known |= {*LOOKAHEAD_ALIASES, *NGRAM_ALIASES, *SUFFIX_ALIASES, *_COUNTED_OTHERWISE}
    for cls in (*_IN_SLOTS.values(), *DRAFTER_CONFIGS.values(), AutoDecodingConfig):
        known |= {f.name for f in fields(cls)} | {*cls.spellings, *getattr(cls, "aliases", ())}
    for key in sorted(set(keys) - known):
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        if near and near[0] in DISCRIMINATORS:
            raise ConfigError(
                f"speculative_config: unknown key {show(key)}; did you mean {near[0]!r}?"
            )
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(
            f"speculative_config: unknown key {show(key)}{hint}; correct or remove it, and add the "
            'method, for example "method": "ngram"'
        )


def _without_sample_method(values: dict[Any, Any]) -> dict[Any, Any]:
    """vLLM names synthetic acceptance twice: by this key, and by the rates or the length."""
    rest = dict(values)
    for raw in values:
        if not isinstance(raw, str) or raw.lower().replace("-", "_") != "rejection_sample_method":
            continue
        how = rest.pop(raw)
        synthetic = any(str(key).startswith("synthetic_acceptance") for key in rest)
        if how == "synthetic" and not synthetic:
            raise ConfigError(
                f"{raw} = 'synthetic': give synthetic_acceptance_length or "
                "synthetic_acceptance_rates with it"
            )
        if how not in (None, "standard", "synthetic") or (how == "standard" and synthetic):
            raise UnsupportedConfigError(
                f"{raw} = {show(how)}: how drafts are accepted is the request's choice "
                "(SamplingParams.acceptance); remove it"
            )
    return rest


def _from_lookahead_dict(values: dict[Any, Any]) -> LookaheadDecodingConfig:
    """As _build; a draft length given with the triple (TensorRT-LLM, vLLM) must agree with it."""
    stated: dict[str, object] = {}
    for raw in list(values):
        key = raw.lower().replace("-", "_") if isinstance(raw, str) else raw
        if key in ("max_draft_len", "num_speculative_tokens", "max_total_draft_tokens"):
            stated[str(raw)] = values.pop(raw)
    config = _build(LookaheadDecodingConfig, values, LOOKAHEAD_ALIASES)
    for key, value in stated.items():
        if value is not None and check_int(key, value, ConfigError) != config.max_draft_len:
            raise ConfigError(
                f"LookaheadDecodingConfig: {key} = {value}, but (W,N,G) = {config.triple} needs "
                f"{config.max_draft_len}; remove {key} or change the triple"
            )
    return config


def _from_ngram_dict(values: dict[Any, Any]) -> NGramDecodingConfig:
    for raw in list(values):
        key = raw.lower().replace("-", "_") if isinstance(raw, str) else raw
        if key in ("prompt_lookup_min", "speculative_ngram_min_match_window_size"):
            value = values.pop(raw)
            if value is not None and check_int(str(raw), value, ConfigError, low=1) != 1:
                raise UnsupportedConfigError(
                    f"NGramDecodingConfig: {raw} = {value}: patterns are always tried from "
                    "max_matching_ngram_size down to 1; use 1 or remove it"
                )
        elif key == "speculative_num_draft_tokens":
            # SGLang counts the last decided token too: its 12 verifies 11 drafts.
            value = check_int(str(raw), values.pop(raw), ConfigError, low=2)
            if values.get("max_draft_len", value - 1) != value - 1:
                raise ConfigError(
                    f"NGramDecodingConfig: {raw} = {value} means max_draft_len = {value - 1}, but "
                    f"max_draft_len = {show(values['max_draft_len'])}; keep one"
                )
            values["max_draft_len"] = value - 1
    return _build(NGramDecodingConfig, values, NGRAM_ALIASES)


def _from_list(
    items: Sequence[Any], method: str | None, tensor_parallel_size: int
) -> SpeculativeConfig:
    """[W,N,G], or [K,M] / [K,M,[devices]]."""
    has_devices = len(items) == 3 and isinstance(items[2], (list, tuple))
    if method is None:
        method = "ngram" if len(items) == 2 or has_devices else "lookahead"
    if method not in ("ngram", "lookahead"):
        raise ConfigError(
            f"speculative_config = {show(list(items))}: method {method!r} has no form as a list; "
            f'give a dict, for example {{"method": "{method}"}}'
        )
    if method == "lookahead":
        if len(items) != 3 or has_devices:
            raise ConfigError(
                f"lookahead_config = {show(list(items))}: expected three integers [W,N,G], "
                f"got {len(items)} entries; for example [7,7,7]"
            )
        return LookaheadDecodingConfig(*items)
    if len(items) not in (2, 3) or (len(items) == 3 and not has_devices):
        raise ConfigError(
            f"prompt_lookup_config = {show(list(items))}: expected [K,M] or [K,M,[devices]]; "
            "for example [10,2] or [10,2,[0]]"
        )
    if has_devices:
        devices = list(items[2])
        if len(devices) != tensor_parallel_size:
            raise ConfigError(
                f"prompt_lookup_config devices = {show(devices)}: {len(devices)} devices for "
                f"tensor_parallel_size = {tensor_parallel_size}; the two must be equal, "
                "or leave the devices out"
            )
        for i, device in enumerate(devices):
            check_int(f"prompt_lookup_config devices[{i}]", device, ConfigError, low=0,
                      high=tensor_parallel_size - 1,
                      remedy="this version has one device: write [0] or leave it out")  # fmt: skip
    return NGramDecodingConfig(max_draft_len=items[0], max_matching_ngram_size=items[1])


def _from_sources(
    items: Sequence[Any], method: str | None, tensor_parallel_size: int
) -> SpeculativeConfig:
    """["suffix", {"method": "medusa"}]; one method alone is that method."""
    parsed = [parse_speculative_config(item, None, tensor_parallel_size) for item in items]
    if None in parsed:
        raise ConfigError(
            f"speculative_config = {show(list(items))}: 'none' in a list of sources; remove it, or "
            "pass None for plain decoding"
        )
    sources: list[Any] = [source for source in parsed if source is not None]
    config: SpeculativeConfig
    config = sources[0] if len(sources) == 1 else CompositeDecodingConfig(sources=tuple(sources))
    if method not in (None, config.method):
        raise ConfigError(
            f"speculative_config = {show(list(items))} is of method {config.method!r}, expected "
            f"{method!r}; make the two agree"
        )
    return config


@overload
def parse_speculative_config(
    value: object, method: Literal["lookahead"], tensor_parallel_size: int = 1
) -> LookaheadDecodingConfig | None: ...
@overload
def parse_speculative_config(
    value: object, method: str | None = None, tensor_parallel_size: int = 1
) -> SpeculativeConfig | None: ...
def parse_speculative_config(
    value: object, method: str | None = None, tensor_parallel_size: int = 1
) -> SpeculativeConfig | None:
    """The speculative configuration in `value`, or None for plain decoding.

    `method` (any spelling) is the method that the context already names, for example a flag's name;
    a discriminator in `value` must agree. A list of devices has `tensor_parallel_size` entries.

    Raises ConfigError (UnsupportedConfigError for a feature that this version does not have).
    """
    if value is None:
        return None
    wanted = None if method is None else canonical_method(method)
    if isinstance(value, SpeculativeConfig):
        if wanted not in (None, value.method):
            raise ConfigError(
                f"speculative_config is a {type(value).__name__}, expected method {wanted!r}; "
                "pass a matching configuration"
            )
        return value
    value = _plain(value, "speculative_config")
    if value is None:
        return None
    if isinstance(value, str):
        return _from_name(value, wanted)
    if isinstance(value, (list, tuple)):
        of_numbers = wanted in ("lookahead", "ngram")  # a list of theirs names no sources
        if not of_numbers and any(
            isinstance(item, (str, Mapping, SpeculativeConfig)) for item in value
        ):
            return _from_sources(value, wanted, tensor_parallel_size)
        return _from_list(value, wanted, tensor_parallel_size)
    if isinstance(value, Mapping):
        return _from_dict(value, wanted, tensor_parallel_size)
    _refuse_form(value, wanted)


def _from_name(value: str, wanted: str | None) -> SpeculativeConfig | None:
    """A bare name: that method's defaults."""
    if wanted in ("lookahead", "ngram") and "," in value:  # a list without its brackets
        _refuse_form(value, wanted)
    named = canonical_method(value)
    if wanted not in (None, named) or named == "composite":
        _refuse_form(value, wanted)
    if named == "none":
        return None
    if named in DRAFTER_CONFIGS:
        return DRAFTER_CONFIGS[named]()
    return AutoDecodingConfig() if named == "auto" else _IN_SLOTS[named]()


def _from_dict(
    values: Mapping[Any, Any], wanted: str | None, tensor_parallel_size: int
) -> SpeculativeConfig | None:
    """A dict that names its method, or whose keys leave no doubt about it."""
    named, rest = _split_method(values, wanted)
    rest = _without_sample_method(rest)
    if named == "none":
        if rest:
            raise ConfigError(
                f"speculative_config: method 'none' with {', '.join(map(str, rest))}; "
                "remove the keys or name a method"
            )
        return None
    if named in DRAFTER_CONFIGS:
        cls = DRAFTER_CONFIGS[named]
        return _build(cls, cls.normalize_keys(rest), cls.aliases)
    if named == "suffix":
        return _build(SuffixDecodingConfig, rest, SUFFIX_ALIASES)
    if named == "auto":
        return _build(AutoDecodingConfig, rest, {"num_speculative_tokens": "max_draft_len"})
    if named == "composite":
        sources = rest.pop("sources", ())
        parsed = [parse_speculative_config(s, None, tensor_parallel_size) for s in sources]
        return _build(CompositeDecodingConfig, {**rest, "sources": parsed}, {})
    return _from_lookahead_dict(rest) if named == "lookahead" else _from_ngram_dict(rest)


def _refuse_form(value: object, wanted: str | None) -> NoReturn:
    lists = {"lookahead": "[7,7,7]", "ngram": "[10,2]"}
    example = lists.get(wanted or "", '{"method": "ngram", "max_draft_len": 10}')
    raise ConfigError(
        f"speculative_config = {show(value)}: expected a configuration object, dict, JSON, YAML or "
        f"list, got {type(value).__name__}; for example {example}"
    )


def _parse_plain(cls: type[ConfigT], value: object, aliases: Mapping[str, str]) -> ConfigT:
    if value is None:
        return cls()
    if isinstance(value, cls):
        return value
    loaded = _plain(value, cls.__name__)
    if not isinstance(loaded, Mapping):
        raise ConfigError(
            f"{cls.__name__} = {show(loaded)}: expected an object with keys, got "
            f'{type(loaded).__name__}; for example {{"{fields(cls)[0].name}": 32}}'
        )
    return _build(cls, loaded, aliases)


def parse_kv_cache_config(value: object) -> KvCacheConfig:
    """KvCacheConfig from an object, dict, JSON, YAML or file; None gives the defaults."""
    return _parse_plain(KvCacheConfig, value, KV_ALIASES)


def parse_scheduler_config(value: object) -> SchedulerConfig:
    """SchedulerConfig from an object, dict, JSON, YAML or file; None gives the defaults."""
    return _parse_plain(SchedulerConfig, value, SCHEDULER_ALIASES)
