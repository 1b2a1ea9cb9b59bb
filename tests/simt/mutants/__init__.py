"""The mutants, by the part of the kernels that they break."""

from __future__ import annotations

from mutants import (
    accept,
    ampere,
    beams,
    decoder,
    e4m3,
    far,
    finish,
    fp8,
    growth,
    held,
    hopper,
    kv,
    launch,
    linear,
    linear_hopper,
    lists,
    masses,
    output,
    packed,
    plan,
    proposed,
    sinks,
    slots,
    step,
    sums,
    synthetic,
    unpack,
)
from mutants.model import SUITES, Mutant

PARTS = (
    kv,
    step,
    slots,
    proposed,
    beams,
    growth,
    accept,
    held,
    masses,
    synthetic,
    unpack,
    decoder,
    linear,
    linear_hopper,
    lists,
    packed,
    e4m3,
    sums,
    plan,
    ampere,
    finish,
    hopper,
    fp8,
    output,
    launch,
    far,
    sinks,
)
MUTANTS: list[Mutant] = [mutant for part in PARTS for mutant in part.MUTANTS]

__all__ = ["MUTANTS", "SUITES", "Mutant"]
