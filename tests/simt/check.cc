// Link it to check every access of a kernel, whatever the schedule happened to be:
//   races      two threads touch the same byte, one writes, and no barrier, fence or launch orders
//              them
//   proxies    wgmma or a bulk copy meets what a thread wrote without a fence_proxy_async() of it
//   launches   a dependent kernel meets what the one before it did, without grid_dependency_wait();
//              launches on two streams that nothing orders meet in memory (streams.cc)
//   bounds     an access outside of shared and of all exposed memory, or a write to const memory
//   uninit     a read of dynamic shared memory that nobody wrote, or that a copy has not filled yet
//   undefined  what -fsanitize=undefined sees: an index outside a local array, a shift by too much
// Kernels are compiled with -fsanitize=thread,undefined -g, but the calls that this makes the
// compiler insert end here and not in libtsan or libubsan. Ordering is tracked with vector clocks:
// barriers, __syncwarp and mbarriers order; shuffles, votes, mma and ldmatrix do not; an atomic
// orders only between fences, which is what catches a forgotten __threadfence.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "simt/clock.h"
#include "simt/shadow.h"
#include "simt/simt.h"
#include "simt/streams.h"
#include "simt/tally.h"

namespace simt {
namespace {

struct Past {
  Known known, released, acquired;
  bool waited = false;  // for the grid that the launch depends on
};
struct State : Past {
  Clock clock;
  Clock proxied;  // the part of it that the async proxy sees
};
struct Released : Past {
  Sum clock, proxied;
};
struct Channel {
  Released next, done;
};

struct Region {
  uintptr_t lo, hi;
  std::string name;
  bool writable, settled = true;
};
struct Place {  // in the source: an instruction, or what an emulated instruction says of its caller
  const void* pc;
  Site site;
};

std::vector<Region> regions, modules;
std::vector<Cell> shared;  // of dynamic shared memory; cells of other blocks count as empty
Shadow local, global;      // of static data, and of all else
std::vector<State> states;
std::unordered_map<uintptr_t, Known> atomics;
std::unordered_map<uintptr_t, Channel> channels;
std::vector<Place> places;
std::unordered_map<uintptr_t, unsigned> place_index;
struct {
  uintptr_t key = 0;
  unsigned index = 0;
} recent_places[1024];
unsigned threads, warps, ranks, block, current;  // current: the rank of the running thread
uintptr_t shared_lo, shared_hi, shared_room, stack_lo, stack_hi;
bool is_shared(uintptr_t a) {  // or in the no man's land behind it
  return a >= shared_lo && a < shared_lo + shared_room;
}

unsigned block_of(Access e) { return unsigned(e >> 46); }
unsigned rank_of(Access e) { return e >> 34 & 0xfff; }
uint32_t clock_of(Access e) { return e >> 15 & 0x7ffff; }
check::Kind kind_of(Access e) { return check::Kind(e >> 13 & 3); }
unsigned place_of(Access e) { return e & 0x1fff; }

// ---- messages -----------------------------------------------------------------------------------
std::string where(const Place& place) {
  if (!place.pc) return at(place.site);
  Dl_info info;
  if (!dladdr(place.pc, &info)) return "?";
  char cmd[512], line[512];
  snprintf(cmd, sizeof cmd, "addr2line -Cis -e '%s' %#lx 2>/dev/null", info.dli_fname,
           uintptr_t(place.pc) - 1 - uintptr_t(info.dli_fbase));
  std::string s;
  if (FILE* f = popen(cmd, "r")) {
    while (fgets(line, sizeof line, f)) {
      std::string l(line, strcspn(line, " \n"));
      s += (s.empty() ? "" : " < ") + l;
    }
    pclose(f);
  }
  return s.empty() ? "?" : s;
}
std::string describe(uintptr_t a) {
  if (is_shared(a)) {
    return "shared memory + " + std::to_string(a - shared_lo) + " of " +
           std::to_string(shared_hi - shared_lo);
  }
  for (auto& r : regions) {
    if (a >= r.lo && a < r.hi) return r.name + " + " + std::to_string(a - r.lo);
  }
  char b[32];
  snprintf(b, sizeof b, "%#lx", a);
  return b;
}
std::string who(unsigned r) {
  if (r < threads) return "thread " + std::to_string(r);
  if (r < threads + warps) return "wgmma of warp " + std::to_string(r - threads);
  return "a copy on mbarrier " + std::to_string(r - threads - warps);
}
[[noreturn]] void report(const std::string& what, uintptr_t a, unsigned bytes, bool write,
                         unsigned by, unsigned place, Access other = 0,
                         const char* relation = nullptr) {
  check::active = false;
  std::string s = what + ": " + (write ? "write" : "read") + " of " + std::to_string(bytes) +
                  " bytes at " + describe(a) + "\n  by " + who(by) + " at " + where(places[place]);
  if (other) {
    s += std::string("\n  ") + relation + " " + who(rank_of(other)) +
         (block_of(other) == block ? "" : " of block " + std::to_string(block_of(other))) + " at " +
         where(places[place_of(other)]);
  }
  fail(s);
}

// ---- clocks -------------------------------------------------------------------------------------
void join(Past& a, const Past& b) {
  a.known = simt::join(a.known, b.known), a.released = simt::join(a.released, b.released);
  a.acquired = simt::join(a.acquired, b.acquired);
  a.waited |= b.waited;
}
bool ordered(Access e, const State& me) {
  if (block_of(e) == block) return me.clock[rank_of(e)] >= clock_of(e);
  if (!me.known) return false;
  auto it = me.known->find(block_of(e));
  return it != me.known->end() && (*it->second)[rank_of(e)] >= clock_of(e);
}

// ---- accesses -----------------------------------------------------------------------------------
unsigned intern_slowly(uintptr_t key, const Place& place) {
  auto& recent = recent_places[(key ^ key >> 10) % 1024];
  auto [it, fresh] = place_index.try_emplace(key, unsigned(places.size()));
  if (fresh) places.push_back(place);
  if (places.size() > kMaxPlaces) {
    check::active = false;
    fail("more access instructions than the checker can name");
  }
  recent.key = key, recent.index = it->second;
  return it->second;
}
inline unsigned intern(uintptr_t key, const Place& place) {
  const auto& recent = recent_places[(key ^ key >> 10) % 1024];
  return recent.key == key ? recent.index : intern_slowly(key, place);
}
unsigned intern(Site s) {  // file names are literals: their addresses and the line make the key
  return intern(uintptr_t(s.file) * 4099 + unsigned(s.line) + (1ull << 63), {nullptr, s});
}
unsigned intern(const void* pc) { return intern(uintptr_t(pc), {pc, {}}); }

const Region* find(const std::vector<Region>& v, uintptr_t a) {
  for (auto& r : v) {
    if (a >= r.lo && a < r.hi) return &r;
  }
  return nullptr;
}

void touch(unsigned by, uintptr_t a, unsigned bytes, bool write, check::Kind kind, unsigned place) {
  if (a >= stack_lo && a < stack_hi && by < threads) return;
  const bool in_shared = is_shared(a);
  if (tally::on) {
    const Region* r = in_shared ? nullptr : find(regions, a);
    tally::note(places[place].pc, places[place].site,
                in_shared ? "shared"
                : r       ? r->name
                          : "",
                bytes, write);
  }
  Shadow* shadow = &local;
  if (in_shared) {
    if (a + bytes > shared_hi) report("out of bounds", a, bytes, write, by, place);
  } else if (const Region* m = find(modules, a)) {
    if (!m->writable) return;
  } else {
    const Region* r = find(regions, a);
    if (!regions.empty() && (!r || a + bytes > r->hi)) {
      report("out of bounds", a, bytes, write, by, place);
    }
    if (write && r && !r->writable) report("write to const memory", a, bytes, write, by, place);
    shadow = &global;
    const bool settled = !r || r->settled;
    if (const char* why = launches::conflict(a, bytes, write, states[by].waited, settled)) {
      report(why, a, bytes, write, by, place);
    }
  }
  // A copy of 12 bytes is three words to the machine.
  if (bytes <= 16 && by < threads && a % (bytes & -bytes)) {
    report("misaligned", a, bytes, write, by, place);
  }
  const State& me = states[by];
  if (me.clock.own >= kMaxClock)
    report("too many barriers for the checker", a, bytes, write, by, place);
  const Access now = uint64_t(block) << 46 | uint64_t(by) << 34 | uint64_t(me.clock.own) << 15 |
                     uint64_t(kind) << 13 | place;
  const auto check_order = [&](Access e, bool wrote) {
    if (!e || (kind == check::atomically && kind_of(e) == check::atomically)) return;
    if (!ordered(e, me)) {
      report("race", a, bytes, write, by, place, e, "unordered with an access by");
    }
    const unsigned r = rank_of(e);
    if (wrote && by >= threads && r < threads && block_of(e) == block &&
        me.proxied[r] < clock_of(e)) {
      report("no fence_proxy_async", a, bytes, write, by, place, e, "after a write by");
    }
  };
  Cell before = {}, after = {};
  for (unsigned i = 0; i < bytes; i++) {
    Cell& c = in_shared ? shared[a + i - shared_lo] : shadow->at(a + i);
    if (i && c == before) {  // mostly the bytes of an access share one history
      c = after;
      continue;
    }
    before = c;
    if (in_shared) {
      if (block_of(c.write) != block) c.write = 0;
      for (Access& e : c.read) {
        if (block_of(e) != block) e = 0;
      }
    }
    check_order(c.write, true);
    if (write) {
      for (Access& e : c.read) {
        check_order(e, false);
        e = 0;
      }
      c.write = now;
    } else {
      if (in_shared && !c.write) report("uninitialised", a, bytes, write, by, place);
      if (kind_of(c.write) == check::in_flight) {
        report("copy in flight", a, bytes, write, by, place, c.write, "started by");
      }
      Access* to = &c.read[now % 3];  // a read that happened before this one need not be remembered
      for (Access& e : c.read) {
        if (!e || e >> 34 == now >> 34 || ordered(e, me)) {
          to = &e;
          break;
        }
      }
      *to = now;
    }
    after = c;
  }
}

int find_module(dl_phdr_info* info, size_t, void* found) {
  Dl_info own;
  dladdr(&threads, &own);
  for (int i = 0; i < info->dlpi_phnum; i++) {
    auto& p = info->dlpi_phdr[i];
    if (p.p_type != PT_LOAD || info->dlpi_addr != uintptr_t(own.dli_fbase)) continue;
    const uintptr_t lo = info->dlpi_addr + p.p_vaddr;
    static_cast<std::vector<Region>*>(found)->push_back(
        {lo, lo + p.p_memsz, "", bool(p.p_flags & PF_W)});
  }
  return 0;
}
std::vector<Region> own_module() {  // the segments of the kernels' library
  std::vector<Region> found;
  dl_iterate_phdr(find_module, &found);
  return found;
}
std::pair<void*, size_t> own_stack() {  // of the thread that launches: slow to find out
  pthread_attr_t attr;
  std::pair<void*, size_t> stack;
  pthread_getattr_np(pthread_self(), &attr);
  pthread_attr_getstack(&attr, &stack.first, &stack.second);
  pthread_attr_destroy(&attr);
  return stack;
}
}  // namespace

void expose(const void* p, size_t bytes, const char* name, bool writable, bool settled) {
  regions.push_back({uintptr_t(p), uintptr_t(p) + bytes, name, writable, settled});
}
void conceal() {
  regions.clear();
  launches::end_call();
}

namespace check {

void begin_launch(unsigned blocks, unsigned n, const LaunchShape& shape) {
  launches::begin(shape.stream, shape.dependent, blocks);
  threads = n, warps = (n + 31) / 32, ranks = threads + warps + kBarrierActors;
  if (blocks > kMaxBlocks) throw Error("more blocks than the checker can name");
  global.clear(), atomics.clear(), places.clear(), place_index.clear();
  for (auto& recent : recent_places) recent = {};
  static const std::vector<Region> own = own_module();
  modules = own;
  thread_local const std::pair<void*, size_t> stack = own_stack();
  ignore(stack.first, stack.second);  // holds the kernel's arguments
  shared.clear();
}
void end_launch() { launches::end(global); }
void begin_block(unsigned id, void* base, size_t bytes, size_t room) {
  block = id, shared_lo = uintptr_t(base), shared_hi = shared_lo + bytes, shared_room = room;
  shared.resize(bytes);
  local.clear(), channels.clear();
  const auto nothing = std::make_shared<Ticks>(ranks);
  states.clear();
  for (unsigned i = 0; i < ranks; i++) states.push_back({{}, {nothing, i, 1}, {nothing, i, 0}});
}
void resume(unsigned r, const void* stack, size_t bytes) {
  current = r, stack_lo = uintptr_t(stack), stack_hi = stack_lo + bytes, active = true;
}
void ignore(const void* p, size_t bytes) {
  modules.push_back({uintptr_t(p), uintptr_t(p) + bytes, "", false});
}

void access(const void* p, unsigned bytes, bool write, Kind kind, Site site) {
  touch(current, uintptr_t(p), bytes, write, kind, intern(site));
}
void instrumented(const void* p, unsigned bytes, bool write, const void* pc) {
  touch(current, uintptr_t(p), bytes, write, plain, intern(pc));
}
void atomic(const void* p, unsigned bytes, Site site) {
  touch(current, uintptr_t(p), bytes, true, atomically, intern(site));
  State& s = states[current];
  Known& k = atomics[uintptr_t(p)];
  s.acquired = simt::join(s.acquired, k);
  k = simt::join(k, s.released);
}
void sync(const unsigned* members, unsigned n) {
  Past all = states[members[0]];
  for (unsigned i = 1; i < n; i++) join(all, states[members[i]]);
  Clock::meet(n, [&](unsigned i) -> Clock& { return states[members[i]].clock; });
  Clock::meet(n, [&](unsigned i) -> Clock& { return states[members[i]].proxied; });
  for (unsigned i = 0; i < n; i++) {
    State& s = states[members[i]];
    static_cast<Past&>(s) = all;
    s.clock.own++;
  }
}
void fence() {
  State& s = states[current];
  if (s.acquired) {
    if (auto it = s.acquired->find(block); it != s.acquired->end()) s.clock.join(*it->second);
    s.known = simt::join(s.known, s.acquired);
    s.acquired = nullptr;
  }
  const auto mine = std::make_shared<const Ticks>(s.clock.all());
  s.released = simt::join(
      s.known, std::make_shared<std::map<unsigned, Kept>>(std::map<unsigned, Kept>{{block, mine}}));
  s.clock.own++;
}
void proxy_fence() {
  State& s = states[current];
  s.proxied.own = s.clock.own++;
}
void dependency_wait() {
  states[current].waited = true;
  launches::waited(block);
}
void begin_dependents() { launches::began_dependents(states[current].waited); }

void release(uintptr_t channel) {
  Released& next = channels[channel].next;
  State& s = states[current];
  join(next, s);
  next.clock.add(s.clock), next.proxied.add(s.proxied);
  s.clock.own++;
}
void flip(uintptr_t channel) {
  auto& [next, done] = channels[channel];
  join(done, next);
  done.clock.add(next.clock), done.proxied.add(next.proxied);
  next = {};
}
void acquire(uintptr_t channel) {
  Released& done = channels[channel].done;
  State& s = states[current];
  join(s, done);
  done.clock.join_into(s.clock), done.proxied.join_into(s.proxied);
}

unsigned warp_actor(unsigned warp) { return threads + warp; }
unsigned barrier_actor(unsigned index) { return threads + warps + index; }
void follow(unsigned actor, unsigned r) {
  State &a = states[actor], &s = states[r];
  join(a, s);
  a.clock.join(s.clock), a.proxied.join(s.proxied);
  s.clock.own++;
}
void access_as(unsigned actor, const void* p, unsigned bytes, bool write, Kind kind, Site site) {
  touch(actor, uintptr_t(p), bytes, write, kind, intern(site));
}
uint32_t step(unsigned actor) { return states[actor].clock.own++; }
void learn(unsigned r, unsigned actor, uint32_t done) { states[r].clock.raise(actor, done); }
void release_as(unsigned actor, uint32_t done, uintptr_t channel) {
  channels[channel].next.clock.raise(actor, done);
}
}  // namespace check
}  // namespace simt
