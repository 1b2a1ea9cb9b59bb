#include "simt/tally.h"

#include <dlfcn.h>

#include <map>
#include <sstream>
#include <tuple>

namespace simt::tally {
namespace {

struct Times {
  uint64_t visits = 0, bytes = 0;
};
// By address, file and line, array, whether it writes.
using Key = std::tuple<const void*, std::string, int, std::string, bool>;
std::map<Key, Times> found;

}  // namespace

void note(const void* pc, Site site, const std::string& array, unsigned bytes, bool write) {
  const bool known = pc != nullptr;
  Times& times = found[{pc, known ? "" : site.file, known ? 0 : site.line, array, write}];
  ++times.visits;
  times.bytes += bytes;
}

void begin() {
  found.clear();
  on = true;
}

std::string end() {
  on = false;
  std::ostringstream lines;
  for (const auto& [key, times] : found) {
    const auto& [pc, file, line, array, write] = key;
    lines << (write ? "write " : "read ") << (array.empty() ? "-" : array) << ' ' << times.visits
          << ' ' << times.bytes << ' ';
    Dl_info info;
    if (pc == nullptr) {
      lines << file << ':' << line << '\n';
    } else if (dladdr(pc, &info) != 0) {  // the call itself lies before the address it returns to
      lines << "0x" << std::hex << uintptr_t(pc) - 1 - uintptr_t(info.dli_fbase) << std::dec
            << '\n';
    } else {
      lines << "?\n";
    }
  }
  return lines.str();
}

}  // namespace simt::tally
