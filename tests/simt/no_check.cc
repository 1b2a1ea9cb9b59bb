// The checker's hooks when nothing is checked; check.cc, where it is linked, takes their place.
#include "simt/simt.h"
#include "simt/streams.h"

#define WEAK __attribute__((weak))

namespace simt {

WEAK void expose(const void*, size_t, const char*, bool, bool) {}
WEAK void conceal() {}
WEAK Event record(Stream) { return {}; }
WEAK void wait_for(Stream, const Event&) {}
WEAK void synchronize(const Event&) {}
WEAK void synchronize() {}
WEAK std::vector<Stream> busy() { return {}; }

namespace check {
WEAK void begin_launch(unsigned, unsigned, const LaunchShape&) {}
WEAK void end_launch() {}
WEAK void begin_block(unsigned, void*, size_t, size_t) {}
WEAK void resume(unsigned, const void*, size_t) {}
WEAK void ignore(const void*, size_t) {}
WEAK void access(const void*, unsigned, bool, Kind, Site) {}
WEAK void atomic(const void*, unsigned, Site) {}
WEAK void sync(const unsigned*, unsigned) {}
WEAK void fence() {}
WEAK void proxy_fence() {}
WEAK void dependency_wait() {}
WEAK void begin_dependents() {}
WEAK void release(uintptr_t) {}
WEAK void flip(uintptr_t) {}
WEAK void acquire(uintptr_t) {}
WEAK unsigned warp_actor(unsigned) { return 0; }
WEAK unsigned barrier_actor(unsigned) { return 0; }
WEAK void follow(unsigned, unsigned) {}
WEAK void access_as(unsigned, const void*, unsigned, bool, Kind, Site) {}
WEAK uint32_t step(unsigned) { return 0; }
WEAK void learn(unsigned, unsigned, uint32_t) {}
WEAK void release_as(unsigned, uint32_t, uintptr_t) {}
}  // namespace check
}  // namespace simt
