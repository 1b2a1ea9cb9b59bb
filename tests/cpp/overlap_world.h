// A device for the executor: slots, pages and step arrays that only a stub stream
// touches, and a target whose next token is a hash of everything that the row can see in its pages.
// Pages that are given back are poisoned at once, so a step that still reads them chooses other
// tokens.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "algo/fault.h"
#include "algo/slot.h"
#include "backend/backend.h"
#include "engine/executor.h"
#include "stub_stream.h"

namespace specdec::testing {

inline constexpr int kHashVocab = 24, kCellWidth = 8;
inline constexpr float kPoison = -12345.0f;

inline std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// The sum over a history that decides its next token, together with the last two tokens.
inline std::uint64_t term(TokenId token, int position) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(token)) + 1) *
         (mixed(0x9e3779b97f4a7c15u * (static_cast<std::uint64_t>(position) + 1)) | 1);
}
inline TokenId next_token(std::uint64_t sum, TokenId before, TokenId last) {
  const std::uint64_t all = mixed(sum);
  if (all % 9 == 0) return static_cast<TokenId>((all >> 20) % kHashVocab);
  return static_cast<TokenId>(mixed(std::uint64_t{1009} * last + before) % 5);
}

// The text that follows a prompt, by the definition.
inline std::vector<TokenId> continuation(const std::vector<TokenId>& prompt, int num_tokens) {
  std::vector<TokenId> text = prompt;
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < text.size(); ++i) sum += term(text[i], static_cast<int>(i));
  for (int i = 0; i < num_tokens; ++i) {
    const TokenId before = text.size() > 1 ? text[text.size() - 2] : -1;
    text.push_back(next_token(sum, before, text.back()));
    sum += term(text.back(), static_cast<int>(text.size()) - 1);
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

class OverlapWorld {
 public:
  OverlapWorld(const ExecutorConfig& config, std::uint32_t seed)
      : executor(config),
        stream(seed),
        config_(config),
        layout_(executor.slot_layout()),
        staging_(executor.staging_layout()),
        random_(seed + 2) {
    const std::size_t ring = executor.ring_size(), batch = config.max_batch_size;
    slots_.resize(batch * layout_.bytes / 16);
    std::fill(slots_.begin(), slots_.end(), Block{});
    staging_ring_.resize(ring * staging_.words);
    entry_ring_.resize(ring * executor.entry_bytes() / 4);
    result_ring_.assign(ring * executor.result_words(), StubStream::kGarbage);
    staged_.resize(staging_.words);
    const std::size_t rows = config.max_num_tokens;
    for (auto* array : {&tokens_, &parents_, &positions_, &sampled_}) array->assign(rows, -7);
    mask_.assign(rows * kMaskWords, 0);
    for (auto* array : {&cu_rows_, &cu_logits_, &draft_rows_}) array->assign(batch + 1, -7);
    kv_len_.assign(batch, -7);
    is_tree_.assign(batch, 0);
    results_.assign(executor.result_words(), -7);
    path_.assign(batch * kMaxStepTokens, -7);
    path_len_.assign(batch, -7);
    const std::size_t cells = std::size_t(config.num_pages) * config.page_size * kCellWidth;
    k_.assign(cells, kPoison);
    v_.assign(cells, kPoison);
    const std::size_t copies = std::size_t(config.num_host_pages) * page_cells();
    k_host_.assign(copies, kPoison);
    v_host_.assign(copies, kPoison);
    StepRings rings;
    rings.staging = staging_ring_.data();
    rings.entries = reinterpret_cast<std::byte*>(entry_ring_.data());
    rings.results = result_ring_.data();
    executor.bind_rings(rings);
  }

  // Plans and enqueues a step; false: there was none.
  bool plan() {
    const StagedStep* planned = executor.plan();
    if (planned == nullptr) return false;
    StagedStep step = *planned;
    for (const PageOrder& copy : step.page_orders) {
      if (copy.to_host) leaving_.emplace(copy.page, step.index);
      stream.enqueue([this, copy] { copy_page(copy); });
    }
    // A graph's bucket has more requests and rows than the step: nobody's.
    const int requests = step.num_prompts + step.num_decodes;
    const int rows = step.num_prompt_rows + step.max_decode_rows;
    step.num_decodes += static_cast<int>(random_() % (config_.max_batch_size - requests + 1));
    step.max_decode_rows += static_cast<int>(random_() % (config_.max_num_tokens - rows + 1));
    const std::int32_t* from = staging_ring_.data() + std::ptrdiff_t{step.ring} * staging_.words;
    stream.copy_in(staged_.data(), from, staging_.words);
    for (const SlotEntry& entry : step.entries) {
      const std::int32_t* bytes =
          entry_ring_.data() + (step.ring * executor.entry_bytes() + entry.offset) / 4;
      auto* slot = reinterpret_cast<std::byte*>(slots_.data()) + entry.slot * layout_.bytes;
      stream.copy_in(reinterpret_cast<std::int32_t*>(slot), bytes, entry.bytes / 4);
    }
    stream.enqueue([this, step] { draft(step); });
    stream.enqueue([this, step] { forward(step); });
    stream.enqueue([this, step] { commit(step); });
    stream.copy_out(result_ring_.data() + std::ptrdiff_t{step.ring} * executor.result_words(),
                    results_.data(), executor.result_words());
    events_.push_back(stream.record());
    stream.pass();
    return true;
  }

  // Plans a step of which nothing can be enqueued, not even copies of pages. `planned` as plan().
  std::vector<StepOutput> plan_and_fail(bool* planned) {
    const StagedStep* step = executor.plan();
    *planned = step != nullptr;
    if (!*planned) return {};
    events_.push_back(stream.record());
    return executor.fail(step->index, "the device is out of order");
  }

  std::vector<StepOutput> deliver() {
    const std::int64_t delivered = executor.steps_in_flight().front();
    std::erase_if(leaving_, [&](const auto& page) { return page.second <= delivered; });
    stream.wait(*events_.front());
    events_.pop_front();
    std::vector<StepOutput> outputs = executor.deliver();
    poison_returned();
    stream.pass();
    return outputs;
  }

  RequestId submit(RequestParams params) {
    const RequestId id = executor.submit(std::move(params));
    ids_.insert(id);
    return id;
  }

  bool cancel(RequestId id) {
    const bool known = executor.cancel(id);
    poison_returned();
    return known;
  }

  // Poisons the pages that nobody holds any more.
  void poison_returned() {
    std::set<std::int32_t> held;
    for (RequestId id : ids_) {
      for (std::int32_t page : executor.pages(id)) held.insert(page);
    }
    for (std::int32_t page : held_) {
      // What is still to be copied away is poisoned behind that.
      if (held.contains(page) || leaving_.contains(page)) continue;
      std::fill_n(k_.begin() + page * page_cells(), page_cells(), kPoison);
      std::fill_n(v_.begin() + page * page_cells(), page_cells(), kPoison);
    }
    held_ = std::move(held);
  }

  std::int64_t rows_seen() const { return rows_seen_; }

  Executor executor;
  StubStream stream;

 private:
  struct alignas(16) Block {
    std::byte bytes[16];
  };

  std::ptrdiff_t page_cells() const { return std::ptrdiff_t{config_.page_size} * kCellWidth; }

  // What was copied is gone where it was.
  void copy_page(const PageOrder& copy) {
    const std::ptrdiff_t cells = page_cells();
    for (auto [pages, copies] : {std::pair{&k_, &k_host_}, std::pair{&v_, &v_host_}}) {
      auto here = pages->begin() + copy.page * cells;
      auto there = copies->begin() + copy.host_page * cells;
      if (!copy.to_host) std::swap(here, there);
      std::copy_n(here, cells, there);
      std::fill_n(here, cells, kPoison);
    }
  }

  SlotPoolView pool() {
    return {reinterpret_cast<std::byte*>(slots_.data()), layout_.bytes, config_.max_batch_size};
  }
  const std::int32_t* staged(int offset) const { return staged_.data() + offset; }
  std::uint32_t* flags() {
    return reinterpret_cast<std::uint32_t*>(results_.data() + results_.size() -
                                            config_.max_batch_size);
  }

  StepView view(const StagedStep& step) const {
    StepView v;
    v.num_requests = step.num_prompts + step.num_decodes;
    v.num_rows = step.num_prompt_rows + step.max_decode_rows;
    v.tokens = tokens_.data();
    v.positions = positions_.data();
    v.parents = parents_.data();
    v.mask = mask_.data();
    v.cu_rows = cu_rows_.data();
    v.kv_len = kv_len_.data();
    v.is_tree = is_tree_.data();
    v.page_table = staged(staging_.page_table);
    v.page_table_stride = staging_.pages_per_request;
    return v;
  }

  // Guesses along a path, often right, and siblings at random; sometimes what is no draft.
  void propose_drafts(const StagedStep& step) {
    const int width = config_.proposed_max_draft_len, first = step.num_prompts;
    const std::size_t count = static_cast<std::size_t>(step.num_decodes) * width;
    std::vector<TokenId> tokens(count, -1), recent(std::size_t{2} * step.num_decodes);
    std::vector<std::int32_t> parents(count, -1), lens(step.num_decodes);
    RecentTokensParams from;
    from.slots = pool();
    from.slot_ids = staged(staging_.slot_ids) + first;
    from.width = 2;
    from.num_requests = step.num_decodes;
    from.tokens = recent.data();
    from.lens = lens.data();
    cpu_backend().recent_tokens(from);
    for (int b = 0; b < step.num_decodes; ++b) {
      if (lens[b] == 0) continue;
      TokenId before = recent[2 * b], last = recent[2 * b + 1];
      int parent = -1;
      for (int i = 0, depth = 0; i < width && depth < config_.proposed_max_path; ++i) {
        TokenId& token = tokens[std::size_t(b) * width + i];
        parents[std::size_t(b) * width + i] = parent;
        if (config_.proposed_max_path < width && random_() % 3 == 0) {  // a sibling
          token = static_cast<TokenId>(random_() % kHashVocab);
          continue;
        }
        token = static_cast<TokenId>(mixed(std::uint64_t{1009} * last + before) % 5);
        before = last;
        last = token;
        parent = i;
        ++depth;
        if (random_() % 20 == 0) token = kHashVocab;  // ends the drafts
      }
    }
    ProposeDraftsParams p;
    p.slots = pool();
    p.slot_ids = from.slot_ids;
    p.tokens = tokens.data();
    p.parents = parents.data();
    p.width = width;
    p.vocab_size = kHashVocab;
    p.num_requests = step.num_decodes;
    cpu_backend().propose_drafts(p);
  }

  void draft(const StagedStep& step) {
    std::fill_n(flags(), config_.max_batch_size, 0u);
    const int prompts = step.num_prompts, rows = step.num_prompt_rows;
    std::copy_n(staged(staging_.kv_len), prompts, kv_len_.begin());
    std::copy_n(staged(staging_.cu_rows), prompts + 1, cu_rows_.begin());
    std::copy_n(staged(staging_.cu_logits), prompts + 1, cu_logits_.begin());
    std::copy_n(staged(staging_.prompt_tokens), rows, tokens_.begin());
    std::copy_n(staged(staging_.prompt_parents), rows, parents_.begin());
    for (int b = prompts; fault(Fault::kFrozenDrafts) && b < prompts + step.num_decodes; ++b) {
      const std::int32_t id = staged(staging_.slot_ids)[b];
      if (!pool().holds(id)) continue;
      Slot* slot = pool().at(id);
      if (!slot->frozen() || slot->len >= slot->max_len) continue;  // its history has room
      slot->finish = 0;
      slot->method = SlotMethod::kNone;  // its drafter may never have been made
    }
    if (config_.method == DraftMethod::kProposed && random_() % 8 != 0) propose_drafts(step);
    DraftStepParams p;
    p.slots = pool();
    p.slot_ids = staged(staging_.slot_ids) + prompts;
    p.max_drafts = staged(staging_.max_drafts) + prompts;
    p.window_rows = staged(staging_.window_rows) + prompts;
    p.guesses = staged(staging_.guesses) + prompts;
    p.num_requests = step.num_decodes;
    p.num_rows = step.max_decode_rows;
    p.tokens = tokens_.data() + rows;
    p.parents = parents_.data() + rows;
    p.cu_rows = draft_rows_.data();
    p.kv_len = kv_len_.data() + prompts;
    p.exec.status = flags() + prompts;
    cpu_backend().draft_step(p);
    for (int b = 0; b <= step.num_decodes; ++b) {
      cu_rows_[prompts + b] = rows + draft_rows_[b];
      cu_logits_[prompts + b] = step.num_prompt_logits + draft_rows_[b];
    }
    BuildStepParams build;
    build.step = view(step);
    build.num_pages = config_.num_pages;
    build.page_size = config_.page_size;
    build.positions = positions_.data();
    build.mask = mask_.data();
    build.is_tree = is_tree_.data();
    build.exec.status = flags();
    cpu_backend().build_step(build);
  }

  float* cell(std::vector<float>& store, int b, int token) {
    const int page = staged(staging_.page_table)[std::ptrdiff_t{b} * staging_.pages_per_request +
                                                 token / config_.page_size];
    if (page < 0 || page >= config_.num_pages) throw std::logic_error("a step reads no page");
    return store.data() +
           (std::ptrdiff_t{page} * config_.page_size + token % config_.page_size) * kCellWidth;
  }

  void forward(const StagedStep& step) {
    const int requests = step.num_prompts + step.num_decodes;
    std::vector<TokenId> choice(staging_.rows, -7);
    for (int b = 0; b < requests; ++b) {
      const int first = cu_rows_[b], rows = cu_rows_[b + 1] - first, kv_len = kv_len_[b];
      rows_seen_ += rows;
      for (int i = 0; i < rows; ++i) {
        for (auto* store : {&k_, &v_}) {
          float* at = cell(*store, b, kv_len + i);
          at[0] = static_cast<float>(tokens_[first + i]);
          at[1] = static_cast<float>(positions_[first + i]);
        }
      }
      if (rows == 0) continue;
      std::uint64_t context = 0;
      std::vector<TokenId> path;  // the last two tokens of the prefix
      for (int t = 0; t < kv_len; ++t) {
        const float *k = cell(k_, b, t), *v = cell(v_, b, t);
        if (k[0] == kPoison) throw std::logic_error("a step reads a page that was given back");
        const bool good = k[0] == v[0] && k[1] == v[1] && k[1] == static_cast<float>(t);
        const TokenId token = good ? static_cast<TokenId>(k[0]) : 12345;
        context += term(token, t);
        if (t >= kv_len - 2) path.push_back(token);
      }
      for (int i = 0; i < rows; ++i) {
        std::uint64_t sum = context;
        std::vector<TokenId> seen = path;
        for (int j = 0; j <= i; ++j) {
          const std::uint32_t word =
              mask_[static_cast<std::size_t>(first + i) * kMaskWords + j / 32];
          if (is_tree_[b] != 0 && (word >> (j % 32) & 1u) == 0) continue;
          const float* k = cell(k_, b, kv_len + j);
          sum += term(static_cast<TokenId>(k[0]), static_cast<int>(k[1]));
          seen.push_back(static_cast<TokenId>(k[0]));
        }
        const TokenId before = seen.size() > 1 ? seen[seen.size() - 2] : -1;
        choice[first + i] = next_token(sum, before, seen.back());
      }
    }
    const int choices = cu_logits_[requests];
    for (int i = 0; i < choices; ++i) sampled_[i] = choice[staged(staging_.logit_rows)[i]];
  }

  void commit(const StagedStep& step) {
    CommitStepParams p;
    p.slots = pool();
    p.slot_ids = staged(staging_.slot_ids);
    p.cu_logits = cu_logits_.data();
    p.sampled = sampled_.data();
    p.num_sampled = config_.max_num_tokens;
    p.num_requests = step.num_prompts + step.num_decodes;
    p.results = reinterpret_cast<SlotResult*>(results_.data());
    p.path = path_.data();
    p.path_len = path_len_.data();
    p.exec.status = flags();
    cpu_backend().commit_step(p);
    CompactKvParams moved;
    moved.step = view(step);
    moved.cache.k = k_.data();
    moved.cache.v = v_.data();
    moved.cache.num_layers = moved.cache.num_kv_heads = 1;
    moved.cache.num_pages = config_.num_pages;
    moved.cache.page_size = config_.page_size;
    moved.cache.head_dim = kCellWidth;
    moved.cache.stride_token = kCellWidth;
    moved.cache.stride_head = moved.cache.stride_page =
        std::int64_t{config_.page_size} * kCellWidth;
    moved.cache.stride_layer = moved.cache.stride_page * config_.num_pages;
    moved.path = path_.data();
    moved.path_len = path_len_.data();
    cpu_backend().compact_kv(moved);
  }

  ExecutorConfig config_;
  const SlotLayout layout_;
  const StagingLayout staging_;
  std::mt19937 random_;
  // The host's.
  std::vector<std::int32_t> staging_ring_, entry_ring_, result_ring_;
  std::deque<StubStream::EventPtr> events_;
  std::set<RequestId> ids_;
  std::set<std::int32_t> held_;
  std::map<std::int32_t, std::int64_t> leaving_;  // pages that a step in flight copies away
  // The device's.
  std::vector<Block> slots_;
  std::vector<std::int32_t> staged_, tokens_, parents_, positions_, sampled_;
  std::vector<std::int32_t> cu_rows_, cu_logits_, draft_rows_, kv_len_, results_, path_, path_len_;
  std::vector<std::uint32_t> mask_;
  std::vector<std::uint8_t> is_tree_;
  std::vector<float> k_, v_;
  std::vector<float> k_host_, v_host_;  // copies of pages
  std::int64_t rows_seen_ = 0;
};

}  // namespace specdec::testing
