// What -fsanitize=thread,undefined makes the compiler insert, answered here and not by libtsan and
// libubsan: every access of a kernel goes to the checker, undefined behaviour ends the launch.
#include <cstdio>

#include "simt/simt.h"

#define TOUCH(n, write)    \
  if (simt::check::active) \
  simt::check::instrumented(p, unsigned(n), write, __builtin_return_address(0))
#define HOOK(n)                                               \
  void __tsan_read##n(void* p) { TOUCH(n, false); }           \
  void __tsan_write##n(void* p) { TOUCH(n, true); }           \
  void __tsan_unaligned_read##n(void* p) { TOUCH(n, false); } \
  void __tsan_unaligned_write##n(void* p) { TOUCH(n, true); }

extern "C" {
// clang-format off
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
// clang-format on
void __tsan_read_range(void* p, size_t n) { TOUCH(n, false); }
void __tsan_write_range(void* p, size_t n) { TOUCH(n, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// -fsanitize=undefined: the record that every handler gets first begins with the place in the
// source.
struct SourcePlace {
  const char* file;
  uint32_t line, column;
};
static void undefined(const char* what, const SourcePlace* p) {
  const bool in_kernel = simt::check::active;
  simt::check::active = false;
  const std::string s = std::string("undefined behaviour: ") + what + " at " +
                        (p->file ? p->file : "?") + ":" + std::to_string(p->line);
  if (in_kernel) simt::fail(s);
  fprintf(stderr, "%s\n", s.c_str());
}
// Further arguments of a handler are left alone.
#define UNDEFINED(name) \
  void __ubsan_handle_##name(SourcePlace* p) { undefined(#name, p); }
// clang-format off
UNDEFINED(out_of_bounds)
UNDEFINED(shift_out_of_bounds)
UNDEFINED(type_mismatch_v1)
UNDEFINED(load_invalid_value)
UNDEFINED(add_overflow)
UNDEFINED(sub_overflow)
UNDEFINED(mul_overflow)
UNDEFINED(negate_overflow)
UNDEFINED(divrem_overflow)
UNDEFINED(pointer_overflow)
UNDEFINED(invalid_builtin)
UNDEFINED(nonnull_arg)
UNDEFINED(missing_return)
UNDEFINED(builtin_unreachable)
UNDEFINED(float_cast_overflow)
// clang-format on
}
