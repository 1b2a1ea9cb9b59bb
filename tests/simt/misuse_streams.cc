// Launches on several streams: those that nothing orders must not meet in memory.
#include "gpu/gpu.cuh"
#include "simt/expect.h"
#include "simt/streams.h"

namespace specdec {
namespace {

constexpr int kThreads = 64;
// Not arrays of the program: those are taken for the kernels' own.
int* const memory = new int[4 * kThreads]();
int *const scratch = memory, *const out_a = memory + kThreads, *const out_b = memory + 2 * kThreads,
           *const in = memory + 3 * kThreads;

__global__ void produce(int* to, const int* from) {
  gpu::grid_dependency_wait();
  to[threadIdx.x] = from[threadIdx.x] + 1;
}

void* stream(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

// Launches produce() and compares the outcome with `want`.
void launch(const char* what, const char* want, std::uintptr_t on, int* to, const int* from,
            bool dependent = true) {
  std::string got = "ok";
  try {
    gpu::launch(produce, dim3(1), dim3(kThreads), 0, stream(on), {.dependent = dependent}, to,
                from);
  } catch (const simt::Error& e) {
    got = e.what();
  }
  const bool good = got.find(want) != std::string::npos;
  simt_test::failures += !good;
  printf("%s %s: want \"%s\", got: %s\n", good ? "pass" : "FAIL", what, want, got.c_str());
}

constexpr const char* kBeside = "unordered with a launch on another stream";

void all() {
  const auto begin = [] { simt::synchronize(); };
  begin();
  launch("a stream", "ok", 1, scratch, in);
  launch("goes on", "ok", 1, out_a, scratch);
  launch("another stream reads what the first read", "ok", 2, out_b, in);
  launch("another stream reads what the first wrote", kBeside, 2, out_b, scratch);

  begin();
  launch("reads scratch", "ok", 1, out_a, scratch);
  launch("another stream writes what is read", kBeside, 2, scratch, in);

  begin();
  launch("writes scratch", "ok", 1, scratch, in);
  launch("another stream shares it", kBeside, 2, scratch, in);
  launch("the default stream is one more", kBeside, 0, scratch, in);

  begin();
  launch("writes scratch", "ok", 1, scratch, in);
  simt::wait_for(stream(2), simt::record(stream(1)));
  launch("behind an event", "ok", 2, out_b, scratch);
  launch("a third stream is not", kBeside, 3, out_a, scratch);

  begin();
  const simt::Event early = simt::record(stream(1));
  launch("writes scratch", "ok", 1, scratch, in);
  simt::wait_for(stream(2), early);
  launch("an event of before", kBeside, 2, out_b, scratch);

  begin();
  launch("writes scratch", "ok", 1, scratch, in);
  simt::wait_for(stream(2), simt::record(stream(1)));
  simt::wait_for(stream(3), simt::record(stream(2)));
  launch("an event behind an event", "ok", 3, out_b, scratch);
  launch("the first goes on", "ok", 1, out_a, in);
  launch("no way back", kBeside, 1, out_b, in);

  begin();
  launch("writes scratch", "ok", 1, scratch, in);
  simt::synchronize(simt::record(stream(1)));
  launch("the host has waited", "ok", 2, out_b, scratch);

  begin();
  launch("writes scratch", "ok", 1, scratch, in);
  simt::synchronize(simt::record(stream(3)));
  launch("the host has waited for another", kBeside, 2, out_b, scratch);

  begin();
  launch("writes scratch", "ok", 1, scratch, in);
  simt::wait_for(stream(1), simt::record(stream(2)));
  launch("waited the wrong way", kBeside, 2, out_b, scratch);

  // A launch depends on the one before it on its own stream, whatever others do meanwhile.
  begin();
  launch("writes scratch", "ok", 1, scratch, in);
  launch("one between them", "ok", 2, out_b, in);
  launch("the next of the first", "ok", 1, out_a, scratch, false);
}

}  // namespace
}  // namespace specdec

int main() {
  using namespace specdec;
  simt::expose(scratch, kThreads * sizeof(int), "scratch");
  simt::expose(out_a, kThreads * sizeof(int), "a");
  simt::expose(out_b, kThreads * sizeof(int), "b");
  simt::expose(in, kThreads * sizeof(int), "in", false);
  for (int seed = 0; seed < 5; seed++) {
    simt::seed(seed);
    all();
  }
  return simt_test::finish();
}
