"""Mutants of synthetic acceptance."""

from __future__ import annotations

from mutants.model import Mutant

STEP = "cuda/accept/synthetic_step.cu"
RESULT = "cuda/accept/accept_result.cuh"
ACCEPT = "cuda/accept/accept_step.cu"
RULE = "cpp/algo/synthetic_acceptance.h"

MUTANTS = [
    Mutant(
        "synthetic-1",
        "the number is keyed by the golden token's position",
        STEP,
        "std::int64_t{p.positions[first]} + 1};",
        "std::int64_t{p.positions[first]}};",
    ),
    Mutant(
        "synthetic-2",
        "parents and token ids are believed",
        STEP,
        "drafted &= is_drafted_node(tree, i, p.vocab);",
        "drafted &= true;",
    ),
    Mutant(
        "synthetic-3",
        "only a rank's first rate is looked at",
        RESULT,
        "i < rates.count; i += team.size()) good &= rates.valid(i);",
        "i < rates.count && i < team.size(); i += team.size()) good &= rates.valid(i);",
    ),
    Mutant(
        "synthetic-4",
        "choices are not written back",
        STEP,
        "p.sampled[first + i] = shared.sampled[i];",
        "",
    ),
    Mutant(
        "synthetic-5",
        "a row without a token is not flagged",
        STEP,
        "if (team.rank() == 0 && shared.result.bad_row >= 0) report(p.exec.status, b, kStatusNaN);",
        "",
    ),
    Mutant(
        "synthetic-6",
        "a long path is written by the first round of ranks alone",
        RESULT,
        "i < path_len; i += team.size()) {",
        "i < path_len && i < team.size(); i += team.size()) {",
    ),
    Mutant(
        "synthetic-7",
        "rates are for greedy requests alone",
        ACCEPT,
        "if (p.synthetic.given()) { const auto choose",
        "if (p.synthetic.given() && greedy) { const auto choose",
    ),
    Mutant(
        "synthetic-8",
        "rates are not looked at where scores are",
        ACCEPT,
        "const bool good = are_rates(BlockTeam{}, p.synthetic);",
        "const bool good = true;",
    ),
    Mutant(
        "synthetic-9",
        "of equally deep paths the last is taken",
        RULE,
        "if (depth[node] > depth[best]) best = node;",
        "if (depth[node] >= depth[best]) best = node;",
    ),
    Mutant(
        "synthetic-10",
        "the token after the path may be one more draft",
        RULE,
        "decided[node] = token < 0 ? token : not_a_child(tree, node, token, vocab);",
        "decided[node] = token;",
    ),
    Mutant(
        "synthetic-11",
        "no barrier between a block of depths and the next",
        RULE,
        "depth[node] = depth[at] + steps; } team.sync();",
        "depth[node] = depth[at] + steps; }",
    ),
    Mutant(
        "synthetic-12",
        "no barrier between the choices that all read and what is decided",
        RULE,
        "team.sync();  // all have read what `choose` reads",
        "",
    ),
    Mutant(
        "synthetic-13",
        "the path is not cut to what was kept before a row without a token",
        RULE,
        "out->path_len = kept;",
        "",
    ),
    Mutant(
        "synthetic-14",
        "a chance that equals the number counts",
        RULE,
        "u < rates.rates[length]) ++length;",
        "u <= rates.rates[length]) ++length;",
    ),
]
