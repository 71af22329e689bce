// SPDX-License-Identifier: Apache-2.0
// Everything that the control plane is told. Time and randomness come in here and nowhere else.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "types.h"

namespace tokenspeed::control {

// Identity of a run of placeholder tokens that stand for something else, for example an image: two prompts share
// the blocks that touch a span only if the contents, and so their lengths, are the same.
struct ContentSpan {
  Tokens start;
  Tokens length;
  std::uint64_t hash_high = 0;
  std::uint64_t hash_low = 0;
};

// Wish to keep a request's pages when it ends well, for the session's next turn. priority: lower is kept longer.
struct Retention {
  std::string session;
  std::int64_t ttl_ms = 0;
  std::int32_t priority = 0;
};

// kReceive: a peer computes the prompt and sends its K/V. kSend: the prompt is computed here, one token is sampled, and
// a peer takes the K/V.
enum class Remote : std::int32_t { kNone = 0, kReceive = 1, kSend = 2 };

// priority: lower is sooner. match_limit: at most so many prompt tokens may come from the prefix cache. deadline_ms:
// the request ends then, in whatever state it is. draft_width: tokens that each decode row may draft. partition_hint:
// where it would best run.
struct Submit {
  RequestKey key;
  std::vector<std::int32_t> token_ids;
  Tokens max_new_tokens;
  Tokens min_new_tokens;
  std::vector<std::int32_t> end_token_ids;
  std::vector<ContentSpan> spans;
  std::string adapter;
  std::string name_space;
  std::optional<Tokens> match_limit;
  std::optional<Retention> retain;
  std::int32_t priority = 0;
  std::optional<std::int64_t> deadline_ms;
  std::int32_t draft_width = 0;
  std::optional<std::int32_t> partition_hint;
  Remote remote = Remote::kNone;
};

struct Cancel {
  RequestKey key;
};

// A stop string was found outside: the request ends with its first keep_tokens generated tokens.
struct Finish {
  RequestKey key;
  Tokens keep_tokens;
};

// Keep the pages until then; only for a request that was submitted with a retention.
struct Retain {
  RequestKey key;
  std::int64_t deadline_ms = 0;
};

// Keep them no longer.
struct Release {
  RequestKey key;
};

struct TransferDone {
  LeaseId lease;
  bool ok = false;
};

struct Tick {
  std::int64_t now_ms = 0;
};

using Event = std::variant<Submit, Cancel, Finish, Retain, Release, TransferDone, Tick>;

// Row r accepted token_ids[accepted_offsets[r] .. accepted_offsets[r + 1]). A non-zero row fault ends that row's
// request only; fault says that nothing which the step wrote may be used.
struct StepResult {
  StepId step_id;
  std::span<const std::int32_t> accepted_offsets;
  std::span<const std::int32_t> token_ids;
  std::span<const std::int32_t> row_faults;
  bool fault = false;
};

// A request that can never run here, with the numbers in tokens.
struct Refusal {
  RequestKey key;
  Tokens needed;
  Tokens capacity;
};

enum class FinishCode : std::int32_t { kNone = 0, kStop = 1, kLength = 2, kCancelled = 3, kFault = 4, kDeadline = 5 };

}  // namespace tokenspeed::control
