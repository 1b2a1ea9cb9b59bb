// specdec_ext._core_testing: parts of the core by themselves, for tests and studies. Built into a
// checkout's environment, never into a wheel.
#include <pybind11/pybind11.h>

namespace specdec {

void register_algo(pybind11::module_& m);
void register_beams(pybind11::module_& m);
void register_limits(pybind11::module_& m);
void register_page_table(pybind11::module_& m);
void register_sampling(pybind11::module_& m);
void register_suffix(pybind11::module_& m);
void register_swap_law(pybind11::module_& m);

}  // namespace specdec

PYBIND11_MODULE(_core_testing, m) {
  specdec::register_algo(m);
  specdec::register_beams(m);
  specdec::register_limits(m);
  specdec::register_page_table(m);
  specdec::register_sampling(m);
  specdec::register_suffix(m);
  specdec::register_swap_law(m);
}
