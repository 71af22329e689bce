// SPDX-License-Identifier: Apache-2.0
#include "oracle.h"

#include <algorithm>
#include <variant>

namespace tokenspeed::control::sim {

Request& Oracle::at(const RequestKey& key) {
  const auto found = requests_.find(key);
  require(found != requests_.end(), "request", key, "was never submitted");
  return found->second;
}

const Request* Oracle::find(const RequestKey& key) const {
  const auto found = requests_.find(key);
  return found == requests_.end() ? nullptr : &found->second;
}

void Oracle::apply(std::span<const Event> batch, std::span<const Refusal> refusals) {
  told_.clear();
  ended_now_.clear();
  for (const Event& event : batch) {
    if (const auto* submit = std::get_if<Submit>(&event)) {
      const bool refused = std::any_of(refusals.begin(), refusals.end(),
                                       [&](const Refusal& refusal) { return refusal.key == submit->key; });
      add(*submit, refused);
    } else if (const auto* tick = std::get_if<Tick>(&event)) {
      apply_tick(*tick);
    } else if (const auto* cancel = std::get_if<Cancel>(&event)) {
      if (requests_.contains(cancel->key)) {
        Request& request = at(cancel->key);
        request.may_hold = false;
        end(request, FinishCode::kCancelled, 0);
      }
    } else if (const auto* finish = std::get_if<Finish>(&event)) {
      if (requests_.contains(finish->key)) {
        Request& request = at(finish->key);
        request.kept = std::min(request.most_kept(), finish->keep_tokens.value());
        end(request, FinishCode::kStop, 0);
      }
    } else if (const auto* retain = std::get_if<Retain>(&event)) {
      if (requests_.contains(retain->key)) {
        at(retain->key).retain_ms = retain->deadline_ms;
      }
    } else if (const auto* release = std::get_if<Release>(&event)) {
      if (requests_.contains(release->key)) {
        at(release->key).may_hold = false;
      }
    }
  }
}

void Oracle::add(const Submit& submit, bool refused) {
  require(refused == layout_.must_refuse(submit), "request", submit.key, "refused", refused, "prompt",
          submit.token_ids.size());
  if (refused) {
    return;
  }
  Request request;
  request.submit = submit;
  request.root = root_history(submit);
  request.limit = layout_.limit(submit);
  request.may_hold = submit.retain.has_value();
  History history = request.root;
  for (std::size_t position = 0; position < submit.token_ids.size(); ++position) {
    const std::uint64_t content = content_at(submit.spans, static_cast<std::int64_t>(position));
    history = extend(history, submit.token_ids[position], content);
    request.history.push_back(history);
  }
  request.token_ids = submit.token_ids;
  known_.extend(submit, request.token_ids, request.history, request.hashes);
  requests_.emplace(submit.key, std::move(request));
  live_.insert_or_assign(submit.key.index, submit.key);
}

void Oracle::end(Request& request, FinishCode code, std::size_t num_tokens) {
  if (request.has_ended()) {
    return;
  }
  request.code = code;
  request.may_hold = request.may_hold && request.ended_well();
  live_.erase(request.submit.key.index);
  ended_now_.insert(request.submit.key);
  told_[request.submit.key] = Told{.code = code, .num_tokens = num_tokens};
}

void Oracle::apply_tick(const Tick& tick) {
  now_ms_ = tick.now_ms;
  std::vector<RequestKey> over;
  for (const auto& [index, key] : live_) {
    const auto& deadline = at(key).submit.deadline_ms;
    if (deadline && *deadline <= now_ms_) {
      over.push_back(key);
    }
  }
  for (const RequestKey& key : over) {
    end(at(key), FinishCode::kDeadline, 0);
  }
}

void Oracle::append(Request& request, std::int32_t token_id) {
  require(token_id == next_token(request.history.back()), "request", request.submit.key, "sampled", token_id, "not",
          next_token(request.history.back()), "after", request.token_ids.size(), "tokens");
  request.history.push_back(extend(request.history.back(), token_id, 0));
  request.token_ids.push_back(token_id);
  known_.extend(request.submit, request.token_ids, request.history, request.hashes);
  ++num_tokens_;
}

FinishCode Oracle::code_after(const Request& request) {
  const auto& ends = request.submit.end_token_ids;
  const bool is_end = std::find(ends.begin(), ends.end(), request.token_ids.back()) != ends.end();
  if (is_end && request.num_generated() > request.submit.min_new_tokens.value()) {
    return FinishCode::kStop;
  }
  return std::cmp_equal(request.token_ids.size(), request.limit) ? FinishCode::kLength : FinishCode::kNone;
}

void Oracle::settle(std::span<const RowResult> rows) {
  told_.clear();
  ended_now_.clear();
  for (const RowResult& row : rows) {
    Request& request = at(row.key);
    if (request.has_ended()) {
      continue;
    }
    if (row.fault) {
      end(request, FinishCode::kFault, 0);
      continue;
    }
    FinishCode code = FinishCode::kNone;
    std::size_t num_tokens = 0;
    while (num_tokens < row.token_ids.size() && code == FinishCode::kNone) {
      append(request, row.token_ids[num_tokens]);
      ++num_tokens;
      code = code_after(request);
    }
    if (code != FinishCode::kNone) {
      end(request, code, num_tokens);
    } else if (num_tokens > 0) {
      told_[row.key] = Told{.code = code, .num_tokens = num_tokens};
    }
  }
}

void Oracle::check(const SequenceEvents& events) {
  require(events.rows.size() % 5 == 0, "event rows", events.rows.size());
  std::span<const std::int32_t> rows(events.rows);
  std::span<const std::int32_t> token_ids(events.token_ids);
  while (!rows.empty()) {
    const auto count = static_cast<std::size_t>(rows[2]);
    require(count <= token_ids.size(), "event tokens", token_ids.size(), "row", count);
    check_row(rows.first(5), token_ids.first(count));
    rows = rows.subspan(5);
    token_ids = token_ids.subspan(count);
  }
  require(token_ids.empty(), "surplus event tokens", token_ids.size());
  for (const auto& [key, told] : told_) {
    require(false, "request", key, "ended or got on, and nothing was told", static_cast<int>(told.code));
  }
}

void Oracle::check_row(std::span<const std::int32_t> row, std::span<const std::int32_t> token_ids) {
  const RequestKey key{.index = row[0], .generation = row[1]};
  const auto found = told_.find(key);
  require(found != told_.end(), "an event of request", key, "code", row[3], "that must not come");
  require(static_cast<FinishCode>(row[3]) == found->second.code, "request", key, "ended with", row[3], "not",
          static_cast<int>(found->second.code));
  require(token_ids.size() == found->second.num_tokens, "request", key, "told", token_ids.size(), "tokens, not",
          found->second.num_tokens);
  Request& request = at(key);
  const auto last = std::span<const std::int32_t>(request.token_ids).last(token_ids.size());
  require(std::equal(last.begin(), last.end(), token_ids.begin()), "request", key, "told other tokens");
  const std::int32_t cached = row[4];
  const bool received = request.submit.remote == Remote::kReceive;
  require(cached >= 0 && cached < request.prompt_len() && cached % layout_.unit() == 0, "request", key, "cached_len",
          cached);
  require(cached <= request.submit.match_limit.value_or(Tokens(cached)).value(), "request", key, "cached_len", cached);
  require(layout_.config().prefix_caching || received || cached == 0, "request", key, "cached_len", cached);
  require(token_ids.empty() || request.cached_len.value_or(cached) == cached, "request", key, "cached_len", cached,
          "was", request.cached_len.value_or(0));
  if (!token_ids.empty()) {
    request.cached_len = cached;
  }
  told_.erase(found);
}

}  // namespace tokenspeed::control::sim
