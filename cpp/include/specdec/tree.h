// The draft tree of a request in one step: tokens[] and parents[], parents[i] < i.
//
// Contract: node 0 is the golden token, the last one decided, whose K/V the step computes. Mask,
// depth, position and paths are derived from the parents, never stored beside them. At most
// kMaxStepTokens nodes.
#pragma once

#include "tree/draft_tree.h"
