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

}  // namespace

void begin_block(unsigned recorded, unsigned threads) {
  entry = recorded ? recorded : std::min(kMost, kFile / threads / kStep * kStep);
  held.assign((threads + 31) / 32, entry);
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
  unsigned asked = 0;
  for (size_t warp = 0; warp < held.size(); warp++) {
    if (held[warp] != held[warp / 4 * 4])
      return "setmaxnreg: warps of a warpgroup set different numbers";
    asked += 32 * held[warp];
  }
  const unsigned owned = 32 * entry * unsigned(held.size());
  if (asked <= owned) return "";
  return "setmaxnreg: the block's warpgroups ask for " + std::to_string(asked) +
         " registers, it owns " + std::to_string(owned) + ": a warp waits for ever";
}

}  // namespace simt::registers
