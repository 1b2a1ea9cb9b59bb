// The checker's vector clocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace simt {

using Ticks = std::vector<uint32_t>;  // by rank in the block; the actors' ranks follow the threads'

inline void join(Ticks& a, const Ticks& b) {
  if (a.size() < b.size()) a.resize(b.size());
  for (size_t i = 0; i < b.size(); i++) a[i] = std::max(a[i], b[i]);
}

inline bool covers(const Ticks& a, const Ticks& b) {  // does b know nothing that a does not?
  return a.size() >= b.size() && std::equal(b.begin(), b.end(), a.begin(), std::less_equal<>());
}

// What is known of other blocks, by block.
using Kept = std::shared_ptr<const Ticks>;
using Known = std::shared_ptr<const std::map<unsigned, Kept>>;
inline Kept join(const Kept& a, const Kept& b) {
  if (a == b || covers(*a, *b)) return a;
  if (covers(*b, *a)) return b;
  auto both = std::make_shared<Ticks>(*a);
  join(*both, *b);
  return both;
}
inline Known join(const Known& a, const Known& b) {
  if (!a || !b || a == b) return a ? a : b;
  std::shared_ptr<std::map<unsigned, Kept>> all;  // once b has something that a lacks
  for (auto& [id, kept] : *b) {
    const auto mine = a->find(id);
    const Kept both = mine == a->end() ? kept : join(mine->second, kept);
    if (mine != a->end() && both == mine->second) continue;
    if (!all) all = std::make_shared<std::map<unsigned, Kept>>(*a);
    (*all)[id] = both;
  }
  return all ? Known(all) : a;
}

// What one rank knows of all. Ranks that have met share one vector and keep their own component
// beside it: a barrier of n threads costs n steps, where vectors of their own would cost n * n.
class Clock {
 public:
  Clock(std::shared_ptr<Ticks> shared, unsigned me, uint32_t own)
      : own(own), me_(me), shared_(std::move(shared)) {}

  uint32_t operator[](unsigned r) const { return r == me_ ? own : (*shared_)[r]; }
  Ticks all() const {
    Ticks ticks = *shared_;
    ticks[me_] = own;
    return ticks;
  }

  void raise(unsigned r, uint32_t ticks) {
    if (r == me_) {
      own = std::max(own, ticks);
    } else if ((*shared_)[r] < ticks) {
      alone()[r] = ticks;
    }
  }
  void join(const Ticks& b) {
    if (b.empty()) return;
    if (!covers(*shared_, b)) simt::join(alone(), b);
    if (me_ < b.size()) own = std::max(own, b[me_]);
  }
  void join(const Clock& b) { join(*b.shared_), raise(b.me_, b.own); }

  // Joins the clocks at(0) to at(n - 1), references, with each other.
  template <class At>
  static void meet(unsigned n, At at) {
    const std::shared_ptr<Ticks> first = at(0).shared_;
    bool news = false;
    for (unsigned i = 0; i < n && !news; i++) {
      const Clock& c = at(i);
      news = c.shared_ != first || c.own != (*first)[c.me_];
    }
    if (!news) return;
    auto all = std::make_shared<Ticks>(*first);
    const Ticks* joined = first.get();
    for (unsigned i = 0; i < n; i++) {
      const Clock& c = at(i);
      if (c.shared_.get() != joined) simt::join(*all, *(joined = c.shared_.get()));
      uint32_t& ticks = (*all)[c.me_];
      ticks = std::max(ticks, c.own);
    }
    for (unsigned i = 0; i < n; i++) {
      Clock& c = at(i);
      c.shared_ = all, c.own = (*all)[c.me_];
    }
  }

  uint32_t own;

 private:
  friend class Sum;
  Ticks& alone() {
    if (shared_.use_count() > 1) shared_ = std::make_shared<Ticks>(*shared_);
    return *shared_;
  }

  unsigned me_;
  std::shared_ptr<Ticks> shared_;  // its component of this rank is out of date
};

// A join of clocks that is itself nobody's. Vectors that many of them share are joined once.
class Sum {
 public:
  void add(const Clock& c) {
    if (added_ != c.shared_) simt::join(ticks_, *(added_ = c.shared_));
    raise(c.me_, c.own);
  }
  void add(const Sum& s) {
    simt::join(ticks_, s.ticks_);
    before_ = behind_ = nullptr;
  }
  void raise(unsigned r, uint32_t ticks) {
    if (ticks_.size() <= r) ticks_.resize(r + 1);
    ticks_[r] = std::max(ticks_[r], ticks);
    before_ = behind_ = nullptr;
  }
  void join_into(Clock& c) {
    if (ticks_.empty()) return;
    if (before_ == c.shared_) {
      c.shared_ = behind_;
      if (c.me_ < ticks_.size()) c.own = std::max(c.own, ticks_[c.me_]);
    } else {
      before_ = c.shared_;
      c.join(ticks_);
      behind_ = c.shared_;
    }
  }

 private:
  Ticks ticks_;
  std::shared_ptr<Ticks> added_;            // the last vector that was joined
  std::shared_ptr<Ticks> before_, behind_;  // a vector of the last clock that learnt of the sum
};

}  // namespace simt
