"""Mutants of the finish kernel of attention."""

from __future__ import annotations

from mutants.model import Mutant

FINISH = "cuda/attention/finish.cuh"
OUTPUT = "cuda/attention/output.cuh"
TAIL = "cuda/attention/tail.cuh"
SOFTMAX = "cuda/attention/softmax.cuh"
ROWS = "cuda/attention/rows.cuh"

MUTANTS = [
    Mutant(
        "finish-1",
        "ancestors taken by slot, not along the path",
        TAIL,
        "request.tree ? min(request.kv_len, keys.tail_end) : keys.tail_end;",
        "keys.tail_end;",
    ),
    Mutant(
        "finish-2",
        "rank among the ancestors one off",
        TAIL,
        "position + __popc(bits & ((1u << lane) - 1));",
        "position + __popc(bits & ((2u << lane) - 1)) - (position > request.kv_len ? 1 : 0);",
    ),
    Mutant(
        "finish-3",
        "a warp's lanes do not wait for the tail's places",
        TAIL,
        "position += __popc(bits); } } __syncwarp();",
        "position += __popc(bits);\n    }\n  }",
    ),
    Mutant(
        "finish-4",
        "no __syncwarp between the scores and the softmax",
        FINISH,
        "shared->scores[mine][h] = score; } } } __syncwarp();",
        "shared->scores[mine][h] = score;\n      }\n    }\n    }",
    ),
    Mutant(
        "finish-5",
        "every part of a KV head takes its first query heads",
        FINISH,
        "const std::int32_t h = (part - kv_head * parts) * kHeads;",
        "const std::int32_t h = 0;",
    ),
    Mutant(
        "finish-6",
        "scores past the last key written",
        FINISH,
        "if (lane % 4 == h % 4 && mine < num_keys) shared->scores[mine][h] = score;",
        "if (lane % 4 == h % 4) shared->scores[mine][h] = score;",
        harmless="the array has room for a whole batch of keys, and nobody reads them",
    ),
    Mutant(
        "finish-7",
        "states folded from the last",
        FINISH,
        "load_state(states.place[h], first + s, &ml[s][h], part[s][h]);",
        "load_state(states.place[h], states.count[h] - 1 - first - s, &ml[s][h], part[s][h]);",
    ),
    Mutant(
        "finish-8",
        "states and tail change places in the sum",
        FINISH,
        "l[h] = merge(w, l[h], l_tail[h]);",
        "l[h] = merge({w.part, w.total}, l_tail[h], l[h]);",
        harmless="a sum of two in either order, the same for every way a row is computed",
    ),
    Mutant(
        "finish-9",
        "sink not in units of log2",
        OUTPUT,
        "call.sinks[head] * kLog2E);",
        "call.sinks[head]);",
    ),
    Mutant(
        "finish-10",
        "sink of the first head for all",
        FINISH,
        "output_factor(call, first_head + h, v_scale, m[h], l[h]);",
        "output_factor(call, first_head, v_scale, m[h], l[h]);",
    ),
    Mutant(
        "finish-11",
        "head in another row block looked up in the first",
        FINISH,
        "kv_head * row_blocks + my_row / launch.row_tile];",
        "kv_head * row_blocks + first_row / launch.row_tile];",
    ),
    Mutant(
        "finish-12",
        "an infinite result is written",
        FINISH,
        "bad = __any_sync(kAllLanes, bad) != 0 || l[h] == 0.0f;",
        "bad = l[h] == 0.0f;",
    ),
    Mutant(
        "finish-13",
        "rows of no request not written",
        FINISH,
        "finisher.store(out + i * call.cache.head_dim, zeros, true);",
        "",
    ),
    Mutant(
        "finish-14",
        "soft cap of the tail left out",
        SOFTMAX,
        "return mapped ? map(qk) : factor * qk;",
        "return factor * qk;",
    ),
    Mutant(
        "finish-15",
        "a score's tree over the lanes misses its last turn",
        TAIL,
        "value[0] += __shfl_xor_sync(kAllLanes, value[0], 1);",
        "",
    ),
    Mutant(
        "finish-16",
        "a row sees one key too many",
        TAIL,
        "return keys.tail_end - shift;",
        "return keys.tail_end - shift + 1;",
    ),
    Mutant(
        "finish-19",
        "the tail begins in front of the first key",
        ROWS,
        "exact_row_keys(position, call.max_depth, launch.granule, call.sliding_window, "
        "call.sink_tokens, call.first_key);",
        "exact_row_keys(position, call.max_depth, launch.granule, call.sliding_window, "
        "call.sink_tokens, 0);",
        tests="first_key_is_read and ampere_f16_f16_k64_r16",
    ),
]
