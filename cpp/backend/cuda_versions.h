// Which CUDA toolkits build the package, and which drivers and devices run what they built. One
// message per refusal. Pure functions: tested where there is no GPU.
#pragma once

#include <string>

#include "base/check.h"

namespace specdec {

// As CUDA counts: 1000 x major + 10 x minor. The oldest toolkit that has everything that is called
// (cudaGetDriverEntryPointByVersion). CMakeLists.txt reads this line.
inline constexpr int kOldestCudaToolkit = 12050;
// The first with matrix instructions and asynchronous copies (mma.sync on bf16, cp.async).
inline constexpr int kOldestComputeMajor = 8;

inline std::string cuda_version_text(int version) {
  return detail::join(version / 1000, ".", version % 1000 / 10);
}

// Why a driver cannot run what a toolkit built; empty: it can. `driver`: the newest CUDA that it
// supports, 0 if there is none. It runs the machine code of every release of that major version,
// and of older ones; PTX of a newer release it refuses (image_fault).
inline std::string driver_fault(int driver, int runtime) {
  if (driver == 0) return "no NVIDIA driver was found";
  const int major = runtime / 1000;
  if (driver / 1000 >= major) return "";
  const char* wanted = major == 12 ? "525 or newer" : major == 13 ? "580 or newer" : "a newer one";
  return detail::join("the NVIDIA driver supports CUDA ", cuda_version_text(driver),
                      ", this package was built with CUDA ", cuda_version_text(runtime),
                      ": install driver ", wanted, ", or build the package with a toolkit of CUDA ",
                      driver / 1000);
}

// Why the kernels do not run on a device of a compute capability; empty: they do.
inline std::string device_fault(const std::string& name, int major, int minor) {
  if (major >= kOldestComputeMajor) return "";
  return detail::join(name, " has compute capability ", major, ".", minor, ": the kernels need ",
                      kOldestComputeMajor, ".0 or newer");
}

// Why a kernel's image does not run on a device that device_fault() passes: it holds no machine
// code for it, and no PTX that its driver would compile.
inline std::string image_fault(int major, int minor, int driver, int runtime) {
  const std::string built = cuda_version_text(runtime);
  const char* newer = driver < runtime ? ", or install a newer driver" : "";
  return detail::join("this package holds no code for a device of compute capability ", major, ".",
                      minor, ", and no PTX that its driver (of CUDA ", cuda_version_text(driver),
                      ") compiles; it was built with CUDA ", built,
                      ": build it on this machine, or with -DCMAKE_CUDA_ARCHITECTURES=", major,
                      minor, major == 9 && minor == 0 ? "a" : "", "-real", newer);
}

}  // namespace specdec
