// For the programs that show what the emulator notices: launches that have to end in a given error.
#pragma once
#include <cstdio>
#include <string>

#include "gpu/gpu.cuh"

namespace specdec::simt_test {

inline int failures = 0;

// Launches and compares the outcome, "ok" or an error's text, with `want`: alternatives by '|'.
template <class... P, class... A>
void expect_launch(const char* what, const char* want, gpu::LaunchOptions options,
                   void (*kernel)(P...), int grid, int block, size_t smem, A... arguments) {
  std::string got = "ok";
  try {
    gpu::launch(kernel, dim3(grid), dim3(block), smem, nullptr, options, arguments...);
  } catch (const simt::Error& e) {
    got = e.what();
  }
  bool good = false;
  const std::string all = want;
  for (size_t from = 0; from <= all.size();) {
    const size_t to = std::min(all.find('|', from), all.size());
    good |= got.find(all.substr(from, to - from)) != std::string::npos;
    from = to + 1;
  }
  failures += !good;
  printf("%s %s: want \"%s\", got: %s\n", good ? "pass" : "FAIL", what, want, got.c_str());
}

template <class... P, class... A>
void expect(const char* what, const char* want, void (*kernel)(P...), int grid, int block,
            size_t smem, A... arguments) {
  expect_launch(what, want, {}, kernel, grid, block, smem, arguments...);
}

inline int finish() {
  printf("%s\n", failures ? "FAILED" : "passed");
  return failures != 0;
}

}  // namespace specdec::simt_test
