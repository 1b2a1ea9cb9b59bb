#include "engine/draft_passes.h"

#include <algorithm>

#include "base/check.h"

namespace specdec {
namespace {

const DraftPassesConfig& checked(const DraftPassesConfig& c) {
  SPECDEC_REQUIRE(c.vocab_size >= 1, "vocab_size = ", c.vocab_size, ": at least 1");
  SPECDEC_REQUIRE(c.num_scores >= 1, "num_scores = ", c.num_scores, ": at least 1");
  SPECDEC_REQUIRE(c.num_slots >= 1, "num_slots = ", c.num_slots, ": at least 1");
  SPECDEC_REQUIRE(c.max_rows >= c.num_slots, "max_rows = ", c.max_rows,
                  ": a pass has at least one row per request, num_slots = ", c.num_slots);
  SPECDEC_REQUIRE(c.max_len >= 1, "max_len = ", c.max_len, ": at least 1");
  SPECDEC_REQUIRE(c.max_drafts >= 1 && c.max_drafts <= kMaxDraftLen, "max_drafts = ", c.max_drafts,
                  ": 1..", kMaxDraftLen);
  SPECDEC_REQUIRE(c.top_k >= 1 && c.top_k <= kMaxDraftChildren, "top_k = ", c.top_k, ": 1..",
                  kMaxDraftChildren);
  SPECDEC_REQUIRE(
      c.input_ids.empty() || c.input_ids.size() == static_cast<std::size_t>(c.vocab_size),
      "input_ids has ", c.input_ids.size(), " entries, vocab_size is ", c.vocab_size);
  SPECDEC_REQUIRE(
      c.output_ids.empty() || c.output_ids.size() == static_cast<std::size_t>(c.num_scores),
      "output_ids has ", c.output_ids.size(), " entries, num_scores is ", c.num_scores);
  SPECDEC_REQUIRE(!c.output_ids.empty() || c.num_scores <= c.vocab_size,
                  "num_scores = ", c.num_scores,
                  " without output_ids: at most vocab_size = ", c.vocab_size);
  for (std::size_t i = 0; i < c.output_ids.size(); ++i) {
    const TokenId id = c.output_ids[i];
    SPECDEC_REQUIRE(id >= 0 && id < c.vocab_size && (i == 0 || id > c.output_ids[i - 1]),
                    "output_ids[", i, "] = ", id, ": ascending ids of 0..", c.vocab_size - 1,
                    " are needed");
  }
  return c;
}

}  // namespace

DraftPasses::DraftPasses(const DraftPassesConfig& config)
    : config_(checked(config)),
      sources_(static_cast<std::size_t>(config.takes_features ? config.max_rows : 0)),
      slots_(static_cast<std::size_t>(config.num_slots)) {}

void DraftPasses::bind_pages(int page_size, int num_pages) {
  SPECDEC_REQUIRE(page_size >= 1 && num_pages >= 1, "bind_pages: ", num_pages, " pages of ",
                  page_size, " tokens: at least one of one");
  page_size_ = page_size;
  num_pages_ = num_pages;
}

void DraftPasses::bind_probs(float* probs, std::int32_t* columns, std::uint8_t* drawn) {
  probs_ = probs;
  probs_columns_ = columns;
  drawn_ = drawn;
}

void DraftPasses::enter(int slot, DraftPick mode, bool adaptive) {
  SPECDEC_REQUIRE(slot >= 0 && slot < config_.num_slots, "slot ", slot, ": slots are 0..",
                  config_.num_slots - 1);
  slots_[slot] = {mode, adaptive, 0, {}};
}

// -- Rounds ---------------------------------------------------------------------------------------

void DraftPasses::begin(const DraftRound& round, bool gives_scores) {
  SPECDEC_REQUIRE(round.num_requests <= config_.num_slots, "begin: ", round.num_requests,
                  " requests, there are ", config_.num_slots, " slots");
  round_ = round;
  gives_scores_ = gives_scores || is_tree();
  draws_ = false;
  drafting_.clear();
  planned_.clear();
  for (int b = 0; b < round.num_requests; ++b) {
    if (drawn_ != nullptr) drawn_[b] = 0;
    const int id = round.slot_ids[b];
    if (!round.slots.holds(id) || id >= config_.num_slots) continue;
    const Slot* slot = round.slots.at(id);
    const int len = slot_len_to_draft(slot, round.max_drafts[b]);
    // A draft at position p comes of a pass that reads p - 1.
    const int depth = std::min(slot_draft_room(slot), config_.max_len - len + 1);
    if (len == 0 || depth <= 0 || (config_.takes_features && len == 1)) continue;
    Reading& reading = slots_[id];
    if (config_.takes_features) reading.read = std::max(reading.read, 1);
    const TokenId* text = const_cast<Slot*>(slot)->history();
    // The golden token is always read: its row is what the first draft comes from.
    reading.read = std::min(reading.read, len - 1);
    for (const TokenId draft : reading.drafts) {
      if (reading.read == len - 1 || text[reading.read] != draft) break;
      ++reading.read;
    }
    reading.drafts.clear();
    Drafting& d = drafting_.emplace_back();
    d.request = b;
    d.slot = id;
    d.len = len;
    d.limit = std::min({round.max_drafts[b], config_.max_drafts, is_tree() ? kMaxDraftLen : depth});
    d.depth = is_tree() ? std::min(config_.max_depth, depth) : d.limit;
    const bool samples = round.laws.temperature != nullptr && !round.laws.law(b).greedy();
    d.mode = samples && !is_tree() ? reading.mode : DraftPick::kBest;
    if (d.mode == DraftPick::kOwn) {
      SPECDEC_REQUIRE(probs_ != nullptr, "a request draws its drafts: bind_probs() comes first");
      drawn_[b] = 1;
      draws_ = true;
    }
    gives_scores_ = gives_scores_ || d.mode != DraftPick::kBest;
    begin_growth(&d.growth);
  }
}

// The chance that what the last pass made comes true as far as the next one drafts from it.
double DraftPasses::chance_below(const Drafting& d) const {
  const DraftGrowth& g = d.growth;
  if (!is_tree()) return g.worth[d.made - 1] < 0.0f ? 1.0 : g.worth[d.made - 1];
  double chance = 0.0;
  for (int i = 0; i < g.count; ++i) {
    if (g.rows[i] >= g.num_rows - g.num_open) chance += g.worth[i];
  }
  return chance;
}

// A pass is shared: it is worth it if all who wait for it expect enough together, or if somebody
// has it made whatever it costs.
void DraftPasses::stop_where_dear() {
  double chance = 0.0;
  for (const Drafting& d : drafting_) {
    if (d.ends) continue;
    if (d.made == 0 || !slots_[d.slot].adaptive) return;
    chance += chance_below(d);
  }
  if (chance >= round_.pass_price) return;
  for (Drafting& d : drafting_) d.ends = true;
}

const StepPlan* DraftPasses::plan() {
  stop_where_dear();
  open_plan(round_.max_pages, gives_scores_);
  planned_.clear();
  const int most = std::max(config_.max_rows / std::max(static_cast<int>(drafting_.size()), 1), 1);
  for (std::size_t i = 0; i < drafting_.size(); ++i) {
    if (!drafting_[i].ends) place(static_cast<int>(i), most);
  }
  if (plan_->num_requests == 0) {
    propose();
    drafting_.clear();
    return nullptr;
  }
  return plan_.get();
}

void DraftPasses::open_plan(int max_pages, bool gives_scores) {
  if (plan_ == nullptr || plan_->page_table_stride < max_pages) {
    plan_ = std::make_unique<StepPlan>(config_.num_slots, config_.max_rows, max_pages);
  }
  StepPlan& plan = *plan_;
  plan.num_requests = plan.num_rows = plan.num_logit_rows = plan.num_prefill_rows = 0;
  plan.needs_logits = gives_scores;
  plan.cu_rows[0] = plan.cu_logits[0] = 0;
  ++plan.generation;
}

bool DraftPasses::add_request(const std::int32_t* pages, int request, int kv_len, int rows) {
  StepPlan& plan = *plan_;
  const int used = (kv_len + rows + page_size_ - 1) / page_size_;
  if (plan.num_rows + rows > config_.max_rows || used > plan.page_table_stride) return false;
  for (int i = 0; i < used; ++i) {
    if (pages[i] < 0 || pages[i] >= num_pages_) return false;
  }
  const int b = plan.num_requests++;
  std::copy_n(pages, used, plan.page_table.begin() + std::ptrdiff_t{b} * plan.page_table_stride);
  plan.kv_len[b] = kv_len;
  plan.slot[b] = request;
  plan.is_tree[b] = 0;
  plan.num_rows += rows;
  plan.cu_rows[b + 1] = plan.num_rows;
  plan.cu_logits[b + 1] = plan.num_logit_rows;
  return true;
}

void DraftPasses::put_row(int row, TokenId token, int position, int parent, int source) {
  plan_->tokens[row] = config_.input_ids.empty() ? token : config_.input_ids[token];
  plan_->positions[row] = position;
  plan_->parents[row] = parent;
  if (config_.takes_features) sources_[row] = source;
}

// `most`: rows of a text that is being read.
void DraftPasses::place(int index, int most) {
  Drafting& d = drafting_[index];
  StepPlan& plan = *plan_;
  const std::int32_t* pages = round_.page_table + std::ptrdiff_t{d.request} * round_.max_pages;
  const int first = plan.num_rows, read = slots_[d.slot].read;
  int kv_len = d.len - 1, rows = d.growth.num_rows;
  if (d.made == 0) {
    kv_len = read;
    rows = std::min(d.len - read, most);
  } else if (!is_tree()) {
    kv_len = d.len + d.made - 1;
    rows = 1;
  }
  if (!add_request(pages, d.request, kv_len, rows)) {
    d.ends = true;
    return;
  }
  int choices = 1;
  if (d.made == 0) {
    const TokenId* text = const_cast<Slot*>(slot(d))->history();
    for (int i = 0; i < rows; ++i) put_row(first + i, text[read + i], read + i, i - 1);
    if (read + rows < d.len) choices = 0;
  } else if (is_tree()) {
    slots_[d.slot].drafts.clear();  // rows are numbered anew
    place_tree(d);
    choices = d.growth.num_open;
  } else {
    put_row(first, d.growth.tokens[d.made - 1], kv_len, -1, d.golden_row);
  }
  // In a chain this is the row that the next draft comes from.
  if (!is_tree() || d.made == 0) d.golden_row = plan.num_rows - 1;
  planned_.push_back({index, rows, plan.num_logit_rows});
  for (int i = choices; i > 0; --i) plan.logit_rows[plan.num_logit_rows++] = plan.num_rows - i;
  plan.cu_logits[plan.num_requests] = plan.num_logit_rows;
}

// Row 0 is the golden token again, then the opened nodes.
void DraftPasses::place_tree(Drafting& d) {
  StepPlan& plan = *plan_;
  const int b = plan.num_requests - 1, first = plan.cu_rows[b];
  const DraftGrowth& g = d.growth;
  put_row(first, const_cast<Slot*>(slot(d))->history()[d.len - 1], d.len - 1, -1);
  for (int i = 0; i < g.count; ++i) {
    if (g.rows[i] == 0) continue;
    const int parent = g.parents[i] < 0 ? 0 : g.rows[g.parents[i]];
    const int source = g.parents[i] < 0 ? d.golden_row : d.first_row + g.was[g.parents[i]];
    put_row(first + g.rows[i], g.tokens[i], plan.positions[first + parent] + 1, parent, source);
  }
  d.golden_row = d.first_row = first;
  const std::int32_t* parents = plan.parents.data() + first;
  if (is_chain(parents, g.num_rows)) return;
  plan.is_tree[b] = 1;
  derive_mask(parents, g.num_rows, plan.mask.data() + std::ptrdiff_t{first} * kMaskWords);
}

// -- Prompts --------------------------------------------------------------------------------------

const StepPlan* DraftPasses::plan_prompts(const PromptPieces& p) {
  open_plan(p.max_pages, false);
  prompt_ends_.clear();
  for (int b = 0; b < p.num_requests; ++b) {
    const int slot = p.slot_ids[b], kv_len = p.kv_len[b];
    const int skipped = config_.takes_features && kv_len == 0 ? 1 : 0;
    const int start = kv_len + skipped;
    const int rows = std::min(p.cu_rows[b + 1] - p.cu_rows[b], config_.max_len - kv_len) - skipped;
    if (slot < 0 || slot >= config_.num_slots || rows <= 0) continue;
    const int first = plan_->num_rows;
    const std::int32_t* pages = p.page_table + std::ptrdiff_t{b} * p.max_pages;
    if (!add_request(pages, b, start, rows)) continue;
    for (int i = 0; i < rows; ++i) {
      put_row(first + i, p.tokens[p.cu_rows[b] + skipped + i], start + i, i - 1);
    }
    prompt_ends_.push_back({slot, start + rows});
  }
  plan_->num_prefill_rows = plan_->num_rows;
  return plan_->num_requests == 0 ? nullptr : plan_.get();
}

void DraftPasses::take_prompts() {
  for (const PromptEnd& end : prompt_ends_) slots_[end.slot].read = end.end;
  prompt_ends_.clear();
}

std::size_t DraftPasses::memory_bytes() const {
  return (plan_ == nullptr ? 0 : plan_->memory_bytes()) + drafting_.capacity() * sizeof(Drafting);
}

}  // namespace specdec
