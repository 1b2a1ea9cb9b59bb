// Something for each cache_salt: tenants do not learn from one another, nor see one another's past.
//
// Bounded: the salt that was used least recently gives way, and begins anew when it comes back. A
// value that a request still holds lives as long as the request.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "algo/sampling_law.h"

namespace specdec {

inline constexpr std::size_t kMaxSaltsThatLearn = 256;

template <class T>
class PerSalt {
 public:
  explicit PerSalt(std::size_t max_salts = kMaxSaltsThatLearn) : max_salts_(max_salts) {}

  // The salt's own, made when it is first asked for.
  std::shared_ptr<T> of(const std::string& salt) {
    const auto known = places_.find(salt);
    if (known != places_.end()) {
      order_.splice(order_.begin(), order_, known->second);
      return known->second->second;
    }
    if (places_.size() == max_salts_) {
      places_.erase(order_.back().first);
      order_.pop_back();
    }
    order_.emplace_front(salt, std::make_shared<T>());
    places_[salt] = order_.begin();
    return order_.front().second;
  }

  std::size_t size() const { return places_.size(); }
  template <class Function>
  void for_each(Function function) const {
    for (const auto& [salt, value] : order_) function(*value);
  }

 private:
  using Order = std::list<std::pair<std::string, std::shared_ptr<T>>>;  // most recently used first
  std::size_t max_salts_;
  Order order_;
  std::unordered_map<std::string, typename Order::iterator> places_;
};

// The same, greedy requests apart from sampled ones: drafts of tokens that are drawn are right less
// often than those of the likeliest ones.
template <class T>
class PerSaltAndLaw {
 public:
  std::shared_ptr<T> of(const std::string& salt, const SamplingLaw& law) {
    const auto both = salts_.of(salt);
    return {both, law.greedy() ? &both->greedy : &both->drawn};
  }

 private:
  struct Both {
    T greedy, drawn;
  };
  PerSalt<Both> salts_;
};

}  // namespace specdec
