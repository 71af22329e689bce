// SPDX-License-Identifier: Apache-2.0
#include "history.h"

#include "random.h"
#include "violation.h"

namespace tokenspeed::control::sim {

namespace {

History mix_text(History history, const std::string& text) {
  history = scramble(history ^ text.size());
  for (const char letter : text) {
    history = scramble(history ^ static_cast<unsigned char>(letter));
  }
  return history;
}

}  // namespace

History root_history(const Submit& submit) { return mix_text(mix_text(1, submit.name_space), submit.adapter); }

History extend(History before, std::int32_t token_id, std::uint64_t content) {
  return scramble(scramble(before * 31 + static_cast<std::uint32_t>(token_id)) ^ content);
}

std::int32_t next_token(History history) {
  return static_cast<std::int32_t>(scramble(history) % static_cast<std::uint64_t>(kVocabulary));
}

std::uint64_t content_at(std::span<const ContentSpan> spans, std::int64_t position) {
  for (const ContentSpan& span : spans) {
    const std::int64_t offset = position - span.start.value();
    if (offset >= 0 && offset < span.length.value()) {
      return scramble(span.hash_high ^ scramble(span.hash_low + static_cast<std::uint64_t>(offset)));
    }
  }
  return 0;
}

void KnownBlocks::extend(const Submit& submit, std::span<const std::int32_t> token_ids,
                         std::span<const History> history, std::vector<BlockHash>& hashes) {
  const auto width = static_cast<std::size_t>(base_size_);
  while ((hashes.size() + 1) * width <= token_ids.size()) {
    const std::size_t start = hashes.size() * width;
    Block block;
    block.parent = hashes.empty() ? hash_root(submit.name_space, submit.adapter) : hashes.back();
    block.token_ids.assign(token_ids.begin() + static_cast<std::ptrdiff_t>(start),
                           token_ids.begin() + static_cast<std::ptrdiff_t>(start + width));
    block.history.assign(history.begin() + static_cast<std::ptrdiff_t>(start),
                         history.begin() + static_cast<std::ptrdiff_t>(start + width));
    BlockHash hash = hash_block(block.parent, block.token_ids);
    for (const ContentSpan& span : submit.spans) {
      const std::int64_t offset = span.start.value() - static_cast<std::int64_t>(start);
      if (offset < base_size_ && offset + span.length.value() > 0) {
        hash = hash_content(hash, span, offset);
      }
    }
    hashes.push_back(hash);
    const auto [known, is_new] = blocks_.try_emplace(hash, block);
    require(is_new || known->second.history == block.history, "two histories have one hash", hash.low);
  }
}

KnownBlocks::Block KnownBlocks::block(const BlockHash& hash, std::int64_t len) const {
  Block whole;
  BlockHash last = hash;
  for (std::int64_t left = len; left > 0; left -= base_size_) {
    const auto found = blocks_.find(last);
    require(found != blocks_.end(), "a hash that no request ever had", hash.low);
    const Block& part = found->second;
    whole.history.insert(whole.history.begin(), part.history.begin(), part.history.end());
    whole.token_ids.insert(whole.token_ids.begin(), part.token_ids.begin(), part.token_ids.end());
    last = part.parent;
  }
  whole.parent = last;
  return whole;
}

}  // namespace tokenspeed::control::sim
