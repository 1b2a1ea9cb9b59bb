#include "backend/registry.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "base/check.h"

namespace specdec {
namespace {

struct PlugIn {
  std::string path;
  const Backend* backend;
};

struct Registry {
  std::mutex mutex;
  std::map<std::string, PlugIn> plug_ins;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

const Backend& find_backend(const std::string& name) {
  if (name == "cpu") return cpu_backend();
  if (name == "cuda") {
    const Backend* cuda = cuda_backend();
    SPECDEC_REQUIRE(cuda != nullptr, "backend = \"cuda\": not usable here: ", cuda_info().reason);
    return *cuda;
  }
  {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().plug_ins.find(name);
    if (found != registry().plug_ins.end()) return *found->second.backend;
  }
  std::string known;
  for (const std::string& each : backend_names()) known += (known.empty() ? "" : ", ") + each;
  throw std::invalid_argument(detail::join("backend = \"", name, "\": there are ", known));
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names{"cpu"};
  if (cuda_backend() != nullptr) names.emplace_back("cuda");
  const std::lock_guard lock(registry().mutex);
  for (const auto& [name, plug_in] : registry().plug_ins) names.push_back(name);
  return names;
}

void load_backend(const std::string& name, const std::string& path) {
  SPECDEC_REQUIRE(!name.empty() && name != "cpu" && name != "cuda", "name = \"", name,
                  "\": a plug-in needs a name of its own, not \"cpu\" or \"cuda\"");
  const std::lock_guard lock(registry().mutex);
  const auto taken = registry().plug_ins.find(name);
  if (taken != registry().plug_ins.end()) {
    SPECDEC_REQUIRE(taken->second.path == path, "name = \"", name, "\": already loaded from ",
                    taken->second.path, ", not from ", path);
    return;
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw std::invalid_argument(
        detail::join("path = \"", path, "\": cannot be opened: ", reason ? reason : "no reason"));
  }
  auto* entry = reinterpret_cast<const Backend* (*)()>(dlsym(library, "specdec_backend"));
  const Backend* backend = entry != nullptr ? entry() : nullptr;
  if (backend == nullptr || backend->layout != kBackendLayout) {
    dlclose(library);
    throw std::invalid_argument(detail::join(
        "path = \"", path, "\": ",
        entry == nullptr ? "exports no specdec_backend()"
                         : "was built from other headers than this package: build both again"));
  }
  registry().plug_ins.emplace(name, PlugIn{path, backend});
}

}  // namespace specdec
