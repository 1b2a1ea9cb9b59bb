// Loads, stores, atomics, addresses. Accesses have to be aligned and inside of what the launch may
// touch; both are faults on hardware too, or worse.
#include <algorithm>
#include <map>

#include "ptx/ops.h"

namespace ptx {

// ---- what a launch may touch --------------------------------------------------------------------
namespace {
struct Range {
  std::uintptr_t begin, end;
  bool writable;
  std::string name;
};
std::map<std::uintptr_t, Range> exposed;  // by end
const Range* latest = nullptr;

bool holds(const Range& r, std::uintptr_t at, unsigned bytes, bool write) {
  return at >= r.begin && at + bytes <= r.end && (r.writable || !write);
}
// Views of one tensor overlap: the one that allows most counts.
const Range* range_of(std::uintptr_t at, unsigned bytes, bool write) {
  if (latest != nullptr && holds(*latest, at, bytes, write)) return latest;
  for (auto r = exposed.upper_bound(at); r != exposed.end(); ++r) {
    if (holds(r->second, at, bytes, write)) return latest = &r->second;
  }
  return nullptr;
}
}  // namespace

void expose(const void* data, std::size_t bytes, const char* name, bool writable) {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  latest = nullptr;
  auto [known, is_new] = exposed.try_emplace(at + bytes, Range{at, at + bytes, writable, name});
  if (!is_new) {
    known->second.begin = std::min(known->second.begin, at);
    known->second.writable |= writable;
  }
}
void conceal() {
  exposed.clear();
  latest = nullptr;
}

namespace {
void check_alignment(std::uint64_t address, unsigned bytes) {
  if (address % bytes) {
    throw Error("misaligned access of " + std::to_string(bytes) + " bytes at " + hex(address));
  }
}
}  // namespace

char* Block::shared_at(std::uint64_t address, unsigned bytes) {
  if (bytes > shared_bytes || address - kSharedBase > shared_bytes - bytes) {
    throw Error("out of bounds: " + std::to_string(bytes) + " bytes at " + hex(address) +
                " of shared memory, which ends at " + hex(kSharedBase + shared_bytes));
  }
  return shared + (address - kSharedBase);
}
char* Block::local_at(unsigned warp, unsigned lane, std::uint64_t offset, unsigned bytes) {
  if (offset + bytes > program->local_bytes) throw Error("out of bounds of local memory");
  return local.data() + std::size_t{program->local_bytes} * (warp * 32 + lane) + offset;
}
char* Block::global_at(std::uint64_t address, unsigned bytes, bool write) {
  if (exposed.empty()) return reinterpret_cast<char*>(address);
  if (range_of(address, bytes, write) == nullptr) {
    const Range* r = range_of(address, bytes, false);
    if (r != nullptr) throw Error("writes to " + r->name + ", which is const");
    throw Error("out of bounds: " + std::to_string(bytes) + " bytes at " + hex(address) +
                " of global memory");
  }
  return reinterpret_cast<char*>(address);
}

namespace {
std::uint64_t address_of(Warp& w, const Op& o, unsigned i, unsigned lane) {
  return w.value(o, i, lane) + o.disp[0];
}

// Windows of the generic address space: shared and local memory lie where the host put them.
char* resolve(Warp& w, Space space, std::uint64_t address, unsigned lane, unsigned bytes,
              bool write) {
  Block& b = *w.block;
  const auto inside = [&](const char* base, std::size_t size) {
    return address - reinterpret_cast<std::uintptr_t>(base) < size;
  };
  switch (space) {
    case Space::shared:
      return b.shared_at(address, bytes);
    case Space::local:
      return b.local_at(w.index, lane, address, bytes);
    case Space::param:
      return reinterpret_cast<char*>(address);
    case Space::generic:
      if (inside(b.shared, b.shared_bytes)) {
        return b.shared_at(address - reinterpret_cast<std::uintptr_t>(b.shared) + kSharedBase,
                           bytes);
      }
      if (inside(b.local.data(), b.local.size())) return reinterpret_cast<char*>(address);
      if (inside(b.program->parameters.data(), b.program->parameters.size())) {
        return reinterpret_cast<char*>(address);
      }
      return b.global_at(address, bytes, write);
    default:
      return b.global_at(address, bytes, write);
  }
}

// ---- loads and stores ---------------------------------------------------------------------------
template <class T>
void set(Warp& w, const Op& o, unsigned i, unsigned lane, T v) {
  if (o.widths[i] == Width::half) {
    w.at<std::uint16_t>(o.x[i])[lane] = std::uint16_t(v);
  } else if (o.widths[i] == Width::word) {
    w.at<std::uint32_t>(o.x[i])[lane] = std::uint32_t(v);
  } else {
    w.at<std::uint64_t>(o.x[i])[lane] = std::uint64_t(v);
  }
}

template <class T, Space kSpace, unsigned kCount>
void load(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) {
    const std::uint64_t address = address_of(w, o, kCount, l);
    check_alignment(address, sizeof(T) * kCount);
    T values[kCount];
    memcpy(values, resolve(w, kSpace, address, l, sizeof values, false), sizeof values);
    for (unsigned i = 0; i < kCount; i++) set(w, o, i, l, values[i]);
  });
}
template <class T, Space kSpace, unsigned kCount>
void store(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) {
    const std::uint64_t address = address_of(w, o, 0, l);
    check_alignment(address, sizeof(T) * kCount);
    T values[kCount];
    for (unsigned i = 0; i < kCount; i++) values[i] = T(w.value(o, 1 + i, l));
    memcpy(resolve(w, kSpace, address, l, sizeof values, true), values, sizeof values);
  });
}

template <class T, Space kSpace>
void put_access(Table& t, const std::string& space, const std::string& type, bool stores) {
  const std::string vectors[] = {"", ".v2", ".v4"};
  const auto put_one = [&]<unsigned kCount>(const std::string& vector) {
    const std::string values(kCount, 'v');
    if (stores) {
      put(t, "st" + space + vector + "." + type,
          {store<T, kSpace, kCount>, "m" + values, sizeof(T)});
    } else {
      put(t, "ld" + space + vector + "." + type,
          {load<T, kSpace, kCount>, values + "m", sizeof(T)});
    }
  };
  put_one.template operator()<1>(vectors[0]);
  put_one.template operator()<2>(vectors[1]);
  if constexpr (sizeof(T) <= 4) put_one.template operator()<4>(vectors[2]);
}
template <Space kSpace>
void put_space(Table& t, const std::string& space, bool loads, bool stores) {
  for (const bool store : {false, true}) {
    if (store ? !stores : !loads) continue;
    put_access<std::uint8_t, kSpace>(t, space, "u8", store);
    put_access<std::int8_t, kSpace>(t, space, "s8", store);
    put_access<std::uint8_t, kSpace>(t, space, "b8", store);
    put_access<std::uint16_t, kSpace>(t, space, "u16", store);
    put_access<std::int16_t, kSpace>(t, space, "s16", store);
    put_access<std::uint16_t, kSpace>(t, space, "b16", store);
    put_access<std::uint32_t, kSpace>(t, space, "u32", store);
    put_access<std::int32_t, kSpace>(t, space, "s32", store);
    put_access<std::uint32_t, kSpace>(t, space, "b32", store);
    put_access<std::uint32_t, kSpace>(t, space, "f32", store);
    put_access<std::uint64_t, kSpace>(t, space, "u64", store);
    put_access<std::uint64_t, kSpace>(t, space, "s64", store);
    put_access<std::uint64_t, kSpace>(t, space, "b64", store);
    put_access<std::uint64_t, kSpace>(t, space, "f64", store);
  }
}

// ---- atomics ------------------------------------------------------------------------------------
// Lanes take turns in order: one of the orders that hardware may take.
template <class T, Space kSpace, class F, unsigned kOperands>
void atomic(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) {
    const std::uint64_t address = address_of(w, o, 1, l);
    check_alignment(address, sizeof(T));
    char* p = resolve(w, kSpace, address, l, sizeof(T), true);
    T old, fresh;
    memcpy(&old, p, sizeof old);
    if constexpr (kOperands == 1) {
      fresh = F{}(old, w.at<T>(o.x[2])[l]);
    } else {
      fresh = F{}(old, w.at<T>(o.x[2])[l], w.at<T>(o.x[3])[l]);
    }
    memcpy(p, &fresh, sizeof fresh);
    w.at<T>(o.x[0])[l] = old;
  });
}
template <class T, class F, unsigned kOperands = 1>
void put_atomic(Table& t, const std::string& op) {
  const std::string s = std::string{letter<T>(), 'm'} + std::string(kOperands, letter<T>());
  put(t, "atom." + op, {atomic<T, Space::generic, F, kOperands>, s});
  put(t, "atom.shared." + op, {atomic<T, Space::shared, F, kOperands>, s});
  for (const char* order : {"", "relaxed.gpu.", "acquire.gpu.", "release.gpu.", "acq_rel.gpu."}) {
    put(t, std::string("atom.") + order + "global." + op,
        {atomic<T, Space::global, F, kOperands>, s});
  }
}
struct AtomAdd {
  template <class T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct AtomMin {
  template <class T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct AtomMax {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct AtomAnd {
  template <class T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct AtomOr {
  template <class T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct AtomXor {
  template <class T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};
struct AtomExchange {
  template <class T>
  T operator()(T, T b) const {
    return b;
  }
};
struct AtomIncrement {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const { return a >= b ? 0 : a + 1; }
};
struct AtomCas {
  template <class T>
  T operator()(T a, T expected, T b) const {
    return a == expected ? b : a;
  }
};

// ---- addresses ----------------------------------------------------------------------------------
template <Space kSpace, bool kToSpace>
void convert_address(Warp& w, const Op& o) {
  Block& b = *w.block;
  lanes_of(w.active, [&](unsigned l) {
    const std::uint64_t from = w.at<std::uint64_t>(o.x[1])[l];
    std::uint64_t base = 0;  // global addresses and those of parameters are generic ones
    if (kSpace == Space::shared) {
      base = reinterpret_cast<std::uintptr_t>(b.shared) - kSharedBase;
    } else if (kSpace == Space::local) {
      base = reinterpret_cast<std::uintptr_t>(b.local.data()) +
             std::size_t{b.program->local_bytes} * (w.index * 32 + l);
    }
    w.at<std::uint64_t>(o.x[0])[l] = kToSpace ? from - base : from + base;
  });
}
void nothing(Warp&, const Op&) {}

}  // namespace

void add_memory(Table& t) {
  put_space<Space::generic>(t, "", true, true);
  put_space<Space::global>(t, ".global", true, true);
  put_space<Space::shared>(t, ".shared", true, true);
  put_space<Space::local>(t, ".local", true, true);
  put_space<Space::param>(t, ".param", true, false);
  for (const char* how : {".global.nc", ".relaxed.gpu.global", ".acquire.gpu.global", ".global.cs",
                          ".global.cg", ".volatile.global"}) {
    put_space<Space::global>(t, how, true, false);
  }
  for (const char* how : {".relaxed.gpu.global", ".release.gpu.global", ".global.cs", ".global.cg",
                          ".volatile.global"}) {
    put_space<Space::global>(t, how, false, true);
  }
  put_space<Space::shared>(t, ".volatile.shared", true, true);
  put_atomic<std::uint32_t, AtomAdd>(t, "add.u32"),
      put_atomic<std::uint64_t, AtomAdd>(t, "add.u64");
  put_atomic<std::int32_t, AtomAdd>(t, "add.s32"), put_atomic<float, AtomAdd>(t, "add.f32");
  put_atomic<std::uint32_t, AtomMin>(t, "min.u32"), put_atomic<std::int32_t, AtomMin>(t, "min.s32");
  put_atomic<std::uint32_t, AtomMax>(t, "max.u32"), put_atomic<std::int32_t, AtomMax>(t, "max.s32");
  put_atomic<std::uint64_t, AtomMin>(t, "min.u64"),
      put_atomic<std::uint64_t, AtomMax>(t, "max.u64");
  put_atomic<std::uint32_t, AtomAnd>(t, "and.b32"), put_atomic<std::uint32_t, AtomOr>(t, "or.b32");
  put_atomic<std::uint32_t, AtomXor>(t, "xor.b32");
  put_atomic<std::uint32_t, AtomExchange>(t, "exch.b32");
  put_atomic<std::uint64_t, AtomExchange>(t, "exch.b64");
  put_atomic<std::uint32_t, AtomIncrement>(t, "inc.u32");
  put_atomic<std::uint32_t, AtomCas, 2>(t, "cas.b32");
  put_atomic<std::uint64_t, AtomCas, 2>(t, "cas.b64");
  put(t, "cvta.u64", {convert_address<Space::global, false>, "xx"});
  put(t, "cvta.global.u64", {convert_address<Space::global, false>, "xx"});
  put(t, "cvta.to.global.u64", {convert_address<Space::global, true>, "xx"});
  put(t, "cvta.param.u64", {convert_address<Space::param, false>, "xx"});
  put(t, "cvta.shared.u64", {convert_address<Space::shared, false>, "xx"});
  put(t, "cvta.to.shared.u64", {convert_address<Space::shared, true>, "xx"});
  put(t, "cvta.local.u64", {convert_address<Space::local, false>, "xx"});
  put(t, "cvta.to.local.u64", {convert_address<Space::local, true>, "xx"});
  // One block runs at a time and its accesses are in order.
  for (const char* fence :
       {"membar.gl", "membar.cta", "membar.sys", "fence.acq_rel.gpu", "fence.sc.gpu",
        "fence.acq_rel.cta", "griddepcontrol.wait", "griddepcontrol.launch_dependents"}) {
    put(t, fence, {nothing, ""});
  }
}

}  // namespace ptx
