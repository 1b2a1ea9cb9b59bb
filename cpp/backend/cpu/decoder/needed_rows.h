// The rows of a step that its last layer still needs, once it has their keys and values.
//
// A prompt is asked for the scores of its last token alone. Its other rows are there for their K/V,
// which the last layer appends before it attends. So from there on the layer has a step of those
// rows that a score depends on. A row's bits depend on no other row: the scores stay what they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/step_view.h"

namespace specdec::cpu {

class NeededRows {
 public:
  // A chain keeps what lies between the first and the last row with scores, a tree all of its rows
  // or none. False: that is more than half of the step, which is not worth moving rows.
  bool find(const StepView& step);

  // The step of these rows, whose K/V are in the pages. Its logit_rows are its own; it has no
  // tokens, positions and parents, which attention does not read. Valid like the step and until the
  // next find().
  const StepView& step() const { return step_; }

  // Moves the needed rows to the front: `bytes` of each, row_bytes apart.
  void move_to_front(std::byte* rows, std::int64_t row_bytes, std::int64_t bytes) const;

 private:
  struct Run {
    std::int32_t begin, end;  // rows of the whole step
  };

  StepView step_;
  std::vector<Run> runs_;  // [B]
  std::vector<std::int32_t> cu_rows_, kv_len_, logit_rows_;
  std::vector<std::uint32_t> mask_;
};

}  // namespace specdec::cpu
