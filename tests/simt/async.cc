// mbarriers and bulk copies. A copy leaves NaN in its destination when it is issued; the data
// arrive when the scheduler runs it (simt::later), late and out of order.
#include "simt/async.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>
#include <vector>

namespace simt {
namespace {

struct Copy {
  char* dst;
  const char* src;
  unsigned bytes, src_bytes;
  Site site;
};
// Each thread's committed groups of cp.async, then the open one.
std::vector<std::deque<std::vector<Copy>>> groups;
bool groups_used = false;

struct Mbarrier {
  unsigned count = 0, pending = 0;  // arrivals of a phase, and those still to come
  int64_t bytes = 0;                // announced and not yet landed
  unsigned phase = 0;               // parity of the one that runs
  unsigned initialiser = 0;         // rank
  bool fenced = false;              // the copy engine may use it
  bool unseen = false;              // bytes have landed that no thread has waited for
  unsigned actor = 0;
  std::vector<std::pair<unsigned, unsigned>> waiting = {};  // rank, parity
};
std::map<uintptr_t, Mbarrier> barriers;  // of the block, by address
unsigned copies_in_flight;

bool in_shared(const void* p, size_t bytes) {
  const auto at = uintptr_t(p), base = uintptr_t(dynamic_shared());
  return at >= base && at + bytes <= base + dynamic_shared_bytes();
}

// What the 8 bytes of a barrier hold: whoever overwrites them is noticed.
uint64_t cookie(uintptr_t p) { return 0x6d62617272696572 ^ p; }

Mbarrier& find(uint64_t* p, const char* op, Site here) {
  auto it = barriers.find(uintptr_t(p));
  if (it == barriers.end()) {
    fail(std::string(op) + " " + at(here) + ": the mbarrier is not initialised");
  }
  if (*p != cookie(uintptr_t(p))) {
    fail(std::string(op) + " " + at(here) + ": the mbarrier was overwritten");
  }
  return it->second;
}

void settle(Mbarrier& b, uintptr_t p) {
  if (b.pending || b.bytes) return;
  b.phase ^= 1, b.pending = b.count;
  check::flip(p);
  auto ended = std::partition(b.waiting.begin(), b.waiting.end(),
                              [&](auto& w) { return w.second == b.phase; });
  for (auto w = ended; w != b.waiting.end(); ++w) unpark(w->first);
  b.waiting.erase(ended, b.waiting.end());
}

// Issues a copy of `bytes` to dst, all of it written by `run` when its time has come.
void start(void* dst, unsigned bytes, uint64_t* bar, Mbarrier& b, Site here,
           std::function<void()> run) {
  check::access_as(b.actor, dst, bytes, true, check::in_flight, here);
  memset(dst, 0xff, bytes);
  stats().bulk_copies++, copies_in_flight++;
  later([=, &b] {
    if (block_ended()) fail("bulk copy " + at(here) + ": it lands in a block that has ended");
    check::access_as(b.actor, dst, bytes, true, check::plain, here);
    run();
    copies_in_flight--;
    check::release_as(b.actor, check::step(b.actor), uintptr_t(bar));
    b.bytes -= bytes, b.unseen = true;
    settle(b, uintptr_t(bar));
  });
}
Mbarrier& check_copy(const char* op, void* dst, unsigned bytes, uint64_t* bar, Site here) {
  Mbarrier& b = find(bar, op, here);
  if (!b.fenced) {
    fail(std::string(op) + " " + at(here) + ": no mbarrier_init_fence() after the mbarrier's init");
  }
  if (!in_shared(dst, bytes)) {
    fail(std::string(op) + " " + at(here) + ": destination outside of the block's shared memory");
  }
  check::access(bar, 8, true, check::atomically, here);
  check::follow(b.actor, rank());
  return b;
}

}  // namespace

// ---- cp.async -----------------------------------------------------------------------------------
void cp_async(void* dst, const void* src, unsigned bytes, unsigned src_bytes, Site site) {
  Quiet quiet;
  auto* d = static_cast<char*>(dst);
  auto* s = static_cast<const char*>(src);
  if (uintptr_t(d) % bytes || (src_bytes && uintptr_t(s) % bytes)) {
    fail("cp.async " + at(site) + ": misaligned");
  }
  if (!in_shared(d, bytes)) {
    fail("cp.async " + at(site) + ": not to shared memory");
  }
  check::access(d, bytes, true, check::in_flight, site);
  if (src_bytes) check::access(s, src_bytes, false, check::plain, site);
  memset(d, 0xff, bytes);  // from now on the destination may change at any moment
  groups_used = true;
  groups[rank()].back().push_back({d, s, bytes, src_bytes, site});
  stats().cp_async++;
}
void cp_async_commit() {
  Quiet quiet;
  groups_used = true;
  groups[rank()].emplace_back();
}
void cp_async_wait(unsigned pending) {
  Quiet quiet;
  auto& mine = groups[rank()];
  while (mine.size() > pending + 1) {
    for (const Copy& c : mine.front()) {
      check::access(c.dst, c.bytes, true, check::plain, c.site);
      memcpy(c.dst, c.src, c.src_bytes);
      memset(c.dst + c.src_bytes, 0, c.bytes - c.src_bytes);
    }
    mine.pop_front();
  }
}

// ---- mbarriers ----------------------------------------------------------------------------------
void mbarrier_init(uint64_t* p, unsigned count, Site here) {
  Quiet quiet;
  if (uintptr_t(p) % 8 || !in_shared(p, 8) || !count || count >= 1u << 20) {
    fail("mbarrier_init " + at(here) + ": bad address or count");
  }
  if (barriers.count(uintptr_t(p))) fail("mbarrier_init " + at(here) + ": initialised twice");
  if (barriers.size() >= check::kBarrierActors) {
    fail("mbarrier_init " + at(here) + ": the emulator has no more mbarriers for a block");
  }
  check::access(p, 8, true, check::plain, here);
  Mbarrier b;
  b.count = b.pending = count;
  b.initialiser = rank();
  b.actor = check::barrier_actor(unsigned(barriers.size()));
  barriers.emplace(uintptr_t(p), std::move(b));
  *p = cookie(uintptr_t(p));
}
void mbarrier_init_fence() {
  Quiet quiet;
  for (auto& [p, b] : barriers) b.fenced |= b.initialiser == rank();
  check::proxy_fence();
}
void mbarrier_arrive(uint64_t* p, unsigned expect_bytes, Site here) {
  Quiet quiet;
  check::access(p, 8, true, check::atomically, here);
  Mbarrier& b = find(p, "mbarrier_arrive", here);
  if (!b.pending) fail("mbarrier_arrive " + at(here) + ": more arrivals than the phase expects");
  check::release(uintptr_t(p));
  b.bytes += expect_bytes, b.pending--;
  if (b.bytes >= 1 << 20) fail("mbarrier_arrive " + at(here) + ": too many bytes in one phase");
  settle(b, uintptr_t(p));
}
void mbarrier_wait(uint64_t* p, unsigned parity, Site here) {
  Quiet quiet;
  check::access(p, 8, true, check::atomically, here);
  Mbarrier& b = find(p, "mbarrier_wait", here);
  if (parity > 1) fail("mbarrier_wait " + at(here) + ": a parity is 0 or 1");
  while (b.phase == parity) {
    b.waiting.push_back({rank(), parity});
    park("mbarrier_wait", here);
  }
  b.unseen = false;
  check::acquire(uintptr_t(p));
}

// ---- bulk copies --------------------------------------------------------------------------------
namespace {
constexpr uint64_t kMagic = 0x74656e736f726d61;

[[noreturn]] void reject(const char* what) {
  throw Error(std::string("encode_tensor_map: ") + what);
}

// Calls f(row, source, lo, hi) for each row of the box: `row` counts rows of the destination; the
// elements [lo, hi) come from source + lo elements, the others are zeros.
template <class F>
void for_each_row(const TensorShape& t, const int* position, F f) {
  unsigned rows = 1;
  for (int i = 1; i < kMaxRank; i++) rows *= t.box[i];
  const int64_t lo = std::clamp<int64_t>(-int64_t(position[0]), 0, t.box[0]);
  const int64_t hi = std::clamp<int64_t>(int64_t(t.dims[0]) - position[0], lo, t.box[0]);
  for (unsigned row = 0; row < rows; row++) {
    int64_t offset = int64_t(position[0]) * t.elem_bytes;
    bool inside = true;
    unsigned rest = row;
    for (int i = 1; i < kMaxRank; i++) {
      const int64_t at = int64_t(position[i]) + rest % t.box[i];
      rest /= t.box[i];
      inside &= at >= 0 && at < int64_t(t.dims[i]);
      offset += at * int64_t(t.strides[i]);
    }
    f(row, t.base + offset, lo, inside ? hi : lo);
  }
}
}  // namespace

TensorShape tensor_shape(int elem_bytes, const void* base, int rank, const uint64_t* dims,
                         const uint64_t* strides_bytes, const uint32_t* box, unsigned span) {
  TensorShape t = {};
  if (elem_bytes != 1 && elem_bytes != 2 && elem_bytes != 4) reject("element size");
  if (rank < 1 || rank > kMaxRank) reject("rank");
  if (uintptr_t(base) % 16) reject("the base address is no multiple of 16");
  t.magic = kMagic, t.base = static_cast<const char*>(base);
  t.rank = uint8_t(rank), t.elem_bytes = uint8_t(elem_bytes), t.span = uint8_t(span);
  for (int i = 0; i < kMaxRank; i++) {
    t.dims[i] = 1, t.box[i] = 1, t.strides[i] = i ? 0 : elem_bytes;
    if (i >= rank) continue;
    if (!dims[i] || dims[i] > 1ull << 32) reject("a dimension is 0 or too large");
    if (!box[i] || box[i] > 256) reject("a side of the box is not in 1..256");
    t.dims[i] = uint32_t(std::min<uint64_t>(dims[i], 0xffffffff)), t.box[i] = uint16_t(box[i]);
    if (!i) continue;
    t.strides[i] = strides_bytes[i - 1];
    if (t.strides[i] % 16 || t.strides[i] >> 40) reject("a stride is no multiple of 16 bytes");
  }
  const unsigned inner = box[0] * elem_bytes;
  if (inner % 16) reject("the innermost side of the box is no multiple of 16 bytes");
  if (span && inner > span) reject("the innermost side of the box exceeds the swizzle");
  if (span && inner < span) reject("the emulator wants a box as wide as its swizzle");
  return t;
}

namespace {
struct TensorCopy {
  TensorShape shape;
  int position[kMaxRank];
  unsigned inner, bytes;  // of a row of the box, of all of it

  TensorCopy(void* dst, const TensorShape& map, std::initializer_list<int> at_position, Site here)
      : shape(map), position{} {
    std::copy(at_position.begin(), at_position.end(), position);
    if (uintptr_t(&map) % 64 || shape.magic != kMagic) {
      fail("tma_load " + at(here) + ": not a tensor map, or one that is not aligned to 64 bytes");
    }
    if (at_position.size() != shape.rank) {
      fail("tma_load " + at(here) + ": the tensor map has rank " + std::to_string(shape.rank));
    }
    inner = shape.box[0] * shape.elem_bytes;
    bytes = inner;
    for (int i = 1; i < kMaxRank; i++) bytes *= shape.box[i];
    if (uintptr_t(dst) % std::max(128u, shape.span * 8u)) {
      fail("tma_load " + at(here) + ": misaligned destination");
    }
    if (position[0] * int64_t(shape.elem_bytes) % 16) {  // on a GPU: an illegal instruction
      fail("tma_load " + at(here) + ": the innermost coordinate is no multiple of 16 bytes");
    }
  }
  void announce_reads(const Mbarrier& b, Site here) const {
    for_each_row(shape, position, [&](unsigned, const char* src, int64_t lo, int64_t hi) {
      if (lo == hi) return;
      check::access_as(b.actor, src + lo * shape.elem_bytes, unsigned(hi - lo) * shape.elem_bytes,
                       false, check::plain, here);
    });
  }
  void land(void* dst) const {
    for_each_row(shape, position, [&](unsigned row, const char* src, int64_t lo, int64_t hi) {
      char line[1024] = {};
      const int64_t e = shape.elem_bytes;
      if (lo < hi) memcpy(line + lo * e, src + lo * e, (hi - lo) * e);
      for (unsigned at = 0; at < inner; at += 16) {
        const uintptr_t linear = uintptr_t(dst) + size_t(row) * inner + at;
        memcpy(reinterpret_cast<char*>(swizzled(linear, shape.span)), line + at, 16);
      }
    });
  }
};
}  // namespace

void bulk_copy(void* dst, const void* src, unsigned bytes, uint64_t* bar, Site here) {
  Quiet quiet;
  if (uintptr_t(dst) % 16 || uintptr_t(src) % 16 || bytes % 16 || !bytes) {
    fail("bulk_load " + at(here) + ": an address or the size is no multiple of 16 bytes");
  }
  Mbarrier& b = check_copy("bulk_load", dst, bytes, bar, here);
  check::access_as(b.actor, src, bytes, false, check::plain, here);
  start(dst, bytes, bar, b, here, [=] { memcpy(dst, src, bytes); });
}
void tensor_copy(void* dst, const TensorShape& map, uint64_t* bar,
                 std::initializer_list<int> position, Site here) {
  Quiet quiet;
  const TensorCopy copy(dst, map, position, here);
  Mbarrier& b = check_copy("tma_load", dst, copy.bytes, bar, here);
  copy.announce_reads(b, here);
  start(dst, copy.bytes, bar, b, here, [dst, copy] { copy.land(dst); });
}

// ---- a block's life -----------------------------------------------------------------------------
namespace async {
void begin_block(unsigned threads) {
  barriers.clear(), copies_in_flight = 0;
  if (groups_used || groups.size() < threads) groups.assign(threads, {1, std::vector<Copy>()});
  groups_used = false;
  wgmma_begin_block(threads);
}
std::string end_block() {
  if (copies_in_flight) {
    return "the block ended with " + std::to_string(copies_in_flight) + " bulk copies in flight";
  }
  for (auto& [p, b] : barriers) {
    if (b.unseen) return "the block ended with bulk copies that no thread waited for";
    if (b.bytes) {
      return "the block ended while an mbarrier waited for " + std::to_string(b.bytes) + " bytes";
    }
  }
  return wgmma_unfinished();
}
}  // namespace async
}  // namespace simt
