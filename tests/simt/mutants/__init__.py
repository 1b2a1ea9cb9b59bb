"""The mutants, by the part of the kernels that they break."""

from __future__ import annotations

from mutants import ampere, fp8, hopper, kv, slots, step
from mutants.model import SUITES, Mutant

MUTANTS: list[Mutant] = [
    *kv.MUTANTS,
    *step.MUTANTS,
    *slots.MUTANTS,
    *ampere.MUTANTS,
    *hopper.MUTANTS,
    *fp8.MUTANTS,
]

__all__ = ["MUTANTS", "SUITES", "Mutant"]
