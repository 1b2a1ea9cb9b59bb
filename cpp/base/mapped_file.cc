#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace specdec {

MappedFile::MappedFile(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  SPECDEC_REQUIRE(file >= 0, path, ": cannot be opened (", std::strerror(errno), ")");
  try {
    map(file, path);
  } catch (...) {
    ::close(file);
    throw;
  }
  ::close(file);
}

MappedFile::MappedFile(int file, const std::string& name) { map(file, name); }

void MappedFile::map(int file, const std::string& name) {
  struct stat about{};
  void* mapped = MAP_FAILED;
  if (::fstat(file, &about) == 0 && about.st_size > 0) {
    bytes_ = static_cast<std::size_t>(about.st_size);
    mapped = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file, 0);
  }
  SPECDEC_REQUIRE(mapped != MAP_FAILED, name, ": cannot be mapped (",
                  bytes_ == 0 ? "it is empty" : std::strerror(errno), ")");
  data_ = static_cast<std::byte*>(mapped);
}

void MappedFile::want_huge_pages() const {
  // Advice only: without it everything still works, a little slower.
  (void)::madvise(data_, bytes_, MADV_HUGEPAGE);
}

MappedFile::~MappedFile() { ::munmap(data_, bytes_); }

}  // namespace specdec
