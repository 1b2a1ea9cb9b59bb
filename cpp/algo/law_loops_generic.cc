#include "algo/law_loops_impl.h"

namespace specdec {
namespace {

SPECDEC_LAW_LOOPS(plain, 4, );

}  // namespace

int num_law_loops() { return 1; }

const LawLoops& law_loops_at(int /*index*/) { return k_plain; }

}  // namespace specdec
