// SPDX-License-Identifier: Apache-2.0
#include "layout.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace tokenspeed::control::sim {

namespace {

std::int64_t divided_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

GroupSpec random_group(Random& random, const Config& config, std::int64_t typical_len, std::int64_t state_size) {
  GroupSpec spec;
  const std::int64_t which = random.between(1, 100);
  spec.kind = which <= 45 ? GroupKind::kFull : which <= 75 ? GroupKind::kWindow : GroupKind::kRecurrent;
  spec.block_size = Tokens(random.chance(85) ? std::int64_t{1} << random.between(0, 3) : 3);
  const std::int64_t sequences = random.chance(60) ? random.between(1, 3) : random.between(2, 8);
  std::int64_t num_blocks = divided_up(typical_len * sequences, spec.block_size.value()) + random.between(0, 3);
  if (spec.kind == GroupKind::kWindow) {
    spec.window = Tokens(random.between(2, random.chance(50) ? 8 : 24));
    // Large enough for windows alone, or so small that whole sequences are set aside.
    const std::int64_t margin = 4 * (divided_up(config.max_num_batched_tokens, spec.block_size.value()) + 1);
    const std::int64_t needs = divided_up(spec.window.value() + 8, spec.block_size.value()) + 8;
    num_blocks = random.chance(50) ? margin + needs * random.between(1, 3) : num_blocks;
  } else if (spec.kind == GroupKind::kRecurrent) {
    spec.block_size = Tokens(state_size);
    num_blocks = random.between(6, random.chance(60) ? 14 : 40);
  }
  spec.num_blocks = Blocks(num_blocks);
  return spec;
}

}  // namespace

Layout::Layout(const Config& config) : config_(config), capacity_(std::numeric_limits<std::int32_t>::max()) {
  for (const GroupSpec& spec : config_.groups) {
    base_size_ = std::gcd(base_size_, spec.block_size.value());
    unit_ = std::lcm(unit_, spec.block_size.value());
    keeps_states_ = keeps_states_ || spec.kind == GroupKind::kRecurrent;
  }
  for (const GroupSpec& spec : config_.groups) {
    if (holds_whole(spec)) {
      capacity_ = std::min(capacity_, spec.num_blocks.value() * spec.block_size.value());
    }
  }
}

std::int64_t Layout::margin(const GroupSpec& spec) const {
  if (spec.kind != GroupKind::kWindow) {
    return 0;
  }
  // Two steps in flight, and two whose pages have expired and are not yet given back.
  const std::int64_t margin = 4 * (divided_up(config_.max_num_batched_tokens, spec.block_size.value()) + 1);
  return margin + kept_pages(spec, 0) <= spec.num_blocks.value() ? margin : 0;
}

bool Layout::holds_whole(const GroupSpec& spec) const {
  return spec.kind == GroupKind::kFull || (spec.kind == GroupKind::kWindow && margin(spec) == 0);
}

// What one sequence may keep in a bounded group at a time, however long it is.
std::int64_t Layout::kept_pages(const GroupSpec& spec, std::int32_t draft_width) const {
  const std::int64_t size = spec.block_size.value();
  const std::int64_t reach = spec.kind == GroupKind::kWindow ? spec.window.value() - 1 : 1;
  const std::int64_t drafts = spec.kind == GroupKind::kWindow ? divided_up(2 * (1 + draft_width), size) : 0;
  return divided_up(reach + unit_, size) + 5 + drafts;
}

std::int64_t Layout::most_pages(const GroupSpec& spec, std::int64_t len, std::int32_t draft_width) const {
  return std::min(divided_up(len - 1, spec.block_size.value()), kept_pages(spec, draft_width));
}

bool Layout::must_refuse(const Submit& submit) const {
  const auto prompt = static_cast<std::int64_t>(submit.token_ids.size());
  if (prompt + 1 > config_.max_model_len || prompt > capacity_) {
    return true;
  }
  return std::any_of(config_.groups.begin(), config_.groups.end(), [&](const GroupSpec& spec) {
    return !holds_whole(spec) &&
           most_pages(spec, limit(submit), submit.draft_width) > spec.num_blocks.value() - margin(spec);
  });
}

std::int64_t Layout::limit(const Submit& submit) const {
  const auto prompt = static_cast<std::int64_t>(submit.token_ids.size());
  const std::int64_t most = std::min(submit.max_new_tokens.value(), config_.max_model_len);
  const std::int64_t wanted = submit.remote == Remote::kSend ? 1 : most;
  return std::min({prompt + wanted, config_.max_model_len, capacity_ + 1});
}

Config random_config(Random& random, std::int64_t typical_len) {
  Config config;
  config.num_partitions = random.chance(70) ? 1 : static_cast<std::int32_t>(random.between(2, 3));
  config.max_num_seqs = static_cast<std::int32_t>(random.between(1, random.chance(50) ? 4 : 8));
  config.max_num_batched_tokens = config.max_num_seqs + random.between(0, random.chance(50) ? 6 : 40);
  const std::int64_t state_size = std::int64_t{1} << random.between(1, 3);
  const std::int64_t num_groups = random.chance(35) ? 1 : random.between(2, 4);
  const std::int64_t host = random.between(1, 100);
  for (std::int64_t index = 0; index < num_groups; ++index) {
    GroupSpec spec = random_group(random, config, typical_len, state_size);
    if (index == 0 && random.chance(60)) {
      while (spec.kind != GroupKind::kFull) {
        spec = random_group(random, config, typical_len, state_size);
      }
    }
    const bool none = host <= 35 || random.chance(10);
    const bool small = host <= 65;
    const std::int64_t most = spec.num_blocks.value();
    spec.num_host_blocks = Blocks(none ? 0 : small ? random.between(1, 6) : random.between(most, 4 * most));
    config.groups.push_back(spec);
  }
  const std::int64_t capacity = std::min(Layout(config).capacity(), 16 * typical_len);
  config.max_model_len = random.chance(70) ? capacity + random.between(1, 8) : random.between(2, 2 * capacity);
  config.ageing_steps = random.between(1, 40);
  config.prefix_caching = random.chance(92);
  config.host_store = random.chance(50) ? HostStore::kOnSeal : HostStore::kOnPressure;
  config.kv_events = true;
  if (random.chance(60)) {
    const std::int64_t most = random.chance(50) ? 4 : config.max_num_batched_tokens;
    config.max_num_mixed_prefill_tokens = random.between(1, most);
  }
  if (random.chance(50)) {
    config.mixed_step_unit = random.between(1, config.max_num_batched_tokens);
  }
  return config;
}

}  // namespace tokenspeed::control::sim
