// The part of each page that the layers of one narrow window hold.
//
// All layers name a page by one number. Layers with a window narrower than the others' need their
// part of it for as long as a row sees it, which is shorter than the page is held; then the part
// serves another page. A part is
//   * seen by as many slots as its count says;
//   * or idle: nobody sees it, but its page is held or published, so that a later text may;
//   * or not there.
// There are at most `most` parts. When another one is needed the one that was idle for longest
// gives way; a table without prefix reuse keeps none idle.
//
// Where memory lies under numbers of its own (`numbered`: a device's pool), a part has one of those
// below `most`. Where the operating system maps a page's memory when it is written, a part has its
// page's number, and who was told that it is gone gives the memory back.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace specdec {

class PageParts {
 public:
  static constexpr std::int32_t kNone = -1;
  using Gone = std::function<void(std::int32_t page)>;

  PageParts(int num_pages, int most, bool numbered, bool keeps_idle, Gone gone);

  bool has(std::int32_t page) const { return number_[page] != kNone; }
  // The part's number, or kNone.
  std::int32_t number(std::int32_t page) const { return number_[page]; }
  // One more slot sees the part, which is made if it is not there. std::logic_error when all are
  // seen and numbers have run out.
  void see(std::int32_t page);
  // One slot sees it no more.
  void leave(std::int32_t page);
  // The page is free: its part is gone. Nobody sees it.
  void drop(std::int32_t page);

  int seen(std::int32_t page) const { return seen_[page]; }
  int count() const { return count_; }
  // Throws std::logic_error unless `seen` (by page: slots that see it) is what was counted, every
  // part is one page's and the idle ones are those that nobody sees. O(pages).
  void check_integrity(const std::vector<std::int32_t>& seen) const;

 private:
  void lose(std::int32_t page);
  void unlist(std::int32_t page);

  int most_;
  bool numbered_, keeps_idle_;
  Gone gone_;
  int count_ = 0;
  std::vector<std::int32_t> number_, seen_;  // by page
  std::vector<std::int32_t> free_;           // numbers
  // Idle parts by page, a ring through the head [num_pages], longest idle first.
  std::vector<std::int32_t> next_, previous_;
};

}  // namespace specdec
