// Which drivers and devices are refused, and in which words.
#include "backend/cuda_versions.h"
#include "check.h"

namespace specdec {
namespace {

TEST(a_driver_runs_its_major_release_and_older_ones) {
  CHECK_EQ(driver_fault(13000, 13000), "");
  CHECK_EQ(driver_fault(13000, 13020), "");
  CHECK_EQ(driver_fault(13020, 13000), "");
  CHECK_EQ(driver_fault(13000, 12080), "");
  CHECK_EQ(driver_fault(12090, 12050), "");
}

TEST(an_old_driver_is_refused_with_versions_and_a_remedy) {
  CHECK_EQ(driver_fault(12080, 13000),
           "the NVIDIA driver supports CUDA 12.8, this package was built with CUDA 13.0: install "
           "driver 580 or newer, or build the package with a toolkit of CUDA 12");
  CHECK(driver_fault(11080, 12050).find("driver 525 or newer") != std::string::npos);
  CHECK_EQ(driver_fault(0, 13000), "no NVIDIA driver was found");
}

TEST(a_device_without_the_instructions_is_refused) {
  CHECK_EQ(device_fault("A100", 8, 0), "");
  CHECK_EQ(device_fault("B200", 10, 0), "");
  CHECK_EQ(device_fault("T4", 7, 5),
           "T4 has compute capability 7.5: the kernels need 8.0 or newer");
}

TEST(a_device_that_the_package_was_not_compiled_for_is_named_with_the_remedy) {
  CHECK_EQ(image_fault(8, 6, 13000, 13000),
           "this package holds no code for a device of compute capability 8.6, and no PTX that its "
           "driver (of CUDA 13.0) compiles; it was built with CUDA 13.0: build it on this machine, "
           "or with -DCMAKE_CUDA_ARCHITECTURES=86-real");
  const std::string older = image_fault(9, 0, 12040, 12080);
  CHECK(older.find("ARCHITECTURES=90a-real, or install a newer driver") != std::string::npos);
}

}  // namespace
}  // namespace specdec
