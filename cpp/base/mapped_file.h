// A file of the disk, read where it is mapped.
#pragma once

#include <cstddef>
#include <string>

namespace specdec {

class MappedFile {
 public:
  // std::invalid_argument naming the file if it cannot be read.
  explicit MappedFile(const std::string& path);
  // The file that is open as `file`, which the caller may close at once. `name` is for errors.
  MappedFile(int file, const std::string& name);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // All of it will be read again and again, front to back.
  void want_huge_pages() const;

 private:
  void map(int file, const std::string& name);

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace specdec
