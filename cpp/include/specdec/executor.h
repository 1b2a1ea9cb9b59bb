// The executor: who takes part in a step, which pages, which drafts, what was accepted.
//
// Contract, where the host runs the steps (Executor::run_on_host):
//
//   id = executor.submit(params)      any time, from any thread; std::invalid_argument refuses
//   loop:
//     executor.plan()                 null: nobody has anything to run
//     plan = executor.build()         rows, positions, ancestor masks, page table of the step
//     ...                             the model fills ids (or scores, if plan->needs_logits)
//     executor.commit(*plan, ids, scores, row_stride)
//     outputs = executor.deliver()    tokens, ends, errors, one StepOutput per request
//
// plan(), build(), commit() and deliver() belong to one thread. Greedy output equals plain decoding
// as long as the model gives a row the same scores however many rows share the pass.
//
// RequestParams says what a request asks for, ExecutorConfig what the executor is made for: the
// drafter (DraftMethod), batch, lengths, pages.
#pragma once

#include "engine/config.h"
#include "engine/executor.h"
#include "engine/request.h"
#include "engine/step_plan.h"
