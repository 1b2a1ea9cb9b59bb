// Draft trees that grow on a step's stream, on the host: the text of algo/draft_growth.h.
#include "algo/draft_growth.h"
#include "backend/cpu/step/step_ops.h"

namespace specdec::cpu {

void grow_drafts(const GrowDraftsParams& p) {
  DraftGrowthScratch scratch;
  for (std::int32_t b = 0; b < p.num_requests; ++b) {
    DraftGrowth* growth = p.growths + b;
    if (p.begins) begin_growth(growth);
    if (p.limit(b) <= 0 || (!p.begins && growth->num_open == 0)) continue;
    specdec::grow_drafts(SerialTeam{}, p.children_of(b), p.limit(b), p.max_open, growth, &scratch);
  }
}

void pack_drafts(const PackDraftsParams& p) {
  std::int32_t end = 0;
  p.cu_rows[0] = 0;
  for (std::int32_t b = 0; b < p.num_requests; ++b) {
    pack_growth(SerialTeam{}, p, b, end);
    if (end + p.rows(b) <= p.num_rows) end += p.rows(b);
    p.cu_rows[b + 1] = end;
  }
  for (std::int32_t row = end; row < p.num_rows; ++row) {
    p.tokens[row] = 0;
    p.parents[row] = -1;
    if (p.sources != nullptr) p.sources[row] = -1;
  }
}

void propose_growths(const ProposeGrowthsParams& p) {
  DraftGrowthScratch scratch;
  for (std::int32_t b = 0; b < p.num_requests; ++b) {
    if (!p.slots.holds(p.slot_ids[b])) continue;
    Slot* slot = p.slots.at(p.slot_ids[b]);
    const std::int32_t len = slot_len_to_draft(slot, kMaxDraftLen);
    if (len == 0) continue;
    propose_growth(SerialTeam{}, p.growths + b, len, slot->proposed_draft(), &scratch);
  }
}

}  // namespace specdec::cpu
