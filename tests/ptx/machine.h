// What runs a kernel: warps of 32 lanes over a frame of places, a block with its shared memory,
// barriers and asynchronous work, the memory that a launch may touch.
//
// A warp runs as groups of lanes at the same statement. The group that is furthest behind runs
// until it meets another, so that branches join where they join in the text. An instruction that
// needs lanes of other groups waits for them.
#pragma once
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <list>

#include "ptx/program.h"

namespace ptx {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// Addresses of shared memory begin here: 0 is none, and a descriptor may not hold less.
constexpr unsigned kSharedBase = 1024;

// ---- memory -------------------------------------------------------------------------------------

// Host memory that kernels may touch; with nothing exposed, all of it.
void expose(const void* data, std::size_t bytes, const char* name, bool writable);
void conceal();

struct Block;
struct Warp;

enum class Waiting : std::uint8_t { no, lanes, barrier, event };

struct Group {
  std::uint32_t pc = 0, mask = 0;
  Waiting waiting = Waiting::no;
  bool refused = false;  // by mbarrier.try_wait, which it asks again
  unsigned depth = 0;
  std::array<std::uint32_t, 8> calls = {};  // statements that called, outermost first
  bool joins(const Group& o) const { return pc == o.pc && depth == o.depth && calls == o.calls; }
};

struct AsyncCopy {
  char* to;
  const char* from;
  unsigned bytes, zeros;
};

// A product of a warp of a warpgroup between its issue and its wait (wgmma.cc).
struct Product {
  const Op* op;
  std::uint64_t a, b;
  bool accumulate;
  std::uint32_t fragment[4][32];
  unsigned group;
  std::vector<float> initial;  // D as it was; empty: D of the product before, or zeros
};
struct Products {
  std::deque<Product> pending;
  unsigned committed = 0, issued = 0;
  bool fenced = false;
};

struct Warp {
  Block* block;
  unsigned index;
  std::vector<char> frame;
  std::uint32_t all = 0;   // lanes that exist
  std::uint32_t live = 0;  // and have not ended
  std::vector<Group> groups;
  std::array<std::deque<std::vector<AsyncCopy>>, 32> copies;  // committed groups, then the open one
  Products products;

  // While a statement runs:
  Group now;
  std::uint32_t active = 0, next = 0;
  const Op* op = nullptr;

  template <class T>
  T* at(std::uint32_t place) {
    return reinterpret_cast<T*>(frame.data() + place);
  }
  std::uint32_t& bits(std::uint32_t place) { return *at<std::uint32_t>(place); }
  std::uint32_t predicate(const Op& o, unsigned i) {
    const std::uint32_t p = bits(o.x[i]);
    return i < 64 && o.negated >> i & 1 ? ~p : p;
  }
  void set_predicate(std::uint32_t place, std::uint32_t value) {
    std::uint32_t& p = bits(place);
    p = (p & ~active) | (value & active);
  }
  // A register read as bits whatever its size.
  std::uint64_t value(const Op& o, unsigned i, unsigned lane);

  // True if the lanes of `mask` are here; else the group waits for them and runs the statement
  // again.
  bool gather(std::uint32_t mask) {
    if ((now.mask & mask) == mask) return true;
    now.waiting = Waiting::lanes;
    return false;
  }
  // The same for .aligned instructions: all lanes of the warp, none of them under a guard.
  bool converged() { return gather(all); }
  void wait_for_event() { now.waiting = Waiting::event; }

  bool runnable() const;
  void run(std::uint64_t& steps);  // until nothing in it can run, or its turn is over
  void split(std::uint32_t mask, std::uint32_t pc);  // those lanes of `now` go on at pc

 private:
  bool choose();
  std::uint32_t limit_ = 0;  // where another group stands
};

// ---- barriers -----------------------------------------------------------------------------------
struct Arrival {
  Warp* warp;
  const Op* op;  // bar.red: gets the result
};
struct Barrier {
  unsigned expected = 0, threads = 0;
  std::uint64_t count = 0;  // of true predicates
  std::vector<Arrival> arrivals;
};
struct Mbarrier {
  unsigned count = 0, pending = 0;
  std::int64_t bytes = 0;
  unsigned phase = 0;
  bool fenced = false, unseen = false;
  unsigned initialiser = 0;  // warp * 32 + lane
};

struct Block {
  const Program* program;
  unsigned threads;
  Dim3 dim, grid, id;
  std::vector<char> shared_memory;
  char* shared = nullptr;  // aligned to 1024 bytes as its address is
  unsigned shared_bytes = 0;
  std::vector<char> local;  // of every lane
  std::deque<Warp> warps;
  std::array<Barrier, 16> barriers;
  std::map<std::uint32_t, Mbarrier> mbarriers;  // by address
  std::vector<std::function<void()>> later;     // copies under way
  std::map<unsigned, std::vector<std::string>>
      products;  // of each warpgroup, as its first warp issued

  char* shared_at(std::uint64_t address, unsigned bytes);
  char* local_at(unsigned warp, unsigned lane, std::uint64_t offset, unsigned bytes);
  char* global_at(std::uint64_t address, unsigned bytes, bool write);
  void wake();  // groups that wait for an event look again
  void run(std::uint64_t seed);
  void check_end() const;
  void arrive(Warp& warp, const Op* op, unsigned id, unsigned expected, unsigned trues);
};

struct Launch {
  Dim3 grid, block;
  unsigned dynamic_bytes = 0;
  void** arguments = nullptr;
  std::uint64_t seed = 0;
};
void run(Program& program, const Launch& launch);  // throws Error

std::string hex(std::uint64_t n);

}  // namespace ptx
