"""Mutants of products that are left in pieces, and of what adds them up."""

from __future__ import annotations

from mutants.model import Mutant

LINEAR = "cuda/linear/linear.cu"
RMS = "cuda/decoder/rms_norm.cu"
ROPE = "cuda/kv/rope_append.cu"
SUMS = "cuda/linear/sums.cuh"

MUTANTS = [
    Mutant(
        "linear-59",
        "groups run into each other",
        SUMS,
        "const bool begins = (u & (sums.units_per_group - 1)) == 0;",
        "const bool begins = u == 0;",
    ),
    Mutant(
        "sums-1",
        "read as they are, not as a result is stored",
        SUMS,
        "x[i] = rounded<T>(x[i]);",
        "x[i] += 0.0f;",
    ),
    Mutant(
        "sums-2",
        "the bias left out by those who add up",
        SUMS,
        "complete_sums<T>(sums.row_scales, sums.bias,",
        "complete_sums<T>(sums.row_scales, nullptr,",
    ),
    Mutant(
        "sums-3",
        "the scales of rows left out by those who add up",
        SUMS,
        "complete_sums<T>(sums.row_scales, sums.bias,",
        "complete_sums<T>(nullptr, sums.bias,",
    ),
    Mutant(
        "sums-4",
        "a norm adds the first row's sums to all",
        RMS,
        "load_sums<T, kInFlight>(p.sums, row, at, a);",
        "load_sums<T, kInFlight>(p.sums, 0, at, a);",
    ),
    Mutant(
        "sums-5",
        "a norm has sums and adds nothing",
        RMS,
        "if (!kInPieces && added == nullptr) return;",
        "if (added == nullptr) return;",
    ),
    Mutant(
        "sums-6",
        "every head is the first one's columns",
        ROPE,
        "const int column = head * p.cache.head_dim + at;",
        "const int column = at;",
    ),
    Mutant(
        "sums-7",
        "heads in float16 whatever the dtype",
        ROPE,
        "if (p.dtype == DType::kBF16) return load_sums<__nv_bfloat16>(p.sums, row, column, x);",
        "",
    ),
    Mutant(
        "sums-8",
        "left, though the next rows take their place",
        LINEAR,
        "if (launch.call.rows < p.rows || p.columns % kLaneElements != 0)",
        "if (p.columns % kLaneElements != 0)",
    ),
    Mutant(
        "sums-9",
        "left, though the last vector is cut",
        LINEAR,
        "if (launch.call.rows < p.rows || p.columns % kLaneElements != 0)",
        "if (launch.call.rows < p.rows)",
    ),
    Mutant(
        "sums-10",
        "left, though more rows are rounded behind these",
        LINEAR,
        "if (rows < p.rows) part.left = nullptr;",
        "",
    ),
    Mutant(
        "sums-11",
        "left, and added up, too",
        LINEAR,
        "*launch.call.left = sums; return;",
        "*launch.call.left = sums;",
    ),
    Mutant(
        "sums-12",
        "units added one after another, whatever their groups",
        LINEAR,
        "units_per_group, launch.call.row_scales, launch.call.bias};",
        "1, launch.call.row_scales, launch.call.bias};",
    ),
]
