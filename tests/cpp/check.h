// The C++ tests' whole framework.
//
//   TEST(name) { CHECK(x > 0); CHECK_EQ(a, b); CHECK_THROWS(f(), std::invalid_argument, "text"); }
//
// A failed check is printed with its place and the test goes on; main() (check_main.cc) runs every
// test, or those whose name contains the argument, and prints "N passed, N failed".
#pragma once

#include <exception>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace specdec::testing {

struct Test {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
inline int& failed_checks() {
  static int count = 0;
  return count;
}

struct Registered {
  Registered(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

inline void fail(const char* file, int line, const std::string& text) {
  ++failed_checks();
  std::cerr << file << ":" << line << ": " << text << "\n";
}

template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (requires { value.begin(); }) {
    out << "[";
    for (const auto& item : value) out << (&item == &*value.begin() ? "" : ", ") << show(item);
    out << "]";
  } else {
    out << "(no text form)";
  }
  return out.str();
}

template <typename A, typename B>
void check_eq(const A& a, const B& b, const char* a_text, const char* b_text, const char* file,
              int line) {
  if (a == b) return;
  fail(file, line, std::string(a_text) + " == " + b_text + ": " + show(a) + " != " + show(b));
}

template <typename Error, typename F>
void check_throws(const F& call, const std::string& part, const char* text, const char* file,
                  int line) {
  try {
    call();
  } catch (const Error& error) {
    if (std::string(error.what()).find(part) == std::string::npos) {
      fail(file, line, std::string(text) + " said \"" + error.what() + "\", not \"" + part + "\"");
    }
    return;
  }
  fail(file, line, std::string(text) + " threw nothing");
}

}  // namespace specdec::testing

#define TEST(name)                                                                    \
  static void test_##name();                                                          \
  static const ::specdec::testing::Registered registered_##name(#name, &test_##name); \
  static void test_##name()
#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) ::specdec::testing::fail(__FILE__, __LINE__, #condition); \
  } while (false)
#define CHECK_EQ(a, b) ::specdec::testing::check_eq((a), (b), #a, #b, __FILE__, __LINE__)
#define CHECK_THROWS(expression, Error, part)                                               \
  ::specdec::testing::check_throws<Error>([&] { (void)(expression); }, (part), #expression, \
                                          __FILE__, __LINE__)
