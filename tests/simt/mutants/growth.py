"""Mutants of draft trees that grow on a step's stream."""

from __future__ import annotations

from mutants.model import Mutant

GROWTH = "cuda/step/growth.cu"
TEXT = "cpp/algo/draft_growth.h"
PARAMS = "cpp/backend/growth_ops.h"

MUTANTS = [
    Mutant(
        "growth-1",
        "every request hears what the first one's rows said",
        PARAMS,
        "const std::int64_t first = std::int64_t{b} * places * width;",
        "const std::int64_t first = 0;",
    ),
    Mutant(
        "growth-2",
        "of equal nodes the later one stays",
        TEXT,
        "before += growth->worth[j] > mine || (growth->worth[j] == mine && j < i) ? 1 : 0;",
        "before += growth->worth[j] > mine || (growth->worth[j] == mine && j > i) ? 1 : 0;",
    ),
    Mutant(
        "growth-3",
        "a child goes before an earlier node of equal worth",
        TEXT,
        "before += growth->worth[j] >= mine ? 1 : 0;",
        "before += growth->worth[j] > mine ? 1 : 0;",
    ),
    Mutant(
        "growth-4",
        "a share that rises is taken",
        TEXT,
        "(i == 0 || shares[i] <= shares[i - 1]) &&",
        "",
    ),
    Mutant(
        "growth-5",
        "parents stand where they stood before nodes were dropped",
        TEXT,
        "growth->parents[at] = parent < 0 ? -1 : scratch->place[parent];",
        "growth->parents[at] = parent;",
    ),
    Mutant(
        "growth-6",
        "new nodes hang under the place that their parent had",
        TEXT,
        "const std::int32_t parent = node < 0 ? -1 : scratch->place[node];",
        "const std::int32_t parent = node;",
    ),
    Mutant(
        "growth-7",
        "rows keep the numbers of the pass before",
        TEXT,
        "growth->rows[at] = read ? row : 0;",
        "growth->rows[at] = read ? growth->rows[i] : 0;",
    ),
    Mutant(
        "growth-8",
        "every node of a level is opened",
        TEXT,
        "kept = of_level < max_open ? 2 : 1;",
        "kept = max_open > 0 ? 2 : 1;",
    ),
    Mutant(
        "growth-9",
        "the rows of a request that does not fit count",
        GROWTH,
        "if (first + rows <= p.num_rows) first += rows;",
        "first += rows;",
    ),
    Mutant(
        "growth-10",
        "padding keeps what another step left",
        GROWTH,
        "p.parents[row] = -1;",
        "",
    ),
    Mutant(
        "growth-11",
        "drafts stand in the order in which they grew",
        TEXT,
        "place += theirs > mine || (theirs == mine && j < i) ? 1 : 0;",
        "place += j < i ? 1 : 0;",
    ),
    Mutant(
        "growth-12",
        "a first level goes on from another step's tree",
        GROWTH,
        "if (p.begins && team.rank() == 0) begin_growth(growth);",
        "",
    ),
]
