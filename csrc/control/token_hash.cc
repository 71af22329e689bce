// SPDX-License-Identifier: Apache-2.0
#include "token_hash.h"

#include <bit>
#include <cstddef>

namespace tokenspeed::control {

namespace {

// Odd constants: the fractional digits of the square roots of 2, 3, 5 and 7.
constexpr std::uint64_t kRoot2 = 0x6A09E667F3BCC909ULL;
constexpr std::uint64_t kRoot3 = 0xBB67AE8584CAA73BULL;
constexpr std::uint64_t kRoot5 = 0x3C6EF372FE94F82BULL;
constexpr std::uint64_t kRoot7 = 0xA54FF53A5F1D36F1ULL;

// Multiply and fold the 128-bit product, so that every input bit reaches both halves. The product is made of 32-bit
// parts because ISO C++ has no 128-bit integer.
std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t a_low = a & 0xFFFFFFFFULL;
  const std::uint64_t a_high = a >> 32U;
  const std::uint64_t b_low = b & 0xFFFFFFFFULL;
  const std::uint64_t b_high = b >> 32U;
  const std::uint64_t low = a_low * b_low;
  const std::uint64_t middle = a_high * b_low + (low >> 32U);
  const std::uint64_t cross = a_low * b_high + (middle & 0xFFFFFFFFULL);
  const std::uint64_t high = a_high * b_high + (middle >> 32U) + (cross >> 32U);
  return high ^ ((cross << 32U) | (low & 0xFFFFFFFFULL));
}

BlockHash mix(const BlockHash& hash, std::uint64_t word) {
  // Two lanes that never share a multiplier and feed each other. XOR keeps a zero factor from wiping out history.
  const std::uint64_t high = hash.high ^ fold(hash.high ^ word ^ kRoot2, kRoot3 ^ std::rotl(hash.low, 23));
  const std::uint64_t low = std::rotl(hash.low, 29) ^ fold(hash.low ^ (word + kRoot5), kRoot7 | 1U) ^ high;
  return BlockHash{.high = high, .low = low};
}

BlockHash mix_text(BlockHash hash, std::string_view text) {
  hash = mix(hash, text.size());
  for (const char letter : text) {
    hash = mix(hash, static_cast<unsigned char>(letter));
  }
  return hash;
}

}  // namespace

BlockHash hash_root(std::string_view name_space, std::string_view adapter) {
  return mix_text(mix_text(BlockHash{.high = kRoot5, .low = kRoot7}, name_space), adapter);
}

BlockHash hash_block(const BlockHash& parent, std::span<const std::int32_t> token_ids) {
  BlockHash hash = mix(parent, token_ids.size());
  std::size_t index = 0;
  for (; index + 1 < token_ids.size(); index += 2) {
    const std::uint64_t first = static_cast<std::uint32_t>(token_ids[index]);
    const std::uint64_t second = static_cast<std::uint32_t>(token_ids[index + 1]);
    hash = mix(hash, first | (second << 32U));
  }
  if (index < token_ids.size()) {
    hash = mix(hash, static_cast<std::uint32_t>(token_ids[index]));
  }
  return hash;
}

BlockHash hash_content(const BlockHash& hash, const ContentSpan& span, std::int64_t offset) {
  const BlockHash content = mix(mix(hash, span.hash_high), span.hash_low);
  return mix(mix(content, static_cast<std::uint64_t>(span.length.value())), static_cast<std::uint64_t>(offset));
}

}  // namespace tokenspeed::control
