// Zeros that cost no memory until they are written: anonymous pages of the operating system.
//
// The pool of K/V pages is as large as the requests could ever need; most of it is never used. An
// allocator that clears its memory by writing zeros would touch all of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specdec {

class ZeroedMemory {
 public:
  // Throws std::bad_alloc if the operating system has no address space left. `bytes` may be 0.
  explicit ZeroedMemory(std::size_t bytes);
  ZeroedMemory(const ZeroedMemory&) = delete;
  ZeroedMemory& operator=(const ZeroedMemory&) = delete;
  ~ZeroedMemory();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

  // Gives what was written back to the operating system: all of it reads as zeros again. Nobody may
  // be reading or writing it meanwhile.
  void release();
  // The same of a part of it, which begins and ends at multiples of unit().
  static void release(std::byte* begin, std::size_t bytes);
  // Bytes of a page of the operating system.
  static std::size_t unit();
  // Bytes that take memory now.
  std::size_t resident_bytes() const;

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace specdec
