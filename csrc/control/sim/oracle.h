// SPDX-License-Identifier: Apache-2.0
// What each request must produce, whatever happens around it: the next token is a function of all tokens before it,
// so that batching, caching and preemption may not change it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "event.h"
#include "scheduler.h"

namespace tokenspeed::control::sim {

inline constexpr std::int32_t kVocabulary = 40;

// History: a hash of the namespace and of all tokens so far. It is also what the device keeps as "K/V" of a position.
[[nodiscard]] std::uint64_t root_history(const std::string& name_space);
[[nodiscard]] std::uint64_t extend(std::uint64_t history, std::int32_t token_id);
[[nodiscard]] std::int32_t next_token(std::uint64_t history);

// A violated promise; the text says which.
class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Values>
void require(bool holds, const Values&... values) {
  if (!holds) {
    std::ostringstream text;
    ((text << values << ' '), ...);
    throw Violation(text.str());
  }
}

struct Request {
  Submit submit;
  std::vector<std::int32_t> token_ids;  // prompt and what was reported so far
  std::uint64_t history = 0;
  std::int64_t limit = 0;
  FinishCode code = FinishCode::kNone;
  FinishCode told = FinishCode::kNone;  // we cancelled or finished it
  bool faulted = false;                 // the device failed a row of it

  [[nodiscard]] std::int64_t num_generated() const {
    return static_cast<std::int64_t>(token_ids.size()) - static_cast<std::int64_t>(submit.token_ids.size());
  }
  [[nodiscard]] bool has_ended() const { return code != FinishCode::kNone; }
};

class Oracle {
 public:
  explicit Oracle(const Config& config) : config_(config) {}

  // Whether the request must be refused.
  [[nodiscard]] bool must_refuse(const Submit& submit) const;
  void add(const Submit& submit);
  void take(const SequenceEvents& events);

  [[nodiscard]] Request& at(std::int32_t index) { return live_.at(index); }
  [[nodiscard]] const std::map<std::int32_t, Request>& live() const { return live_; }
  [[nodiscard]] const std::vector<std::vector<std::int32_t>>& transcripts() const { return transcripts_; }
  [[nodiscard]] std::size_t num_ended() const { return num_ended_; }

 private:
  void take_row(std::span<const std::int32_t> row, std::span<const std::int32_t> token_ids);
  [[nodiscard]] FinishCode accept(Request& request, std::int32_t token_id) const;

  Config config_;
  std::map<std::int32_t, Request> live_;
  std::vector<std::vector<std::int32_t>> transcripts_;
  std::size_t num_ended_ = 0;
};

}  // namespace tokenspeed::control::sim
