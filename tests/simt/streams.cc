// Linked with check.cc: what launches touched, and which of them are ordered.
#include "simt/streams.h"

#include <algorithm>
#include <deque>
#include <set>

#include "simt/simt.h"

namespace simt {
namespace {

struct Run {  // of bytes that a launch touched alike
  uintptr_t lo, hi;
  bool written;
};
struct Launch {
  uint64_t number;         // of its stream's, from 1
  bool overtaken = false;  // may the one after it start while the one before it runs?
  std::vector<Run> runs;   // by address
  std::unordered_map<uintptr_t, std::vector<char>> content;  // of pages written, when it ended

  bool touched(uintptr_t a, unsigned bytes, bool write) const {
    auto run = std::upper_bound(runs.begin(), runs.end(), a,
                                [](uintptr_t at, const Run& r) { return at < r.hi; });
    for (; run != runs.end() && run->lo < a + bytes; ++run) {
      if (write || run->written) return true;
    }
    return false;
  }
  // Memory that the host changed later is no kernel's work any more.
  bool changed(uintptr_t a, unsigned bytes) const {
    for (const uintptr_t end = a + bytes; a < end; a++) {
      const auto kept = content.find(a / kPage);
      if (kept != content.end() && kept->second[a % kPage] != *reinterpret_cast<const char*>(a))
        return true;
    }
    return false;
  }
};
struct History {
  uint64_t count = 0;   // of launches so far
  uint64_t before = 0;  // of them, in front of the call that is running
  Event behind;         // what its next launch comes after, besides its own launches
  std::deque<Launch> launches;
};

// A stream's launches that are remembered until the host has waited for them. Programs of one
// stream never wait, and would remember all.
constexpr size_t kRemembered = 32;

std::map<Stream, History> streams;
Event host;
struct {
  History* history = nullptr;
  Launch launch;
  bool dependent = false, settles = false;
  size_t blocks = 0;
  std::set<unsigned> waited;          // blocks of which a thread has waited
  std::vector<const Launch*> before;  // of its own stream, not yet waited for
  std::vector<const Launch*> beside;  // of other streams, in no order with it
} running;

void join(Event& a, const Event& b) {
  for (const auto& [stream, n] : b) a[stream] = std::max(a[stream], n);
}

std::vector<Run> runs_of(const Shadow& shadow) {
  std::vector<uintptr_t> pages;
  for (const auto& [page, cells] : shadow.pages) pages.push_back(page);
  std::sort(pages.begin(), pages.end());
  std::vector<Run> runs;
  for (const uintptr_t page : pages) {
    const Cell* cells = shadow.pages.at(page).get();
    for (uintptr_t i = 0; i < kPage; i++) {
      const Cell& c = cells[i];
      if (!c.write && !c.read[0]) continue;
      const uintptr_t a = page * kPage + i;
      const bool written = c.write != 0;
      if (!runs.empty() && runs.back().hi == a && runs.back().written == written) {
        runs.back().hi++;
      } else {
        runs.push_back({a, a + 1, written});
      }
    }
  }
  return runs;
}

}  // namespace

Event record(Stream stream) {
  const History& h = streams[stream];
  Event event = h.behind;
  event[stream] = h.count;
  return event;
}
void wait_for(Stream stream, const Event& event) { join(streams[stream].behind, event); }
void synchronize(const Event& event) { join(host, event); }
void synchronize() {
  for (auto& [stream, h] : streams) host[stream] = h.count, h.launches.clear();
}
std::vector<Stream> busy() {
  std::vector<Stream> found;
  for (const auto& [stream, h] : streams) {
    if (h.count > host[stream]) found.push_back(stream);
  }
  return found;
}

namespace launches {

void end_call() {
  for (auto& [stream, h] : streams) h.before = h.count;
}

void begin(Stream stream, bool dependent, size_t blocks) {
  History& mine = streams[stream];
  join(mine.behind, host);
  running.history = &mine;
  running.launch = {.number = ++mine.count, .runs = {}, .content = {}};
  running.dependent = dependent, running.settles = false;
  running.blocks = blocks, running.waited.clear();
  running.before.clear(), running.beside.clear();
  if (dependent) {
    for (auto l = mine.launches.rbegin(); l != mine.launches.rend(); ++l) {
      running.before.push_back(&*l);
      if (l->overtaken) continue;
      // All in front of a launch of the same call is complete, whoever enqueued it.
      running.settles = l->number > mine.before;
      break;
    }
  }
  for (const auto& [other, h] : streams) {
    if (other == stream) continue;
    const auto known = mine.behind.find(other);
    for (const Launch& l : h.launches) {
      if (known == mine.behind.end() || l.number > known->second) running.beside.push_back(&l);
    }
  }
}

void began_dependents(bool waited) { running.launch.overtaken |= running.dependent && !waited; }
void waited(unsigned block) { running.waited.insert(block); }

void end(const Shadow& touched) {
  if (running.dependent && running.waited.empty()) {
    throw Error(
        "a dependent launch ends without grid_dependency_wait: what comes after it may "
        "overtake the launch before it");
  }
  Launch& launch = running.launch;
  // A block that ends without having waited lets the next launch begin as well.
  launch.overtaken |= running.dependent && running.waited.size() < running.blocks;
  launch.runs = runs_of(touched);
  for (const Run& r : launch.runs) {
    if (!r.written) continue;
    for (uintptr_t page = r.lo / kPage; page <= (r.hi - 1) / kPage; page++) {
      const char* from = reinterpret_cast<const char*>(page * kPage);
      if (!launch.content.contains(page)) launch.content[page].assign(from, from + kPage);
    }
  }
  auto& all = running.history->launches;
  if (!launch.overtaken) {  // nobody asks what those before it left
    for (Launch& l : all) l.content.clear();
  }
  all.push_back(std::move(launch));
  if (all.size() > kRemembered) all.pop_front();
}

const char* conflict(uintptr_t a, unsigned bytes, bool write, bool waited, bool settled) {
  if (running.dependent && !waited) {
    if (!settled && !running.settles) return "before grid_dependency_wait";
    for (const Launch* l : running.before) {
      if (l->touched(a, bytes, write) && !l->changed(a, bytes)) {
        return "before grid_dependency_wait";
      }
    }
  }
  for (const Launch* l : running.beside) {
    if (l->touched(a, bytes, write)) return "unordered with a launch on another stream";
  }
  return nullptr;
}

}  // namespace launches
}  // namespace simt
