// What a tensor map holds here: the runtime writes it (runtime.cc), bulk copies read it.
#pragma once
#include <cstdint>

namespace ptx {

constexpr std::uint64_t kTensorMapMagic = 0x7074785f74656e73;

struct alignas(64) TensorMap {
  std::uint64_t magic;
  std::uint64_t base;
  std::uint64_t strides[5];  // bytes; that of the innermost dimension is the element
  std::uint32_t dims[5];     // elements, innermost first; 1 beyond the rank
  std::uint16_t box[5];
  std::uint8_t rank, element, span;  // span: bytes of the swizzle, 0 without
};
static_assert(sizeof(TensorMap) == 128);

// 16-byte chunks of a tile change places: the bits of the address above bit 4 that number a chunk
// within its span are XORed with as many from bit 7 on.
inline std::uint64_t swizzled(std::uint64_t address, unsigned span) {
  const std::uint64_t chunks = span / 16;
  return span == 0 ? address : address ^ (address >> 7 & (chunks - 1)) << 4;
}

}  // namespace ptx
