#include "check.h"

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  int passed = 0, failed = 0;
  for (const auto& test : specdec::testing::tests()) {
    if (test.name.find(only) == std::string::npos) continue;
    const int before = specdec::testing::failed_checks();
    try {
      test.body();
    } catch (const std::exception& error) {
      specdec::testing::fail(test.name.c_str(), 0, std::string("threw: ") + error.what());
    }
    const bool ok = specdec::testing::failed_checks() == before;
    (ok ? passed : failed) += 1;
    if (!ok) std::cerr << "FAILED " << test.name << "\n";
  }
  std::cout << passed << " passed, " << failed << " failed\n";
  return failed == 0 && passed > 0 ? 0 : 1;
}
