// A team of host threads that meet at every sync(): stands for a warp in tests. Under
// ThreadSanitizer it also shows that ranks share memory only across a sync().
#pragma once

#include <barrier>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace specdec::testing {

class ThreadTeam {
 public:
  struct Shared {
    explicit Shared(int n) : barrier(n), values(n) {}
    std::barrier<> barrier;
    std::vector<std::int32_t> values;
  };

  ThreadTeam(Shared* shared, int rank) : shared_(shared), rank_(rank) {}
  std::int32_t rank() const { return rank_; }
  std::int32_t size() const { return static_cast<std::int32_t>(shared_->values.size()); }
  void sync() const { shared_->barrier.arrive_and_wait(); }
  bool any(bool flag) const {
    std::int32_t total = 0;
    scan(flag ? 1 : 0, &total);
    return total > 0;
  }
  std::int32_t scan(std::int32_t value, std::int32_t* total) const {
    shared_->values[rank_] = value;
    sync();
    std::int32_t before = 0, sum = 0;
    for (int r = 0; r < size(); ++r) {
      if (r < rank_) before += shared_->values[r];
      sum += shared_->values[r];
    }
    *total = sum;
    sync();
    return before;
  }

  // Runs body(team) on `size` ranks.
  static void run(int size, const std::function<void(const ThreadTeam&)>& body) {
    Shared shared(size);
    std::vector<std::thread> threads;
    for (int r = 1; r < size; ++r) {
      threads.emplace_back([&, r] { body(ThreadTeam(&shared, r)); });
    }
    body(ThreadTeam(&shared, 0));
    for (std::thread& thread : threads) thread.join();
  }

 private:
  Shared* shared_;
  int rank_;
};

}  // namespace specdec::testing
