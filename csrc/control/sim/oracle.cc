// SPDX-License-Identifier: Apache-2.0
#include "oracle.h"

#include <algorithm>

#include "random.h"

namespace tokenspeed::control::sim {

std::uint64_t root_history(const std::string& name_space) {
  std::uint64_t history = 1;
  for (const char letter : name_space) {
    history = scramble(history ^ static_cast<unsigned char>(letter));
  }
  return history;
}

std::uint64_t extend(std::uint64_t history, std::int32_t token_id) {
  return scramble(history * 31 + static_cast<std::uint32_t>(token_id));
}

std::int32_t next_token(std::uint64_t history) {
  return static_cast<std::int32_t>(scramble(history) % static_cast<std::uint64_t>(kVocabulary));
}

bool Oracle::must_refuse(const Submit& submit) const {
  const auto prompt = static_cast<std::int64_t>(submit.token_ids.size());
  return prompt + 1 > config_.max_model_len || prompt > config_.num_blocks * config_.block_size;
}

void Oracle::add(const Submit& submit) {
  Request request;
  request.submit = submit;
  request.token_ids = submit.token_ids;
  request.history = root_history(submit.name_space);
  for (const std::int32_t token_id : submit.token_ids) {
    request.history = extend(request.history, token_id);
  }
  const auto prompt = static_cast<std::int64_t>(submit.token_ids.size());
  request.limit = std::min(
      {prompt + submit.max_new_tokens.value(), config_.max_model_len, config_.num_blocks * config_.block_size + 1});
  live_.insert_or_assign(submit.key.index, std::move(request));
}

FinishCode Oracle::accept(Request& request, std::int32_t token_id) const {
  require(token_id == next_token(request.history), "request", request.submit.key, "got token", token_id, "not",
          next_token(request.history), "after", request.token_ids.size(), "tokens");
  request.history = extend(request.history, token_id);
  request.token_ids.push_back(token_id);
  const auto& ends = request.submit.end_token_ids;
  if (request.num_generated() > request.submit.min_new_tokens.value() &&
      std::find(ends.begin(), ends.end(), token_id) != ends.end()) {
    return FinishCode::kStop;
  }
  return std::cmp_equal(request.token_ids.size(), request.limit) ? FinishCode::kLength : FinishCode::kNone;
}

void Oracle::take(const SequenceEvents& events) {
  require(events.rows.size() % 5 == 0, "event rows", events.rows.size());
  std::span<const std::int32_t> rows(events.rows);
  std::span<const std::int32_t> token_ids(events.token_ids);
  while (!rows.empty()) {
    const auto count = static_cast<std::size_t>(rows[2]);
    require(count <= token_ids.size(), "event tokens", token_ids.size(), "row", count);
    take_row(rows.first(5), token_ids.first(count));
    rows = rows.subspan(5);
    token_ids = token_ids.subspan(count);
  }
  require(token_ids.empty(), "surplus event tokens", token_ids.size());
}

void Oracle::take_row(std::span<const std::int32_t> row, std::span<const std::int32_t> token_ids) {
  const auto found = live_.find(row[0]);
  require(found != live_.end(), "event for request", row[0], "that does not live");
  Request& request = found->second;
  require(request.submit.key.generation == row[1], "event for", row[0], '#', row[1], "not", request.submit.key);
  const auto code = static_cast<FinishCode>(row[3]);
  FinishCode expected = FinishCode::kNone;
  for (const std::int32_t token_id : token_ids) {
    require(expected == FinishCode::kNone, "request", request.submit.key, "got tokens after its end");
    expected = accept(request, token_id);
  }
  if (token_ids.empty()) {
    require(code != FinishCode::kNone, "request", request.submit.key, "empty event");
    expected = code == FinishCode::kFault && request.faulted ? FinishCode::kFault : request.told;
  }
  require(code == expected, "request", request.submit.key, "ended with", row[3], "not", static_cast<int>(expected));
  require(row[4] <= static_cast<std::int32_t>(request.submit.token_ids.size()) - 1, "cached_len", row[4]);
  if (code != FinishCode::kNone) {
    transcripts_.push_back(request.token_ids);
    live_.erase(found);
    ++num_ended_;
  }
}

}  // namespace tokenspeed::control::sim
