// What the run-ahead executor asks of its configuration.
#pragma once

namespace specdec {

struct RunAheadConfig;

// The configuration as given. Throws std::invalid_argument naming the field, its value, the limit
// and the remedy.
const RunAheadConfig& checked_config(const RunAheadConfig& config);

// Drafts from outside that are no trees: as many as the longest path has.
bool brings_chains(const RunAheadConfig& config);

}  // namespace specdec
