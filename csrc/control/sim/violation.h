// SPDX-License-Identifier: Apache-2.0
// How the simulator says that a promise was broken.
#pragma once

#include <sstream>
#include <stdexcept>

namespace tokenspeed::control::sim {

// A violated promise; the text says which.
class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Values>
void require(bool holds, const Values&... values) {
  if (!holds) [[unlikely]] {
    std::ostringstream text;
    ((text << values << ' '), ...);
    throw Violation(text.str());
  }
}

}  // namespace tokenspeed::control::sim
