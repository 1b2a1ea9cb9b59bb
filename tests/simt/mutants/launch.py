"""Mutants of launches: what a kernel owes the one before it, its stream, the device's limits, the
registers that warpgroups hand over, operands that wgmma still reads."""

from __future__ import annotations

import re

from mutants.model import Mutant

APPEND, ROPE, COMPACT = "cuda/kv/append.cu", "cuda/kv/rope_append.cu", "cuda/kv/compact.cu"
ARGMAX, COMMIT, DRAFT = "cuda/step/argmax.cu", "cuda/step/commit_step.cu", "cuda/step/draft_step.cu"
SAMPLE, SYNTHETIC = "cuda/accept/sample_rows.cu", "cuda/accept/synthetic_step.cu"
RMS, GATE = "cuda/decoder/rms_norm.cu", "cuda/decoder/gated_activation.cu"
PLAN, FINISH = "cuda/attention/plan.cu", "cuda/attention/finish.cuh"
AMPERE, LAUNCH = "cuda/attention/ampere.cuh", "cuda/attention/hopper_launch.cuh"
MAIN, CONSUMER = "cuda/attention/hopper.cuh", "cuda/attention/hopper_consumer.cuh"
TILE, LINEAR = "cuda/attention/hopper_tile.h", "cuda/linear/hopper_linear.cuh"
LOAD = "cuda/attention/hopper_load.cuh"

WAIT = "gpu::grid_dependency_wait(); gpu::launch_dependents();"
NO_WAIT = "gpu::launch_dependents();"
NO_STREAM = "nullptr"


def _never_waits(name: str, file: str) -> Mutant:
    return Mutant(name, "does not wait for the kernel before it", file, WAIT, NO_WAIT)


def _default_stream(name: str, file: str, old: str) -> Mutant:
    """old: the launch's stream with what stands around it."""
    new = re.sub(r"\b(?:launch\.call|call|p)(?:\.exec)?\.stream", NO_STREAM, old)
    return Mutant(name, "launched on the default stream", file, old, new)


WAITS = [
    _never_waits("append-14", APPEND),
    _never_waits("rope-12", ROPE),
    _never_waits("compact-10", COMPACT),
    _never_waits("rms-13", RMS),
    _never_waits("gate-7", GATE),
    _never_waits("enter-8", COMMIT),
    _never_waits("sample-10", SAMPLE),
    _never_waits("synthetic-15", SYNTHETIC),
    _never_waits("plan-11", PLAN),
    _never_waits("ampere-34", AMPERE),
    Mutant(
        "finish-17",
        "does not wait for the kernel before it",
        FINISH,
        "gpu::grid_dependency_wait(); std::uint32_t flags",
        "std::uint32_t flags",
    ),
    Mutant(
        "append-15",
        "one thread waits for the kernel before it, and nobody for that thread",
        APPEND,
        WAIT,
        "if (threadIdx.x == 0) gpu::grid_dependency_wait(); gpu::launch_dependents();",
    ),
    Mutant(
        "compact-11",
        "the path's length is read before the wait",
        COMPACT,
        WAIT + " const int b = static_cast<int>(blockIdx.y), "
        "thread = static_cast<int>(threadIdx.x); const int n = p.path_len[b];",
        "const int b = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);\n"
        "  const int n = p.path_len[b];\n  gpu::grid_dependency_wait();\n"
        "  gpu::launch_dependents();",
    ),
    Mutant(
        "argmax-9",
        "pieces are joined before they are there",
        ARGMAX,
        WAIT + " const int row = static_cast<int>(blockIdx.x) * kWarps",
        NO_WAIT + " const int row = static_cast<int>(blockIdx.x) * kWarps",
    ),
]

LAYERS = "second_layer and hopper_f16_f16_k64_r128"
QUERIES = (
    "gpu::grid_dependency_wait();  // the queries are there; nothing from the second unit on "
    "gpu::launch_dependents();"
)
# The main pass of a layer that is not the first begins before the kernel in front of it ends.
EARLY = [
    Mutant(
        "hopper-54",
        "no wait for the keys of the step",
        LOAD,
        "gpu::grid_dependency_wait_if((block + 1) * kBlockKeys > kv_len || ahead-- == 0);",
        "(void)ahead;",
        tests=LAYERS,
    ),
    Mutant(
        "hopper-55",
        "a tile of old and new keys counts as old",
        LOAD,
        "(block + 1) * kBlockKeys > kv_len",
        "block * kBlockKeys >= kv_len",
        tests=LAYERS,
    ),
    Mutant("hopper-56", "no wait for the queries", CONSUMER, QUERIES, NO_WAIT, tests=LAYERS),
    Mutant(
        "hopper-57",
        "what comes behind may begin before this waits",
        CONSUMER,
        QUERIES,
        "gpu::launch_dependents();\n    gpu::grid_dependency_wait();",
        tests=LAYERS,
    ),
    Mutant(
        "hopper-58",
        "blocks without a unit wait for nobody",
        CONSUMER,
        "gpu::grid_dependency_wait();  // without a unit, too: what begins behind this kernel "
        "relies on it",
        "",
        tests=LAYERS,
    ),
    Mutant(
        "finish-20",
        "tails of requests that the plan has flagged are looked up",
        FINISH,
        "known && launch.work.job_begin[b] < launch.work.job_begin[b + 1]",
        "known",
    ),
]

STREAMS = [
    _default_stream("append-16", APPEND, "dim3(static_cast<unsigned>(threads)), 0, p.exec.stream"),
    _default_stream("rope-13", ROPE, "p.exec.stream, gpu::LaunchOptions"),
    _default_stream("compact-12", COMPACT, "sizeof(Moves), p.exec.stream"),
    _default_stream("argmax-10", ARGMAX, "dim3(kArgmaxThreads), 0, p.exec.stream"),
    _default_stream("rms-14", RMS, "p.exec.stream, options"),
    _default_stream("gate-8", GATE, "p.exec.stream, options"),
    _default_stream("slots-15", DRAFT, "sizeof(std::int32_t), p.exec.stream, options"),
    _default_stream("enter-9", COMMIT, "sizeof(CommitShared), p.exec.stream"),
    _default_stream("synthetic-16", SYNTHETIC, "sizeof(SyntheticShared), p.exec.stream"),
    _default_stream("plan-12", PLAN, "sizeof(PlanShared), launch.call.exec.stream"),
    _default_stream("ampere-35", AMPERE, "Config::kSmemBytes, launch.call.exec.stream"),
    _default_stream("finish-18", FINISH, "launch.call.exec.stream, {.dependent"),
]

LIMITS = [
    Mutant(
        "append-17",
        "more threads than a block may have",
        APPEND,
        "dim3(static_cast<unsigned>(threads)), 0",
        "dim3(static_cast<unsigned>(threads) + 1024), 0",
    ),
    Mutant(
        "rope-14",
        "heads along the third axis of the grid, all of them",
        ROPE,
        "blocks_per_row(p.step.num_rows, heads, team));",
        "blocks_per_row(p.step.num_rows, heads, team) << 16);",
    ),
    Mutant(
        "compact-13",
        "more shared memory than a block may have",
        COMPACT,
        "sizeof(Moves), p.exec.stream",
        "sizeof(Moves) + (227 << 10), p.exec.stream",
    ),
    Mutant(
        "argmax-11",
        "no blocks at all",
        ARGMAX,
        "dim3(static_cast<unsigned>((p.rows + kWarps - 1) / kWarps))",
        "dim3(static_cast<unsigned>(p.rows / (kWarps << 20)))",
    ),
    Mutant(
        "enter-10",
        "a block's threads do not find their registers",
        COMMIT,
        "constexpr int kCommitThreads = 512;",
        "constexpr int kCommitThreads = 1024;",
    ),
    Mutant(
        "sample-11",
        "a block of 1024 threads of 72 registers",
        SAMPLE,
        "dim3(law_threads(p.rows.vocab, 32))",
        "dim3(1024)",
    ),
    Mutant(
        "rms-15",
        "shared memory by the columns",
        RMS,
        "2 * kMaxWarps * sizeof(float),",
        "p.columns * (std::size_t{1} << 14),",
    ),
    Mutant(
        "ampere-36",
        "one ring of copies too many for the memory of 9.0",
        AMPERE,
        "Config::kSmemBytes, launch.call.exec.stream",
        "Config::kSmemBytes + (200 << 10), launch.call.exec.stream",
    ),
    Mutant(
        "hopper-45",
        "one more warpgroup of 168 registers",
        LAUNCH,
        "hopper::hopper_main<T, Tile>, dim3(launch.work.num_blocks), dim3(Tile::kThreads)",
        "hopper::hopper_main<T, Tile>, dim3(launch.work.num_blocks), dim3(Tile::kThreads + 128)",
    ),
    Mutant(
        "linear-56",
        "a second ring in the shared memory of a block",
        LINEAR,
        "sizeof(HopperLinearShared<Tile>), call.exec.stream",
        "3 * sizeof(HopperLinearShared<Tile>), call.exec.stream",
    ),
]

DEC = "if constexpr (Tile::kHandsOver) gpu::setmaxnreg_dec<Tile::kProducerRegisters>();"
INC = "gpu::setmaxnreg_inc<Tile::kConsumerRegisters>();"
REGISTERS = [
    Mutant(
        "hopper-46",
        "consumers take 8 more than there are",
        MAIN,
        INC,
        "gpu::setmaxnreg_inc<Tile::kConsumerRegisters + 8>();",
    ),
    Mutant(
        "hopper-47",
        "the producer keeps 8 that consumers take",
        MAIN,
        DEC,
        DEC.replace("Registers>", "Registers + 8>"),
    ),
    Mutant(
        "hopper-48",
        "consumers give what they should take",
        MAIN,
        INC,
        "gpu::setmaxnreg_dec<Tile::kConsumerRegisters>();",
    ),
    Mutant(
        "hopper-49",
        "one warp of the producer gives",
        MAIN,
        DEC,
        DEC.replace("if constexpr (", "if (threadIdx.x < 32 && "),
    ),
    Mutant(
        "hopper-50",
        "a block owns all registers of a multiprocessor, however many threads share them",
        TILE,
        "kGroups * kAtEntry - kConsumers * kConsumerRegisters;",
        "kFile / 128 - kConsumers * kConsumerRegisters;",
    ),
    Mutant("fp8-29", "the producer gives nothing", MAIN, DEC, ""),
    Mutant(
        "fp8-30",
        "consumers take 8 more than there are",
        MAIN,
        INC,
        "gpu::setmaxnreg_inc<Tile::kConsumerRegisters + 8>();",
    ),
    Mutant(
        "fp8-31",
        "a number that is no multiple of 8",
        MAIN,
        DEC,
        DEC.replace("Registers>", "Registers + 4>"),
    ),
]

OPERANDS = [
    Mutant(
        "hopper-51",
        "weights are packed while the product of those before reads them",
        CONSUMER,
        "const bool moved = weigh(block, decay); gpu::wgmma_wait<0>();",
        "const bool moved = weigh(block, decay);\n      products.pack_weights(s);\n"
        "      gpu::wgmma_wait<0>();",
    ),
    Mutant(
        "hopper-52",
        "one lane changes one weight while the last product reads it",
        CONSUMER,
        "close_sums(weights); gpu::wgmma_wait<0>();",
        "close_sums(weights);\n    if (lane == 7) s[28] += 1.0f;\n    products.pack_weights(s);\n"
        "    gpu::wgmma_wait<0>();",
    ),
    Mutant(
        "hopper-53",
        "scores that have just come are packed while the product of the weights runs",
        CONSUMER,
        "gpu::wgmma_wait<1>(); gpu::wgmma_hold(s);",
        "gpu::wgmma_wait<1>();\n      gpu::wgmma_hold(s);\n      products.pack_weights(s);",
    ),
    Mutant(
        "fp8-32",
        "weights are packed while the product of those before reads them",
        CONSUMER,
        "const bool moved = weigh(block, decay); gpu::wgmma_wait<0>();",
        "const bool moved = weigh(block, decay);\n      products.pack_weights(s);\n"
        "      gpu::wgmma_wait<0>();",
    ),
    Mutant(
        "fp8-33",
        "the last weights are cleared while the product reads them",
        CONSUMER,
        "close_sums(weights); gpu::wgmma_wait<0>();",
        "close_sums(weights);\n    s[26] = s[27] = s[30] = s[31] = 0.0f;\n"
        "    products.pack_weights(s);\n    gpu::wgmma_wait<0>();",
    ),
]

MUTANTS = [*WAITS, *EARLY, *STREAMS, *LIMITS, *REGISTERS, *OPERANDS]
