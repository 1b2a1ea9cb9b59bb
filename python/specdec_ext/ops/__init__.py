"""The kernels of speculative decoding, on torch tensors.

Inference only: a tensor that requires gradients is refused. Outputs are given by the caller and
filled; nothing is copied or allocated on the way. The GIL is released while a kernel runs.

Axes     B requests, R rows (step tokens) of all requests, H query heads, G KV heads, K head dim,
         P pages, S page size in tokens, V vocabulary, W mask words.
Slots    The K/V of a request's token t lies in page ``page_table[b, t // S]`` at ``t % S``; the
         i-th row of the step lies at token ``kv_len[b] + i``. Page ids past that are never read.
Devices  All tensors of a call are on one device. CPU tensors are served by the CPU, where lengths,
         page ids and masks are checked value by value before anything runs. CUDA tensors are
         served on the caller's current stream without any synchronisation: what a device holds is
         not read on the host, so a kernel that meets a bad value leaves out that request and sets
         flags in ``status`` ([B] int32 or uint32, OR-ed in).

Every row's bits depend only on its query, the K/V of the tokens that it sees in position order,
and the scalar parameters: not on the other rows or requests, the page and slot numbers, how a
prompt was cut into chunks, or the number of threads.
"""

from __future__ import annotations

from specdec_ext._core import DeviceLimits, SlotLayout
from specdec_ext.ops._where import backend_names, device_limits, load_backend, plugin_path
from specdec_ext.ops.accept import (
    ACCEPTANCE_RULES,
    AcceptResults,
    DraftProbs,
    SamplingLaws,
    accept_scratch_bytes,
    accept_step,
    make_accept_results,
    sample_rows,
    synthetic_step,
)
from specdec_ext.ops.attention import spec_attention, step_attention
from specdec_ext.ops.beams import grow_beams, merge_beams
from specdec_ext.ops.growth import grow_drafts, make_growths, pack_drafts, propose_growths
from specdec_ext.ops.kv import append_kv, compact_kv, rope_append_kv, step_append_kv
from specdec_ext.ops.packed_weight import PACKED_FORMATS, PackedWeight, pack_weight
from specdec_ext.ops.proposed_drafts import keep_hidden, propose_drafts, recent_tokens
from specdec_ext.ops.rows import (
    e4m3_rows,
    gated_activation,
    linear,
    linear_scratch_bytes,
    linear_sums,
    rms_norm,
    unpack_weight,
)
from specdec_ext.ops.slots import (
    SlotResult,
    commit_step,
    draft_step,
    enter_slot,
    make_results,
    make_slots,
    read_results,
)
from specdec_ext.ops.step import (
    argmax,
    build_step,
    mask_from_parents,
    num_threads,
    pack_mask,
    set_num_threads,
)
from specdec_ext.ops.table import (
    AttentionInstance,
    AttentionProblem,
    AttentionTable,
    pick_attention,
    plan_workspace,
    supported_attention,
)
from specdec_ext.ops.torch_library import register_torch_library

__all__ = [
    "ACCEPTANCE_RULES",
    "PACKED_FORMATS",
    "AcceptResults",
    "AttentionInstance",
    "AttentionProblem",
    "AttentionTable",
    "DeviceLimits",
    "DraftProbs",
    "PackedWeight",
    "SamplingLaws",
    "SlotLayout",
    "SlotResult",
    "accept_scratch_bytes",
    "accept_step",
    "append_kv",
    "argmax",
    "backend_names",
    "build_step",
    "commit_step",
    "compact_kv",
    "device_limits",
    "draft_step",
    "e4m3_rows",
    "enter_slot",
    "gated_activation",
    "grow_beams",
    "grow_drafts",
    "keep_hidden",
    "linear",
    "linear_scratch_bytes",
    "linear_sums",
    "load_backend",
    "make_accept_results",
    "make_growths",
    "make_results",
    "make_slots",
    "mask_from_parents",
    "merge_beams",
    "num_threads",
    "pack_drafts",
    "pack_mask",
    "pack_weight",
    "pick_attention",
    "plan_workspace",
    "plugin_path",
    "propose_drafts",
    "propose_growths",
    "read_results",
    "recent_tokens",
    "register_torch_library",
    "rms_norm",
    "rope_append_kv",
    "sample_rows",
    "set_num_threads",
    "spec_attention",
    "step_append_kv",
    "step_attention",
    "supported_attention",
    "synthetic_step",
    "unpack_weight",
]
