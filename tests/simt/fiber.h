// A stack that can be left and taken up again: a few instructions on x86-64, ucontext elsewhere.
#pragma once
#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace simt {

inline constexpr std::size_t kStackBytes = 256 << 10;

#if defined(__x86_64__)

// Saves the registers that a call preserves on the old stack and takes them from the new one.
extern "C" void simt_switch(void** save, void* load);

struct Context {
  void* sp = nullptr;

  void init(char* stack, void (*entry)()) {
    auto* top = reinterpret_cast<void**>(stack + kStackBytes);
    top[-2] = reinterpret_cast<void*>(entry);  // what the first switch returns to
    sp = top - 8;
  }
  static void swap(Context& from, Context& to) { simt_switch(&from.sp, to.sp); }
};

#else

struct Context {
  ucontext_t context;

  void init(char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void swap(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
};

#endif
}  // namespace simt
