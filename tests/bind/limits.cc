// Limits and defaults that the Python package states for itself, so that a configuration is checked
// before the core is loaded: a test holds both against each other.
#include <pybind11/pybind11.h>

#include "algo/accept_rules.h"
#include "algo/slot.h"
#include "base/pages.h"
#include "base/types.h"
#include "engine/prediction.h"

namespace specdec {

void register_limits(pybind11::module_& m) {
  m.attr("KNOWN_DRAFTS") = kKnownDrafts;
  m.attr("WEIGHED_DRAFTS") = kWeighedDrafts;
  m.attr("MAX_DRAFT_LEN") = kMaxDraftLen;
  m.attr("MAX_PAGE_SIZE") = kMaxPageSize;
  m.attr("MAX_STOP_IDS") = kMaxSlotStopIds;
  m.attr("POSTERIOR_THRESHOLD") = kPosteriorThreshold;
  m.attr("POSTERIOR_ALPHA") = kPosteriorAlpha;
}

}  // namespace specdec
