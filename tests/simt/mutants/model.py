"""What a mutant is, and which objects and tests a group of them needs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Suite:
    objects: tuple[str, ...]  # patterns of the object files that are compiled again
    files: tuple[str, ...]  # below tests/kernels
    tests: str  # pytest's -k
    unit: str = ""  # a source to compile instead: the few kernels that the tests run


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str  # suite and number
    bug: str  # in a few words
    file: str
    old: str  # occurs once
    new: str
    harmless: str = ""  # why no test can or should notice; empty: a bug
    tests: str = ""  # instead of the suite's -k
    unseen: str = dataclasses.field(default="", repr=False)  # why a bug that survives does

    @property
    def suite(self) -> str:
        return self.name.rsplit("-", 1)[0]


def main_unit(family: str, launcher: str, kernel: str) -> str:
    """The one instance of a family that a suite runs."""
    return f"""#include "attention/{family}.cuh"
#include "attention/instances/launchers.h"
namespace specdec::attention {{
void {launcher}(const AttentionLaunch& launch) {{ {kernel}(launch); }}
}}
"""


FINISH_UNIT = """#include "attention/finish.cuh"
#include "attention/instances/launchers.h"
namespace specdec::attention {
void finish_f16_f16(const AttentionLaunch& launch) {
  launch_finish_heads<__half, __half, 2>(launch);
}
}
"""
ATTENTION = (
    "test_cuda_attention.py",
    "test_cuda_attention_data.py",
    "test_cuda_exactness.py",
    "test_cuda_folding.py",
    "test_cuda_plan_reuse.py",
)
FAR = ("test_far_pages.py",)
SINKS = ("test_cuda_sink_tokens.py",)
OUTPUT = ("test_cuda_output.py",)
AMPERE_UNIT = main_unit(
    "ampere", "ampere_f16_f16_k64_r16", "launch_ampere<AmpereConfig<__half, __half, 64, 16>>"
)
HOPPER_UNIT = main_unit(
    "hopper_launch", "hopper_f16_f16_k64_r64", "launch_hopper<__half, HopperTile<64, 1>>"
)
# What kills most: values at every edge, bits against other schedules, bad data.
HARD = "(every_instance or every_edge or sms or bad_data or hard_cases)"

SUITES = {
    "append": Suite(("kv/append",), ("test_cuda_kv.py",), "append and emu and not rope"),
    "rope": Suite(("kv/rope",), ("test_cuda_kv.py",), "emu and (rope or position)"),
    "compact": Suite(("kv/compact",), ("test_cuda_compaction.py",), "emu"),
    "build": Suite(("step/build",), ("test_cuda_step.py",), "emu and not argmax"),
    "slots": Suite(
        ("step/draft", "step/commit"),
        ("test_slots.py", "test_slots_sampled.py"),
        "emu and not fast",
    ),
    "proposed": Suite(
        ("step/proposed", "step/draft", "step/commit"), ("test_proposed_drafts.py",), "emu"
    ),
    "beams": Suite(("step/beams",), ("test_beam_ops.py",), "emu"),
    "growth": Suite(("step/growth",), ("test_growth_ops.py",), "emu"),
    "sample": Suite(("accept/",), ("test_cuda_sample.py",), "emu and not fast"),
    "accept": Suite(("accept/accept",), ("test_cuda_accept.py",), "emu and not fast"),
    "enter": Suite(("step/commit",), ("test_slots_prompt.py", "test_slots.py"), "emu and not fast"),
    "rows": Suite(
        ("accept/row_laws", "accept/accept_step", "accept/sample"),
        ("test_cuda_sample.py", "test_cuda_accept.py"),
        "emu and not fast",
    ),
    "lists": Suite(
        ("accept/row_laws", "accept/sample"),
        ("test_cuda_sample.py",),
        "emu and (are_broad or one_bin or reads_at_once or just_full or edges_of or checker)",
    ),
    "held": Suite(
        ("accept/row_laws", "accept/accept_step"),
        ("test_cuda_held.py", "test_cuda_accept.py"),
        "test_cuda_held or under_the_checker or tree_is_left_out",
    ),
    "masses": Suite(("accept/row_laws",), ("test_cuda_masses.py",), "emu"),
    "synthetic": Suite(
        ("accept/synthetic", "accept/accept_step"), ("test_cuda_synthetic.py",), "emu and not fast"
    ),
    "argmax": Suite(("step/argmax",), ("test_cuda_step.py",), "argmax and emu"),
    "rms": Suite(("decoder/rms",), ("test_row_ops.py",), "emu and not gated"),
    "gate": Suite(("decoder/gated",), ("test_row_ops.py",), "emu and not norm and not addition"),
    "e4m3": Suite(
        ("linear/linear.cu", "linear/e4m3_rows", "linear/instances/hopper_e4m3"),
        ("test_e4m3_linear.py",),
        "emu",
    ),
    "unpack": Suite(
        ("linear/unpack", "linear/e4m3_rows"), ("test_unpack_weight.py",), "emu and not fast"
    ),
    "packed": Suite(
        (
            "linear/linear",
            *(
                f"linear/packed{width}_{t}"
                for width in ("", "_wide4", "_wide8")
                for t in ("bf16", "f16")
            ),
            *(
                f"linear/instances/hopper_packed_{t}_{kind}"
                for kind in ("q4_0", "q4_1", "q4_g", "q4_k", "q5_k", "q6_k", "q8_0", "q8_g", "f8_g")
                for t in ("bf16", "f16")
            ),
        ),
        ("test_packed_linear.py",),
        "emu and not fast",
    ),
    "linear": Suite(
        ("linear/linear", "linear/matrix_bf16", "linear/instances/hopper_linear_bf16"),
        ("test_cuda_linear.py",),
        "emu and (bfloat16 or not float16)",
    ),
    "sums": Suite(("linear/linear.cu", "decoder/rms", "kv/rope"), ("test_linear_sums.py",), "emu"),
    "plan": Suite(("attention/plan",), ATTENTION, f"{HARD} and ampere_f16_f16_k64_r16"),
    "ampere": Suite(
        (),
        ATTENTION,
        f"{HARD} and ampere_f16_f16_k64_r64",
        main_unit(
            "ampere",
            "ampere_f16_f16_k64_r64",
            "launch_ampere<AmpereConfig<__half, __half, 64, 64>>",
        ),
    ),
    "widen": Suite(
        (),
        ATTENTION,
        f"{HARD} and ampere_f16_e4m3_k64_r64",
        main_unit(
            "ampere",
            "ampere_f16_e4m3_k64_r64",
            "launch_ampere<AmpereConfig<__half, __nv_fp8_e4m3, 64, 64>>",
        ),
    ),
    "hopper": Suite(
        (),
        ATTENTION,
        f"{HARD} and hopper_f16_f16_k64_r128",
        main_unit(
            "hopper_launch", "hopper_f16_f16_k64_r128", "launch_hopper<__half, HopperTile<64, 2>>"
        ),
    ),
    "queries": Suite(
        (),
        ATTENTION,
        "every_instance and hopper_f16_f16_k256_r64",
        main_unit(
            "hopper_launch", "hopper_f16_f16_k256_r64", "launch_hopper<__half, HopperTile<256, 1>>"
        ),
    ),
    "wide": Suite(
        (),
        ATTENTION,
        f"{HARD} and hopper_f16_e4m3_k64_r128",
        main_unit(
            "hopper_launch",
            "hopper_f16_e4m3_k64_r128",
            "launch_hopper<__half, HopperTile<64, 2, true>>",
        ),
    ),
    "fp8": Suite(
        (),
        ("test_cuda_fp8.py",),
        "emu and not fast and f16_e4m3_k128_r128",
        main_unit(
            "hopper_launch",
            "hopper_f16_e4m3_k128_r128_fp8",
            "launch_hopper<__half, HopperFp8Tile<128, 2>>",
        ),
    ),
    "finish": Suite((), ATTENTION, f"{HARD} and ampere_f16_f16_k64_r16", FINISH_UNIT),
    "generic": Suite(("attention/generic",), ATTENTION, "first_key_is_read and generic"),
    "sinkplan": Suite(("attention/plan",), SINKS, "ampere_f16_f16_k64_r16"),
    "sinkampere": Suite((), SINKS, "ampere_f16_f16_k64_r16", AMPERE_UNIT),
    "sinkhopper": Suite((), SINKS, "hopper_f16_f16_k64_r64", HOPPER_UNIT),
    "sinkfinish": Suite((), SINKS, "ampere_f16_f16_k64_r16", FINISH_UNIT),
    "sinkgeneric": Suite(("attention/generic",), SINKS, "generic"),
    "outputampere": Suite((), OUTPUT, "ampere_f16_f16_k64_r16", AMPERE_UNIT),
    "outputnarrow": Suite(
        (),
        OUTPUT,
        "every_instance and ampere_f16_f16_k80_r16",
        main_unit(
            "ampere",
            "ampere_f16_f16_k80_r16",
            "launch_ampere<AmpereConfig<__half, __half, 80, 16>>",
        ),
    ),
    "outputhopper": Suite((), OUTPUT, "hopper_f16_f16_k64_r64", HOPPER_UNIT),
    "outputwide": Suite(
        (),
        OUTPUT,
        "hopper_f16_e4m3_k64_r128",
        main_unit(
            "hopper_launch",
            "hopper_f16_e4m3_k64_r128",
            "launch_hopper<__half, HopperTile<64, 2, true>>",
        ),
    ),
    "outputfinish": Suite((), OUTPUT, "ampere_f16_f16_k64_r16", FINISH_UNIT),
    # Pages and layers beyond the reach of 32 bits.
    "far": Suite(("kv/",), FAR, "append or compaction"),
    "fargeneric": Suite(("attention/generic",), FAR, "generic"),
    "farampere": Suite((), FAR, "ampere_f16_f16_k64_r16", AMPERE_UNIT),
    "farfinish": Suite((), FAR, "ampere_f16_f16_k64_r16", FINISH_UNIT),
    "farhopper": Suite((), FAR, "hopper_f16_f16_k64_r64", HOPPER_UNIT),
}
