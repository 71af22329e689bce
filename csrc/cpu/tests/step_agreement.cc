// SPDX-License-Identifier: Apache-2.0
// Runs whole decode steps of a small random model, some of whose matrices stay packed, with every instruction set that
// this machine has: they agree with the portable set, and a row has the same bits alone and among others.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <list>
#include <random>
#include <vector>

#include "step.h"

namespace tokenspeed::cpu {
namespace {

constexpr std::int64_t kHidden = 64, kHeads = 4, kKvHeads = 2, kHeadDim = 20, kFf = 96, kVocab = 41;
constexpr std::int64_t kLayers = 2, kRows = 5, kBlock = 8, kBlocksEach = 40, kPages = kRows * kBlocksEach + 1;

// A model, its pages and its rows. Memory stays where it is as long as this lives.
class Rig {
 public:
  Rig(bool is_plain, DType page_dtype) {
    for (std::int64_t index = 0; index < kLayers; ++index) {
      StepLayer layer{};
      const std::int64_t width = (kHeads + 2 * kKvHeads) * kHeadDim;
      layer.norm_before_attention = floats(kHidden);
      layer.norm_before_mlp = floats(kHidden);
      layer.qkv = packed(PackedFormat::kQ8_0, width, kHidden);
      layer.out = numbers(kHidden, kHeads * kHeadDim);
      layer.gate_up = packed(PackedFormat::kQ4_1, 2 * kFf, kHidden);
      layer.down = packed(PackedFormat::kQ5_0, kHidden, kFf);
      layer.rotary = floats(kBlocksEach * kBlock * kHeadDim);
      layer.rotary_dim = layer.rotary_stride = kHeadDim;
      layer.k = pages(page_dtype);
      layer.v = pages(page_dtype);
      layer.window = index == 0 ? 50 : 0;
      if (!is_plain) {
        layer.q_norm = floats(kHeadDim);
        layer.k_norm = floats(kHeadDim);
        layer.norm_after_attention = floats(kHidden);
        layer.norm_after_mlp = floats(kHidden);
        layer.qkv.bias = floats(width);
      }
      layers_.push_back(layer);
    }
    model_.embed = is_plain ? numbers(kVocab, kHidden) : packed(PackedFormat::kQ8_0, kVocab, kHidden);
    model_.head = is_plain ? numbers(kVocab, kHidden) : model_.embed;
    model_.layers = layers_.data();
    model_.num_layers = kLayers;
    model_.norm = floats(kHidden);
    model_.num_heads = kHeads;
    model_.num_kv_heads = kKvHeads;
    model_.head_dim = kHeadDim;
    model_.block_size = kBlock;
    model_.activation = is_plain ? 0 : 1;
    model_.page_dtype = static_cast<std::int64_t>(page_dtype);
    model_.eps = 1e-5F;
    model_.scale = 0.2F;
    model_.embed_scale = is_plain ? 1.0F : 3.0F;
    for (std::int64_t row = 0; row < kRows; ++row) {
      token_ids_.push_back(7 * row % kVocab);
      positions_.push_back(row == 0 ? kBlocksEach * kBlock - 1 : 11 * row);
      seq_lens_.push_back(static_cast<std::int32_t>(positions_.back() + 1));
      for (std::int64_t block = 0; block < kBlocksEach; ++block) {
        table_.push_back(static_cast<std::int32_t>(kPages - 1 - row * kBlocksEach - block));
      }
    }
  }

  // Logits of some rows in one step.
  [[nodiscard]] std::vector<float> run(const Kernels& set, std::int64_t first, std::int64_t num_rows) const {
    std::vector<float> logits(static_cast<std::size_t>(num_rows * kVocab), NAN);
    const StepTable table{table_.data() + first * kBlocksEach, kBlocksEach};
    decode_step(set, model_,
                {token_ids_.data() + first, positions_.data() + first, seq_lens_.data() + first, &table, logits.data(),
                 nullptr, nullptr, nullptr, num_rows, 1});
    return logits;
  }

 private:
  const float* floats(std::int64_t count) {
    std::normal_distribution<float> normal;
    auto& values = floats_.emplace_back(static_cast<std::size_t>(count));
    for (float& value : values) {
      value = normal(generator_);
    }
    return values.data();
  }

  StepPages pages(DType dtype) {
    // Heads of a page one after another.
    constexpr std::int64_t kSize = kPages * kBlock * kKvHeads * kHeadDim;
    const float* values = floats(kSize);
    void* data = const_cast<float*>(values);
    if (dtype == DType::kBFloat16) {
      auto& halves = halves_.emplace_back();
      for (std::int64_t i = 0; i < kSize; ++i) {
        halves.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(values[i]) >> 16));
      }
      data = halves.data();
    }
    std::int64_t page_dim = kHeadDim;
    if (dtype == DType::kInt8) {
      // A head is its codes and then their scale.
      page_dim += 4;
      auto& bytes = bytes_.emplace_back(static_cast<std::size_t>(kPages * kBlock * kKvHeads * page_dim));
      for (std::size_t i = 0, head = 0; head < bytes.size(); head += static_cast<std::size_t>(page_dim)) {
        for (std::int64_t k = 0; k < kHeadDim; ++k, ++i) {
          bytes[head + static_cast<std::size_t>(k)] =
              static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(values[i]));
        }
        const float scale = 0.01F * (1.5F + std::tanh(values[i - 1]));
        std::memcpy(bytes.data() + head + kHeadDim, &scale, sizeof(scale));
      }
      data = bytes.data();
    }
    return {data, kKvHeads * kBlock * page_dim, page_dim, kBlock * page_dim};
  }

  StepMatrix numbers(std::int64_t num_outputs, std::int64_t num_inputs) {
    return {floats(num_outputs * num_inputs), nullptr, 0, nullptr, num_outputs, num_inputs};
  }

  StepMatrix packed(PackedFormat format, std::int64_t num_outputs, std::int64_t num_inputs) {
    const PackedShape shape = packed_shape(format);
    std::uniform_int_distribution<unsigned> byte(0, 255);
    const std::int64_t row_bytes = num_inputs / shape.inputs * shape.bytes;
    std::vector<std::uint8_t> blocks(static_cast<std::size_t>(num_outputs * row_bytes));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const bool is_upper = i % static_cast<std::size_t>(shape.bytes) % 2 == 1;
      const bool is_scale = i % static_cast<std::size_t>(shape.bytes) < 4 && is_upper;
      blocks[i] = static_cast<std::uint8_t>(is_scale ? 0x16 : byte(generator_));
    }
    auto& bytes = bytes_.emplace_back(packed_size(format, num_outputs, num_inputs));
    pack({blocks.data(), bytes.data(), num_outputs, num_inputs, row_bytes, format});
    const auto& piece = pieces_.emplace_back(PackedPiece{bytes.data(), num_outputs, static_cast<std::int64_t>(format)});
    return {nullptr, &piece, 1, nullptr, num_outputs, num_inputs};
  }

  std::mt19937 generator_{7};  // NOLINT: the same inputs on every run are wanted
  std::list<std::vector<float>> floats_;
  std::list<std::vector<std::uint16_t>> halves_;
  std::list<std::vector<std::uint8_t>> bytes_;
  std::list<PackedPiece> pieces_;
  std::vector<StepLayer> layers_;
  StepModel model_{};
  std::vector<std::int64_t> token_ids_, positions_;
  std::vector<std::int32_t> seq_lens_, table_;
};

// Whether a set agrees with portable. Activations that lie between two bytes may fall to either side.
bool agrees(const Kernels& set, const Rig& rig) {
  const std::vector<float> expected = rig.run(portable_kernels(), 0, kRows);
  const std::vector<float> actual = rig.run(set, 0, kRows);
  double error = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(static_cast<double>(expected[i] - actual[i]), 2.0);
    size += std::pow(static_cast<double>(expected[i]), 2.0);
  }
  if (!(error <= 1e-4 * size)) {
    std::printf("%s: a step is off by %g\n", set.isa, std::sqrt(error / size));
    return false;
  }
  for (std::int64_t row = 0; row < kRows; ++row) {
    const std::vector<float> alone = rig.run(set, row, 1);
    if (std::memcmp(alone.data(), actual.data() + row * kVocab, alone.size() * sizeof(float)) != 0) {
      std::printf("%s: row %d of a step depends on its batch\n", set.isa, static_cast<int>(row));
      return false;
    }
  }
  std::printf("%s: steps agree\n", set.isa);
  return true;
}

}  // namespace
}  // namespace tokenspeed::cpu

int main() {
  using namespace tokenspeed::cpu;  // NOLINT: a test program
  bool is_good = true;
  for (const bool is_plain : {true, false}) {
    for (const DType page_dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt8}) {
      const Rig rig(is_plain, page_dtype);
      for (const Kernels& set : kernel_sets()) {
        is_good = agrees(set, rig) && is_good;
      }
    }
  }
  return is_good ? 0 : 1;
}
