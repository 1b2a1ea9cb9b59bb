"""Mutants of 32-bit offsets: pages, layers or heads that lie 2^31 elements apart."""

from __future__ import annotations

from mutants.model import Mutant

ROWS, COMPACT, APPEND = "cuda/step/step_rows.cuh", "cuda/kv/compact.cu", "cuda/kv/append.cu"
COPY, TAIL = "cuda/attention/ampere_copy.cuh", "cuda/attention/tail.cuh"
LAUNCH, GENERIC = "cuda/attention/hopper_launch.cuh", "cuda/attention/generic.cuh"
ROPE = "cuda/kv/rope_append.cu"

MUTANTS = [
    Mutant(
        "far-1",
        "append, compact: the page's offset in 32 bits",
        ROWS,
        "page * cache.stride_page +",
        "static_cast<std::int32_t>(page * cache.stride_page) +",
    ),
    Mutant(
        "far-2",
        "compact: the layer's offset in 32 bits",
        COMPACT,
        "layer * p.cache.stride_layer + head",
        "static_cast<std::int32_t>(layer * p.cache.stride_layer) + head",
    ),
    Mutant(
        "far-3",
        "compact: where a token comes from in 32 bits",
        COMPACT,
        "slot_elements(p.cache, 0, from_page, from) * element_bytes;",
        "static_cast<std::int32_t>(slot_elements(p.cache, 0, from_page, from) * element_bytes);",
    ),
    Mutant(
        "far-4",
        "compact: where a token goes, as bits without a sign",
        COMPACT,
        "slot_elements(p.cache, 0, to_page, to) * element_bytes;",
        "static_cast<std::uint32_t>(slot_elements(p.cache, 0, to_page, to) * element_bytes);",
    ),
    Mutant(
        "far-5",
        "append: an element's place in 32 bits",
        APPEND,
        "slot_elements(p.cache, p.layer, place.page, place.slot) + head",
        "static_cast<std::int32_t>(slot_elements(p.cache, p.layer, place.page, place.slot)) + head",
    ),
    Mutant(
        "far-6",
        "append with rotation: an element's place in 32 bits",
        ROPE,
        "slot_elements(p.cache, p.layer, place.page, place.slot) +",
        "static_cast<std::int32_t>(slot_elements(p.cache, p.layer, place.page, place.slot)) +",
    ),
    Mutant(
        "fargeneric-1",
        "the generic kernel: a key's place in 32 bits",
        GENERIC,
        "slot_elements(p.cache, p.layer, page, slot) + row.kv_head",
        "static_cast<std::int32_t>(slot_elements(p.cache, p.layer, page, slot)) + row.kv_head",
    ),
    Mutant(
        "farampere-1",
        "main pass: the page's offset in 32 bits",
        COPY,
        "offset = page * cache.stride_page +",
        "offset = static_cast<std::int32_t>(page * cache.stride_page) +",
    ),
    Mutant(
        "farampere-2",
        "main pass: offsets without a sign, in 32 bits",
        COPY,
        "offset = page * cache.stride_page + in_page * cache.stride_token + head_offset;",
        "offset = static_cast<std::uint32_t>(page * cache.stride_page + in_page * "
        "cache.stride_token + head_offset);",
    ),
    Mutant(
        "farfinish-1",
        "drafts' keys: the page's offset in 32 bits",
        TAIL,
        "pages[slot >> launch.page_shift] * cache.stride_page +",
        "static_cast<std::int32_t>(pages[slot >> launch.page_shift] * cache.stride_page) +",
    ),
    Mutant(
        "farhopper-1",
        "tensor maps: strides in 32 bits",
        LAUNCH,
        "stride(cache.stride_page)};",
        "stride(static_cast<std::int32_t>(cache.stride_page))};",
    ),
]
