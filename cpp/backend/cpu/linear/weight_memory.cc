#include "backend/cpu/linear/weight_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <mutex>
#include <new>
#include <utility>

namespace specdec::cpu {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kChunkBytes = std::size_t{64} << 20;
constexpr std::size_t kAlignment = 64;

std::size_t round_up(std::size_t n, std::size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace

struct WeightBlock::Chunk {
  explicit Chunk(std::size_t bytes) {
    size = round_up(bytes, kHugePage);
    mapped = size + kHugePage;
    base = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::uintptr_t>(base);
    begin = static_cast<std::byte*>(base) + (round_up(address, kHugePage) - address);
    // Advice only: without huge pages everything still works, a little slower.
    (void)::madvise(begin, size, MADV_HUGEPAGE);
  }
  ~Chunk() { ::munmap(base, mapped); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  void* base = nullptr;
  std::byte* begin = nullptr;
  std::size_t mapped = 0, size = 0, used = 0;
};

WeightBlock::WeightBlock(std::shared_ptr<Chunk> chunk, std::byte* data)
    : chunk_(std::move(chunk)), data_(data) {}

std::shared_ptr<WeightBlock> WeightBlock::allocate(std::size_t bytes) {
  static std::mutex mutex;
  // Weak: a chunk lives as long as its blocks, not as long as the process.
  static std::weak_ptr<Chunk> open_chunk;
  bytes = round_up(bytes == 0 ? 1 : bytes, kAlignment);
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Chunk> chunk = open_chunk.lock();
  if (chunk == nullptr || chunk->used + bytes > chunk->size) {
    const bool own_chunk = bytes > kChunkBytes / 2;
    chunk = std::make_shared<Chunk>(own_chunk ? bytes : kChunkBytes);
    if (!own_chunk) open_chunk = chunk;
  }
  std::byte* data = chunk->begin + chunk->used;
  chunk->used += bytes;
  return std::shared_ptr<WeightBlock>(new WeightBlock(std::move(chunk), data));
}

}  // namespace specdec::cpu
