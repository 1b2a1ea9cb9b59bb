// The scheduler behind simt.h: fibers, launches, barriers, warp collectives. Compiled without
// sanitizer instrumentation, as all of the emulator is.
#include "simt/simt.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "simt/async.h"
#include "simt/fiber.h"
#include "simt/limits.h"

#if defined(__x86_64__)
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");
#endif

namespace simt {
namespace {

constexpr size_t kGuardBytes = 4096;

// A meeting of the lanes of one warp: collects their payloads, then keeps them until every lane has
// moved on.
struct Meeting {
  unsigned mask, arrived, holders;
  const char* op;
  Site site;
  alignas(64) char slot[32][kSlot];
};

struct Thread {
  Context context;
  char* stack;
  uint3 idx;
  unsigned rank, lane, warp;
  bool done;
  const char* op;  // what it waits at, null when it can run
  Site site;
  unsigned mask;
  Meeting* held = nullptr;
};

struct Barrier {
  std::vector<unsigned> waiting;  // ranks
  unsigned count = 0;
  unsigned true_count = 0, all_count = 0;
  int result = 0;

  void reset() {
    waiting.clear();
    count = true_count = all_count = 0, result = 0;
  }
};

struct Block {
  std::vector<unsigned> ready;  // a bit mask of lanes for each warp
  std::vector<unsigned> order;  // of warps: the first one that is ready runs
  std::vector<unsigned> turn;   // the lane of each warp that yields begin at
  std::vector<std::vector<Meeting*>> open;
  std::map<int, Barrier> barriers;
  std::vector<std::function<void()>> operations;  // asynchronous, not yet done
  unsigned threads = 0, done = 0;
  unsigned idle = 0;  // yields since anything else happened
} block;

std::vector<Thread> fibers;  // with room for all: they never move
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMeetings = 2 * kMaxThreads;  // each thread holds one and waits at one
Meeting* meetings = nullptr;
std::vector<Meeting*> spare;
Thread* self = nullptr;  // null while an asynchronous operation runs
Context scheduler;
std::mutex launching;
std::atomic<std::thread::id> launcher;
unsigned entry_registers;  // of a thread, 0 if nobody knows
void (*body)(void*);
void* body_args;
std::string error;
Stats counts;
uint64_t rng_state = 0, rng_seed = [] {
  const char* s = getenv("SIMT_SEED");
  return s ? strtoull(s, nullptr, 0) : 0;
}();
std::unique_ptr<char[], void (*)(void*)> arena{nullptr, free};
char* shared_base = nullptr;
size_t shared_bytes = 0, shared_room = 0;  // of a block; with the no man's land behind it

uint64_t rng() {  // splitmix64
  uint64_t z = (rng_state += 0x9e3779b97f4a7c15);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}
template <class V>
void shuffle(V& v) {
  for (size_t i = v.size(); i > 1; i--) std::swap(v[i - 1], v[rng() % i]);
}

// The lane that runs next: of the first warp that has one; null if all wait.
Thread* take_ready() {
  const auto w = std::find_if(block.order.begin(), block.order.end(),
                              [](unsigned w) { return block.ready[w]; });
  if (w == block.order.end()) return nullptr;
  const unsigned turn = rng_seed ? rng() % 32 : block.turn[*w] % 32;
  const unsigned lane = (std::countr_zero(std::rotr(block.ready[*w], turn)) + turn) % 32;
  block.ready[*w] &= ~(1u << lane);
  return &fibers[*w * 32 + lane];
}
void enter(Thread& t) {
  self = &t;
  threadIdx = t.idx;
  counts.switches++;
  check::resume(t.rank, t.stack, kStackBytes);
}
// In order, one thread gives way to the next by itself; what else there is to do, and whatever is
// drawn, run_block() decides.
void to_scheduler() {
  Thread& me = *self;
  Thread* next = rng_seed || !error.empty() ? nullptr : take_ready();
  if (next == &me) return enter(me);
  if (next) enter(*next);
  Context::swap(me.context, next ? next->context : scheduler);
}
void fiber_main() {
  for (;;) {
    try {
      body(body_args);
    } catch (const std::exception& e) {  // an emulated kernel may throw; a fiber has no caller
      if (error.empty()) error = e.what();
    }
    check::active = false;
    self->done = true;
    block.done++, block.idle = 0;
    to_scheduler();
  }
}
void resume(Thread& t) {
  enter(t);
  Context::swap(scheduler, t.context);
  check::active = false;
  self = nullptr;
}
void wait_at(const char* op, Site site, unsigned mask) {
  self->op = op, self->site = site, self->mask = mask;
  to_scheduler();
  check::active = false;  // the caller is emulator code; its Quiet ends later
}
void wake(Thread& t) {
  t.op = nullptr;
  block.idle = 0;
  block.ready[t.warp] |= 1u << t.lane;
}
void* map_memory(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return p;
}
// Stacks parked in the middle of a kernel cannot be unwound: they are dropped.
void discard_fibers() {
  for (auto& t : fibers) munmap(t.stack - kGuardBytes, kStackBytes + kGuardBytes);
  fibers.clear(), spare.clear(), block.operations.clear();
  for (unsigned i = 0; i < kMeetings; i++) spare.push_back(meetings + i);
}

// ---- messages -----------------------------------------------------------------------------------
std::string name(uint3 i) {
  char text[48];
  snprintf(text, sizeof text, "(%u,%u,%u)", i.x, i.y, i.z);
  return text;
}
std::string deadlock() {
  std::map<std::string, std::vector<unsigned>> groups;
  for (unsigned i = 0; i < block.threads; i++) {
    Thread& t = fibers[i];
    char mask[16] = "";
    if (t.mask) snprintf(mask, sizeof mask, " mask %08x", t.mask);
    groups[t.done ? "has ended" : "waits at " + std::string(t.op) + " " + at(t.site) + mask]
        .push_back(i);
  }
  std::string s = "deadlock in block " + name(blockIdx) + ":";
  for (auto& [what, ranks] : groups) {
    s += "\n  " + std::to_string(ranks.size()) + " thread(s) " + what + ": ";
    for (size_t i = 0, j; i < ranks.size(); i = j) {
      for (j = i + 1; j < ranks.size() && ranks[j] == ranks[j - 1] + 1;) j++;
      s.append(i ? ", " : "").append(std::to_string(ranks[i]));
      if (j > i + 1) s.append("-").append(std::to_string(ranks[j - 1]));
    }
  }
  return s;
}

// ---- launches -----------------------------------------------------------------------------------
void begin_block(unsigned linear) {
  const unsigned n = block.threads, warps = (n + 31) / 32;
  blockIdx = {linear % gridDim.x, linear / gridDim.x % gridDim.y, linear / gridDim.x / gridDim.y};
  memset(shared_base, 0xff, shared_room);  // NaN in every floating-point type
  block.done = block.idle = 0;
  block.ready.assign(warps, 0), block.turn.assign(warps, 0), block.order.resize(warps);
  block.open.resize(warps);
  for (auto& open : block.open) open.clear();
  for (auto& [id, barrier] : block.barriers) barrier.reset();
  block.operations.clear();
  for (unsigned w = 0; w < warps; w++) block.order[w] = w;
  uint3 idx = {0, 0, 0};
  for (unsigned rank = 0; rank < n; rank++) {
    Thread& t = fibers[rank];
    t.idx = idx, t.rank = rank, t.lane = rank % 32, t.warp = rank / 32;
    t.done = false, t.mask = 0;
    wake(t);
    if (++idx.x == blockDim.x) idx.x = 0, idx.y++;
    if (idx.y == blockDim.y) idx.y = 0, idx.z++;
  }
  check::begin_block(linear, shared_base, shared_bytes, shared_room);
  async::begin_block(n);
  registers::begin_block(entry_registers, n);
  counts.blocks++;
  if (rng_seed) shuffle(block.order);
}
void run_operation() {
  const size_t i = rng_seed ? rng() % block.operations.size() : block.operations.size() - 1;
  auto operation = std::move(block.operations[i]);
  block.operations.erase(block.operations.begin() + i);
  operation();
}
void run_block(unsigned linear) {
  begin_block(linear);
  while (error.empty()) {
    if (rng_seed) {
      const uint64_t chance = rng();
      if (chance % 32 == 0) shuffle(block.order);
      if (chance >> 32 & 1 && !block.operations.empty()) run_operation();
    }
    if (Thread* next = take_ready()) {
      resume(*next);
    } else if (block.operations.empty() || block_ended()) {
      break;
    } else {
      run_operation();
    }
  }
  if (error.empty() && !block_ended()) error = deadlock();
  if (error.empty()) error = async::end_block();
  if (error.empty()) error = registers::end_block();
  for (unsigned i = 0; i < block.threads; i++) {
    Meeting*& m = fibers[i].held;
    if (m && !--m->holders) spare.push_back(m);
    m = nullptr;
  }
}
}  // namespace

std::string at(Site s) {
  const char* slash = strrchr(s.file, '/');
  return std::string(slash ? slash + 1 : s.file) + ":" + std::to_string(s.line);
}
Stats& stats() { return counts; }
void seed(uint64_t s) { rng_seed = s; }
unsigned rank() { return self->rank; }
unsigned lane() { return self->lane; }
unsigned elected() { return rng_seed % 32; }
bool block_ended() { return block.done == block.threads; }
void* dynamic_shared() { return shared_base; }
size_t dynamic_shared_bytes() { return shared_bytes; }

void fail(const std::string& what) {
  if (!self) {  // an asynchronous operation: run() catches it
    throw Error(what + "\n  in block " + name(blockIdx));
  }
  Quiet quiet;
  error = what + "\n  in thread " + name(self->idx) + " of block " + name(blockIdx);
  for (;;) to_scheduler();
}
void fail_lane(const char* op, unsigned lane) {
  Quiet quiet;
  fail(std::string(op) + " reads lane " + std::to_string(lane) + ", which its mask lacks");
}
void yield() {  // to every other thread: spinning makes progress, or is reported
  Quiet quiet;
  if (++block.idle > 1000 * block.threads) {
    fail("livelock: the threads that can run do nothing but spin");
  }
  auto& o = block.order;
  o.erase(std::find(o.begin(), o.end(), self->warp));
  o.push_back(self->warp);
  block.turn[self->warp]++;
  block.ready[self->warp] |= 1u << self->lane;
  to_scheduler();
}
void park(const char* op, Site site) { wait_at(op, site, 0); }
void unpark(unsigned rank) { wake(fibers[rank]); }
void later(std::function<void()> operation) { block.operations.push_back(std::move(operation)); }

void run(const LaunchShape& shape, void (*fn)(void*), void* args) {
  const auto& [kernel, grid, threads, smem, stream, dependent] = shape;
  if (launcher.load() == std::this_thread::get_id()) throw Error("a launch from inside a kernel");
  std::lock_guard lock(launching);
  entry_registers = limits::check(shape);
  const unsigned n = threads.x * threads.y * threads.z, blocks = grid.x * grid.y * grid.z;
  if (!meetings) {
    meetings = static_cast<Meeting*>(map_memory(kMeetings * sizeof(Meeting)));
    discard_fibers();
  }
  fibers.reserve(kMaxThreads);
  while (fibers.size() < n) {
    auto* p = static_cast<char*>(map_memory(kStackBytes + kGuardBytes));
    mprotect(p, kGuardBytes, PROT_NONE);
    Thread& t = fibers.emplace_back();
    t.stack = p + kGuardBytes;
    t.context.init(t.stack, fiber_main);
  }
  // A kilobyte of no man's land lies behind the block's memory.
  shared_bytes = smem, shared_room = (smem + 1023) / 1024 * 1024 + 1024;
  arena.reset(static_cast<char*>(aligned_alloc(1024, shared_room)));
  shared_base = arena.get();
  body = fn, body_args = args, gridDim = grid, blockDim = threads, error.clear();
  block.threads = n, rng_state = rng_seed;
  counts.launches++;
  launcher = std::this_thread::get_id();
  try {
    check::begin_launch(blocks, n, shape);
    check::ignore(meetings, kMeetings * sizeof(Meeting));
    std::vector<unsigned> order(blocks);
    for (unsigned i = 0; i < blocks; i++) order[i] = i;
    if (rng_seed) shuffle(order);
    for (unsigned i = 0; i < blocks && error.empty(); i++) run_block(order[i]);
    if (error.empty()) check::end_launch();
  } catch (const std::exception& e) {
    error = e.what();
  }
  launcher = std::thread::id();
  if (!error.empty()) {
    discard_fibers();
    throw Error(error);
  }
}

// ---- barriers and warp collectives --------------------------------------------------------------
int barrier_reduce(bool pred, int how, const char* op, Site site) {
  Barrier& b = block.barriers[0];
  b.true_count += pred, b.all_count++;
  barrier(0, 0, op, site);
  return how == 0 ? b.result >> 1 : how == 1 ? b.result & 1 : b.result > 1;
}

// One more thread is at barrier `id`; true if it is the last.
static bool complete(Barrier& b, int id, unsigned count, const char* op, Site site) {
  if (id && (id > 15 || count % 32)) fail(std::string(op) + " " + at(site) + ": bad id or count");
  if (b.waiting.empty()) b.count = count;
  if (b.count != count) {
    fail(std::string(op) + " " + at(site) + ": " + std::to_string(count) +
         " threads, others said " + std::to_string(b.count));
  }
  return b.waiting.size() + 1 == count;
}
static void release(Barrier& b) {
  b.result = int(b.true_count << 1 | (b.true_count == b.all_count));
  b.true_count = b.all_count = 0;
  check::sync(b.waiting.data(), unsigned(b.waiting.size()));
  for (unsigned r : b.waiting) {
    if (r != self->rank) wake(fibers[r]);
  }
  b.waiting.clear();
}
void barrier(int id, unsigned count, const char* op, Site site) {
  Quiet quiet;
  Barrier& b = block.barriers[id];
  if (!count) count = block.threads;
  if (!b.waiting.empty() && id == 0) {
    Thread& t = fibers[b.waiting[0]];
    if (!(t.site == site)) {
      fail("divergent barrier: thread " + std::to_string(self->rank) + " is at " + op + " " +
           at(site) + ", thread " + std::to_string(t.rank) + " at " + t.op + " " + at(t.site));
    }
  }
  const bool last = complete(b, id, count, op, site);
  b.waiting.push_back(self->rank);
  if (last) {
    release(b);
  } else {
    wait_at(op, site, 0);
  }
}
void* meet(unsigned mask, const void* in, unsigned bytes, void (*leader)(void*), const char* op,
           Site site) {
  Quiet quiet;
  Thread& t = *self;
  if (!(mask >> t.lane & 1)) {
    fail(std::string(op) + " " + at(site) + ": the mask lacks the calling lane");
  }
  if (t.held && !--t.held->holders) spare.push_back(t.held);
  t.held = nullptr;
  auto& open = block.open[t.warp];
  auto it = std::find_if(open.begin(), open.end(), [&](Meeting* m) {
    return m->mask == mask && !(m->arrived >> t.lane & 1);
  });
  if (it == open.end()) {
    Meeting* m = spare.back();
    spare.pop_back();
    m->mask = mask, m->arrived = 0, m->holders = std::popcount(mask), m->op = op, m->site = site;
    it = open.insert(open.end(), m);
  }
  Meeting* m = t.held = *it;
  if ((m->op != op && strcmp(m->op, op)) || !(m->site == site)) {
    fail("divergent warp: lane " + std::to_string(t.lane) + " is at " + op + " " + at(site) +
         ", others at " + m->op + " " + at(m->site));
  }
  if (bytes) memcpy(m->slot[t.lane], in, bytes);
  m->arrived |= 1u << t.lane;
  if (m->arrived != mask) {
    wait_at(op, site, mask);
  } else {
    open.erase(it);
    if (leader) leader(m->slot);
    block.ready[t.warp] |= mask & ~(1u << t.lane);
    block.idle = 0;
  }
  return m->slot;
}
void sync_warp(unsigned mask, Site site) {
  // The last lane to arrive joins the clocks of all, before any of them runs on.
  meet(
      mask, &mask, sizeof mask,
      [](void* slots) {
        unsigned ranks[32], n = 0;
        const unsigned m = Slots<unsigned>{static_cast<char*>(slots)}[self->lane];
        for (unsigned l = 0; l < 32; l++) {
          if (m >> l & 1) ranks[n++] = self->warp * 32 + l;
        }
        check::sync(ranks, n);
      },
      "__syncwarp", site);
}

}  // namespace simt
