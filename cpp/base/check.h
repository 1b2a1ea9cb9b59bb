// The error words. REQUIRE is for the caller's mistake, ENSURE for our own broken invariant.
//
// Text: what, got, limit, remedy, e.g. "draft_tree.parents[5] = 7: a parent comes before its child
// (0..4)". Arguments are streamed one after another.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace specdec::detail {

template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace specdec::detail

// Caller's mistake: std::invalid_argument, which Python sees as ValueError.
#define SPECDEC_REQUIRE(cond, ...)                                                  \
  do {                                                                              \
    if (!(cond)) throw std::invalid_argument(::specdec::detail::join(__VA_ARGS__)); \
  } while (false)

// Our broken invariant: std::logic_error, which Python sees as RuntimeError.
#define SPECDEC_ENSURE(cond, ...)                                                                \
  do {                                                                                           \
    if (!(cond))                                                                                 \
      throw std::logic_error(::specdec::detail::join(                                            \
          "internal error (please report): ", __VA_ARGS__, " [", __FILE__, ":", __LINE__, "]")); \
  } while (false)
