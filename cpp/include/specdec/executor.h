// The executor decides which requests take part in a step, with which pages and drafts, and what is
// accepted.
//
// Contract, where the host runs the steps (Executor::run_on_host):
//
//   id = executor.submit(params)      any time, from any thread; std::invalid_argument refuses
//   loop:
//     executor.plan()                 null: no request has anything to run
//     plan = executor.build()         rows, positions, ancestor masks, page table of the step
//     ...                             the model fills ids (or scores, if plan->needs_logits)
//     executor.commit(*plan, ids, scores, row_stride)
//     outputs = executor.deliver()    tokens, ends, errors, one StepOutput per request
//
// plan(), build(), commit() and deliver() belong to one thread. Greedy output equals plain decoding
// as long as the model gives a row the same scores however many rows share the pass.
//
// RequestParams describes a request, ExecutorConfig the executor: its drafter (DraftMethod), batch,
// lengths and pages.
#pragma once

#include "engine/config.h"
#include "engine/executor.h"
#include "engine/request.h"
#include "engine/step_plan.h"
