"""
Compiled core of specdec_ext. Use the specdec_ext package; this module is its engine.
"""

from __future__ import annotations

import collections.abc
import typing

import numpy
import numpy.typing
import typing_extensions

__all__: list[str] = [
    "BEAM_SCORES",
    "DRAFT_SOURCES",
    "GROWTH_BYTES",
    "MASK_WORDS",
    "MAX_STEP_TOKENS",
    "PACK_LAYOUT",
    "BeamDrafter",
    "Bfloat16Array",
    "ChoiceTree",
    "DeviceLimits",
    "DraftPasses",
    "Eagle3Head",
    "Executor",
    "LazyZeros",
    "LinearSums",
    "LlamaDecoder",
    "MedusaDrafter",
    "MedusaHeads",
    "PackedLinear",
    "PagePools",
    "RecurrentDrafter",
    "SearchCost",
    "ShardedStep",
    "SharedCounters",
    "SlotEntry",
    "SlotLayout",
    "StagedChoices",
    "StagedStep",
    "StagedTree",
    "StagingLayout",
    "StepCost",
    "StepOutput",
    "StepPlan",
    "StepTimes",
    "VerifiedDraft",
    "accept_scratch_bytes",
    "accept_step",
    "acceptance_rules",
    "append_kv",
    "argmax",
    "backend_memory",
    "backend_names",
    "best_allowed",
    "build_step",
    "commit_step",
    "compact_kv",
    "convert_floats",
    "count_not_finite",
    "cpu_isa",
    "cuda_info",
    "decoder_packs",
    "dequantize",
    "device_limits",
    "draft_step",
    "e4m3_rows",
    "fill_step_plan",
    "gated_activation",
    "grow_beams",
    "grow_drafts",
    "guess_tree",
    "has_fast_attention",
    "keep_hidden",
    "kv_row_bytes",
    "kv_row_width",
    "linear",
    "linear_scratch_bytes",
    "load_backend",
    "make_step_plan",
    "map_packs",
    "mask_from_parents",
    "merge_best",
    "merge_step_beams",
    "move_kv",
    "num_threads",
    "pack_drafts",
    "pack_mask",
    "packed_bytes",
    "pages_in_window",
    "plan_workspace",
    "propose_drafts",
    "propose_growths",
    "random_uniform",
    "recent_tokens",
    "rms_norm",
    "rope_append_kv",
    "sample_rows",
    "set_num_threads",
    "spec_attention",
    "step_append_kv",
    "step_attention",
    "supported_attention",
    "synthetic_step",
    "text_array",
    "text_array_end",
    "unpack_weight",
]

class StepPlan:
    """
    StepSizes of one step. Arrays are read-only views, valid until the executor's next plan().
    """
    def __init__(
        self,
        *,
        max_requests: typing.SupportsInt | typing.SupportsIndex,
        max_rows: typing.SupportsInt | typing.SupportsIndex,
        max_pages_per_request: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        An empty plan, for fill_step_plan.
        """
    def pack(
        self, page_size: typing.SupportsInt | typing.SupportsIndex
    ) -> numpy.typing.NDArray[numpy.int32]:
        """
        The plan as int32 words, for unpack() on another rank. K/V moves and copies of pages that are due go with the first packet and no other.
        """
    def unpack(self, words: typing.Annotated[numpy.typing.ArrayLike, numpy.int32]) -> None:
        """
        Become the plan that another rank has packed.
        """
    @property
    def cu_logits(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        [B + 1] int32 first logit row of each request
        """
    @property
    def cu_rows(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        [B + 1] int32 first row of each request
        """
    @property
    def generation(self) -> int: ...
    @property
    def is_tree(self) -> numpy.typing.NDArray[numpy.uint8]:
        """
        [B] uint8, 0: the rows are a causal chain
        """
    @property
    def kv_len(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        [B] int32 tokens in the KV cache before the step
        """
    @property
    def kv_moves(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        [M, 2] int32: what the last commit moved in the pages, from and to, as page * page size + place in the page
        """
    @property
    def logit_rows(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        [L] int32 rows whose scores are needed
        """
    @property
    def mask(self) -> numpy.typing.NDArray[numpy.uint32]:
        """
        [R, 4] uint32 ancestor bits, least significant first; only valid where is_tree
        """
    @property
    def needs_logits(self) -> bool: ...
    @property
    def num_logit_rows(self) -> int: ...
    @property
    def num_prefill_rows(self) -> int: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def page_orders(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        [N, 3] int32: what was done with pages behind those moves, as PagePools.follow() takes it
        """
    @property
    def page_table(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        [B, max_pages] int32 page ids in token order; entries past the length are stale
        """
    @property
    def parents(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        [R] int32 parent row within the request, -1 for its first row
        """
    @property
    def positions(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        [R] int32 absolute positions
        """
    @property
    def request_ids(self) -> numpy.typing.NDArray[numpy.int64]:
        """
        [B] int64 what submit() returned; 0 in a plan made by hand
        """
    @property
    def slot(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        [B] int32 executor slot of each request
        """
    @property
    def step(self) -> int: ...
    @property
    def tokens(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        [R] int32 token ids
        """

class DeviceLimits:
    """
    What a kernel choice may depend on besides the problem.
    """
    def __init__(
        self,
        major: typing.SupportsInt | typing.SupportsIndex,
        minor: typing.SupportsInt | typing.SupportsIndex,
        num_sms: typing.SupportsInt | typing.SupportsIndex,
        shared_bytes: typing.SupportsInt | typing.SupportsIndex,
        l2_bytes: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    @property
    def l2_bytes(self) -> int: ...
    @property
    def major(self) -> int:
        """
        compute capability, before the dot
        """
    @property
    def minor(self) -> int:
        """
        compute capability, after the dot
        """
    @property
    def num_sms(self) -> int: ...
    @property
    def shared_bytes(self) -> int:
        """
        shared memory that one block can have
        """

class LinearSums:
    """
    A product that ``linear`` left in pieces in its workspace, to be read before the workspace is used again.
    """
    @property
    def shape(self) -> tuple[int, int]: ...

class PackedLinear:
    """
    A linear layer for few rows: weights packed once, streamed per call.
    """
    def __init__(self, weight: typing.Any, bias: typing.Any = None) -> None:
        """
        weight [N, K] and bias [N] (CPU, float32, bfloat16 or float16) are copied. A quantised weight is a pair: its blocks, uint8 [N, bytes of a row], and their format's name: q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, q4_g, q8_g, f8_g or f8_a8.
        """
    def read(self) -> int:
        """
        Read the packed weights and do nothing else: the floor of ``run``. Returns a checksum.
        """
    def run(self, x: typing.Any, out: typing.Any, fast: bool = False) -> None:
        """
        Write ``x @ weight.T + bias`` into ``out``.

        Parameters
        ----------
        x : tensor [R, K]
            float32, bfloat16 or float16, CPU, inner dimension contiguous. Rounded to bfloat16 if the weight
            is bfloat16 or e4m3 (f8_a8: to e4m3 then, with a scale for the row), to 8 bits in blocks of 32 if
            it is quantised; used as float32 otherwise.
        out : tensor [R, N]
            Any of the three dtypes, CPU, inner dimension contiguous. Accumulation is float32.
        fast : bool
            On processors with tiles, if R is ``many_rows`` or more and the weight is quantised: its elements
            and ``x`` are rounded to bfloat16, and ``out`` is that of a bfloat16 weight.

        Otherwise a row of ``out`` depends only on its row of ``x``: not on R, not on threads.
        Raises ValueError for shapes, strides and devices, TypeError for dtypes.
        """
    def unpack_rows(self, ids: typing.Any, out: typing.Any) -> None:
        """
        Write rows ``ids`` int32 [n] of the weight into ``out`` float32 [n, K].
        """
    @property
    def dtype(self) -> str: ...
    @property
    def in_features(self) -> int: ...
    @property
    def many_rows(self) -> int:
        """
        From so many rows on ``run(fast=True)`` differs; 0: never.
        """
    @property
    def out_features(self) -> int: ...
    @property
    def weight_bytes(self) -> int:
        """
        Bytes of packed weights and bias, padding included.
        """

class LlamaDecoder:
    """
    A decoder of the Llama shape: all rows of a step in one call, one parallel region.

    Runs Llama, Vicuna, Mistral, Qwen2, Qwen3, SmolLM3, Gemma 2 and Gemma 3 (text) checkpoints in
    float32, bfloat16, float16 or GGUF's block formats, each weight in its own. Norms, attention and activations are float32; a row's bits depend on its
    own path alone. Every setter copies. Raises ValueError naming the field or the tensor.
    """
    def __init__(
        self,
        *,
        vocab_size: typing.SupportsInt | typing.SupportsIndex,
        hidden_size: typing.SupportsInt | typing.SupportsIndex,
        intermediate_size: typing.SupportsInt | typing.SupportsIndex,
        num_layers: typing.SupportsInt | typing.SupportsIndex,
        num_heads: typing.SupportsInt | typing.SupportsIndex,
        num_kv_heads: typing.SupportsInt | typing.SupportsIndex,
        head_dim: typing.SupportsInt | typing.SupportsIndex,
        max_rows: typing.SupportsInt | typing.SupportsIndex,
        max_position: typing.SupportsInt | typing.SupportsIndex,
        rms_norm_eps: typing.SupportsFloat | typing.SupportsIndex,
        activation: str,
        attention_scale: typing.SupportsFloat | typing.SupportsIndex,
        attention_softcap: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        final_softcap: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        embedding_scale: typing.SupportsFloat | typing.SupportsIndex = 1.0,
        norm_offset: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        has_qk_norm: bool = False,
        has_sandwich_norms: bool = False,
        tie_word_embeddings: bool = False,
        rope_index: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        sliding_window: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        head_size: typing.SupportsInt | typing.SupportsIndex = 0,
        shard_rank: typing.SupportsInt | typing.SupportsIndex = 0,
        kv_head_bounds: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        hidden_bounds: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        ffn_bounds: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        head_bounds: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        sink_tokens: typing.SupportsInt | typing.SupportsIndex = 0,
        adds_partial_sums: bool = False,
        has_fast_forms: bool = False,
    ) -> None:
        """
        Fields as in config.json; ``rope_index`` and ``sliding_window`` have one entry per layer (table index or -1; tokens or 0). ``sink_tokens``: of a text's start that layers with a window see besides. ``max_rows`` sizes the buffers. ``head_size``: rows of the head if they are not the whole vocabulary. With bounds [ranks + 1] it computes the rows of each projection that lie between those of ``shard_rank``; with ``adds_partial_sums`` the output and the down projection have all rows, of the columns that this rank computes, and the ranks' sums are added up. ``has_fast_forms``: passes of many rows multiply quantised weights as bfloat16, and attention rounds to it, where that is faster (processors with tiles), so a row's bits depend on how many rows a pass has; not for a shard.
        """
    def bind_cache(
        self,
        k_pages: typing.Any,
        v_pages: typing.Any,
        k_scale: typing.Any = None,
        v_scale: typing.Any = None,
    ) -> None:
        """
        Use these pages [layers, P, G, S, kv_row_width(dtype, K)] from now on; keeps them alive. All weights must be set. k_scale, v_scale: float32 [layers, G], copied; what e4m3 pages hold times these is K and V; None: 1.
        """
    def embed(self, tokens: typing.Any, out: typing.Any) -> None:
        """
        Rows of the input embedding table as stored (no model's scale on them): tokens int32 [n], out float32 [n, hidden_size].
        """
    def forward(
        self, plan: StepPlan, out: typing.Any, hidden: typing.Any = None, best: typing.Any = None
    ) -> None:
        """
        Run the rows of ``plan`` and append their K/V to the pages.

        Parameters
        ----------
        plan : StepPlan
        out : tensor, contiguous
            int32 [L]: the greedy ids of the logit rows (first largest score, -1 for a row with a NaN).
            float32 [L, V]: their scores.
        hidden : tensor float32 [L, hidden_size], contiguous, optional
            Receives the head's input of each logit row: the final norm's output.
        best : tensor int32 [L], contiguous, optional
            Beside scores: receives the greedy ids.

        Releases the GIL. One call at a time per decoder.
        """
    def read_weights(self) -> int:
        """
        Read the packed weights as a greedy step does and do nothing else: the floor of ``forward``. Returns a checksum.
        """
    def score_rows(self, hidden: typing.Any, out: typing.Any) -> None:
        """
        Write the output head's scores of ``hidden`` float32 [n, hidden_size] into ``out`` float32 [n, V]: for rows that forward() gave as hidden, the bits of its scores.
        """
    def set_embedding(self, weight: typing.Any) -> None:
        """
        weight [V, hidden]; with tied embeddings it is the head as well.
        """
    def set_final_norm(self, weight: typing.Any) -> None:
        """
        weight [hidden].
        """
    def set_head(self, weight: typing.Any) -> None:
        """
        weight [head_size, hidden].
        """
    def set_layer(
        self, layer: typing.SupportsInt | typing.SupportsIndex, tensors: dict[str, typing.Any]
    ) -> None:
        """
        Give layer ``layer`` its weights, by checkpoint name.

        ``tensors`` maps names without ``model.layers.<i>.``, e.g. ``self_attn.q_proj.weight`` [H*K, hidden],
        to weights as PackedLinear takes them. Weights that read the same input (q, k, v; gate, up) are all
        quantised or all of one dtype. Projection biases are optional.
        """
    def set_rope(
        self, index: typing.SupportsInt | typing.SupportsIndex, cos: typing.Any, sin: typing.Any
    ) -> None:
        """
        Rotary table: cos and sin float32 [>= max_position, rotary_dim / 2].
        """
    def set_taps(
        self,
        layers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        rows: typing.Any,
    ) -> None:
        """
        From now on forward() leaves the residual stream of its rows, as it enters each of these layers (num_layers: as it leaves the last), in ``rows`` float32 [max_rows, len(layers) * hidden_size]; keeps it alive. No layers, rows None: nothing is left.
        """
    def unpack_head_rows(self, ids: typing.Any, out: typing.Any) -> None:
        """
        Write rows ``ids`` int32 [n] of the output head's weight into ``out`` float32 [n, hidden_size].
        """
    @property
    def buffer_bytes(self) -> int:
        """
        Bytes of the buffers between layers (after bind_cache).
        """
    @property
    def has_fast_forms(self) -> bool:
        """
        Whether passes of many rows multiply other forms of their inputs than short ones.
        """
    @property
    def weight_bytes(self) -> int:
        """
        Bytes of packed weights that a step reads.
        """

class SharedCounters:
    """
    Counters that processes share, a cache line each: one adds, the others wait. What was written before add() is seen behind wait().
    """
    def __init__(self, memory: typing_extensions.Buffer) -> None:
        """
        memory: writable bytes of a shared mapping, zeros at first.
        """
    def add(self, index: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def wait(
        self,
        index: typing.SupportsInt | typing.SupportsIndex,
        target: typing.SupportsInt | typing.SupportsIndex,
        seconds: typing.SupportsFloat | typing.SupportsIndex,
    ) -> bool:
        """
        Until the counter has been added to `target` times (modulo 2^32); False: it was not within `seconds`. Releases the GIL.
        """

class ShardedStep:
    """
    A forward pass of a decoder that holds a shard. run_part() for each part in order, the ranks' chunks gathered in between, then finish(). Raises ValueError.
    """
    def __init__(self, decoder: LlamaDecoder, plan: StepPlan, embedded: typing.Any = None) -> None:
        """
        embedded: float32 [R, hidden_size], what embedded_rows() of rank 0 gave; rank 0 needs none.
        """
    def chunk_bytes(self, part: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        Bytes of each rank's chunk behind a part, for the longest of them.
        """
    def embedded_rows(self) -> numpy.typing.NDArray[numpy.float32]:
        """
        A copy of the rows that the first layer reads, before the first part.
        """
    def finish(self, gathered: typing.Any, out: typing.Any, hidden: typing.Any = None) -> None:
        """
        out: float32 [L, own scores], or uint8 [L, 8] for the best score of each row and its id, to be merged. hidden: as LlamaDecoder.forward's. Releases the GIL.
        """
    def run_part(
        self,
        part: typing.SupportsInt | typing.SupportsIndex,
        gathered: typing.Any,
        chunk: typing.Any,
    ) -> None:
        """
        gathered: uint8, the ranks' chunks behind the part before, one after another (None for part 0). chunk: uint8, receives this rank's. Releases the GIL.
        """
    @property
    def num_parts(self) -> int: ...

class SlotLayout:
    """
    What the slots of a pool have in common (cpp/algo/slot.h).
    """
    def __init__(
        self,
        *,
        method: str,
        max_seq_len: typing.SupportsInt | typing.SupportsIndex,
        lookahead: tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ] = (1, 1, 0),
        max_matching_ngram_size: typing.SupportsInt | typing.SupportsIndex = 2,
    ) -> None: ...
    def request_bytes(
        self,
        prompt_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        *,
        max_tokens: typing.SupportsInt | typing.SupportsIndex,
        eos_token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        stop_token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        speculative: bool = True,
        lookahead: tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ] = (1, 1, 0),
        max_draft_len: typing.SupportsInt | typing.SupportsIndex = 4,
        is_keep_all: bool = True,
        is_use_oldest: bool = True,
        suffix: dict[str, typing.Any] = {},
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> bytes:
        """
        The start of the slot of a request that enters.
        """
    @property
    def history_offset(self) -> int:
        """
        Bytes before a slot's history, int32 [max_seq_len]: its prompt from the start on.
        """
    @property
    def max_seq_len(self) -> int: ...
    @property
    def result_words(self) -> int:
        """
        int32 words of what commit_step writes for one request.
        """
    @property
    def slot_bytes(self) -> int:
        """
        Bytes of one slot.
        """

class StagingLayout:
    """
    Offsets, in int32 words, of the parts of one place of the staging ring (cpp/engine/staging.h).
    """
    @property
    def acceptance(self) -> int: ...
    @property
    def acceptance_threshold(self) -> int: ...
    @property
    def choice_parents(self) -> int: ...
    @property
    def commit_ids(self) -> int: ...
    @property
    def cu_logits(self) -> int: ...
    @property
    def cu_rows(self) -> int: ...
    @property
    def guesses(self) -> int: ...
    @property
    def kv_len(self) -> int: ...
    @property
    def logit_rows(self) -> int: ...
    @property
    def max_drafts(self) -> int: ...
    @property
    def min_p(self) -> int: ...
    @property
    def move_cu_rows(self) -> int: ...
    @property
    def move_kv_len(self) -> int: ...
    @property
    def move_path(self) -> int: ...
    @property
    def move_path_len(self) -> int: ...
    @property
    def narrow(self) -> int:
        """
        Windows with tables of their own.
        """
    @property
    def narrow_tables(self) -> int: ...
    @property
    def page_table(self) -> int: ...
    @property
    def pages_per_request(self) -> int: ...
    @property
    def posterior_alpha(self) -> int: ...
    @property
    def posterior_threshold(self) -> int: ...
    @property
    def prompt_parents(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def slot_ids(self) -> int: ...
    @property
    def temperature(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> int: ...
    @property
    def window_rows(self) -> int: ...
    @property
    def words(self) -> int: ...

class SlotEntry:
    """
    The start of a slot, within the ring of entries.
    """
    @property
    def at(self) -> int:
        """
        Where in the slot.
        """
    @property
    def bytes(self) -> int: ...
    @property
    def enters(self) -> bool:
        """
        False: the slot is the request's already.
        """
    @property
    def offset(self) -> int: ...
    @property
    def request_id(self) -> int: ...
    @property
    def slot(self) -> int: ...

class StagedChoices:
    """
    Rows of scores that the host reads.
    """
    @property
    def count(self) -> int: ...
    @property
    def first(self) -> int:
        """
        Among the step's choices.
        """
    @property
    def slot(self) -> int:
        """
        Whose drafter goes on from them; -1: nobody's.
        """

class StagedTree:
    """
    A tree of the device's that the host decides on.
    """
    @property
    def decode(self) -> int:
        """
        Among the step's decoding requests.
        """
    @property
    def rows(self) -> int:
        """
        At most.
        """
    @property
    def slot(self) -> int: ...

class StagedStep:
    """
    What the host knows of a step that it enqueues.
    """
    @property
    def entries(self) -> list[SlotEntry]: ...
    @property
    def host_choices(self) -> list[StagedChoices]:
        """
        Of requests whose rows the host knows; their scores come first in the ring.
        """
    @property
    def host_trees(self) -> list[StagedTree]:
        """
        Their scores follow.
        """
    @property
    def index(self) -> int: ...
    @property
    def kept_rows(self) -> list[tuple[int, int]]:
        """
        (slot, row of its part of the last step) that a drafter goes on from.
        """
    @property
    def max_decode_rows(self) -> int:
        """
        Rows of all decoding requests, an upper bound.
        """
    @property
    def max_kv_len(self) -> int:
        """
        Tokens and rows of any one request, an upper bound.
        """
    @property
    def max_rows(self) -> int:
        """
        Of any one request, an upper bound.
        """
    @property
    def most_asked(self) -> int:
        """
        Drafts of any one request that its drafter is to make.
        """
    @property
    def moves(self) -> bool:
        """
        K/V is to be moved before the step.
        """
    @property
    def needs_scores(self) -> bool:
        """
        Somebody samples: the model's best tokens are not enough.
        """
    @property
    def num_decodes(self) -> int: ...
    @property
    def num_prompt_logits(self) -> int: ...
    @property
    def num_prompt_rows(self) -> int: ...
    @property
    def num_prompts(self) -> int: ...
    @property
    def page_orders(self) -> list[tuple[bool, int, int, list[int]]]:
        """
        Copies to be made before everything else, in this order: (to the host's pool or from there, page, page of the host's pool, the page's parts by narrow window, -1: none).
        """
    @property
    def ring(self) -> int:
        """
        Its place in the rings.
        """
    @property
    def second_worth(self) -> float:
        """
        Tokens that a second of drafting has to bring; 0: any.
        """

class PagePools:
    """
    Pools of pages on the host that go by one number, with their copies in the host's pool. See cpp/engine/page_pools.h.
    """
    def __init__(
        self,
        pools: collections.abc.Sequence[tuple[typing.Any, typing.Any]],
        k_pages: typing.Any = None,
        v_pages: typing.Any = None,
        narrow_windows: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
    ) -> None:
        """
        pools: (pages, copies) of each; pages [layers, P, ...], copies [H, layers, ...]; both are kept alive. k_pages, v_pages: those of a model whose layers have narrow_windows, as Executor takes them.
        """
    def follow(self, orders: typing.Annotated[numpy.typing.ArrayLike, numpy.int32]) -> None:
        """
        orders: int32 [N, 3] of StepPlan.page_orders, in this order: (1: a copy to the host's pool, 0: from there; page; page of the host's pool), or (2; page; narrow window, whose layers give its memory back).
        """

class VerifiedDraft:
    """
    A draft that a step verified.
    """
    @property
    def accepted(self) -> bool: ...
    @property
    def parent(self) -> int:
        """
        Index of another draft; -1: it follows the golden token.
        """
    @property
    def sources(self) -> list[int]:
        """
        Who proposed it, as indices of DRAFT_SOURCES; a draft may be of several.
        """
    @property
    def token(self) -> int: ...

class StepOutput:
    """
    What one step delivered to one request, or several steps (outputs_at_once): then counts are sums, and the end is the last step's.
    """
    def since(self, sequence: typing.SupportsInt | typing.SupportsIndex) -> StepOutput:
        """
        What of it came after the output of that number; None: nothing.
        """
    @property
    def drafts(self) -> list[VerifiedDraft]:
        """
        The verified drafts, if asked for (return_drafts).
        """
    @property
    def error(self) -> str | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def is_prefill(self) -> bool: ...
    @property
    def last_logit_row(self) -> int: ...
    @property
    def logit_rows(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[typing.Any]: ...
    @property
    def max_path(self) -> int: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def prompt_logprobs(self) -> list[typing.Any]: ...
    @property
    def request_id(self) -> int: ...
    @property
    def sequence(self) -> int:
        """
        Grows from output to output.
        """
    @property
    def sources(self) -> list[tuple[int | None, int, int]]:
        """
        (source, drafts, accepted drafts) of each source that has proposed any; a draft may be of several. None: those of which the host does not know whose they are.
        """
    @property
    def step(self) -> int: ...
    @property
    def steps(self) -> list[typing.Any]:
        """
        (is_prefill, rows, drafts, accepted drafts, tokens) of each step.
        """
    @property
    def stop_reason(self) -> int | None: ...
    @property
    def token_sources(self) -> typing.Any:
        """
        The source of each token: None where it was no accepted draft; of several sources the first in the order of DRAFT_SOURCES; -1 where the host does not know. None instead of the list: no token was an accepted draft.
        """
    @property
    def tokens(self) -> list[int]: ...

class ChoiceTree:
    """
    A tree whose scores the caller changes or masks.
    """
    def output(self, first: typing.SupportsInt | typing.SupportsIndex) -> list[int]:
        """
        The tokens of the output from index `first` on.
        """
    @property
    def first(self) -> int:
        """
        Its root among the step's rows of scores.
        """
    @property
    def fixed(self) -> int:
        """
        Nodes from the root on that cut() leaves.
        """
    @property
    def greedy(self) -> bool:
        """
        The best token that a mask allows follows each node, and nothing else changes its scores: masks matter where the best of all tokens is not allowed.
        """
    @property
    def history(self) -> list[int]:
        """
        Up to the root, which is its last token.
        """
    @property
    def masked(self) -> bool:
        """
        The caller gives masks of its nodes.
        """
    @property
    def parents(self) -> list[int]:
        """
        Of node 0, the last decided token: -1.
        """
    @property
    def processed(self) -> bool:
        """
        The caller changes its scores.
        """
    @property
    def request_id(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...

class Executor:
    """
    Who takes part in which step, and what a step brought. See cpp/engine/executor.h.
    """
    def __init__(
        self,
        k_pages: typing.Any = None,
        v_pages: typing.Any = None,
        *,
        vocab_size: typing.SupportsInt | typing.SupportsIndex,
        max_batch_size: typing.SupportsInt | typing.SupportsIndex = 32,
        max_seq_len: typing.SupportsInt | typing.SupportsIndex,
        max_num_tokens: typing.SupportsInt | typing.SupportsIndex,
        num_pages: typing.SupportsInt | typing.SupportsIndex = 0,
        page_size: typing.SupportsInt | typing.SupportsIndex = 0,
        overlap_depth: typing.SupportsInt | typing.SupportsIndex = 0,
        method: str = "none",
        lookahead: tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ] = (1, 1, 0),
        ngram: dict[str, typing.Any] = {},
        suffix: dict[str, typing.Any] = {},
        with_suffix: bool = False,
        suffix_cached_requests: typing.SupportsInt | typing.SupportsIndex = 0,
        proposed_max_draft_len: typing.SupportsInt | typing.SupportsIndex = 127,
        proposed_max_path: typing.SupportsInt | typing.SupportsIndex | None = None,
        proposed_by_host: bool = False,
        max_draft_depth: typing.SupportsInt | typing.SupportsIndex = 127,
        adaptive: bool = True,
        pads_rows: bool = False,
        enable_chunked_prefill: bool = True,
        max_prefill_slowdown: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        policy: str = "guaranteed_no_evict",
        enable_block_reuse: bool = False,
        check_integrity: bool = False,
        draft_len_schedule: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex
            ]
        ] = [],
        synthetic_acceptance_rates: collections.abc.Sequence[
            typing.SupportsFloat | typing.SupportsIndex
        ] = [],
        attention_window: typing.SupportsInt | typing.SupportsIndex = 0,
        sink_tokens: typing.SupportsInt | typing.SupportsIndex = 0,
        narrow_windows: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        narrow_sink_tokens: typing.SupportsInt | typing.SupportsIndex = 0,
        narrow_pages: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        num_host_pages: typing.SupportsInt | typing.SupportsIndex = 0,
        host_page_bytes: typing.SupportsInt | typing.SupportsIndex = 0,
        host_bytes_per_second: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    ) -> None:
        """
        k_pages, v_pages: pages on the CPU: the host runs the steps, plan() -> forward pass -> commit(). Without them the caller enqueues the steps on a device, between
        stage() and deliver(), over the rings that bind_rings() names; num_pages and page_size say what there
        is. attention_window, sink_tokens: what a row of the model sees at most, whatever its layer; pages
        behind it are given back. 0: everything. narrow_windows: one per layer, 0 for none; layers with one, and
        narrow_sink_tokens, hold their part of a page while it does not lie behind theirs; narrow_pages: for how many
        parts there is room, by distinct window, ascending (default: all). Pages on the CPU are LazyZeros then, of which
        a layer's part is whole pages of the operating system; on a device parts have tables of their own (StagingLayout).
        max_draft_depth: predictions draft no deeper.
        num_host_pages: pages of the host's pool for requests that are preempted, host_page_bytes of all that
        goes by a page's number, host_bytes_per_second of the way there; 0: not known.
        """
    def bind_host_pages(self, pools: typing.Any) -> None:
        """
        Where the host runs the steps: what is copied of preempted requests, a PagePools.
        """
    def bind_rings(
        self,
        *,
        staging: typing.Any,
        entries: typing.Any,
        results: typing.Any,
        scores: typing.Any,
        trees: typing.Any,
    ) -> None:
        """
        Host memory that the executor writes and reads: staging [ring_size, words] int32, entries [ring_size, entry_bytes] uint8, results [ring_size, result_words] int32, scores [ring_size, max_host_rows, vocab_size] float32, trees [ring_size, max_batch_size, tree_words] int32.
        """
    def build(self) -> StepPlan:
        """
        The arrays of the step that stage() opened, with the drafts that its slots have.
        """
    def cancel(self, request_id: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Ends a request; what held() would show of it is gone. False: it had ended.
        """
    def choice_trees(self) -> list[ChoiceTree]:
        """
        The trees whose scores the caller's own processors or grammars change: of plan()'s step, or of the oldest step in flight on a device.
        """
    def commit(
        self,
        plan: StepPlan,
        result: typing.Any,
        *,
        raw: typing.Any = None,
        errors: collections.abc.Mapping[typing.SupportsInt | typing.SupportsIndex, str] = {},
        masks: collections.abc.Mapping[typing.SupportsInt | typing.SupportsIndex, typing.Any] = {},
        hidden: typing.Any = None,
        kept: typing.Any = None,
        draft_probs: typing.Any = None,
        best: typing.Any = None,
    ) -> list[StepOutput]:
        """
        result: int32 greedy ids [L], or float32 scores [L, V] if plan.needs_logits. Where the caller changed scores: raw, the model's own [L, V], for logprobs; errors, by request id: those requests end with that message. masks, by request id, of every tree with a grammar: int32 [nodes, words], a bit for each token that may follow the node; no nodes where no mask changes a choice. hidden [L, H], the head's inputs of the rows: the one that each request's last token was chosen after is copied to its slot's row of kept [max_batch_size, H]. draft_probs: what the drafts of the step's decoding requests were drawn from, ops.DraftProbs in their second form. best: beside scores, int32 [L], the best token of each row as the model gave it, -1 where one is NaN, if it is known. Returns what is due: the step's own outputs at overlap_depth 0, those of the step `overlap_depth` before it else.
        """
    def cut(
        self,
        request_id: typing.SupportsInt | typing.SupportsIndex,
        kept: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None:
        """
        Between draft() and build(): takes the nodes out of a request's tree that `kept` [nodes] is 0 of, and what is below them. The first ChoiceTree.fixed stay.
        """
    def decoding(self, request_id: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Past its prompt, and no step in flight decides the token after history().
        """
    def deliver(
        self,
        scores: typing.Any = None,
        errors: collections.abc.Mapping[typing.SupportsInt | typing.SupportsIndex, str] = {},
        masks: collections.abc.Mapping[typing.SupportsInt | typing.SupportsIndex, typing.Any] = {},
    ) -> list[StepOutput]:
        """
        What the oldest step in flight brought; its event must have completed. Where the caller changed the scores that the host reads: scores [oldest_host_rows, vocab_size] float32; errors, by request id: those requests end with that message. masks: as commit() takes them.
        """
    def draft(self) -> list[ChoiceTree]:
        """
        Between stage() and build(): makes the step's drafts. Returns the ChoiceTrees of requests with a grammar.
        """
    def draft_len_limit(self) -> int:
        """
        Drafts of one request that draft_len_schedule allows for the requests that run now.
        """
    def fail(self, plan: StepPlan, message: str) -> list[StepOutput]:
        """
        The forward pass failed: the plan's requests end with an error, others go on.
        """
    def fail_step(
        self, index: typing.SupportsInt | typing.SupportsIndex, message: str
    ) -> list[StepOutput]:
        """
        The step could not be enqueued: its requests end with an error. It is still delivered.
        """
    def force(
        self,
        request_id: typing.SupportsInt | typing.SupportsIndex,
        tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> None:
        """
        What a grammar leaves no choice about: drafts for the request's next decode step.
        """
    def held(
        self,
        request_id: typing.SupportsInt | typing.SupportsIndex,
        after: typing.SupportsInt | typing.SupportsIndex,
    ) -> StepOutput:
        """
        What steps have delivered to a request with outputs_at_once and no call has returned yet, behind the output of number `after`; None: nothing.
        """
    def history(self, request_id: typing.SupportsInt | typing.SupportsIndex) -> list[int]:
        """
        Prompt and tokens, as far as steps have run.
        """
    def newest(self) -> StagedStep:
        """
        The step that stage() brought last, again.
        """
    def output(
        self,
        request_id: typing.SupportsInt | typing.SupportsIndex,
        first: typing.SupportsInt | typing.SupportsIndex,
    ) -> list[int]:
        """
        The output from index `first` on; [] while a step in flight decides more of it.
        """
    def outputs(self) -> list[StepOutput]:
        """
        What steps have delivered since the last one was planned; their calls returned it, too.
        """
    def pages(self, request_id: typing.SupportsInt | typing.SupportsIndex) -> list[int]:
        """
        Pages that the request holds, by block of its text; -1: given back, behind the attention window.
        """
    def plan(self) -> StepPlan:
        """
        The next step, or None when there is nothing to run: stage() and build() in one call. Before commit() or fail() it is the same step again, so that whoever was interrupted can resume it.
        """
    def propose(
        self,
        request_id: typing.SupportsInt | typing.SupportsIndex,
        tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        parents: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] | None = None,
        probs: typing.Any = None,
        *,
        vocab_ids: typing.Any = None,
        replacement: bool = False,
    ) -> None:
        """
        Drafts for the request's next decode step, used once.

        parents[i] is an index among the drafts, -1 for the golden token; None: a chain. probs: float32
        [n, V], row i is the distribution that draft i was drawn from, copied; None: the drafts were chosen
        without chance. vocab_ids: int [V'], the tokens of probs' columns [n, V'], every other token has
        probability 0. Siblings were drawn in their order, one after another, without replacement (each from
        its row less the earlier siblings, renormalised) unless `replacement`.
        """
    def reserve(self) -> int: ...
    def reset_prefix_cache(self) -> int:
        """
        Forgets the published pages that no running request holds; returns how many.
        """
    def set_draft_cost(
        self,
        fixed: typing.SupportsFloat | typing.SupportsIndex,
        each: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    ) -> None:
        """
        Seconds that drafting costs a step besides the rows of the drafts: if it drafts at all, and for each draft.
        """
    def set_step_cost(
        self,
        rows: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        seconds: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
        context_len: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        growth: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex] = [],
        prefill: tuple[
            typing.SupportsFloat | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex
        ] = (1.0, 1.0),
    ) -> None:
        """
        T(rows) of the model on this machine; adaptive draft lengths need it. seconds: with
        context_len tokens in the cache; growth: seconds that each token more adds, by rows;
        prefill: how rows of prompts compare with both (StepCost).
        """
    def stage(self) -> StagedStep | None:
        """
        The next step, or None when there is nothing to enqueue now.
        """
    def stats(self) -> dict[str, typing.Any]: ...
    def submit(
        self,
        prompt_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        *,
        max_tokens: typing.SupportsInt | typing.SupportsIndex,
        min_tokens: typing.SupportsInt | typing.SupportsIndex = 0,
        eos_token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        stop_token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        ignore_eos: bool = False,
        speculative: bool = True,
        lookahead: tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ]
        | None = None,
        max_draft_len: typing.SupportsInt | typing.SupportsIndex | None = None,
        suffix_draft_len: typing.SupportsInt | typing.SupportsIndex | None = None,
        adaptive: bool | None = None,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
        temperature: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        top_k: typing.SupportsInt | typing.SupportsIndex = 0,
        top_p: typing.SupportsFloat | typing.SupportsIndex = 1.0,
        min_p: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        acceptance: str = "exact_match",
        posterior_threshold: typing.SupportsFloat | typing.SupportsIndex = 0.09,
        posterior_alpha: typing.SupportsFloat | typing.SupportsIndex = 0.3,
        acceptance_threshold: typing.SupportsFloat | typing.SupportsIndex = 1.0,
        repetition_penalty: typing.SupportsFloat | typing.SupportsIndex = 1.0,
        presence_penalty: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        frequency_penalty: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        logit_bias: collections.abc.Mapping[
            typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex
        ] = {},
        bad_words: collections.abc.Sequence[
            collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
        ] = [],
        allowed_token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
        | None = None,
        logprobs: typing.SupportsInt | typing.SupportsIndex | None = None,
        prompt_logprobs: typing.SupportsInt | typing.SupportsIndex | None = None,
        processes_scores: bool = False,
        cache_salt: str = "",
        priority: typing.SupportsInt | typing.SupportsIndex = 0,
        return_logits: bool = False,
        external_drafts: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        end_after_drafts: bool = False,
        external_probs: typing.Any = None,
        compute_whole_prompt: bool = False,
        prediction: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        grammar: bool = False,
        forced: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        return_drafts: bool = False,
        outputs_at_once: typing.SupportsInt | typing.SupportsIndex = 1,
        id: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> int: ...
    @property
    def entry_bytes(self) -> int: ...
    @property
    def host_slots(self) -> numpy.typing.NDArray[numpy.uint8]:
        """
        uint8 [max_batch_size, slot_layout.slot_bytes], the executor's own memory.
        """
    @property
    def host_staging(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        int32 [ring_size, staging_layout.words], the executor's own memory.
        """
    @property
    def in_flight(self) -> int: ...
    @property
    def max_host_rows(self) -> int:
        """
        Rows of one step whose scores the host reads, at most.
        """
    @property
    def max_rows_per_request(self) -> int:
        """
        Rows of a decoding request in one step, at most.
        """
    @property
    def num_unfinished(self) -> int: ...
    @property
    def oldest_host_rows(self) -> int:
        """
        Rows of scores that the host reads of the oldest step in flight.
        """
    @property
    def oldest_ring(self) -> int:
        """
        The place of the oldest step in flight in the rings.
        """
    @property
    def overlap_depth(self) -> int: ...
    @property
    def result_words(self) -> int: ...
    @property
    def ring_size(self) -> int: ...
    @property
    def slot_layout(self) -> SlotLayout: ...
    @property
    def staging_layout(self) -> StagingLayout: ...
    @property
    def steps_in_flight(self) -> list[int]:
        """
        The indices of the steps in flight, oldest first.
        """
    @property
    def tree_offset(self) -> int:
        """
        Where a slot's draft tree lies, in bytes.
        """
    @property
    def tree_words(self) -> int:
        """
        Words of a draft tree in a slot.
        """
    @property
    def vocab_size(self) -> int: ...

class DraftPasses:
    """
    The passes of a draft model in steps that run where they are enqueued. See cpp/engine/draft_passes.h.
    """
    def __init__(
        self,
        *,
        vocab_size: typing.SupportsInt | typing.SupportsIndex,
        num_scores: typing.SupportsInt | typing.SupportsIndex,
        num_slots: typing.SupportsInt | typing.SupportsIndex,
        max_rows: typing.SupportsInt | typing.SupportsIndex,
        max_len: typing.SupportsInt | typing.SupportsIndex,
        max_drafts: typing.SupportsInt | typing.SupportsIndex,
        top_k: typing.SupportsInt | typing.SupportsIndex = 1,
        max_depth: typing.SupportsInt | typing.SupportsIndex = 0,
        min_confidence: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        input_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        output_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        takes_features: bool = False,
    ) -> None: ...
    def begin(
        self,
        layout: SlotLayout,
        slots: typing.Any,
        slot_ids: typing.Any,
        max_drafts: typing.Any,
        page_table: typing.Any,
        laws: typing.Any,
        gives_scores: bool,
        pass_price: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    ) -> None:
        """
        A step's drafts; the tensors of drafters.DraftInputs, laws None where nobody samples; pass_price: tokens that a pass after the first has to bring, which needs scores.
        """
    def bind_pages(
        self,
        page_size: typing.SupportsInt | typing.SupportsIndex,
        num_pages: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def bind_probs(self, probs: typing.Any, columns: typing.Any, drawn: typing.Any) -> None:
        """
        Where mode 'own' leaves what it drew from, by the step's requests: float32 [num_slots, max_drafts, num_scores], int32 [num_slots, max_drafts], uint8 [num_slots].
        """
    def enter(
        self, slot: typing.SupportsInt | typing.SupportsIndex, mode: str, adaptive: bool = True
    ) -> None:
        """
        A request takes a slot; mode: how its drafts are chosen if it samples, 'best', 'coupled' or 'own'; adaptive: it drafts no deeper than passes pay.
        """
    def num_read(self, slot: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        Tokens of the slot's text whose K/V is in place.
        """
    def plan(self) -> StepPlan:
        """
        The next pass; None: there is none, and the drafts lie in the slots.
        """
    def plan_prompts(
        self,
        tokens: typing.Any,
        slot_ids: typing.Any,
        kv_len: typing.Any,
        cu_rows: typing.Any,
        page_table: typing.Any,
    ) -> StepPlan:
        """
        The pass that reads a step's rows of prompts, or None; take_prompts() after it.
        """
    def sources(self, plan: StepPlan) -> numpy.typing.NDArray[numpy.int32]:
        """
        int32 [R], with takes_features: the row of the pass before whose result is the row's feature; -1: the feature of the position before it, by the target.
        """
    def take(self, result: typing.Any) -> None:
        """
        What a pass gave: ids [L] or scores [L, V].
        """
    def take_prompts(self) -> None: ...
    @property
    def draws(self) -> bool:
        """
        Drafts of this round are drawn from what the model said.
        """
    @property
    def memory_bytes(self) -> int: ...

class SearchCost:
    """
    What BeamDrafter.draft() took.
    """
    @property
    def network_seconds(self) -> float:
        """
        In the layers.
        """
    @property
    def network_thread_seconds(self) -> float:
        """
        In the layers, processor time of the calling thread.
        """
    @property
    def passes(self) -> int: ...
    @property
    def rows(self) -> int:
        """
        Of all passes.
        """
    @property
    def seconds(self) -> float: ...

class RecurrentDrafter:
    """
    ReDrafter's network over packed linear layers.

    A BeamDrafter searches with it. Layers are PackedLinear: ``recurrence`` [H, 2H] or None (states add
    up embeddings), ``projection`` [E, 2H] or None (E = 2H), ``blocks`` [E, E] each, ``head``
    [num_scores, E] or None: the target's. ``target`` is the target's LlamaDecoder, whose embedding rows are read. Raises ValueError
    naming the layer that does not fit.
    """
    def __init__(
        self,
        *,
        hidden_size: typing.SupportsInt | typing.SupportsIndex,
        num_scores: typing.SupportsInt | typing.SupportsIndex,
        recurrence: typing.Any,
        projection: typing.Any,
        blocks: list[typing.Any],
        target: typing.Any,
        head: typing.Any,
    ) -> None: ...

class BeamDrafter:
    """
    Drafts a RecurrentDrafter's beams for the requests of a step.
    """
    def __init__(
        self,
        network: RecurrentDrafter,
        *,
        token_ids: typing.Any = None,
        max_requests: typing.SupportsInt | typing.SupportsIndex,
        vocab_size: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        ``token_ids`` int32 [num_scores]: the token of each score, None: the same number.
        """
    def draft(
        self,
        layout: SlotLayout,
        slots: typing.Any,
        slot_ids: typing.Any,
        max_drafts: typing.Any,
        hidden: typing.Any,
        *,
        pass_price: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        probs: typing.Any = None,
        ids: typing.Any = None,
        has_probs: typing.Any = None,
    ) -> SearchCost:
        """
        Search beams for a step's requests and put their trees into the slots.

        layout, slots  of the pool, uint8 [num_slots, slot_bytes]
        slot_ids       int32 [B], -1: nobody
        max_drafts     int32 [B] drafts of this step, 0: none
        hidden         float32 [num_slots, H]: the head's input that each slot's last token was chosen from
        pass_price     tokens that a pass after the first has to bring, where all requests are adaptive
        probs, ids, has_probs
                       float32 and int32 [>= B, drafts, 50] and uint8 [>= B]: take what the drafts of requests
                       that keep their laws were chosen from, and who has such; None: nobody asks

        Releases the GIL. Returns what the search took; no passes: nobody drafted.
        """
    def enter(
        self,
        slot: typing.SupportsInt | typing.SupportsIndex,
        *,
        num_beams: typing.SupportsInt | typing.SupportsIndex = 0,
        length: typing.SupportsInt | typing.SupportsIndex = 0,
        temperature: typing.SupportsFloat | typing.SupportsIndex = 1.0,
        adaptive: bool = False,
        keeps_laws: bool = False,
    ) -> None:
        """
        A request takes a slot; ``num_beams`` 0: it wants no drafts. An adaptive one searches no wider and deeper than its step has drafts.
        """

class Eagle3Head:
    """
    An EAGLE-3 head: one decoder layer on the target's own states.

    Layers are PackedLinear: ``fc`` [H, tap_size], ``qkv`` [(heads + 2 kv heads) * head_dim, 2H], ``o``,
    ``gate_up`` [2 * intermediate, H], ``down``, ``head`` [num_scores, H]; norms float32 [H]; ``cos``,
    ``sin`` float32 [positions, head_dim / 2]. ``embedding``: a PackedLinear [vocab, H], or the target's
    LlamaDecoder. Raises ValueError naming the layer that does not fit.
    """
    def __init__(
        self,
        *,
        hidden_size: typing.SupportsInt | typing.SupportsIndex,
        tap_size: typing.SupportsInt | typing.SupportsIndex,
        num_scores: typing.SupportsInt | typing.SupportsIndex,
        num_heads: typing.SupportsInt | typing.SupportsIndex,
        num_kv_heads: typing.SupportsInt | typing.SupportsIndex,
        head_dim: typing.SupportsInt | typing.SupportsIndex,
        rms_norm_eps: typing.SupportsFloat | typing.SupportsIndex,
        norm_before_residual: bool,
        sliding_window: typing.SupportsInt | typing.SupportsIndex,
        fc: typing.Any,
        qkv: typing.Any,
        o: typing.Any,
        gate_up: typing.Any,
        down: typing.Any,
        head: typing.Any,
        input_norm: typing.Any,
        feature_norm: typing.Any,
        ffn_norm: typing.Any,
        final_norm: typing.Any,
        cos: typing.Any,
        sin: typing.Any,
        embedding: typing.Any,
    ) -> None: ...
    def bind_cache(self, k_pages: typing.Any, v_pages: typing.Any, features: typing.Any) -> None:
        """
        Pages with the ids of the target's: K and V [1, P, G, S, K], features float32 [P, S, H]; kept alive.
        """
    def forward(self, plan: StepPlan, sources: typing.Any, out: typing.Any) -> None:
        """
        Runs the rows of ``plan``. ``sources`` int32 [R]: the row of the call before whose result is the row's feature, -1: the feature in the pages. ``out`` float32 [L, num_scores], or None: K/V alone. Releases the GIL.
        """
    def keep(
        self,
        plan: StepPlan,
        num_prompts: typing.SupportsInt | typing.SupportsIndex,
        layout: SlotLayout,
        slots: typing.Any,
        taps: typing.Any,
    ) -> None:
        """
        Behind the commit of ``plan``, whose first ``num_prompts`` requests are prompts: keeps the features of the rows that are part of their texts now. ``taps`` float32 [>= R, tap_size]: the target's states by row (LlamaDecoder.set_taps). Releases the GIL.
        """
    @property
    def num_kept(self) -> int:
        """
        Features that keep() has made.
        """
    @property
    def weight_bytes(self) -> int:
        """
        Bytes of packed weights.
        """

class MedusaHeads:
    """
    Medusa heads over packed linear layers.

    Layers are PackedLinear: ``first`` [num_heads * H, H], the first residual layers of all heads, or None;
    ``deeper``, a list of [H, H] for each head; ``lm_heads`` [num_scores, H], one of each head, one for
    all, or none: then ``target``, the target's LlamaDecoder, gives its head. ``token_ids`` int32
    [num_scores]: the token of each score, None: the same number. Raises ValueError naming the layer that
    does not fit.
    """
    def __init__(
        self,
        *,
        hidden_size: typing.SupportsInt | typing.SupportsIndex,
        num_heads: typing.SupportsInt | typing.SupportsIndex,
        num_scores: typing.SupportsInt | typing.SupportsIndex,
        first: typing.Any,
        deeper: collections.abc.Sequence[collections.abc.Sequence[typing.Any]],
        lm_heads: collections.abc.Sequence[typing.Any],
        target: typing.Any = None,
        token_ids: typing.Any = None,
    ) -> None: ...
    def best(
        self,
        hidden: typing.Any,
        num_heads: typing.SupportsInt | typing.SupportsIndex,
        top_k: typing.SupportsInt | typing.SupportsIndex,
    ) -> numpy.typing.NDArray[numpy.int32]:
        """
        Token ids int32 [B, num_heads, top_k] of the best guesses, best first; -1 after the last, and for a row of scores with NaN or +infinity.
        """
    def scores(
        self, hidden: typing.Any, num_heads: typing.SupportsInt | typing.SupportsIndex
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        float32 [num_heads, B, num_scores] of the first heads, for float32 hidden [B, H].
        """

class MedusaDrafter:
    """
    Drafts a MedusaHeads' trees for the requests of a step.
    """
    def __init__(
        self,
        heads: MedusaHeads,
        *,
        rates: typing.Annotated[numpy.typing.ArrayLike, numpy.float64],
        max_requests: typing.SupportsInt | typing.SupportsIndex,
        vocab_size: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        ``rates`` float64 [heads, ranks]: how often each guess is right, to start from.
        """
    def draft(
        self,
        layout: SlotLayout,
        slots: typing.Any,
        slot_ids: typing.Any,
        max_drafts: typing.Any,
        hidden: typing.Any,
    ) -> None:
        """
        Ask the heads for a step's requests and put their trees into the slots.

        layout, slots  of the pool, uint8 [num_slots, slot_bytes]
        slot_ids       int32 [B], -1: nobody
        max_drafts     int32 [B] drafts of this step, 0: none
        hidden         float32 [num_slots, H]: the head's input that each slot's last token was chosen from

        Guesses of earlier steps are held against the texts. Releases the GIL.
        """
    def enter(
        self,
        slot: typing.SupportsInt | typing.SupportsIndex,
        choices: collections.abc.Sequence[
            collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
        ],
        adaptive: bool,
    ) -> None:
        """
        A request takes a slot; no choices: it wants no drafts. An adaptive one drafts the likeliest nodes first, any other its choices in their order.
        """
    def measured(self) -> tuple[list[list[float]], list[float]]:
        """
        (how often each head's guess of each rank was right, over all steps so far [heads] [ranks], observations of each head)
        """
    def stats(self) -> dict[str, typing.Any]:
        """
        Counts: steps that asked the heads, proposals and their nodes, idle requests of steps; head_seconds, head_thread_seconds.
        """

class Bfloat16Array:
    """
    A contiguous NumPy array of uint16 as a tensor of bfloat16, which NumPy does not have. Takes the place of a tensor in every call; torch.from_dlpack() gives a view of it.
    """
    def __dlpack__(
        self,
        *,
        stream: typing.Any = None,
        max_version: typing.Any = None,
        dl_device: typing.Any = None,
        copy: typing.Any = None,
    ) -> typing_extensions.CapsuleType:
        """
        What a consumer may ask for besides is ignored: it gets this memory, on the host.
        """
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __init__(self, bits: numpy.ndarray) -> None: ...
    @property
    def bits(self) -> numpy.typing.NDArray[numpy.uint16]:
        """
        The array, not a copy.
        """
    @property
    def shape(self) -> tuple[typing.Any, ...]: ...

class LazyZeros:
    """
    A tensor of zeros on the host whose memory is taken when it is first written. torch.from_dlpack() gives a view of it, which keeps it alive.
    """
    def __dlpack__(
        self,
        *,
        stream: typing.Any = None,
        max_version: typing.Any = None,
        dl_device: typing.Any = None,
        copy: typing.Any = None,
    ) -> typing_extensions.CapsuleType:
        """
        What a consumer may ask for besides is ignored: it gets this memory, on the host.
        """
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __init__(
        self, shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], dtype: str
    ) -> None:
        """
        dtype: as torch names it, such as "bfloat16".
        """
    def release(self) -> None:
        """
        Give the memory back to the operating system: every element is zero again. Nothing may use the tensor meanwhile.
        """
    def write_zeros(self, count: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Write zeros into [:, :count]: memory that was never written is one page to the machine. Raises ValueError.
        """
    @property
    def dtype(self) -> str:
        """
        Its name, such as "bfloat16".
        """
    @property
    def num_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int:
        """
        Bytes that take memory now.
        """
    @property
    def shape(self) -> tuple[typing.Any, ...]: ...

class StepCost:
    """
    T(rows, context), seconds of one forward pass: linear between measured points, after the last with the slope over four. See cpp/engine/step_cost.h.
    """
    def __call__(self, rows: typing.SupportsFloat | typing.SupportsIndex) -> float: ...
    def __init__(
        self,
        table: dict[int, float],
        growth: dict[int, float] = {},
        context_len: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        prefill: tuple[
            typing.SupportsFloat | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex
        ] = (1.0, 1.0),
    ) -> None:
        """
        table: {rows: seconds}, 1 row and at least one more count, of a pass of one request with `context_len` tokens in the cache. growth: {rows: seconds} that each token more adds; empty: nothing. prefill: rows of prompts cost so many times what the table says, and the text that they read so many times what growth says.
        """
    def at(
        self,
        requests: typing.SupportsInt | typing.SupportsIndex,
        context_len: typing.SupportsFloat | typing.SupportsIndex,
    ) -> StepCost:
        """
        Of steps of `requests` requests with `context_len` tokens in the cache, on average: their rows share the weights, each reads a cache of its own.
        """
    def prefill(
        self,
        base: typing.SupportsFloat | typing.SupportsIndex,
        rows: typing.SupportsFloat | typing.SupportsIndex,
        start: typing.SupportsFloat | typing.SupportsIndex,
    ) -> float:
        """
        Seconds that `rows` rows of a prompt, `start` tokens of which were read before, add to a pass of `base` rows.
        """
    def seconds(
        self,
        first: typing.SupportsInt | typing.SupportsIndex,
        more: typing.SupportsInt | typing.SupportsIndex,
    ) -> numpy.typing.NDArray[numpy.float64]:
        """
        [more + 1]: of first, first + 1, ..., first + more rows.
        """
    @property
    def columns(self) -> tuple[list[int], list[float], float, list[float], tuple[float, float]]:
        """
        (rows, seconds, context_len, growth, prefill), as Executor.set_step_cost() takes them.
        """

class StepTimes:
    """
    T(rows, context) refined by the steps that are served anyway. See cpp/engine/step_times.h.
    """
    @typing.overload
    def __init__(self, start: StepCost) -> None:
        """
        start: the table to begin with.
        """
    @typing.overload
    def __init__(self, start: StepCost, guess: StepCost) -> None:
        """
        guess: what rows are taken to cost that looked dear and were not seen for long.
        """
    def observe(self, plan: StepPlan, seconds: typing.SupportsFloat | typing.SupportsIndex) -> bool:
        """
        The forward pass of `plan` took `seconds`. True: cost has changed.
        """
    @property
    def cost(self) -> StepCost: ...
    @property
    def observed(self) -> int:
        """
        Steps that counted.
        """

def accept_scratch_bytes(
    num_requests: typing.SupportsInt | typing.SupportsIndex,
    vocab_size: typing.SupportsInt | typing.SupportsIndex,
    has_probs: bool,
) -> int:
    """
    See specdec_ext.ops.accept_scratch_bytes.
    """

def accept_step(
    scores: typing.Any,
    cu_logits: typing.Any,
    positions: typing.Any,
    tokens: typing.Any,
    parents: typing.Any,
    acceptance: typing.Any,
    *,
    temperature: typing.Any,
    top_k: typing.Any,
    top_p: typing.Any,
    min_p: typing.Any,
    seed: typing.Any,
    posterior_threshold: typing.Any = None,
    posterior_alpha: typing.Any = None,
    acceptance_threshold: typing.Any = None,
    probs: typing.Any = None,
    vocab_ids: typing.Any = None,
    draft_columns: typing.Any = None,
    has_probs: typing.Any = None,
    replacement: typing.Any = None,
    synthetic_rates: typing.Any = None,
    sampled: typing.Any,
    path: typing.Any,
    path_len: typing.Any,
    emitted: typing.Any,
    num_emitted: typing.Any,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    workspace: typing.Any = None,
    status: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.accept_step.
    """

def acceptance_rules() -> dict[str, bool]:
    """
    {name: whether it is lossless} of each acceptance rule, in the order of their numbers.
    """

def append_kv(
    k: typing.Any,
    v: typing.Any,
    k_pages: typing.Any,
    v_pages: typing.Any,
    page_table: typing.Any,
    kv_len: typing.Any,
    cu_rows: typing.Any,
    *,
    k_scale: typing.Any = None,
    v_scale: typing.Any = None,
    max_rows: typing.Any = None,
    max_kv_len: typing.Any = None,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    status: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.append_kv.
    """

def argmax(
    scores: typing.Any,
    out: typing.Any,
    *,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    workspace: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.argmax.
    """

def backend_memory(backend: str) -> str:
    """
    Where a backend takes its tensors from: "cpu" or "cuda".
    """

def backend_names() -> list[str]:
    """
    Names of the backends that can run operations here.
    """

def best_allowed(
    scores: typing.Annotated[numpy.typing.ArrayLike, numpy.float32],
    mask: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
) -> int | None:
    """
    The best token, first of equals, of those that `mask` has (int32 [words], 32 tokens each, least significant bit first). None where the best of their scores is not finite, or one is NaN. scores: float32 [vocabulary]
    """

def build_step(
    parents: typing.Any,
    page_table: typing.Any,
    kv_len: typing.Any,
    cu_rows: typing.Any,
    *,
    positions: typing.Any,
    mask: typing.Any,
    is_tree: typing.Any,
    slots: typing.Any = None,
    page_size: typing.SupportsInt | typing.SupportsIndex,
    num_pages: typing.SupportsInt | typing.SupportsIndex,
    max_depth: typing.SupportsInt | typing.SupportsIndex = 127,
    max_rows: typing.Any = None,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    status: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.build_step.
    """

def commit_step(
    layout: SlotLayout,
    slots: typing.Any,
    slot_ids: typing.Any,
    cu_logits: typing.Any,
    sampled: typing.Any,
    *,
    results: typing.Any,
    path: typing.Any,
    path_len: typing.Any,
    accepted_path: typing.Any = None,
    accepted_path_len: typing.Any = None,
    emitted: typing.Any = None,
    num_emitted: typing.Any = None,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    status: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.commit_step.
    """

def compact_kv(
    k_pages: typing.Any,
    v_pages: typing.Any,
    page_table: typing.Any,
    kv_len: typing.Any,
    cu_rows: typing.Any,
    path: typing.Any,
    path_len: typing.Any,
    *,
    num_rows: typing.Any = None,
    max_kv_len: typing.Any = None,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    status: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.compact_kv.
    """

def convert_floats(values: typing.Any, out: typing.Any) -> None:
    """
    Write ``values`` into ``out``: as many elements, both contiguous tensors of float32, bfloat16 or float16 on the CPU. Rounds to the nearest, ties to even.
    """

def count_not_finite(values: typing.Any) -> int:
    """
    How many of the values are NaN or infinite: a contiguous tensor of float32, bfloat16 or float16 on the CPU.
    """

def cpu_isa() -> str:
    """
    Instruction set of the CPU kernels: plain, avx2, avx512, avx512_bf16 or amx (SPECDEC_CPU_ISA caps it).
    """

def cuda_info() -> dict[str, typing.Any]:
    """
    What the CUDA side of this build is, and which devices it sees.
    """

def decoder_packs(decoder: LlamaDecoder) -> list[typing.Any]:
    """
    The packed weights of a LlamaDecoder: (name, type, n, k, bytes), k = 0 for vectors. The bytes are the decoder's own memory: use them while it lives.
    """

def dequantize(weight: typing.Any, out: typing.Any) -> None:
    """
    Write the values of a quantised weight (uint8 [N, bytes of a row], format name) into ``out`` float32 [N, K], contiguous.
    """

def device_limits(
    backend: str, device: typing.SupportsInt | typing.SupportsIndex = 0
) -> DeviceLimits:
    """
    DeviceLimits of one device of a backend that chooses its kernels by device.
    """

def draft_step(
    layout: SlotLayout,
    slots: typing.Any,
    slot_ids: typing.Any,
    *,
    tokens: typing.Any,
    parents: typing.Any,
    cu_rows: typing.Any,
    kv_len: typing.Any,
    max_drafts: typing.Any = None,
    window_rows: typing.Any = None,
    guesses: typing.Any = None,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    status: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.draft_step.
    """

def e4m3_rows(
    x: typing.Any,
    *,
    numbers: typing.Any,
    scales: typing.Any,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.e4m3_rows.
    """

def fill_step_plan(
    plan: StepPlan,
    *,
    tokens: typing.Any,
    positions: typing.Any,
    parents: typing.Any,
    mask: typing.Any,
    cu_rows: typing.Any,
    kv_len: typing.Any,
    is_tree: typing.Any,
    page_table: typing.Any,
    logit_rows: typing.Any,
    cu_logits: typing.Any,
    page_size: typing.SupportsInt | typing.SupportsIndex,
    num_pages: typing.SupportsInt | typing.SupportsIndex,
    needs_logits: bool = False,
) -> None:
    """
    Copies the arrays of a step into a plan, for a model that takes plans. Requests without rows are left out; the rows after the last request are padding. plan.slot says which request of the arrays each one is.
    """

def gated_activation(
    x: typing.Any,
    *,
    out: typing.Any,
    activation: str = "silu",
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.gated_activation.
    """

def grow_beams(
    scores: typing.Any,
    columns: typing.Any,
    *,
    tokens: typing.Any,
    parents: typing.Any,
    log_probs: typing.Any,
    reached: typing.Any,
    depth: typing.SupportsInt | typing.SupportsIndex,
    num_scores: typing.SupportsInt | typing.SupportsIndex,
    num_beams: typing.Any,
    lengths: typing.Any,
    next_rows: typing.Any,
    next_tokens: typing.Any,
    temperatures: typing.Any = None,
    token_ids: typing.Any = None,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.grow_beams.
    """

def grow_drafts(
    growths: typing.Any,
    shares: typing.Any,
    columns: typing.Any,
    limits: typing.Any,
    *,
    num_columns: typing.SupportsInt | typing.SupportsIndex,
    max_open: typing.SupportsInt | typing.SupportsIndex,
    begins: bool,
    token_ids: typing.Any = None,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.grow_drafts.
    """

def guess_tree(
    choices: collections.abc.Sequence[
        collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ],
    rates: typing.Annotated[numpy.typing.ArrayLike, numpy.float64],
    likeliest: bool,
) -> tuple[typing.Any, ...]:
    """
    (heads, ranks, parents, worth) of the nodes of Medusa choices, int32 and float64 [n]: what rank of which head each is, its parent (-1: the golden token), and the probability that it is accepted by ``rates`` float64 [heads, ranks]. ``likeliest``: those that are worth most first, else in their own order.
    """

def has_fast_attention(kv_dtype: str, head_dim: typing.SupportsInt | typing.SupportsIndex) -> bool:
    """
    Whether attention on the CPU with ``exact=False`` ever has other bits than with ``exact=True``: it multiplies bfloat16 K/V as such, where a processor has instructions for that.
    """

def keep_hidden(
    layout: SlotLayout,
    slots: typing.Any,
    slot_ids: typing.Any,
    cu_logits: typing.Any,
    *,
    results: typing.Any,
    path: typing.Any,
    path_len: typing.Any,
    hidden: typing.Any,
    kept: typing.Any,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.keep_hidden.
    """

def kv_row_bytes(dtype: str, head_dim: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    Bytes that a token's K (or V) of one head takes in pages of this dtype.
    """

def kv_row_width(dtype: str, head_dim: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    The last axis of K/V pages of this dtype, in elements: an int8 vector is followed by its scale, float32.
    """

def linear(
    x: typing.Any,
    weight: typing.Any,
    *,
    out: typing.Any,
    bias: typing.Any = None,
    constant_weight: bool = False,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    workspace: typing.Any = None,
    format: str | None = None,
    columns: typing.SupportsInt | typing.SupportsIndex = 0,
    cut_columns: typing.SupportsInt | typing.SupportsIndex = 0,
    leave_sums: bool = False,
) -> LinearSums | None:
    """
    See specdec_ext.ops.linear.
    """

def linear_scratch_bytes(
    rows: typing.SupportsInt | typing.SupportsIndex,
    columns: typing.SupportsInt | typing.SupportsIndex,
    depth: typing.SupportsInt | typing.SupportsIndex,
    dtype: str,
    backend: str,
    format: str | None = None,
) -> int:
    """
    See specdec_ext.ops.linear_scratch_bytes.
    """

def load_backend(name: str, path: str) -> None:
    """
    Opens a shared library that exports specdec_backend() and registers it as `name`.
    """

def make_step_plan(
    tokens: collections.abc.Sequence[
        collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ],
    *,
    parents: collections.abc.Sequence[
        collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ] = [],
    kv_len: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    page_table: collections.abc.Sequence[
        collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ],
    logits_for_all_rows: bool = True,
    needs_logits: bool = True,
) -> StepPlan:
    """
    A plan made by hand, for calibration and tests. parents: per request, [] for a chain.
    """

def map_packs(
    decoder: LlamaDecoder,
    file: typing.SupportsInt | typing.SupportsIndex,
    name: str,
    pieces: collections.abc.Sequence[
        tuple[
            str,
            str,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ]
    ],
) -> None:
    """
    Give a LlamaDecoder all weights but rotary tables where they lie in the open file ``file`` (a descriptor, which may be closed at once): (name, type, n, k, first byte) as decoder_packs() gave them. Raises ValueError naming the piece; ``name`` is the file's.
    """

def mask_from_parents(
    parents: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
) -> numpy.typing.NDArray[numpy.uint32]:
    """
    See specdec_ext.ops.mask_from_parents.
    """

def merge_best(parts: typing.Any, ids: typing.Any) -> None:
    """
    ids int32 [L] of what finish() gave on each rank, uint8 [ranks, L, 8]: the first largest score, -1 for a row with a NaN.
    """

def merge_step_beams(
    tokens: typing.Any,
    parents: typing.Any,
    log_probs: typing.Any,
    reached: typing.Any,
    *,
    draft_tokens: typing.Any,
    draft_parents: typing.Any,
    counts: typing.Any,
    draft_nodes: typing.Any = None,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.merge_beams.
    """

def move_kv(
    decoder: LlamaDecoder, moves: typing.Annotated[numpy.typing.ArrayLike, numpy.int32]
) -> None:
    """
    Repeat the StepPlan.kv_moves of rank 0 in own pages.
    """

def num_threads() -> int:
    """
    Threads of the CPU backend.
    """

def pack_drafts(
    growths: typing.Any,
    golden: typing.Any,
    *,
    tokens: typing.Any,
    parents: typing.Any,
    cu_rows: typing.Any,
    logit_rows: typing.Any,
    sources: typing.Any = None,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.pack_drafts.
    """

def pack_mask(
    mask: typing.Any,
    out: typing.Any,
    *,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.pack_mask.
    """

def packed_bytes(
    type: str,
    n: typing.SupportsInt | typing.SupportsIndex,
    k: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Bytes of such a piece of decoder_packs(); -1 for one that cannot be. Raises ValueError for an unknown type.
    """

def pages_in_window(
    *,
    attention_window: typing.SupportsInt | typing.SupportsIndex,
    sink_tokens: typing.SupportsInt | typing.SupportsIndex,
    page_size: typing.SupportsInt | typing.SupportsIndex,
    max_num_tokens: typing.SupportsInt | typing.SupportsIndex,
    overlap_depth: typing.SupportsInt | typing.SupportsIndex,
    enable_chunked_prefill: bool,
    enable_block_reuse: bool,
    prompt: typing.SupportsInt | typing.SupportsIndex,
    step: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Pages that a text holds at once, at most, within an attention window: of a prompt of so many tokens, in steps of so many rows.
    """

def plan_workspace(
    *,
    dtype: str,
    kv_dtype: str,
    head_dim: typing.SupportsInt | typing.SupportsIndex,
    num_heads: typing.SupportsInt | typing.SupportsIndex,
    num_kv_heads: typing.SupportsInt | typing.SupportsIndex,
    page_size: typing.SupportsInt | typing.SupportsIndex,
    num_requests: typing.SupportsInt | typing.SupportsIndex,
    num_rows: typing.SupportsInt | typing.SupportsIndex,
    max_rows: typing.SupportsInt | typing.SupportsIndex,
    max_kv_len: typing.SupportsInt | typing.SupportsIndex,
    aligned: bool,
    limits: DeviceLimits,
    instance: str | None,
) -> dict[str, typing.Any]:
    """
    See specdec_ext.ops.plan_workspace.
    """

def propose_drafts(
    layout: SlotLayout,
    slots: typing.Any,
    slot_ids: typing.Any,
    tokens: typing.Any,
    parents: typing.Any = None,
    *,
    survival: typing.Any = None,
    counts: typing.Any = None,
    vocab_size: typing.SupportsInt | typing.SupportsIndex,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    status: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.propose_drafts.
    """

def propose_growths(
    layout: SlotLayout,
    slots: typing.Any,
    slot_ids: typing.Any,
    growths: typing.Any,
    *,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.propose_growths.
    """

def random_uniform(
    seed: typing.SupportsInt | typing.SupportsIndex,
    position: typing.SupportsInt | typing.SupportsIndex,
    purpose: str,
    draw: typing.SupportsInt | typing.SupportsIndex = 0,
) -> float:
    """
    A number in [0, 1) of the counter generator. purpose: 'token' decides the token at an absolute position, 'accept' whether sibling number `draw` at it is kept, 'draft' is for drafters that draw their drafts.
    """

def recent_tokens(
    layout: SlotLayout,
    slots: typing.Any,
    slot_ids: typing.Any,
    *,
    tokens: typing.Any,
    lens: typing.Any,
    room: typing.Any = None,
    max_drafts: typing.Any = None,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.recent_tokens.
    """

def rms_norm(
    x: typing.Any,
    weight: typing.Any,
    *,
    out: typing.Any,
    added: typing.Any = None,
    added_weight: typing.Any = None,
    sums: LinearSums | None = None,
    eps: typing.SupportsFloat | typing.SupportsIndex = 1e-06,
    norm_plus_one: bool = False,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.rms_norm.
    """

def rope_append_kv(
    q: typing.Any,
    k: typing.Any,
    v: typing.Any,
    k_pages: typing.Any,
    v_pages: typing.Any,
    page_table: typing.Any,
    kv_len: typing.Any,
    cu_rows: typing.Any,
    positions: typing.Any,
    *,
    q_out: typing.Any,
    cos: typing.Any = None,
    sin: typing.Any = None,
    interleaved: bool = False,
    q_norm: typing.Any = None,
    k_norm: typing.Any = None,
    norm_eps: typing.SupportsFloat | typing.SupportsIndex = 9.999999974752427e-07,
    norm_plus_one: bool = False,
    k_scale: typing.Any = None,
    v_scale: typing.Any = None,
    max_rows: typing.Any = None,
    max_kv_len: typing.Any = None,
    sums: LinearSums | None = None,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    status: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.rope_append_kv.
    """

def sample_rows(
    scores: typing.Any,
    cu_logits: typing.Any,
    positions: typing.Any,
    *,
    temperature: typing.Any,
    top_k: typing.Any,
    top_p: typing.Any,
    min_p: typing.Any,
    seed: typing.Any,
    out: typing.Any,
    probs: typing.Any = None,
    purpose: str = "token",
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    workspace: typing.Any = None,
    status: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.sample_rows.
    """

def set_num_threads(num_threads: typing.SupportsInt | typing.SupportsIndex) -> None:
    """
    See specdec_ext.ops.set_num_threads.
    """

def spec_attention(
    q: typing.Any,
    k_pages: typing.Any,
    v_pages: typing.Any,
    page_table: typing.Any,
    kv_len: typing.Any,
    cu_rows: typing.Any,
    *,
    mask: typing.Any = None,
    is_tree: typing.Any = None,
    out: typing.Any,
    scale: typing.SupportsFloat | typing.SupportsIndex,
    sliding_window: typing.SupportsInt | typing.SupportsIndex = 0,
    softcap: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    sinks: typing.Any = None,
    k_scale: typing.Any = None,
    v_scale: typing.Any = None,
    exact: bool = True,
    max_depth: typing.SupportsInt | typing.SupportsIndex = 127,
    max_rows: typing.Any = None,
    max_kv_len: typing.Any = None,
    instance: str | None = None,
    reuse_plan: bool = False,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    workspace: typing.Any = None,
    status: typing.Any = None,
    sink_tokens: typing.SupportsInt | typing.SupportsIndex = 0,
    first_key: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.spec_attention.
    """

def step_append_kv(
    plan: StepPlan,
    layer: typing.SupportsInt | typing.SupportsIndex,
    k: typing.Any,
    v: typing.Any,
    k_pages: typing.Any,
    v_pages: typing.Any,
    k_scale: typing.Any = None,
    v_scale: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.step_append_kv.
    """

def step_attention(
    plan: StepPlan,
    layer: typing.SupportsInt | typing.SupportsIndex,
    q: typing.Any,
    out: typing.Any,
    k_pages: typing.Any,
    v_pages: typing.Any,
    scale: typing.SupportsFloat | typing.SupportsIndex,
    sliding_window: typing.SupportsInt | typing.SupportsIndex = 0,
    softcap: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    sinks: typing.Any = None,
    k_scale: typing.Any = None,
    v_scale: typing.Any = None,
    sink_tokens: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.step_attention.
    """

def supported_attention() -> list[typing.Any]:
    """
    See specdec_ext.ops.supported_attention.
    """

def synthetic_step(
    cu_logits: typing.Any,
    positions: typing.Any,
    tokens: typing.Any,
    parents: typing.Any,
    seed: typing.Any,
    synthetic_rates: typing.Any,
    *,
    vocab_size: typing.SupportsInt | typing.SupportsIndex,
    sampled: typing.Any,
    path: typing.Any,
    path_len: typing.Any,
    emitted: typing.Any,
    num_emitted: typing.Any,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
    status: typing.Any = None,
) -> None:
    """
    See specdec_ext.ops.synthetic_step.
    """

def text_array(
    data: typing_extensions.Buffer,
    at: typing.SupportsInt | typing.SupportsIndex,
    count: typing.SupportsInt | typing.SupportsIndex,
) -> list[str]:
    """
    `count` texts of a GGUF array that begins at byte `at` of `data`. ValueError: the data ends before; UnicodeDecodeError: one is not UTF-8.
    """

def text_array_end(
    data: typing_extensions.Buffer,
    at: typing.SupportsInt | typing.SupportsIndex,
    count: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Where they end, without reading them.
    """

def unpack_weight(
    weight: typing.Any,
    *,
    out: typing.Any,
    format: str,
    columns: typing.SupportsInt | typing.SupportsIndex,
    first: typing.SupportsInt | typing.SupportsIndex = 0,
    backend: typing.Any = None,
    stream: typing.SupportsInt | typing.SupportsIndex = 0,
) -> None:
    """
    See specdec_ext.ops.unpack_weight.
    """

BEAM_SCORES: int = 50
DRAFT_SOURCES: tuple[typing.Any, ...] = (
    "request",
    "prediction",
    "grammar",
    "suffix",
    "edits",
    "ngram",
    "model",
    "lookahead",
)
GROWTH_BYTES: int = 2552
MASK_WORDS: int = 4
MAX_STEP_TOKENS: int = 128
PACK_LAYOUT: int = 1
__version__: str
