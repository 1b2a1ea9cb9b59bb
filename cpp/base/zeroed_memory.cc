#include "base/zeroed_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <vector>

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
  if (bytes_ > 0) release(data_, bytes_);
}

void ZeroedMemory::release(std::byte* begin, std::size_t bytes) {
  const int failed = madvise(begin, bytes, MADV_DONTNEED);
  SPECDEC_ENSURE(failed == 0, "madvise of ", bytes, " bytes failed");
}

std::size_t ZeroedMemory::unit() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::size_t ZeroedMemory::resident_bytes() const {
  std::vector<unsigned char> resident((bytes_ + unit() - 1) / unit());
  if (resident.empty()) return 0;
  const int failed = mincore(data_, bytes_, resident.data());
  SPECDEC_ENSURE(failed == 0, "mincore of ", bytes_, " bytes failed");
  return unit() * static_cast<std::size_t>(std::count_if(resident.begin(), resident.end(),
                                                         [](unsigned char c) { return c & 1; }));
}

}  // namespace specdec
