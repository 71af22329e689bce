// SPDX-License-Identifier: Apache-2.0
// Random inputs of the kernels, the same ones on every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"

namespace tokenspeed::cpu {
namespace {

std::mt19937 generator(7);  // NOLINT: the same inputs on every run are wanted

std::vector<float> random_floats(std::size_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(generator);
  }
  return values;
}

// The upper halves of random floats.
std::vector<std::uint16_t> random_bf16(std::size_t count) {
  std::vector<std::uint16_t> halves;
  for (const float value : random_floats(count)) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    halves.push_back(static_cast<std::uint16_t>(bits >> 16));
  }
  return halves;
}

std::vector<char> random_values(std::size_t count, DType dtype) {
  std::vector<char> bytes(count * (dtype == DType::kFloat32 ? 4 : 2));
  if (dtype == DType::kFloat32) {
    std::memcpy(bytes.data(), random_floats(count).data(), bytes.size());
  } else {
    std::memcpy(bytes.data(), random_bf16(count).data(), bytes.size());
  }
  return bytes;
}

// Heads of K or V as pages keep them, one after another.
std::vector<char> random_pages(std::int64_t num_heads, std::int64_t head_dim, DType dtype) {
  const auto count = static_cast<std::size_t>(num_heads * head_dim);
  if (dtype != DType::kInt8) {
    return random_values(count, dtype);
  }
  const auto numbers = random_floats(count);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(num_heads));
  std::iota(slots.begin(), slots.end(), 0);
  std::vector<char> pages(count + 4 * slots.size());
  const std::int64_t page_dim = head_dim + 4;
  portable_kernels().kv_write({numbers.data(), pages.data(), slots.data(), num_heads, 1, head_dim, num_heads, head_dim,
                               head_dim, 0, page_dim, page_dim, DType::kFloat32, DType::kInt8});
  return pages;
}

// Random blocks whose float16 numbers are all about 0.0015.
std::vector<std::uint8_t> random_blocks(PackedFormat format, std::int64_t rows, std::int64_t inputs) {
  const PackedShape shape = packed_shape(format);
  std::uniform_int_distribution<unsigned> byte(0, 255);
  std::vector<std::uint8_t> blocks(static_cast<std::size_t>(rows * inputs / shape.inputs * shape.bytes));
  for (std::uint8_t& value : blocks) {
    value = static_cast<std::uint8_t>(byte(generator));
  }
  const bool is_last = format == PackedFormat::kQ2K || format == PackedFormat::kQ3K || format == PackedFormat::kQ6K ||
                       format == PackedFormat::kQ6KPlanes;
  const auto bytes = static_cast<std::size_t>(shape.bytes);
  for (std::size_t block = 0; block < blocks.size(); block += bytes) {
    for (const std::size_t upper : {std::size_t{1}, std::size_t{3}}) {
      blocks[block + (is_last ? bytes - upper : upper)] = 0x16;
    }
  }
  return blocks;
}

// A packed weight of random blocks.
class RandomWeight {
 public:
  RandomWeight(PackedFormat format, std::int64_t num_outputs, std::int64_t num_inputs)
      : packed_(packed_size(format, num_outputs, num_inputs)),
        piece_{packed_.data(), num_outputs, static_cast<std::int64_t>(format)} {
    const PackedShape shape = packed_shape(format);
    const auto blocks = random_blocks(format, num_outputs, num_inputs);
    pack({blocks.data(), packed_.data(), num_outputs, num_inputs, num_inputs / shape.inputs * shape.bytes, format});
  }
  RandomWeight(RandomWeight&&) = default;
  RandomWeight& operator=(RandomWeight&&) = default;
  RandomWeight(const RandomWeight&) = delete;
  RandomWeight& operator=(const RandomWeight&) = delete;
  ~RandomWeight() = default;

  [[nodiscard]] const PackedPiece& piece() const { return piece_; }

 private:
  std::vector<std::uint8_t> packed_;
  PackedPiece piece_;
};

}  // namespace
}  // namespace tokenspeed::cpu
