#include "ptx/machine.h"

#include <algorithm>
#include <cstdio>

namespace ptx {
namespace {
constexpr std::uint64_t kTurn = 1 << 20;  // statements before another warp's turn
constexpr std::uint64_t kLivelock = std::uint64_t{1} << 30;  // of a block
}  // namespace

std::string hex(std::uint64_t n) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(n));
  return text;
}

std::uint64_t Warp::value(const Op& o, unsigned i, unsigned lane) {
  switch (o.widths[i]) {
    case Width::half:
      return at<std::uint16_t>(o.x[i])[lane];
    case Width::word:
      return at<std::uint32_t>(o.x[i])[lane];
    case Width::wide:
      return at<std::uint64_t>(o.x[i])[lane];
    default:
      return bits(o.x[i]) >> lane & 1;
  }
}

// ---- a warp -------------------------------------------------------------------------------------
bool Warp::runnable() const {
  return std::any_of(groups.begin(), groups.end(),
                     [](const Group& g) { return g.waiting == Waiting::no; });
}

void Warp::split(std::uint32_t mask, std::uint32_t pc) {
  Group other = now;
  other.mask = mask, other.pc = pc;
  now.mask &= ~mask;
  groups.push_back(other);
  limit_ = std::min(limit_, pc);
}

// Joins groups that stand at the same statement and takes the one that is furthest behind.
bool Warp::choose() {
  for (std::size_t i = 0; i < groups.size(); i++) {
    for (std::size_t j = i + 1; j < groups.size();) {
      const auto held = [](const Group& g) {
        return g.waiting == Waiting::barrier || g.waiting == Waiting::event;
      };
      if (groups[i].joins(groups[j]) && !held(groups[i]) && !held(groups[j])) {
        groups[i].mask |= groups[j].mask, groups[i].waiting = Waiting::no;
        groups.erase(groups.begin() + std::ptrdiff_t(j));
      } else {
        j++;
      }
    }
  }
  const Group* best = nullptr;
  for (const Group& g : groups) {
    if (g.waiting == Waiting::no && (best == nullptr || g.pc < best->pc)) best = &g;
  }
  if (best == nullptr) return false;
  now = *best;
  groups.erase(groups.begin() + (best - groups.data()));
  limit_ = ~0u;
  for (const Group& g : groups) {
    if (g.waiting == Waiting::no) limit_ = std::min(limit_, g.pc);
  }
  return true;
}

void Warp::run(std::uint64_t& steps) {
  const std::vector<Op>& code = block->program->code;
  for (std::uint64_t turn = kTurn; turn > 0 && choose();) {
    for (;;) {
      const Op& o = code[now.pc];
      op = &o;
      active = now.mask;
      if (o.guarded) active &= o.guard_negated ? ~bits(o.guard) : bits(o.guard);
      next = now.pc + 1;
      if (active || o.always) o.run(*this, o);
      ++steps;
      if (now.waiting == Waiting::no || now.waiting == Waiting::barrier) now.pc = next;
      if (now.waiting != Waiting::no || now.mask == 0 || --turn == 0 || now.pc >= limit_) break;
    }
    if (now.mask) groups.push_back(now);
  }
}

// ---- barriers -----------------------------------------------------------------------------------
void Block::arrive(Warp& warp, const Op* op, unsigned id, unsigned expected, unsigned trues) {
  if (id >= barriers.size()) throw Error("there is no barrier " + std::to_string(id));
  Barrier& b = barriers[id];
  if (expected == 0) expected = (threads + 31) / 32 * 32;
  if (expected % 32) throw Error("a barrier counts whole warps");
  if (!b.arrivals.empty() && b.expected != expected) {
    throw Error("barrier " + std::to_string(id) + " with " + std::to_string(expected) +
                " threads, others came with " + std::to_string(b.expected));
  }
  const Op* const first = b.arrivals.empty() ? nullptr : b.arrivals[0].op;
  if (!b.arrivals.empty() && first != op) throw Error("bar.red meets another barrier");
  b.expected = expected, b.threads += 32, b.count += trues;
  b.arrivals.push_back({&warp, op});
  warp.now.waiting = Waiting::barrier;
  if (b.threads < b.expected) return;
  for (const Arrival& a : b.arrivals) {
    if (op != nullptr) {
      const bool result = op->detail == 2 ? b.count > 0 : b.count == threads;
      for (unsigned l = 0; op->detail == 0 && l < 32; l++) {
        a.warp->at<std::uint32_t>(op->x[0])[l] = std::uint32_t(b.count);
      }
      if (op->detail != 0) a.warp->bits(op->x[0]) = result ? ~0u : 0;
    }
    if (a.warp == &warp) warp.now.waiting = Waiting::no;
    for (Group& g : a.warp->groups) {
      if (g.waiting == Waiting::barrier) g.waiting = Waiting::no;
    }
  }
  b = {};
}

void Block::wake() {
  for (Warp& w : warps) {
    for (Group& g : w.groups) {
      if (g.waiting == Waiting::event) g.waiting = Waiting::no;
    }
  }
}

// ---- a block ------------------------------------------------------------------------------------
namespace {
std::string who_waits(const Block& b) {
  static const char* const kinds[] = {"", "other lanes of its warp", "a barrier", "an mbarrier"};
  std::string text = "deadlock";
  unsigned told = 0;
  for (const Warp& w : b.warps) {
    for (const Group& g : w.groups) {
      const std::uint32_t at = g.pc - (g.waiting == Waiting::barrier);
      if (++told <= 4) {
        text += "; warp " + std::to_string(w.index) + ", lanes " + hex(g.mask) + ", waits for " +
                kinds[int(g.waiting)] + " at " + b.program->where(b.program->code[at]);
      }
    }
  }
  return text;
}
}  // namespace

void Block::run(std::uint64_t seed) {
  std::uint64_t steps = 0;
  for (bool all_ended = false; !all_ended;) {
    bool ran = false;
    all_ended = true;
    for (std::size_t i = 0; i < warps.size(); i++) {
      Warp& w = warps[seed % 2 ? warps.size() - 1 - i : i];
      if (w.runnable()) {
        try {
          w.run(steps);
        } catch (const Error& error) {
          throw Error("warp " + std::to_string(w.index) + ", lanes " + hex(w.active) + ", " +
                      program->where(*w.op) + ": " + error.what());
        }
        ran = true;
      }
      all_ended &= w.live == 0;
    }
    if (steps > kLivelock) throw Error("livelock");
    if (ran || all_ended) continue;
    // What was started is done as late as it can be, and the last of it first.
    if (later.empty()) throw Error(who_waits(*this));
    const auto copy = std::move(later.back());
    later.pop_back();
    copy();
    wake();
  }
  check_end();
}

void Block::check_end() const {
  if (!later.empty()) throw Error("the block ended with bulk copies that no thread waited for");
  for (const auto& [address, b] : mbarriers) {
    if (b.bytes != 0) {
      throw Error("the block ended while the mbarrier at " + hex(address) + " waited for " +
                  std::to_string(b.bytes) + " bytes");
    }
    if (b.unseen) throw Error("the block ended with bulk copies that no thread waited for");
  }
  for (const Barrier& b : barriers) {
    if (!b.arrivals.empty()) throw Error("the block ended while threads wait at a barrier");
  }
  for (const Warp& w : warps) {
    if (!w.products.pending.empty()) throw Error("the block ended with a wgmma under way");
  }
}

// ---- a launch -----------------------------------------------------------------------------------
namespace {
void set_words(Warp& w, const Program& p, const char* name, unsigned value) {
  const auto at = p.specials.find(name);
  if (at != p.specials.end()) std::fill_n(w.at<std::uint32_t>(at->second), 32, value);
}
void begin_warp(Warp& w, const Block& b) {
  const Program& p = *b.program;
  const unsigned first = w.index * 32;
  w.all = b.threads - first >= 32 ? ~0u : (1u << (b.threads - first)) - 1;
  w.live = w.all, w.products = {};
  w.groups = {Group{.mask = w.all}};
  for (auto& lane : w.copies) lane.assign(1, {});
  for (unsigned l = 0; l < 32; l++) {
    const unsigned rank = first + l;
    const unsigned values[4] = {rank % b.dim.x, rank / b.dim.x % b.dim.y, rank / b.dim.x / b.dim.y,
                                l};
    static const char* const names[4] = {"%tid.x", "%tid.y", "%tid.z", "%laneid"};
    for (unsigned i = 0; i < 4; i++) {
      const auto at = p.specials.find(names[i]);
      if (at != p.specials.end()) w.at<std::uint32_t>(at->second)[l] = values[i];
    }
  }
  set_words(w, p, "%ntid.x", b.dim.x), set_words(w, p, "%ntid.y", b.dim.y);
  set_words(w, p, "%ntid.z", b.dim.z), set_words(w, p, "%nctaid.x", b.grid.x);
  set_words(w, p, "%nctaid.y", b.grid.y), set_words(w, p, "%nctaid.z", b.grid.z);
  set_words(w, p, "%ctaid.x", b.id.x), set_words(w, p, "%ctaid.y", b.id.y);
  set_words(w, p, "%ctaid.z", b.id.z);
}
void prepare(Block& b, const Program& program, const Launch& launch) {
  b.program = &program;
  b.dim = launch.block, b.grid = launch.grid;
  b.threads = b.dim.x * b.dim.y * b.dim.z;
  if (b.threads == 0 || b.threads > 1024 ||
      (program.entry->max_threads && b.threads > program.entry->max_threads)) {
    throw Error(std::to_string(b.threads) + " threads: more than the kernel was compiled for");
  }
  b.shared_bytes = program.dynamic_at - kSharedBase + launch.dynamic_bytes;
  b.shared_memory.resize(b.shared_bytes + 2048);
  b.shared = reinterpret_cast<char*>(
      (reinterpret_cast<std::uintptr_t>(b.shared_memory.data()) + 1023) / 1024 * 1024);
  const unsigned num_warps = (b.threads + 31) / 32;
  b.local.resize(std::size_t{program.local_bytes} * 32 * num_warps);
  for (unsigned i = 0; i < num_warps; i++) {
    Warp& w = b.warps.emplace_back();
    w.block = &b, w.index = i;
    w.frame.assign(program.frame_bytes, '\xff');  // a register that nobody wrote is NaN
    for (const auto& [at, content] : program.constants) {
      memcpy(w.frame.data() + at, content.data(), content.size());
    }
  }
}
}  // namespace

void run(Program& program, const Launch& launch) {
  const auto base = reinterpret_cast<char*>(program.parameter_base);
  for (std::size_t i = 0; i < program.parameter_slots.size(); i++) {
    const auto [offset, bytes] = program.parameter_slots[i];
    memcpy(base + offset, launch.arguments[i], bytes);
  }
  Block b;
  prepare(b, program, launch);
  const std::uint64_t blocks = std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  for (std::uint64_t i = 0; i < blocks; i++) {
    const std::uint64_t at = launch.seed % 2 ? blocks - 1 - i : i;
    b.id = {unsigned(at % launch.grid.x), unsigned(at / launch.grid.x % launch.grid.y),
            unsigned(at / launch.grid.x / launch.grid.y)};
    std::fill(b.shared_memory.begin(), b.shared_memory.end(), '\xff');
    std::fill(b.local.begin(), b.local.end(), '\xff');
    b.mbarriers.clear(), b.later.clear(), b.products.clear();
    for (Barrier& barrier : b.barriers) barrier = {};
    for (Warp& w : b.warps) begin_warp(w, b);
    try {
      b.run(launch.seed);
    } catch (const Error& error) {
      throw Error(program.entry->name + ", block " + std::to_string(b.id.x) + "," +
                  std::to_string(b.id.y) + "," + std::to_string(b.id.z) + ": " + error.what());
    }
  }
}

}  // namespace ptx
