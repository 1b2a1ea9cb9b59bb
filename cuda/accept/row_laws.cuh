// What is known of every row of a step before somebody looks at one: its largest score, its law's
// cut and mass, the token that its own number draws, and what rejection makes of its drafts.
#pragma once

#include <cstdint>

#include "algo/law_cuts.h"
#include "backend/accept_ops.h"

namespace specdec::cuda {

// In place of a drawn token: the cut lies beyond the row's list, or no path leads to the row. Who
// wants it has to look at the whole row.
inline constexpr TokenId kCutUnknown = -3;

// What blocks take their work from.
struct RowQueue {
  std::uint32_t tickets;  // tasks taken so far
  unsigned rejected;      // drafts that wait to be subtracted, or have been
  unsigned taken;         // pieces of them
  unsigned finished;      // tasks and pieces
};

// A draft that was drawn from probabilities: of the node's own row.
struct HeldDraft {
  Mass mass;        // of its probabilities
  Mass left;        // of its parent's law once it is rejected
  double scale;     // of its probabilities, where they are subtracted
  unsigned faults;  // not 0: some are none
  unsigned summed;  // pieces
  unsigned known;   // mass and faults hold
  unsigned joined;  // of what it takes to hold it: its sum, and its parent's law as it is by then
  unsigned subtracted;  // pieces
  unsigned unused;      // kRowUnused, kNeverHeld
};
static_assert(sizeof(HeldDraft) == 48);
// No path leads to the node; nor will it be held against its parent.
inline constexpr unsigned kRowUnused = 1, kNeverHeld = 2;

// What rejection makes of a row's drafts. All 0: not known, the walk looks itself.
struct RowOutcome {
  std::int32_t next;  // the draft that is kept; kNoDraft
  TokenId token;      // after the row
};
inline constexpr std::int32_t kNoDraft = -1;

// Arrays in a step's scratch; null: there was no room, and nothing is known.
struct RowLaws {
  RowQueue* queue = nullptr;
  std::uint64_t* best = nullptr;  // [rows] key of the largest score, and where its group begins
  Mass* total = nullptr;          // [rows] of the law before top_k and top_p
  HeldDraft* held = nullptr;      // [rows]
  RowOutcome* outcome = nullptr;  // [rows]
  unsigned* done = nullptr;       // [rows, 2] pieces searched, pieces weighed
  unsigned* rejected = nullptr;   // [rows] of queue->rejected: the draft's row
  TokenId* drawn = nullptr;       // [rows] or what is wrong with the row; kCutUnknown
  LawCut* cut = nullptr;          // [rows] of a law that cuts, and was drawn from
  // [rows, chunks] of a law that does not cut, or of what is left of a law
  Mass* mass_of_chunk = nullptr;
  char* lists = nullptr;  // [rows, law_list_bytes] of a law that cuts; see RowList
  std::int64_t list_bytes = 0;
  std::int32_t chunks = 0;

  SPECDEC_HD explicit operator bool() const { return queue != nullptr; }
  SPECDEC_HD Mass* masses_of(std::int32_t row) const {
    return mass_of_chunk + std::int64_t{row} * chunks;
  }
  // Does it hold something of the rows of this law?
  SPECDEC_HD static bool draws(const SamplingLaw& law) { return law.valid() && !law.greedy(); }
  // Is some of the law cut off by top_k or top_p?
  SPECDEC_HD static bool cuts(const SamplingLaw& law, std::int32_t vocab) {
    return top_k_of(law, vocab) > 0 || law.top_p < 1.0f;
  }
  SPECDEC_HD static std::int32_t top_k_of(const SamplingLaw& law, std::int32_t vocab) {
    return law.top_k < vocab ? law.top_k : 0;
  }
  // For a row that was drawn from.
  SPECDEC_HD LawCut cut_of(std::int32_t row, const SamplingLaw& law, std::int32_t vocab) const {
    if (cuts(law, vocab)) return cut[row];
    LawCut none;
    none.total = total[row];
    return none;
  }
};

struct RowLawsParams {
  ScoreRows rows;
  SamplingView sampling;
  RandomPurpose purpose = RandomPurpose::kToken;
  // [rows] within the request: a row's number is that of its depth below the request's first row.
  // Null: of its own position.
  const std::int32_t* parents = nullptr;
  // What is accepted, where drafts are; else as it is made.
  AcceptStepParams accept;
  TokenId* ids = nullptr;  // [rows] out: the largest score
  RowLaws laws;
  void* stream = nullptr;

  // Has some draft a probability for each token, and may be held against its row?
  SPECDEC_HD bool holds() const {
    return parents != nullptr && accept.probs != nullptr && accept.vocab_ids == nullptr;
  }
};

// The arrays within exec.workspace, `offset` bytes from its start; none if they do not fit.
RowLaws place_row_laws(const ScoreRows& rows, const ExecutionContext& exec, std::int64_t offset);
void row_laws(const RowLawsParams& params);

// All rows' largest scores (ids), and their laws where the scratch from `offset` on is enough: else
// by argmax, with what there is.
RowLaws search_rows(RowLawsParams params, const ExecutionContext& exec, std::int64_t offset);

}  // namespace specdec::cuda
