// SPDX-License-Identifier: Apache-2.0
// Assertions that stay on in production and print the values they failed on.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>

namespace tokenspeed::control {

// A bug in this library or in whoever drives it; never something a user of the engine can cause.
class CheckError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

namespace detail {

template <class... Values>
[[noreturn]] void fail_check(const char* condition, const char* file, int line, const Values&... values) {
  std::ostringstream message;
  message << file << ':' << line << ": CHECK(" << condition << ") failed";
  if constexpr (sizeof...(Values) > 0) {
    message << ':';
    ((message << ' ' << values), ...);
  }
  throw CheckError(message.str());
}

// A destructor must not throw, so a handle that is dropped while live ends the process: going on would lose a page.
[[noreturn]] inline void fail_dropped(const char* what, long long value) noexcept {
  (void)std::fprintf(stderr, "tokenspeed control: %s %lld was dropped while live\n", what, value);
  std::abort();
}

}  // namespace detail
}  // namespace tokenspeed::control

#define TS_CHECK(condition, ...)                                                                                 \
  do {                                                                                                           \
    if (!(condition)) [[unlikely]] {                                                                             \
      ::tokenspeed::control::detail::fail_check(#condition, __FILE_NAME__, __LINE__ __VA_OPT__(, ) __VA_ARGS__); \
    }                                                                                                            \
  } while (false)
