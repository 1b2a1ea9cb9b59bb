// What works beside the threads of a block: mbarriers and the copies that count on them (async.cc),
// matrix products of a warp and of a warpgroup (matrix.cc). ptx_sm80.h and ptx_sm90.h give these
// the names that kernels use.
#pragma once
#include "simt/simt.h"

namespace simt {

// ---- mbarriers ----------------------------------------------------------------------------------
void mbarrier_init(uint64_t* bar, unsigned count, Site);
void mbarrier_init_fence();
void mbarrier_arrive(uint64_t* bar, unsigned expect_bytes, Site);
void mbarrier_wait(uint64_t* bar, unsigned parity, Site);

// ---- bulk copies --------------------------------------------------------------------------------
inline constexpr int kMaxRank = 5;

// The fields of a tensor map, as kernels carry it.
struct alignas(64) TensorShape {
  uint64_t magic;
  const char* base;
  uint64_t strides[kMaxRank];  // bytes; strides[0] = elem_bytes
  uint32_t dims[kMaxRank];     // elements, innermost first; 1 beyond rank
  uint16_t box[kMaxRank];      // the same of one copy
  uint8_t rank, elem_bytes;
  uint8_t span;  // bytes of the swizzle, 0 without
};
static_assert(sizeof(TensorShape) == 128);

TensorShape tensor_shape(int elem_bytes, const void* base, int rank, const uint64_t* dims,
                         const uint64_t* strides_bytes, const uint32_t* box, unsigned span);
void bulk_copy(void* dst, const void* src, unsigned bytes, uint64_t* bar, Site);
void tensor_copy(void* dst, const TensorShape&, uint64_t* bar, std::initializer_list<int> position,
                 Site);

// Where hardware keeps the 16 bytes of a tile that lie at `linear` before the permutation: the
// number of the chunk within its span, XORed with that of the 128-byte line. span: 0, 32, 64 or
// 128.
inline uintptr_t swizzled(uintptr_t linear, unsigned span) {
  return span ? linear ^ (linear >> 7 & (span / 16 - 1)) << 4 : linear;
}

// Shared memory addresses, as descriptors hold them, begin here: 0 means nothing.
inline constexpr unsigned kSharedBase = 1024;

// ---- matrix products ----------------------------------------------------------------------------
enum class Element { bf16, f16, e4m3 };

// c += a b by a warp: m16n8k16 of a 16-bit type.
void mma(Element, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site);

// A warpgroup's product as one thread issues it. d: n / 2 values. a: descriptor of A in shared
// memory, or null and `fragment` for A in registers.
struct Wgmma {
  Element type;
  unsigned n;
  bool trans_b, accumulate, a_in_registers;
  uint64_t a, b;
};
void wgmma(const Wgmma&, float* d, const uint32_t* fragment, Site);
void wgmma_fence(Site);
void wgmma_commit(Site);
void wgmma_wait(unsigned pending_groups, Site);
void wgmma_begin_block(unsigned threads);
std::string wgmma_unfinished();  // empty, or what a block left behind

namespace async {
void begin_block(unsigned threads);
std::string end_block();  // empty, or what is wrong
}  // namespace async

namespace registers {
// recorded: registers of a thread at entry, 0 if nobody knows.
void begin_block(unsigned recorded, unsigned threads);
void set(unsigned count, bool more, Site);  // of the running thread's warp, for each thread
std::string end_block();                    // empty, or what is wrong
}  // namespace registers
}  // namespace simt
