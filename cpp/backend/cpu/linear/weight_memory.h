// Memory for packed weights: large chunks on huge pages, shared by successive weights, so that a
// model of many small matrices does not pay a TLB miss per 4 KiB while it streams its weights.
#pragma once

#include <cstddef>
#include <memory>

namespace specdec::cpu {

// Aligned to 64 bytes, zero-filled. The chunk is freed with the last block in it.
class WeightBlock {
 public:
  // Thread-safe. Errors: std::bad_alloc.
  static std::shared_ptr<WeightBlock> allocate(std::size_t bytes);

  std::byte* data() const { return data_; }

 private:
  struct Chunk;
  WeightBlock(std::shared_ptr<Chunk> chunk, std::byte* data);

  std::shared_ptr<Chunk> chunk_;
  std::byte* data_;
};

}  // namespace specdec::cpu
