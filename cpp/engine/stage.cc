// What a step's places of the rings hold of a request: the start of its slot, or what is new of it;
// its law, its pages, K/V to be moved.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "engine/executor.h"

namespace specdec {

// Puts the start of the request's slot among the step's entries. False: no room in this step's
// place of the ring.
bool Executor::enter(RequestRecord& request) {
  const SlotRequest slot = slot_request(request, /*take_prompt=*/false);
  const std::int64_t bytes = written_slot_bytes(slot);
  block_.resize(static_cast<std::size_t>(bytes / 8 + 1));
  write_slot(layout_, slot, block_.data());
  if (!stage_entry({request.slot, request.id, 0, bytes}, block_.data())) return false;
  request.entered = true;
  if (fault(Fault::kEntryLost) && request.id > config_.max_batch_size) step_.entries.pop_back();
  return true;
}

// Copies bytes to the step's place in the ring of entries, if there is room.
bool Executor::stage_entry(SlotEntry entry, const void* bytes) {
  if (!step_.entries.empty()) {
    entry.offset = (step_.entries.back().offset + step_.entries.back().bytes + 15) / 16 * 16;
  }
  if (entry.offset + entry.bytes > entry_bytes_) return false;
  std::memcpy(rings_.entries + step_.ring * entry_bytes_ + entry.offset, bytes,
              static_cast<std::size_t>(entry.bytes));
  step_.entries.push_back(entry);
  return true;
}

// Brings the device's slot of a request that the host decides up to date with the host's.
bool Executor::mirror(RequestRecord& request) {
  Slot* slot = request.host_slot;
  const auto head = static_cast<std::int64_t>(sizeof(Slot));
  const std::int64_t known = std::int64_t{request.mirrored} * std::int64_t{sizeof(TokenId)};
  const std::int64_t all = std::int64_t{slot->len} * std::int64_t{sizeof(TokenId)};
  const bool first = request.mirrored == 0;
  if (first && !stage_entry({request.slot, request.id, 0, head + all}, slot)) return false;
  if (!first) {
    if (!stage_entry({request.slot, request.id, 0, head, 0, false}, slot)) return false;
    const auto* text = reinterpret_cast<const std::byte*>(slot->history()) + known;
    if (!stage_entry({request.slot, request.id, 0, all - known, head + known, false}, text)) {
      return false;
    }
  }
  request.mirrored = slot->len;
  if (request.kept_row >= 0) step_.kept_rows.emplace_back(request.slot, request.kept_row);
  return true;
}

// The law and the rule of the step's request `index`; null: greedy, for padding.
void Executor::stage_law(std::int32_t* place, const RequestRecord* request, int index) const {
  const SamplingLaw law = request == nullptr ? SamplingLaw{} : request->params.sampling;
  const AcceptanceParams rule =
      request == nullptr ? AcceptanceParams{} : request->params.acceptance;
  const auto put = [&](int offset, auto value) {
    std::memcpy(reinterpret_cast<std::byte*>(place + offset) + index * sizeof(value), &value,
                sizeof(value));
  };
  put(staging_.temperature, law.temperature);
  put(staging_.top_p, law.top_p);
  put(staging_.min_p, law.min_p);
  put(staging_.top_k, law.top_k);
  put(staging_.acceptance, static_cast<std::uint8_t>(rule.rule));
  put(staging_.posterior_threshold, rule.posterior_threshold);
  put(staging_.posterior_alpha, rule.posterior_alpha);
  put(staging_.acceptance_threshold, rule.threshold);
}

// A step's table names pages alone: a block that was given back stands as the next one that was
// not. Nothing of it is seen; a draft model that has fallen behind the window may write there, what
// it reads again before it looks. `behind`: what blocks behind the last page get.
void Executor::fill_page_row(const std::vector<std::int32_t>& pages, std::int32_t* row,
                             std::int32_t behind) {
  std::int32_t next = behind;
  for (std::size_t i = pages.size(); i-- > 0;) {
    if (pages[i] != PageTable::kNoPage) next = pages[i];
    row[i] = next;
  }
}

// The pages of the step's request `index`, after reserving what it may touch; its rows write the
// positions from `from` to `to` - 1.
void Executor::stage_pages(const RequestRecord& request, int index, std::int64_t from,
                           std::int64_t to) {
  const std::int64_t tokens = request.tokens_to_hold();
  PageTable& table = book_.pages();
  const bool reserved = table.reserve(request.slot, tokens);
  SPECDEC_ENSURE(reserved, "request ", request.id, " was promised pages for ", tokens,
                 " tokens and did not get them");
  table.cover(request.slot, from, to);
  const auto& pages = table.pages(request.slot);
  const std::ptrdiff_t first = std::ptrdiff_t{index} * staging_.pages_per_request;
  fill_page_row(pages, staged(staging_.page_table) + first);
  // What the row's last use left behind must not look like a page.
  int& used = staged_pages_[static_cast<std::size_t>(step_.ring) * staging_.requests + index];
  const int count = static_cast<int>(pages.size());
  const auto end_row = [&](std::int32_t* row) {
    if (used > count) std::fill(row + count, row + used, -1);
  };
  end_row(staged(staging_.page_table) + first);
  // Narrow windows' tables name their parts; behind the last part that is seen nothing is written.
  for (int window = 0; host_ == nullptr && window < staging_.narrow; ++window) {
    block_parts_.resize(pages.size());
    for (int block = 0; block < count; ++block) {
      block_parts_[block] = table.part(window, request.slot, block);
    }
    std::int32_t* row = staged(staging_.narrow_tables) +
                        std::ptrdiff_t{window} * staging_.requests * staging_.pages_per_request +
                        first;
    fill_page_row(block_parts_, row, PageParts::kNone);
    end_row(row);
  }
  used = count;
  step_.max_kv_len = std::max(step_.max_kv_len, static_cast<int>(tokens));
}

// The K/V that the host's last choice left where it was drafted.
void Executor::place_moves(RequestRecord& request, int index) {
  const auto count = static_cast<std::int32_t>(request.unmoved.size());
  std::int32_t* path = staged(staging_.move_path) + std::ptrdiff_t{index} * kMaxStepTokens;
  std::int32_t* first = staged(staging_.move_cu_rows) + index;
  first[1] = first[0] + (count == 0 ? 0 : request.unmoved.back() + 1);
  staged(staging_.move_kv_len)[index] = request.unmoved_at;
  staged(staging_.move_path_len)[index] = count;
  std::copy(request.unmoved.begin(), request.unmoved.end(), path);
  step_.moves |= count > 0;
  request.unmoved.clear();
}

}  // namespace specdec
