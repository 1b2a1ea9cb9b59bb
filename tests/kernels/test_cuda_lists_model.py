"""What benchmarks/gpu/model_lists.py says a row's list takes, against a run of the kernels: each
loop over a row's groups, kept tokens and list makes as many trips as the model counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from accept_cases import laws_on
from benchmarks.gpu import model_lists
from cuda_calls import CHECKED
from kernel_calls import int32

from emulators import EMULATED, EMULATOR, Touched, tally
from reference.sampling_reference import Law
from specdec_ext import ops

FOLDER = Path(__file__).resolve().parents[2] / "cuda" / "accept"
FILES = ("row_lists.cuh", "row_listed.cuh", "row_cuts.cuh")

# Every loop of these files that is not unrolled whole, in order, and the model's name for it. None:
# a trip or two for each thread, whatever the row.
MODELLED: dict[str, list[tuple[str, str | None]]] = {
    "row_lists.cuh": [
        ("for (int at = begin; at < end; at += kGroupReads * kGroupStep) {", "bins keep"),
        ("for (int i = first; i < last; ++i) {", "bits"),
        ("for (int i = first; i < last; ++i) {", "bits"),
        ("for (std::uint32_t bits = shared->kept[i]; bits != 0; bits &= bits - 1) {", "bits"),
        ("for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kRowThreads) "
         "shared->law.bins[i] = 0;", None),
        ("for (int i = static_cast<int>(threadIdx.x); i < kFineBins; i += kRowThreads) "
         "shared->fine[i] = 0;", None),
        ("for (int i = static_cast<int>(threadIdx.x); i < kFineBins; i += kRowThreads) {", None),
        ("for (int done = 0; done < count;) {", "batch"),
        ("while (max(reach, 1) << (made.finer + 1) <= kFineBins) ++made.finer;", None),
        ("for (std::uint32_t i = mine.first; i < mine.last; ++i) {", "keys"),
        ("for (std::uint32_t i = mine.first; i < mine.last; ++i) {", "edges"),
    ],
    "row_listed.cuh": [
        ("for (std::uint32_t i = threadIdx.x; i < made.listed; i += kRowThreads) {", "write"),
        ("for (std::uint32_t i = threadIdx.x; i < made.listed; i += kRowThreads) {", "crowded"),
        ("for (std::uint32_t i = threadIdx.x; i < made.listed; i += kListReads * kRowThreads) {",
         "read"),
    ],
    "row_cuts.cuh": [
        ("for (std::uint32_t i = 0; i < count; ++i) {", "cut"),
        ("for (std::uint32_t i = first; i < last; ++i) {", "weigh"),
        ("for (std::uint32_t i = first; i < last; ++i) {", "edge"),
        ("for (std::uint32_t i = first; i < last; ++i) {", "sum"),
        ("for (; unit - before >= mass_of(list[i].weight); ++i) before += mass_of(list[i].weight);",
         "unit"),
    ],
}  # fmt: skip
# Not on the way of the rows that are predicted: of a bin with more tokens than threads.
ELSEWHERE = {"crowded"}


def test_the_model_has_every_loop_of_the_lists() -> None:
    counts = model_lists.cell_counts(8192, "top_p")
    trips = [
        *(t for cut in model_lists.LAWS for t in model_lists.list_trips(counts, cut)),
        *model_lists.cut_trips(counts, "top_p"),
    ]
    known = {trip.name for trip in trips if not trip.between}
    named = set()
    for file, wanted in MODELLED.items():
        lines = [line.strip() for line in (FOLDER / file).read_text().splitlines()]
        found = [
            line
            for before, line in zip(["", *lines], lines, strict=False)
            if line.startswith(("for (", "while (")) and before != "#pragma unroll"
        ]
        assert found == [header for header, _ in wanted], file
        named |= {one for _, names in wanted for one in (names or "").split()}
    assert named == known | ELSEWHERE


def line_of(file: str, text: str, which: int = 0) -> str:
    """The place of a line of the source as the emulation names it."""
    lines = (FOLDER / file).read_text().splitlines()
    found = [i for i, line in enumerate(lines, 1) if text in line]
    assert len(found) > which, f"{file} has no line {text!r}"
    return f"{file}:{found[which]}"


def bytes_at(found: list[Touched], array: str, *lines: str, writes: bool = False) -> int:
    return sum(
        t.bytes
        for t in found
        if t.array == array and t.writes == writes and all(line in t.lines for line in lines)
    )


def times_at(found: list[Touched], *lines: str) -> int:
    """How often a line was passed: the most that one of its accesses was made."""
    return max((t.times for t in found if all(line in t.lines for line in lines)), default=0)


CHAIN = [-1, 0, 1, 2]
VOCAB = 2504  # whole groups, and no whole chunks


def sample(scores: torch.Tensor, law: Law, backend: str = CHECKED.backend) -> torch.Tensor:
    rows = len(scores)
    ids = torch.zeros(rows, dtype=torch.int32)
    cu_logits, positions = int32([0, rows]), int32(list(range(rows)))
    laws = laws_on(CHECKED, [law], [7])
    return ops.sample_rows(scores, cu_logits, positions, laws, out=ids, backend=backend)


def match(scores: torch.Tensor, law: Law) -> None:
    """Drafts that are what is drawn: no row is left out."""
    accept(scores, law, "exact_match", sample(scores, law, "cpu")[:-1].tolist(), None)


def hold(scores: torch.Tensor, law: Law) -> None:
    """Drafts that are kept for sure: the same."""
    probs = torch.softmax(scores / law.temperature, 1)[[0, *CHAIN[1:]]]
    given = ops.DraftProbs(probs, replacement=torch.ones(1, dtype=torch.uint8))
    accept(scores, law, "rejection", scores[:-1].argmax(1).tolist(), given)


def accept(
    scores: torch.Tensor, law: Law, rule: str, drafts: list[int], probs: ops.DraftProbs | None
) -> None:
    rows = len(scores)
    results = ops.make_accept_results(rows, 1)
    ops.accept_step(
        scores,
        int32([0, rows]),
        int32(list(range(rows))),
        int32([0, *drafts]),
        int32(CHAIN),
        laws_on(CHECKED, [law], [7]),
        torch.tensor([ops.ACCEPTANCE_RULES.index(rule)], dtype=torch.uint8),
        results=results,
        draft_probs=probs,
        backend=CHECKED.backend,
    )
    assert results.path_len.tolist() == [rows - 1]


@pytest.mark.parametrize("law", [Law(0.8, top_k=40), Law(0.8, top_p=0.9)], ids=["top_k", "top_p"])
@pytest.mark.parametrize("run", [sample, match, hold])
@EMULATED
@EMULATOR
def test_a_list_reads_what_the_model_says(
    run: Callable[[torch.Tensor, Law], object], law: Law
) -> None:
    rng = np.random.default_rng(11)
    scores = (3 * rng.standard_normal((len(CHAIN), VOCAB), np.float32)).astype(np.float32)
    with tally() as found:
        run(torch.from_numpy(scores), law)
    cut = "top_p" if law.top_p < 1 else "top_k"
    counts = [model_lists.list_counts(r, law.temperature, law.top_k, law.top_p) for r in scores]
    assert sum(c.kept for c in counts) > 100, "a row has something to keep"
    listed = sum(c.listed for c in counts)

    read = 4 * model_lists.GROUP * sum(c.read for c in counts)
    of_groups = [
        bytes_at(found, "workspace", line_of("row_lists.cuh", "for_groups(group_best", k))
        for k in (0, 1)
    ]
    assert of_groups == [4 * sum(c.groups for c in counts)] * 2
    batch = line_of("row_lists.cuh", "const KeptGroups<T> kept(row, shared->groups")
    assert bytes_at(found, "scores", batch) == read
    # Nothing else of a list reads scores but the largest, by each thread.
    every = sum(
        t.bytes
        for t in found
        if t.array == "scores" and any(line.startswith(FILES) for line in t.lines)
    )
    assert every - sum(model_lists.score_bytes(c) for c in counts) <= (
        4 * model_lists.THREADS * 4 * len(counts)
    )

    written = line_of("row_lists.cuh", "shared->groups[at++] =")
    assert times_at(found, written) == sum(c.kept for c in counts)
    edge = [c.counted if cut == "top_k" else c.weighed for c in counts]
    looked = line_of("row_cuts.cuh", "const EdgeToken other = shared->edge[i];")
    assert times_at(found, looked) == sum(n * n for n in edge)
    keyed = line_of("row_lists.cuh", "c.key = order_key(c.weight);")
    assert bytes_at(found, "shared", keyed, writes=True) == 4 * listed
    weighed = line_of("row_cuts.cuh", "list[i].weight = weight;")
    assert bytes_at(found, "shared", weighed, writes=True) == 4 * listed
    if cut == "top_p":
        read = line_of("row_listed.cuh", "read[k] = from[i + k * kRowThreads];")
        assert bytes_at(found, "workspace", read) == model_lists.TOKEN_BYTES * listed
        # Once more with weights, which the model leaves out, where drafts are held.
        wrote = line_of("row_listed.cuh", "to[i] = shared.law.candidates[i];")
        written = model_lists.TOKEN_BYTES * listed * (2 if run is hold else 1)
        assert bytes_at(found, "workspace", wrote, writes=True) == written
        for text in ("const Candidate c = list[i];", "sum += mass_of(list[i].weight);"):
            assert times_at(found, line_of("row_cuts.cuh", text)) == listed
    assert set(edge) != {0}
