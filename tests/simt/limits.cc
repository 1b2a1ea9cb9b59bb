// The table of devices, and the records of docs/kernels/registers.md, which scripts/cuda_check.sh
// writes from what ptxas says and `make cuda-check` holds against it. A kernel's name is that of
// its symbol, written as in that table.
#include "simt/limits.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <vector>

#include "simt/emulated_device.h"

namespace simt::limits {
namespace {

// CUDA C++ Programming Guide, "Compute Capabilities". The same for all of these: 1024 threads and
// 65,536 registers of a block, dealt to the warps of four parts by 256 at a time.
struct Device {
  int major, minor;
  unsigned shared_bytes;  // of a block, opted in
  const char* target;     // whose machine code it runs
};
constexpr Device kDevices[] = {{8, 0, 163 << 10, "sm_80"},
                               {8, 6, 99 << 10, "sm_80"},
                               {8, 9, 99 << 10, "sm_80"},
                               {9, 0, 227 << 10, "sm_90a"}};
constexpr unsigned kThreads = 1024, kBlockRegisters = 65536, kRegisterUnit = 256, kParts = 4;
constexpr unsigned kGridRows = 65535;  // along y and z; x has 2^31 - 1

struct Record {
  unsigned registers, shared_bytes;  // static
};
using Records = std::map<std::pair<std::string, std::string>, Record>;  // by name and target
std::map<const void*, Record> of_tests;
std::set<std::string> missing;

const Device& device() {
  const auto limits = specdec::emulated_limits();
  for (const Device& d : kDevices) {
    if (d.major == limits.major && d.minor == limits.minor) return d;
  }
  throw Error("no table of limits for a device of " + std::to_string(limits.major) + "." +
              std::to_string(limits.minor) + ": add it to tests/simt/limits.cc");
}

const Records& records() {
  static const Records all = [] {
    Records found;
    const std::regex row(R"(\| `(.+)` \| (sm_\w+) \| (\d+) \| \d+ \| \d+ \| (\d+) \|)");
    std::ifstream file(SIMT_REGISTERS);
    for (std::string line; std::getline(file, line);) {
      std::smatch m;
      if (!std::regex_match(line, m, row)) continue;
      found[{m[1], m[2]}] = {unsigned(std::stoul(m[3])), unsigned(std::stoul(m[4]))};
    }
    return found;
  }();
  return all;
}

// The symbols of a loaded file, by address: all of them, as kernels are not exported.
std::map<uintptr_t, std::string> symbols_of(const char* path) {
  std::map<uintptr_t, std::string> found;
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.size() < sizeof(ElfW(Ehdr))) return found;
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(bytes.data());
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(bytes.data() + header->e_shoff);
  for (int i = 0; i < header->e_shnum; i++) {
    const auto& table = sections[i];
    if (table.sh_type != SHT_SYMTAB) continue;
    const char* names = bytes.data() + sections[table.sh_link].sh_offset;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(bytes.data() + table.sh_offset);
    for (size_t j = 0; j < table.sh_size / sizeof(ElfW(Sym)); j++) {
      if ((symbols[j].st_info & 15) == STT_FUNC)
        found[symbols[j].st_value] = names + symbols[j].st_name;
    }
  }
  return found;
}

// As scripts/cuda_check/ptxas.py shortens a name.
std::string readable(const std::string& symbol) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), free);
  std::string name = text ? text.get() : symbol;
  name = std::regex_replace(name, std::regex(R"(\(anonymous namespace\)::)"), "");
  name = std::regex_replace(name, std::regex(R"(\bspecdec::(\w+::)*)"), "");
  name = std::regex_replace(name, std::regex("^void "), "");
  name = std::regex_replace(name, std::regex("__nv_bfloat16"), "bf16");
  name = std::regex_replace(name, std::regex("__nv_fp8_e4m3"), "e4m3");
  name = std::regex_replace(name, std::regex("__half"), "fp16");
  int depth = 0;
  for (size_t i = name.size(); name.ends_with(')') && i-- > 0;) {
    depth += (name[i] == ')') - (name[i] == '(');
    if (depth == 0) return name.substr(0, i);
  }
  return name;
}

const std::string& name_of(const void* kernel) {
  static std::map<const void*, std::string> names;
  auto [name, fresh] = names.try_emplace(kernel);
  Dl_info file;
  if (fresh && dladdr(kernel, &file)) {
    static std::map<std::string, std::map<uintptr_t, std::string>> symbols;
    auto [known, unread] = symbols.try_emplace(file.dli_fname);
    if (unread) known->second = symbols_of(file.dli_fname);
    const auto found = known->second.find(uintptr_t(kernel) - uintptr_t(file.dli_fbase));
    if (found != known->second.end()) name->second = readable(found->second);
  }
  return name->second;
}

// Null: none. The code for 8.0 serves 9.0 where there is no other.
const Record* record_of(const void* kernel) {
  if (const auto own = of_tests.find(kernel); own != of_tests.end()) return &own->second;
  const std::string& name = name_of(kernel);
  for (const Device* d = &device(); d >= kDevices; --d) {
    if (const auto r = records().find({name, d->target}); r != records().end()) return &r->second;
  }
  return nullptr;
}

bool known_elsewhere(const std::string& name) {
  return std::any_of(std::begin(kDevices), std::end(kDevices),
                     [&](const Device& d) { return records().contains({name, d.target}); });
}

}  // namespace

void record(const void* kernel, unsigned registers) { of_tests[kernel] = {registers, 0}; }

std::string unrecorded() {
  std::string lines;
  for (const std::string& name : missing) lines += name + "\n";
  return lines;
}

unsigned check(const LaunchShape& shape) {
  const Device& d = device();
  const auto& [kernel, grid, block, smem, stream, dependent] = shape;
  const auto refuse = [&](const std::string& what) {
    throw Error("invalid launch of " + name_of(kernel) + " on " + std::to_string(d.major) + "." +
                std::to_string(d.minor) + ": " + what);
  };
  const auto count = [](const dim3& n) { return uint64_t{n.x} * n.y * n.z; };
  const auto text = [](uint64_t n) { return std::to_string(n); };
  if (!count(grid) || grid.x >> 31 || grid.y > kGridRows || grid.z > kGridRows) {
    refuse("a grid of " + text(grid.x) + " x " + text(grid.y) + " x " + text(grid.z) + " blocks");
  }
  const uint64_t threads = count(block);
  if (!threads || threads > kThreads || block.z > 64) {
    refuse(text(threads) + " threads in a block, " + text(kThreads) + " at most");
  }
  const Record* record = record_of(kernel);
  if (!record) {
    const std::string& name = name_of(kernel);
    if (known_elsewhere(name)) refuse("it was not compiled for this device");
    missing.insert(name);
  }
  const size_t most =
      std::min<size_t>(d.shared_bytes, size_t(specdec::emulated_limits().shared_bytes));
  const size_t shared = smem + (record ? record->shared_bytes : 0);
  if (shared > most) {
    refuse(text(shared) + " bytes of shared memory in a block, " + text(most) + " at most");
  }
  if (!record) return 0;
  const unsigned of_warp =
      (record->registers * 32 + kRegisterUnit - 1) / kRegisterUnit * kRegisterUnit;
  const unsigned warps = kParts * (kBlockRegisters / kParts / of_warp);
  if ((threads + 31) / 32 > warps) {
    refuse(text(threads) + " threads of " + text(record->registers) +
           " registers in a block, which has registers for " + text(32 * warps) +
           " such threads: too many resources requested");
  }
  return record->registers;
}

}  // namespace simt::limits
