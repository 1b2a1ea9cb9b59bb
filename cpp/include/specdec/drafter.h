// Drafters: where the drafts come from that the model verifies.
//
// Contract: whatever a drafter proposes, the text is the model's own. A drafter is one of
//   * code of the request's slot (algo/slot.h): lookahead, prompt lookup or suffix decoding, as
//     ExecutorConfig::method says;
//   * the caller: Executor::propose(id, tokens, parents) hands in the tree of a request's next
//     decode step, with ExecutorConfig::method = DraftMethod::kProposed;
//   * an operation on a device, which writes a ProposedDraft into the slot before the step.
// Drafts that were drawn at random come with the distributions they were drawn from
// (ProposedProbs), and only untrue ones could change the law of sampled output.
#pragma once

#include "algo/draft_probs.h"
#include "algo/proposed_draft.h"
#include "algo/slot.h"
#include "engine/config.h"
