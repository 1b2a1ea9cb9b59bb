// Registers that warpgroups hand over (setmaxnreg). A block owns what it is launched with: what the
// compiled kernel takes at entry where that is recorded (limits.h), else at most an even share of a
// multiprocessor's file. A warpgroup that asks for what nobody gives up waits for ever.
#include <algorithm>
#include <vector>

#include "simt/async.h"

namespace simt::registers {
namespace {

constexpr unsigned kFile = 65536, kStep = 8, kLeast = 24, kMost = 256;
unsigned entry;              // of a thread
std::vector<unsigned> held;  // of a thread, by warp
size_t block_warps;          // of each block of a cluster

}  // namespace

void begin_block(unsigned recorded, unsigned threads, unsigned stride, unsigned cluster) {
  entry = recorded ? recorded : std::min(kMost, kFile / threads / kStep * kStep);
  block_warps = (stride + 31) / 32;
  held.assign(block_warps * cluster, entry);
}

void set(unsigned count, bool more, Site site) {
  const Quiet quiet;
  const std::string where = "setmaxnreg " + at(site) + ": ";
  if (count % kStep || count < kLeast || count > kMost) {
    fail(where + std::to_string(count) + " is no multiple of 8 from 24 to 256");
  }
  unsigned& mine = held[rank() / 32];
  if (mine != count && (count > mine) != more) {
    fail(where + (more ? "inc" : "dec") + " from " + std::to_string(mine) + " to " +
         std::to_string(count));
  }
  mine = count;
}

std::string end_block() {
  const unsigned owned = 32 * entry * unsigned(block_warps);
  for (size_t first = 0; first < held.size(); first += block_warps) {
    unsigned asked = 0;
    for (size_t warp = 0; warp < block_warps; warp++) {
      if (held[first + warp] != held[first + warp / 4 * 4])
        return "setmaxnreg: warps of a warpgroup set different numbers";
      asked += 32 * held[first + warp];
    }
    if (asked > owned) {
      return "setmaxnreg: the block's warpgroups ask for " + std::to_string(asked) +
             " registers, it owns " + std::to_string(owned) + ": a warp waits for ever";
    }
  }
  return "";
}

}  // namespace simt::registers
