"""Mutants of RMSNorm and the gated activation."""

from __future__ import annotations

from mutants.model import Mutant

NORM = "cuda/decoder/rms_norm.cu"
GATE = "cuda/decoder/gated_activation.cu"
ROWS = "cuda/decoder/row_elements.cuh"

MUTANTS = [
    Mutant(
        "rms-1",
        "no barrier between the warps' sums and their total",
        NORM,
        "shared[threadIdx.x / 32] = sum;\n  __syncthreads();",
        "shared[threadIdx.x / 32] = sum;",
    ),
    Mutant(
        "rms-2",
        "both sums in one place",
        NORM,
        "block_sum(sum, sums + kMaxWarps)",
        "block_sum(sum, sums)",
    ),
    Mutant(
        "rms-3",
        "the last warp's sum forgotten",
        NORM,
        "for (int w = 0; w < warps; ++w)",
        "for (int w = 0; w + 1 < warps || w == 0; ++w)",
    ),
    Mutant(
        "rms-4",
        "eps outside of the root",
        NORM,
        "1.0f / sqrtf(sum / static_cast<float>(p.columns) + p.eps)",
        "1.0f / (sqrtf(sum / static_cast<float>(p.columns)) + p.eps)",
    ),
    Mutant(
        "rms-5",
        "mean over the vectors' room instead of the columns",
        NORM,
        "sum / static_cast<float>(p.columns)",
        "sum / static_cast<float>((p.columns + 7) / 8 * 8)",
    ),
    Mutant(
        "rms-6",
        "the quotient is not rounded before the weight",
        NORM,
        "rounded<T>(w[i] * rounded<T>(x[i] * inverse))",
        "rounded<T>(w[i] * (x[i] * inverse))",
        tests="transformers and emu",
    ),
    Mutant(
        "rms-7",
        "Gemma's quotient is rounded before the weight",
        NORM,
        "rounded<T>(x[i] * inverse * (1.0f + w[i]))",
        "rounded<T>(rounded<T>(x[i] * inverse) * (1.0f + w[i]))",
        tests="transformers and emu",
    ),
    Mutant(
        "rms-8",
        "the sum is normalised before it is rounded",
        NORM,
        "v[i] = rounded<T>(v[i] + a[i]);",
        "v[i] = v[i] + a[i];",
    ),
    Mutant(
        "rms-9",
        "the sum is not stored",
        NORM,
        "    store_vector(v, x, at, p.columns, aligned);\n  };",
        "  };",
    ),
    Mutant(
        "rms-10",
        "what is read again is not summed",
        NORM,
        "    take(at, v);\n    sum += squares(v);",
        "    take(at, v);",
    ),
    Mutant(
        "rms-11",
        "weights from the row's start for every vector",
        NORM,
        "load_vector(weight, at, p.columns, aligned, w);",
        "load_vector(weight, at % 8, p.columns, aligned, w);",
    ),
    Mutant(
        "rms-12",
        "alignment of what is added not looked at",
        NORM,
        " && fits(p.added, p.added_row_stride) &&",
        " &&",
        tests="addition and emu",
    ),
    Mutant(
        "gate-1",
        "the other half first",
        GATE,
        "load_vector(gate, at, p.columns, aligned, x);\n"
        "  load_vector(gate + p.columns, at, p.columns, aligned, up);",
        "load_vector(gate, at, p.columns, aligned, up);\n"
        "  load_vector(gate + p.columns, at, p.columns, aligned, x);",
    ),
    Mutant(
        "gate-2",
        "the activation is not rounded",
        GATE,
        "rounded<T>(active) * up[i]",
        "active * up[i]",
        tests="transformers and emu",
    ),
    Mutant(
        "gate-3",
        "sign of the exponent",
        GATE,
        "expf(-x)",
        "expf(x)",
    ),
    Mutant(
        "gate-4",
        "the cube forgotten",
        GATE,
        "0.044715f * x * x * x",
        "0.044715f * x",
    ),
    Mutant(
        "gate-5",
        "columns that fill no vector are taken for aligned",
        GATE,
        "p.columns % kLaneElements == 0 &&",
        "true &&",
    ),
    Mutant(
        "gate-6",
        "a cut vector is written to its end",
        ROWS,
        "    if (at + i < columns) narrow(x[i], row[at + i]);",
        "    narrow(x[i], row[at + i]);",
    ),
]
