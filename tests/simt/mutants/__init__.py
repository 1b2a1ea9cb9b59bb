"""The mutants, by the part of the kernels that they break."""

from __future__ import annotations

from mutants import ampere, hopper, kv, step
from mutants.model import SUITES, Mutant

MUTANTS: list[Mutant] = [*kv.MUTANTS, *step.MUTANTS, *ampere.MUTANTS, *hopper.MUTANTS]

__all__ = ["MUTANTS", "SUITES", "Mutant"]
