// A stream for tests: enqueued work runs later, as early or as late as is legal, in pieces between
// which the host goes on. What a host must not do while work is in flight becomes visible:
//   a copy's source changed before the copy ran        found by comparing
//   a copy's target read before its event              it holds garbage until the copy has run
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace specdec::testing {

class StubStream {
 public:
  struct Event {
    bool done = false;
  };
  using EventPtr = std::shared_ptr<Event>;
  static constexpr std::int32_t kGarbage = -0x5a5a5a;

  explicit StubStream(std::uint32_t seed) : random_(seed) {}

  void enqueue(std::function<void()> work) { pieces_.push_back(std::move(work)); }

  // The host's memory to the device's. The words are copied in pieces, in any order.
  void copy_in(std::int32_t* to, const std::int32_t* from, std::size_t words) {
    auto seen = std::make_shared<std::vector<std::int32_t>>(from, from + words);
    for (auto [begin, end] : cut(words)) {
      enqueue([=] {
        if (!std::equal(from + begin, from + end, seen->begin() + begin)) {
          throw std::logic_error("a staging buffer was written before its event");
        }
        std::copy(from + begin, from + end, to + begin);
      });
    }
  }

  // The device's memory to the host's.
  void copy_out(std::int32_t* to, const std::int32_t* from, std::size_t words) {
    std::fill(to, to + words, kGarbage);
    for (auto [begin, end] : cut(words)) {
      enqueue([=] { std::copy(from + begin, from + end, to + begin); });
    }
  }

  EventPtr record() {
    auto event = std::make_shared<Event>();
    enqueue([event] { event->done = true; });
    return event;
  }

  // Time passes: nothing happens, or some of the work, or all of it.
  void pass() {
    const int mood = static_cast<int>(random_() % 4);
    std::size_t count = mood == 0 ? 0 : (mood == 1 ? pieces_.size() : random_() % 12);
    for (; count > 0 && !pieces_.empty(); --count) run_one();
  }

  void wait(const Event& event) {
    while (!event.done) run_one();
    pass();
  }

 private:
  std::vector<std::pair<std::size_t, std::size_t>> cut(std::size_t words) {
    const std::size_t middle = words == 0 ? 0 : random_() % words;
    std::vector<std::pair<std::size_t, std::size_t>> parts = {{0, middle}, {middle, words}};
    if (random_() % 2 == 0) std::swap(parts[0], parts[1]);
    return parts;
  }
  void run_one() {
    const auto work = std::move(pieces_.front());
    pieces_.pop_front();
    work();
  }

  std::mt19937 random_;
  std::deque<std::function<void()>> pieces_;
};

}  // namespace specdec::testing
