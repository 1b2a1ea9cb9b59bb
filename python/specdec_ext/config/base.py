"""What configurations have in common, and the options that every method of speculation has."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ConfigError
from .validate import check_float, check_int, show

__all__ = [
    "MODEL_SPELLINGS",
    "OPTION_ALIASES",
    "OPTION_NAMES",
    "SpeculationOptions",
    "Spelled",
    "Spellings",
]

MAX_SCHEDULE_STEPS = 64
MAX_RUNNING = 4096

# Other projects' spellings of the options.
OPTION_ALIASES = {
    "spec_synth_len": "synthetic_acceptance_length",
    "spec_synth_rates": "synthetic_acceptance_rates",
    "disable_by_batch_size": "max_concurrency",
}


# Another spelling of a field -> the field, and what a value means there; (name, value) -> value.
Spellings = Mapping[str, tuple[str, Callable[[str, Any], Any]]]


def as_it_is(name: str, value: Any) -> Any:
    """The meaning of a spelling that is a mere name."""
    return value


# Configurations call a model `model`; TensorRT-LLM and vLLM have these names too.
MODEL_SPELLINGS: Spellings = {
    "speculative_model": ("model", as_it_is),
    "speculative_model_dir": ("model", as_it_is),
}


class Spelled(type):
    """A class that can also be constructed with the other spellings of its fields.

    A keyword that is no field raises TypeError with the nearest name.
    """

    if not TYPE_CHECKING:  # type checkers know only the fields

        def __call__(cls, *args, **kwargs):
            given = cls._respell(kwargs)
            names = [f.name for f in fields(cls) if f.init]
            for name in given:
                if name not in names:
                    near = difflib.get_close_matches(name, names, n=1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    raise TypeError(
                        f"{cls.__name__}() got an unexpected keyword argument {name!r}{hint}"
                    )
            return super().__call__(*args, **given)


class _Config(metaclass=Spelled):
    """Base of the frozen dataclasses: validated fields are written once, during construction."""

    spellings: ClassVar[Spellings] = {}

    @classmethod
    def _respell(cls, given: dict[str, Any]) -> dict[str, Any]:
        """`given` by the fields' own names. Raises ConfigError for two values of one field."""
        result = {name: value for name, value in given.items() if name not in cls.spellings}
        for name in given.keys() & cls.spellings.keys():
            field_name, meaning = cls.spellings[name]
            value = meaning(name, given[name])
            if field_name in result and result[field_name] != value:
                raise ConfigError(
                    f"{cls.__name__}.{field_name} is given twice, as {show(result[field_name])} "
                    f"and as {show(value)} ({name} = {show(given[name])}); keep one"
                )
            result[field_name] = value
        return result

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, object]:
        """The fields as a plain dict, with the discriminator `method` where the class has one."""
        method = getattr(self, "method", None)
        own = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return own if method is None else {"method": method, **own}


@dataclass(frozen=True)
class SpeculationOptions(_Config):
    """Options that every method has; keywords only.

    draft_len_schedule  {requests: drafts}: the most drafts while at most so many requests run, and
                        none beyond the last entry. {4: 8, 16: 2} allows 8 drafts for 1..4 requests,
                        2 for 5..16, and none above
    max_concurrency     no drafts while more requests run; the same as the schedule
                        {max_concurrency: max_draft_len}, and not together with a schedule
    synthetic_acceptance_length
                        for measuring speed without a trained drafter: steps keep drafts so that
                        this is the mean number of tokens per step, whatever the model says.
                        1 .. max_draft_path_len + 1. THE TEXT IS THEN NOT THE MODEL'S
    synthetic_acceptance_rates
                        the same by position: entry i is the probability that a step keeps at least
                        i + 1 drafts; entries do not rise. Give either this or the length
    """

    draft_len_schedule: Mapping[int, int] | None = field(default=None, kw_only=True, hash=False)
    max_concurrency: int | None = field(default=None, kw_only=True)
    synthetic_acceptance_length: float | None = field(default=None, kw_only=True)
    synthetic_acceptance_rates: Sequence[float] | None = field(default=None, kw_only=True)

    if TYPE_CHECKING:  # fields or properties of the subclasses

        @property
        def max_draft_len(self) -> int: ...
        @property
        def max_draft_path_len(self) -> int: ...

    @property
    def deepest_draft(self) -> int:
        """Levels of the tree that a step of any request verifies, at most (a chain's drafts)."""
        return self.max_draft_path_len

    def _check_options(self) -> None:
        """Called when the method's own fields are valid. Raises ConfigError."""
        where = f"{type(self).__name__}."
        if self.draft_len_schedule is not None:
            if self.max_concurrency is not None:
                raise ConfigError(
                    f"{where}draft_len_schedule and max_concurrency are both set; a schedule "
                    "already ends speculation beyond its last entry: keep one of them"
                )
            self._set(draft_len_schedule=self._schedule(where + "draft_len_schedule"))
        if self.max_concurrency is not None:
            limit = check_int(where + "max_concurrency", self.max_concurrency, ConfigError,
                              low=1, high=MAX_RUNNING)  # fmt: skip
            self._set(max_concurrency=limit)
        length, rates = self.synthetic_acceptance_length, self.synthetic_acceptance_rates
        if length is not None and rates is not None:
            raise ConfigError(
                f"{where}synthetic_acceptance_length and synthetic_acceptance_rates are both set; "
                "keep one of them"
            )
        if length is not None:
            deepest = self.max_draft_path_len
            number = check_float(
                where + "synthetic_acceptance_length", length, ConfigError,
                low=1.0, high=deepest + 1.0,
                remedy=f"1 keeps no draft, a step of this configuration at most {deepest}",
            )  # fmt: skip
            self._set(synthetic_acceptance_length=number)
        if rates is not None:
            self._set(synthetic_acceptance_rates=self._rates(where + "synthetic_acceptance_rates"))

    def _schedule(self, name: str) -> dict[int, int]:
        given: Any = self.draft_len_schedule
        if not isinstance(given, Mapping) or not 1 <= len(given) <= MAX_SCHEDULE_STEPS:
            raise ConfigError(
                f"{name} = {show(given)}: expected 1..{MAX_SCHEDULE_STEPS} entries "
                "{running requests: drafts}, for example {4: 8, 16: 2}"
            )
        steps: dict[int, int] = {}
        for key, value in given.items():
            # JSON knows only text as a key.
            number = int(key) if isinstance(key, str) and key.isdecimal() else key
            batch = check_int(f"{name} key", number, ConfigError, low=1, high=MAX_RUNNING)
            if batch in steps:
                raise ConfigError(f"{name}: {batch} is given twice; keep one")
            steps[batch] = check_int(
                f"{name}[{batch}]", value, ConfigError, low=0, high=self.max_draft_len,
                remedy=f"max_draft_len = {self.max_draft_len}",
            )  # fmt: skip
        return dict(sorted(steps.items()))

    def _rates(self, name: str) -> tuple[float, ...]:
        given: Any = self.synthetic_acceptance_rates
        deepest = self.max_draft_path_len
        if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
            raise ConfigError(f"{name} = {show(given)}: expected a list of numbers in [0, 1]")
        if not 1 <= len(given) <= deepest:
            raise ConfigError(
                f"{name} has {len(given)} entries: give 1..{deepest}, one per draft that a step of "
                "this configuration can keep"
            )
        rates: list[float] = []
        for i, value in enumerate(given):
            before = rates[-1] if rates else 1.0
            rates.append(
                check_float(
                    f"{name}[{i}]", value, ConfigError, low=0.0, high=before,
                    remedy="entry i is the chance that at least i + 1 drafts are kept, so entries "
                    "are at most 1 and do not rise",
                )
            )  # fmt: skip
        return tuple(rates)

    @property
    def draft_len_steps(self) -> list[tuple[int, int]]:
        """(running requests, drafts) of the schedule, ascending; empty: no limit."""
        if self.max_concurrency is not None:
            return [(self.max_concurrency, self.max_draft_len)]
        return sorted((self.draft_len_schedule or {}).items())

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """Probability that a step keeps at least 1, 2, ... drafts; empty: acceptance is real."""
        if self.synthetic_acceptance_rates is not None:
            return tuple(self.synthetic_acceptance_rates)
        if self.synthetic_acceptance_length is None:
            return ()
        # The schedule of least variance: the whole part always, one more as often as is left.
        whole, rest = divmod(self.synthetic_acceptance_length - 1.0, 1.0)
        return (1.0,) * int(whole) + ((rest,) if rest > 0.0 else ()) or (0.0,)

    @property
    def synthetic_acceptance(self) -> dict[str, Any] | None:
        """What outputs report about synthetic acceptance; None: acceptance is real."""
        rates = self.synthetic_rates
        if not rates:
            return None
        return {
            "mean_acceptance_length": 1.0 + sum(rates),
            "rates": list(rates),
            "note": "drafts were kept at these rates whatever the model said: for speed only, the "
            "text is not the model's",
        }

    def to_dict(self) -> dict[str, object]:
        """The method's fields, and the options that are set."""
        result = super().to_dict()
        for name in OPTION_NAMES:
            if result[name] is None:
                del result[name]
        return result


OPTION_NAMES = tuple(f.name for f in fields(SpeculationOptions))
