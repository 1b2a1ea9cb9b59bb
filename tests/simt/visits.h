// Blocks of a cluster that use each other's memory: whose end waits for whom.
//
// A block's memory is gone when its last thread ends. So before that some thread of it has to know
// of everything that other blocks did there; that it happened to be so in one order of the threads
// is not enough.
#pragma once

#include <cstdint>

namespace simt {

namespace check {
uint32_t now();                             // of the running thread, in its own ticks
bool knows(unsigned rank, uint32_t ticks);  // the running thread, what another did until then
}  // namespace check

namespace async {
void thread_ended();  // the running one
}  // namespace async

}  // namespace simt
