// SPDX-License-Identifier: Apache-2.0
#include "sessions.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>
#include <variant>

namespace tokenspeed::control::sim {

namespace {

constexpr std::int32_t kNumIndices = 14;  // few, so that indices are reused all the time
constexpr std::size_t kMostSessions = 6;
constexpr std::int32_t kPlaceholder = kVocabulary - 1;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

template <class T>
const T& one_of(Random& random, const std::vector<T>& values) {
  return values[at(random.between(0, static_cast<std::int64_t>(values.size()) - 1))];
}

bool submits(const std::vector<Event>& batch, std::int32_t index) {
  return std::any_of(batch.begin(), batch.end(), [&](const Event& event) {
    const auto* submit = std::get_if<Submit>(&event);
    return submit != nullptr && submit->key.index == index;
  });
}

std::int64_t last_tick(const Oracle& oracle, const std::vector<Event>& batch) {
  std::int64_t now_ms = oracle.now_ms();
  for (const Event& event : batch) {
    if (const auto* tick = std::get_if<Tick>(&event)) {
      now_ms = tick->now_ms;
    }
  }
  return now_ms;
}

// Where nothing is cut in two.
std::size_t cut_at(const Submit& submit, std::size_t len) {
  for (const ContentSpan& span : submit.spans) {
    const auto start = at(span.start.value());
    if (start < len && start + at(span.length.value()) > len) {
      return start;
    }
  }
  return len;
}

void cut(Submit& submit, std::size_t len) {
  const std::size_t end = cut_at(submit, std::min(len, submit.token_ids.size()));
  submit.token_ids.resize(end);
  std::erase_if(submit.spans, [&](const ContentSpan& span) { return at(span.start.value()) >= end; });
}

}  // namespace

Mood::Mood(Random& random)
    : typical_len(random.chance(50) ? random.between(3, 16) : random.between(12, 40)),
      end_percent(random.chance(60) ? random.between(0, 8) : random.between(8, 40)),
      hold_percent(random.between(0, 20)),
      tick_percent(random.between(2, 20)),
      retain_percent(random.chance(70) ? random.between(30, 90) : random.between(0, 30)),
      remote_percent(random.chance(60) ? 0 : random.between(5, 40)),
      draft_percent(random.chance(40) ? 0 : random.between(20, 100)),
      deadline_percent(random.chance(50) ? 0 : random.between(5, 40)),
      span_percent(random.chance(60) ? 0 : random.between(10, 60)),
      priority_percent(random.between(0, 50)) {}

Sessions::Sessions(const Layout& layout, const Mood& mood)
    : layout_(layout), mood_(mood), generations_(at(kNumIndices), -1) {}

void Sessions::add_event(Random& random, const Oracle& oracle, const Scheduler& scheduler, std::vector<Event>& batch) {
  const std::int64_t which = random.between(1, 100);
  if (which <= mood_.end_percent) {
    add_end(random, oracle, scheduler, batch);
  } else if (which <= mood_.end_percent + mood_.hold_percent) {
    add_hold(random, oracle, scheduler, batch);
  } else if (which <= mood_.end_percent + mood_.hold_percent + mood_.tick_percent) {
    batch.emplace_back(Tick{.now_ms = last_tick(oracle, batch) + random.between(0, 60)});
  } else {
    add_submits(random, oracle, batch);
  }
}

void Sessions::add_submits(Random& random, const Oracle& oracle, std::vector<Event>& batch) {
  if (sessions_.size() < kMostSessions && (sessions_.empty() || random.chance(40))) {
    sessions_.push_back(Session{.name = "s" + std::to_string(num_sessions_++), .requests = {}});
  } else if (random.chance(5)) {
    sessions_.erase(sessions_.begin());
    sessions_.push_back(Session{.name = "s" + std::to_string(num_sessions_++), .requests = {}});
  }
  Session& session = sessions_[at(random.between(0, static_cast<std::int64_t>(sessions_.size()) - 1))];
  const Session& source = random.chance(80) ? session : one_of(random, sessions_);
  const Request* before = source.requests.empty() ? nullptr : oracle.find(source.requests.back());
  const bool starts_over = before == nullptr || std::cmp_greater(before->token_ids.size(), 3 * mood_.typical_len);
  if (starts_over && (before == nullptr || random.chance(50))) {
    (void)add_submit(random, oracle, fresh(random), session, batch);
  } else if (!starts_over && &source == &session && random.chance(60)) {
    (void)add_submit(random, oracle, next_turn(random, *before), session, batch);
  } else {
    // Subagents: several at once from the same prefix.
    const std::int64_t count = random.chance(50) ? 1 : random.between(2, 4);
    for (std::int64_t forked = 0; forked < count; ++forked) {
      Session& owner = random.chance(50) ? session : sessions_[at(random.between(0, std::ssize(sessions_) - 1))];
      (void)add_submit(random, oracle, fork_of(random, *before), owner, batch);
    }
  }
}

// False where no index is free.
bool Sessions::add_submit(Random& random, const Oracle& oracle, Submit submit, Session& session,
                          std::vector<Event>& batch) {
  std::vector<std::int32_t> free;
  for (std::int32_t index = 0; index < kNumIndices; ++index) {
    if (!oracle.live().contains(index) && !submits(batch, index)) {
      free.push_back(index);
    }
  }
  if (free.empty()) {
    return false;
  }
  const std::int32_t index = one_of(random, free);
  std::int32_t& generation = generations_[at(index)];
  generation += static_cast<std::int32_t>(random.between(1, 2));
  submit.key = RequestKey{.index = index, .generation = generation};
  set_wishes(random, oracle, submit, session);
  session.requests.push_back(submit.key);
  batch.emplace_back(std::move(submit));
  return true;
}

Submit Sessions::fresh(Random& random) const {
  Submit submit;
  submit.name_space = random.chance(85) ? "" : "tenant";
  submit.adapter = random.chance(85) ? "" : "lora";
  add_tokens(random, submit, random.between(1, random.chance(80) ? mood_.typical_len : 2 * mood_.typical_len));
  return submit;
}

Submit Sessions::next_turn(Random& random, const Request& before) const {
  Submit submit;
  submit.name_space = before.submit.name_space;
  submit.adapter = before.submit.adapter;
  submit.spans = before.submit.spans;
  submit.token_ids = before.token_ids;
  submit.token_ids.resize(at(before.prompt_len() + before.most_kept()));
  add_tokens(random, submit, random.between(random.chance(10) ? 0 : 1, 1 + mood_.typical_len / 2));
  return submit;
}

// From somewhere in another's transcript on; or the very same prompt; or one that differs in a span's contents or
// length only.
Submit Sessions::fork_of(Random& random, const Request& before) const {
  Submit submit;
  submit.name_space = random.chance(95) ? before.submit.name_space : "other";
  submit.adapter = random.chance(95) ? before.submit.adapter : "lora2";
  submit.spans = before.submit.spans;
  submit.token_ids = before.token_ids;
  const std::int64_t which = random.between(1, 100);
  if (which <= 15) {
    cut(submit, before.submit.token_ids.size());
  } else if (which <= 30 && !submit.spans.empty()) {
    ContentSpan& span = submit.spans[at(random.between(0, std::ssize(submit.spans) - 1))];
    if (random.chance(50)) {
      span.hash_low ^= 1;
    } else {
      span.length -= Tokens(span.length > Tokens(1) ? 1 : 0);  // its last placeholder is an ordinary token
    }
  } else {
    cut(submit, at(random.between(0, std::ssize(submit.token_ids))));
    add_tokens(random, submit, random.between(1, 1 + mood_.typical_len / 2));
  }
  if (submit.token_ids.empty()) {
    add_tokens(random, submit, 1);
  }
  return submit;
}

void Sessions::add_tokens(Random& random, Submit& submit, std::int64_t count) const {
  for (std::int64_t added = 0; added < count; ++added) {
    submit.token_ids.push_back(static_cast<std::int32_t>(random.between(0, kPlaceholder - 1)));
  }
  if (random.chance(mood_.span_percent)) {
    // The length belongs to the content, as with an image.
    const auto low = static_cast<std::uint64_t>(random.between(0, 3));
    const auto length = static_cast<std::int64_t>(2 + low / 2 * 3);
    submit.spans.push_back(ContentSpan{
        .start = Tokens(std::ssize(submit.token_ids)), .length = Tokens(length), .hash_high = 7, .hash_low = low});
    submit.token_ids.insert(submit.token_ids.end(), at(length), kPlaceholder);
    submit.token_ids.push_back(static_cast<std::int32_t>(random.between(0, kPlaceholder - 1)));
  }
}

void Sessions::set_wishes(Random& random, const Oracle& oracle, Submit& submit, const Session& session) const {
  submit.max_new_tokens = Tokens(random.chance(75)   ? random.between(1, 12)
                                 : random.chance(95) ? random.between(12, 70)
                                                     : kNoEnd - random.between(0, 9));
  submit.min_new_tokens = Tokens(random.chance(80) ? 0 : random.between(0, 10));
  if (random.chance(60)) {
    submit.end_token_ids = {0, 1};
  }
  if (random.chance(mood_.priority_percent)) {
    submit.priority = static_cast<std::int32_t>(random.between(-2, 2));
  }
  if (random.chance(10)) {
    submit.match_limit = Tokens(random.between(0, 2 * mood_.typical_len));
  }
  if (random.chance(mood_.retain_percent)) {
    submit.retain = Retention{.session = session.name,
                              .ttl_ms = random.chance(3) ? kNoEnd : random.between(0, random.chance(30) ? 20 : 400),
                              .priority = static_cast<std::int32_t>(random.between(-1, 1))};
  }
  if (random.chance(mood_.deadline_percent)) {
    submit.deadline_ms = oracle.now_ms() + random.between(0, random.chance(50) ? 60 : 300);
  }
  if (!layout_.keeps_states() && random.chance(mood_.draft_percent)) {
    submit.draft_width = static_cast<std::int32_t>(random.between(1, 4));
  }
  if (random.chance(30)) {
    submit.partition_hint = static_cast<std::int32_t>(random.between(0, layout_.config().num_partitions - 1));
  }
  if (random.chance(mood_.remote_percent)) {
    submit.remote = random.chance(50) ? Remote::kReceive : Remote::kSend;
  }
}

void Sessions::add_end(Random& random, const Oracle& oracle, const Scheduler& scheduler, std::vector<Event>& batch) {
  const auto key = any_request(random, oracle, scheduler, batch);
  if (!key) {
    return;
  }
  if (random.chance(50)) {
    batch.emplace_back(Cancel{.key = *key});
    return;
  }
  const Request* request = oracle.find(*key);
  // What has ended may have been told to keep less than whoever says Finish now knows.
  const std::int64_t more = request != nullptr && request->has_ended() ? 5 : 0;
  const std::int64_t most = request == nullptr ? 0 : request->most_kept() + more;
  batch.emplace_back(Finish{.key = *key, .keep_tokens = Tokens(random.between(0, most))});
}

void Sessions::add_hold(Random& random, const Oracle& oracle, const Scheduler& scheduler, std::vector<Event>& batch) {
  const auto key = any_request(random, oracle, scheduler, batch);
  if (!key) {
    return;
  }
  if (random.chance(50)) {
    const std::int64_t later = random.chance(20) ? 0 : random.between(0, 500);
    batch.emplace_back(Retain{.key = *key, .deadline_ms = oracle.now_ms() + later});
  } else {
    batch.emplace_back(Release{.key = *key});
  }
}

// A request that is in the plane, whose state is chosen first so that rare ones come up as often as others; sometimes
// one that ended long ago, or that comes with this very batch.
std::optional<RequestKey> Sessions::any_request(Random& random, const Oracle& oracle, const Scheduler& scheduler,
                                                const std::vector<Event>& batch) const {
  if (random.chance(10)) {
    for (const Event& event : batch) {
      if (const auto* submit = std::get_if<Submit>(&event)) {
        return submit->key;
      }
    }
  }
  std::map<std::string_view, std::vector<RequestKey>> by_state;
  for (const auto& sequence : scheduler.sequences()) {
    if (sequence) {
      std::visit([&](const auto& state) { by_state[state.kName].push_back(sequence->key()); }, sequence->state());
    }
  }
  if (by_state.empty() || random.chance(10)) {
    if (oracle.requests().empty()) {
      return std::nullopt;
    }
    return std::next(oracle.requests().begin(), random.between(0, std::ssize(oracle.requests()) - 1))->first;
  }
  const auto chosen = std::next(by_state.begin(), random.between(0, std::ssize(by_state) - 1));
  return one_of(random, chosen->second);
}

Event Sessions::invalid_event(Random& random, const Oracle& oracle) const {
  Submit submit;
  submit.key = RequestKey{.index = kNumIndices + 1, .generation = 0};
  submit.token_ids = {1, 2, 3};
  submit.max_new_tokens = Tokens(1);
  switch (random.between(0, 8)) {
    case 0:
      return Cancel{.key = RequestKey{.index = kNumIndices, .generation = 0}};
    case 1:
      return Tick{.now_ms = oracle.now_ms() - 1};
    case 2:
      submit.draft_width = 1000;
      return submit;
    case 3:
      submit.partition_hint = layout_.config().num_partitions;
      return submit;
    case 4:
      submit.spans = {ContentSpan{.start = Tokens(2), .length = Tokens(2)}};
      return submit;
    case 5:
      submit.spans = {ContentSpan{.start = Tokens(2), .length = Tokens(kNoEnd)}};
      return submit;
    case 6:
      submit.token_ids.back() = -1;
      return submit;
    case 7:
      if (!oracle.live().empty()) {
        const auto& [index, key] = *oracle.live().begin();
        submit.key = RequestKey{.index = index, .generation = key.generation + 1};
        return submit;
      }
      break;
    default:
      if (!oracle.live().empty()) {
        const Request* request = oracle.find(oracle.live().begin()->second);
        return Finish{.key = request->submit.key, .keep_tokens = Tokens(request->num_generated() + 1)};
      }
  }
  submit.token_ids.clear();
  return submit;
}

}  // namespace tokenspeed::control::sim
