// The order of launches: streams, events and the host that waits for them; and what each launch
// touched, which the ones that may run beside it must leave alone. Part of the checker: without it
// (no_check.cc) nothing is ordered and nothing is remembered.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "simt/shadow.h"

namespace simt {

// ---- for tests ----------------------------------------------------------------------------------

using Stream = const void*;                // any pointer; null is a stream like the others
using Event = std::map<Stream, uint64_t>;  // how many launches of each stream it stands behind
Event record(Stream);                      // behind all that the stream was given so far
void wait_for(Stream, const Event&);       // what the stream is given later comes behind the event
void synchronize(const Event&);            // so does what the host does later, on any stream
void synchronize();                        // for all streams
std::vector<Stream> busy();                // those that the host has not waited for

// ---- for the checker ----------------------------------------------------------------------------
namespace launches {

void end_call();  // what was exposed may be written by others until the next launch
void begin(Stream, bool dependent, size_t blocks);
void began_dependents(bool waited);  // by the running thread: what follows in its stream may start
void waited(unsigned block);         // one of its threads has, for the launch before
void end(const Shadow& touched);     // throws Error if a dependent launch waited for nothing

// Why the running launch must not touch these bytes: another one may run at the same time that
// touched them, or might have if they are not settled (expose()). Null: it may. waited: has the
// thread waited for the launch before its own?
const char* conflict(uintptr_t a, unsigned bytes, bool write, bool waited, bool settled);

}  // namespace launches
}  // namespace simt
