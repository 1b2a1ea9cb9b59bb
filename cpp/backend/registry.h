// Backends by name: "cpu", "cuda" if it is usable, and the plug-ins that were loaded.
#pragma once

#include <string>
#include <vector>

#include "backend/backend.h"

namespace specdec {

// std::invalid_argument that says what there is, or why "cuda" is not.
const Backend& find_backend(const std::string& name);

// In the order given above.
std::vector<std::string> backend_names();

// Opens the shared library at `path` and registers what its `extern "C" const specdec::Backend*
// specdec_backend()` returns. The library stays open. std::invalid_argument if it cannot be opened,
// exports no such function, was built from other headers, or the name is taken by another library;
// loading the same file under the same name again does nothing.
void load_backend(const std::string& name, const std::string& path);

}  // namespace specdec
