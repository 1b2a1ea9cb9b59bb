// LlamaDecoder as one of several ranks: a step in parts, with what the ranks exchange in between.
//
// Every projection is split by output rows and reads its whole input, so no sum crosses ranks and
// each number has the bits that one rank alone gives it. A rank computes its columns in place; its
// chunk is a copy of them, and the other ranks' chunks are copied to theirs.
//
// With adds_partial_sums the projections that end a block read what their own rank has computed,
// and give a sum over those columns alone: a chunk is that sum of all of a row's outputs, and each
// rank adds up the chunks in the order of the ranks. A row's bits depend on the number of ranks,
// and on nothing else.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "backend/cpu/decoder/decoder_parts.h"
#include "backend/cpu/decoder/llama_decoder.h"
#include "base/check.h"
#include "base/pages.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

void check_bounds(const char* name, const std::vector<int>& bounds, std::size_t entries, int size) {
  SPECDEC_REQUIRE(bounds.size() == entries && bounds.front() == 0 && bounds.back() == size,
                  "decoder.", name, ": ", entries, " bounds from 0 to ", size, " are needed");
  for (std::size_t r = 1; r < entries; ++r) {
    SPECDEC_REQUIRE(bounds[r] > bounds[r - 1], "decoder.", name, ": rank ", r - 1,
                    " would compute nothing of ", size, "; use fewer ranks");
  }
}

}  // namespace

void LlamaDecoder::take_shard() {
  const DecoderConfig& c = config_;
  const std::size_t entries = c.kv_head_bounds.size();
  const auto rank = static_cast<std::size_t>(c.shard_rank);
  SPECDEC_REQUIRE(c.shard_rank >= 0 && rank + 1 < entries, "decoder.shard_rank = ", c.shard_rank,
                  ": ranks are 0..", entries - 2);
  check_bounds("kv_head_bounds", c.kv_head_bounds, entries, c.num_kv_heads);
  check_bounds("hidden_bounds", c.hidden_bounds, entries, c.hidden_size);
  check_bounds("ffn_bounds", c.ffn_bounds, entries, c.intermediate_size);
  check_bounds("head_bounds", c.head_bounds, entries, c.head_size);
  for (std::size_t r = 1; r + 1 < entries; ++r) {
    SPECDEC_REQUIRE(c.ffn_bounds[r] % kPanelColumns == 0, "decoder.ffn_bounds[", r,
                    "] = ", c.ffn_bounds[r], ": must be a multiple of ", kPanelColumns);
  }
  const auto columns = [rank](const std::vector<int>& bounds) {
    return Columns{bounds[rank], bounds[rank + 1] - bounds[rank]};
  };
  const int group = c.num_heads / c.num_kv_heads;
  num_kv_heads_ = static_cast<int>(columns(c.kv_head_bounds).count);
  num_heads_ = num_kv_heads_ * group;
  first_head_ = c.kv_head_bounds[rank] * group;
  hidden_ = columns(c.hidden_bounds);
  ffn_ = columns(c.ffn_bounds);
  scores_ = columns(c.head_bounds);
  if (!c.adds_partial_sums) return;
  hidden_ = {0, c.hidden_size};
  read_heads_ = {std::int64_t{first_head_} * c.head_dim, std::int64_t{num_heads_} * c.head_dim};
  read_ffn_ = ffn_;
}

LlamaDecoder::Exchange LlamaDecoder::exchange_of(int part) {
  const DecoderConfig& c = config_;
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  const auto offsets = [](const std::vector<int>& bounds, auto bytes_before) {
    std::vector<std::int64_t> result(bounds.size());
    std::transform(bounds.begin(), bounds.end(), result.begin(), bytes_before);
    return result;
  };
  switch (part % kPartsOfLayer) {
    case kAttend: {
      const std::int64_t width = c.num_heads / c.num_kv_heads * c.head_dim * kFloat;
      return {offsets(c.kv_head_bounds, [width](int head) { return head * width; }),
              reinterpret_cast<std::byte*>(attention_.data()), attention_stride_ * kFloat};
    }
    case kGate: {
      // In the form that the down projection takes: a rank has whole blocks.
      const InputForm form = layers_[part / kPartsOfLayer].down->input_form();
      return {offsets(c.ffn_bounds, [form](int column) { return input_offset(form, column); }),
              act_.data(), act_bytes_};
    }
    default:
      return {offsets(c.hidden_bounds, [](int column) { return column * kFloat; }),
              reinterpret_cast<std::byte*>(sum_.data()), c.hidden_size * kFloat};
  }
}

std::int64_t LlamaDecoder::chunk_bytes(int part, std::int64_t rows) {
  SPECDEC_REQUIRE(is_shard() && part >= 0 && part < num_parts(), "part ", part, ": parts are 0..",
                  num_parts() - 1);
  if (config_.adds_partial_sums) {
    return rows * config_.hidden_size * static_cast<std::int64_t>(sizeof(float));
  }
  const Exchange exchange = exchange_of(part);
  std::int64_t most = 0;
  for (std::size_t r = 1; r < exchange.offsets.size(); ++r) {
    most = std::max(most, exchange.offsets[r] - exchange.offsets[r - 1]);
  }
  return rows * most;
}

// The other ranks' columns.
void LlamaDecoder::take_chunks(int part, const std::byte* gathered, std::int64_t rows) {
  if (config_.adds_partial_sums) return add_partial_sums(gathered, rows);
  const Exchange exchange = exchange_of(part);
  const std::int64_t chunk = chunk_bytes(part, rows);
  over_rows(rows, 1, [&](Range some) {
    for (std::size_t r = 0; r + 1 < exchange.offsets.size(); ++r) {
      if (static_cast<int>(r) == config_.shard_rank) continue;
      const std::int64_t begin = exchange.offsets[r], bytes = exchange.offsets[r + 1] - begin;
      const std::byte* from = gathered + static_cast<std::int64_t>(r) * chunk;
      for (std::int64_t row = some.begin; row < some.end; ++row) {
        std::memcpy(exchange.base + row * exchange.row_bytes + begin, from + row * bytes, bytes);
      }
    }
  });
}

// sum_ = the sum of all ranks' chunks.
void LlamaDecoder::add_partial_sums(const std::byte* gathered, std::int64_t rows) {
  const std::int64_t n = config_.hidden_size, chunk = chunk_bytes(0, rows);
  over_rows(rows, num_ranks(), [&](Range some) {
    for (std::int64_t row = some.begin; row < some.end; ++row) {
      float* sum = sum_.data() + row * n;
      for (int r = 0; r < num_ranks(); ++r) {
        const auto* from = reinterpret_cast<const float*>(gathered + r * chunk) + row * n;
        if (r == 0) {
          std::memcpy(sum, from, n * sizeof(float));
        } else {
          ops_.add(from, n, sum);
        }
      }
    }
  });
}

void LlamaDecoder::give_chunk(int part, std::int64_t rows, std::byte* chunk) {
  if (config_.adds_partial_sums) {
    const std::int64_t bytes = config_.hidden_size * static_cast<std::int64_t>(sizeof(float));
    over_rows(rows, 1, [&](Range some) {
      std::memcpy(chunk + some.begin * bytes, sum_.data() + some.begin * config_.hidden_size,
                  (some.end - some.begin) * bytes);
    });
    return;
  }
  const Exchange exchange = exchange_of(part);
  const std::int64_t begin = exchange.offsets[config_.shard_rank];
  const std::int64_t bytes = exchange.offsets[config_.shard_rank + 1] - begin;
  over_rows(rows, 1, [&](Range some) {
    for (std::int64_t row = some.begin; row < some.end; ++row) {
      std::memcpy(chunk + row * bytes, exchange.base + row * exchange.row_bytes + begin, bytes);
    }
  });
}

void LlamaDecoder::move_kv(const std::int32_t* pairs, std::int64_t n) {
  const auto element = static_cast<std::int64_t>(dtype_bytes(cache_.dtype));
  const std::int64_t bytes = kv_row_bytes(cache_.dtype, cache_.head_dim);  // with a scale, if any
  const std::int64_t places = std::int64_t{cache_.num_pages} * cache_.page_size;
  for (std::int64_t i = 0; i < 2 * n; ++i) {
    SPECDEC_REQUIRE(pairs[i] >= 0 && pairs[i] < places, "move_kv: place ", pairs[i],
                    ": places are 0..", places - 1);
  }
  const auto offset = [&](std::int32_t place) {
    return place / cache_.page_size * cache_.stride_page +
           place % cache_.page_size * cache_.stride_token;
  };
  const std::int64_t layer_ns = n * cache_.num_kv_heads * cache_.head_dim / 4;
  ThreadPool::global().run_items(cache_.num_layers, layer_ns, [&](Range layers, int) {
    for (std::int64_t layer = layers.begin; layer < layers.end; ++layer) {
      for (std::int64_t i = 0; i < n; ++i) {
        for (int g = 0; g < cache_.num_kv_heads; ++g) {
          const std::int64_t head = layer * cache_.stride_layer + g * cache_.stride_head;
          for (void* pages : {cache_.k, cache_.v}) {
            std::byte* base = static_cast<std::byte*>(pages) + head * element;
            std::memcpy(base + offset(pairs[2 * i + 1]) * element,
                        base + offset(pairs[2 * i]) * element, bytes);
          }
        }
      }
    }
  });
}

void LlamaDecoder::begin_parts(const StepView& step, const float* embedded) {
  SPECDEC_REQUIRE(is_shard(), "a step in parts is for decoders that hold a shard");
  prepare(step);
  best_rows_.resize(step.num_logit_rows);
  if (embedded != nullptr) {
    std::copy_n(embedded, std::int64_t{step.num_rows} * config_.hidden_size, residual_.data());
  } else {
    embed(step, {0, step.num_rows});
  }
}

const float* LlamaDecoder::embedded_rows() const { return residual_.data(); }

void LlamaDecoder::run_part(const StepView& step, int part, const std::byte* gathered,
                            std::byte* chunk) {
  SPECDEC_REQUIRE(is_shard() && part >= 0 && part < num_parts(), "part ", part, ": parts are 0..",
                  num_parts() - 1);
  const ThreadPool::Hold threads(ThreadPool::global());
  if (ThreadPool::global().size() > prepared_ranks_) prepare(step);  // resized between two parts
  const int layer = part / parts_of_layer();
  const std::int64_t rows = step.num_rows;
  if (part > 0) take_chunks(part - 1, gathered, rows);
  if (config_.adds_partial_sums) {
    run_whole_part(step, part);
  } else {
    switch (part % kPartsOfLayer) {
      case kAttend:
        append_kv(step, layer);
        attend(step, layer);
        break;
      case kProject:
        project(step, layer);
        break;
      case kGate:
        enter_feed_forward(step, layer);
        gate(step, layers_[layer], 0, rows);
        break;
      default:
        down(step, layers_[layer], 0, rows);
        break;
    }
  }
  give_chunk(part, rows, chunk);
}

// Attention or the feed-forward, to this rank's part of its output's sums.
void LlamaDecoder::run_whole_part(const StepView& step, int part) {
  const int layer = part / parts_of_layer();
  if (part % parts_of_layer() == 0) {
    append_kv(step, layer);
    attend(step, layer);
    project(step, layer);
  } else {
    enter_feed_forward(step, layer);
    gate(step, layers_[layer], 0, step.num_rows);
    down(step, layers_[layer], 0, step.num_rows);
  }
}

void LlamaDecoder::finish_logits(const StepView& step, const std::byte* gathered, float* logits,
                                 float* hidden) {
  end_layers(step, gathered, hidden);
  run_head_scores(step, logits);
}

void LlamaDecoder::finish_best(const StepView& step, const std::byte* gathered, RowBest* best,
                               float* hidden) {
  end_layers(step, gathered, hidden);
  run_head_best(step, best);
}

void LlamaDecoder::end_layers(const StepView& step, const std::byte* gathered, float* hidden) {
  take_chunks(num_parts() - 1, gathered, step.num_rows);
  over_rows(step.num_rows, 1, [&](Range some) { add_sum(layers_.back().ffn_out_norm, some); });
  run_final_norm(step, hidden);
}

}  // namespace specdec::cpu
