#include "base/zeroed_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "base/check.h"

namespace specdec {

// MAP_NORESERVE: what is never written is not counted as used under strict overcommit either.
ZeroedMemory::ZeroedMemory(std::size_t bytes) : bytes_(bytes) {
  void* memory = mmap(nullptr, std::max<std::size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(memory);
}

ZeroedMemory::~ZeroedMemory() { munmap(data_, std::max<std::size_t>(bytes_, 1)); }

void ZeroedMemory::release() {
  if (bytes_ == 0) return;
  const int failed = madvise(data_, bytes_, MADV_DONTNEED);
  SPECDEC_ENSURE(failed == 0, "madvise of ", bytes_, " bytes failed");
}

}  // namespace specdec
