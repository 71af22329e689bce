// SPDX-License-Identifier: Apache-2.0
#include "coverage.h"

#include <utility>
#include <variant>

#include "sequence.h"

namespace tokenspeed::control::sim {

namespace {

template <class S, class... Signal>
void add_legal(TypeList<Signal...>, std::vector<std::string>& pairs) {
  const auto add = [&]<class X>(const X*) {
    using Result = decltype(Transitions::on(std::declval<S>(), std::declval<X>()));
    if constexpr (!IllegalReason<Result>::kIllegal) {
      pairs.push_back(std::string(S::kName) + " + " + X::kName);
    }
  };
  (add(static_cast<const Signal*>(nullptr)), ...);
}

template <class... S>
std::vector<std::string> legal_pairs(const std::variant<S...>*) {
  std::vector<std::string> pairs;
  (add_legal<S>(Signals(), pairs), ...);
  return pairs;
}

}  // namespace

std::vector<std::string> Coverage::unseen() const {
  std::vector<std::string> pairs;
  for (std::string& pair : legal_pairs(static_cast<const State*>(nullptr))) {
    if (!counts_.contains(pair)) {
      pairs.push_back(std::move(pair));
    }
  }
  return pairs;
}

}  // namespace tokenspeed::control::sim
