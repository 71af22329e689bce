// SPDX-License-Identifier: Apache-2.0
#include "step.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <tuple>

#include "thread_pool.h"

namespace tokenspeed::cpu {
namespace {

constexpr int kStepSlot = kNumScratchSlots - 1;  // of scratch; the kernels use those before it

std::int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

void scale(float* x, std::int64_t size, float factor) {
  for (std::int64_t i = 0; i < size; ++i) {
    x[i] *= factor;
  }
}

// Of bfloat16: rounded to the nearest, of two to the even one.
void scale(std::uint16_t* x, std::int64_t size, float factor) {
  for (std::int64_t i = 0; i < size; ++i) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(x[i]) << 16) * factor;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    x[i] = std::isnan(value) ? 0x7FC0 : static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1U)) >> 16);
  }
}

// What passes between two kernels, in the model's dtype; rows first.
struct Buffers {
  void* stream;    // the residual stream
  void* normed;    // what a branch reads
  void* branch;    // what a branch gives
  void* qkv;       // a row's heads of q, k and v
  void* heads;     // of q and k, normalised
  void* attended;  // heads
  void* gate_up;
  void* gated;
  std::int64_t* slots;        // of each group and row
  std::int32_t* query_start;  // 0, 1, ...
};

using Sizes = std::array<std::int64_t, 10>;  // bytes of each of the buffers, in their order

Sizes sizes_of(const StepModel& model, const StepBatch& batch) {
  const std::int64_t each = batch.num_rows * size_of(DType(model.dtype));
  const std::int64_t stream = each * model.embed.num_inputs;
  const std::int64_t all_heads = each * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim;
  std::int64_t ff_size = 0;
  for (std::int64_t index = 0; index < model.num_layers; ++index) {
    ff_size = std::max(ff_size, model.layers[index].down.num_inputs);
  }
  Sizes sizes{stream,
              stream,
              stream,
              all_heads,
              all_heads,
              each * model.num_heads * model.head_dim,
              each * 2 * ff_size,
              each * ff_size,
              8 * batch.num_groups * batch.num_rows,
              4 * (batch.num_rows + 1)};
  constexpr std::int64_t kAlignment = 64;
  for (std::int64_t& size : sizes) {
    size = (size + kAlignment - 1) / kAlignment * kAlignment;
  }
  return sizes;
}

Buffers cut(std::byte* memory, const Sizes& sizes) {
  std::array<std::byte*, std::tuple_size_v<Sizes>> parts{};
  for (std::size_t index = 0; index < parts.size(); memory += sizes[index], ++index) {
    parts[index] = memory;
  }
  return {parts[0],
          parts[1],
          parts[2],
          parts[3],
          parts[4],
          parts[5],
          parts[6],
          parts[7],
          reinterpret_cast<std::int64_t*>(parts[8]),
          reinterpret_cast<std::int32_t*>(parts[9])};
}

class Step {
 public:
  Step(const Kernels& set, const StepModel& model, const StepBatch& batch, const Buffers& buffers)
      : set_(set), model_(model), batch_(batch), buffers_(buffers), dtype_(DType(model.dtype)) {}

  void run() const {
    place_tokens();
    embed();
    norm(model_.layers[0].norm_before_attention, nullptr);
    for (std::int64_t index = 0; index < model_.num_layers; ++index) {
      const StepLayer& layer = model_.layers[index];
      const bool is_last = index + 1 == model_.num_layers;
      linear(layer.qkv, buffers_.normed, buffers_.qkv, dtype_);
      attend(layer);
      linear(layer.out, buffers_.attended, buffers_.branch, dtype_);
      join(layer.norm_after_attention, layer.norm_before_mlp);
      linear(layer.gate_up, buffers_.normed, buffers_.gate_up, dtype_);
      gate(layer.down.num_inputs);
      linear(layer.down, buffers_.gated, buffers_.branch, dtype_);
      join(layer.norm_after_mlp, is_last ? model_.norm : model_.layers[index + 1].norm_before_attention);
    }
    head();
  }

 private:
  void head() const {
    const StepMatrix& matrix = model_.head;
    if (batch_.logits != nullptr) {
      linear(matrix, buffers_.normed, batch_.logits, DType::kFloat32);
    } else {
      set_.packed_highest({buffers_.normed, matrix.pieces, batch_.token_out, batch_.is_faulty, batch_.num_whole,
                           batch_.num_rows, matrix.num_inputs, matrix.num_inputs, dtype_});
    }
  }

  // Where K and V of the new tokens go.
  void place_tokens() const {
    std::int64_t* slot = buffers_.slots;
    for (std::int64_t group = 0; group < batch_.num_groups; ++group) {
      const StepTable& table = batch_.tables[group];
      for (std::int64_t row = 0; row < batch_.num_rows; ++row) {
        const std::int64_t position = batch_.positions[row];
        const std::int64_t page = table.blocks[row * table.stride + position / model_.block_size];
        *slot++ = page * model_.block_size + position % model_.block_size;
      }
    }
    for (std::int64_t row = 0; row <= batch_.num_rows; ++row) {
      buffers_.query_start[row] = static_cast<std::int32_t>(row);
    }
  }

  void embed() const {
    const StepMatrix& matrix = model_.embed;
    if (matrix.pieces != nullptr) {
      set_.packed_rows({matrix.pieces->data, batch_.token_ids, buffers_.stream, batch_.num_rows, matrix.num_outputs,
                        matrix.num_inputs, PackedFormat(matrix.pieces->format), dtype_});
    } else {
      const std::int64_t row_bytes = matrix.num_inputs * size_of(dtype_);
      for (std::int64_t row = 0; row < batch_.num_rows; ++row) {
        std::memcpy(static_cast<std::byte*>(buffers_.stream) + row * row_bytes,
                    static_cast<const std::byte*>(matrix.weight) + batch_.token_ids[row] * row_bytes,
                    static_cast<std::size_t>(row_bytes));
      }
    }
    if (model_.embed_scale != 1.0F) {
      const std::int64_t size = batch_.num_rows * matrix.num_inputs;
      dtype_ == DType::kFloat32 ? scale(static_cast<float*>(buffers_.stream), size, model_.embed_scale)
                                : scale(static_cast<std::uint16_t*>(buffers_.stream), size, model_.embed_scale);
    }
  }

  // normed = the norm of the stream, to which the branch is added first where there is one. It may lie in `normed`.
  void norm(const void* weight, void* branch) const {
    const std::int64_t size = model_.embed.num_inputs;
    const bool adds = branch != nullptr;
    set_.rms_norm({adds ? branch : buffers_.stream, weight, adds ? buffers_.stream : nullptr, buffers_.normed,
                   batch_.num_rows, 1, size, size, 0, size, model_.eps, model_.weight_offset, dtype_});
  }

  // A branch ends, after a norm of its own perhaps, and the next one begins.
  void join(const void* norm_after, const void* norm_before) const {
    void* branch = buffers_.branch;
    if (norm_after != nullptr) {
      const std::int64_t size = model_.embed.num_inputs;
      set_.rms_norm({branch, norm_after, nullptr, buffers_.normed, batch_.num_rows, 1, size, size, 0, 0, model_.eps,
                     model_.weight_offset, dtype_});
      branch = buffers_.normed;
    }
    norm(norm_before, branch);
  }

  void linear(const StepMatrix& matrix, const void* x, void* out, DType out_dtype) const {
    const std::int64_t num_rows = batch_.num_rows;
    if (matrix.pieces != nullptr) {
      set_.packed_linear({x, matrix.pieces, matrix.bias, out, matrix.num_pieces, num_rows, matrix.num_outputs,
                          matrix.num_inputs, matrix.num_inputs, dtype_, out_dtype});
      return;
    }
    set_.linear({x, matrix.weight, matrix.bias, out, num_rows, matrix.num_outputs, matrix.num_inputs, matrix.num_inputs,
                 matrix.num_inputs, dtype_, out_dtype});
  }

  void gate(std::int64_t ff_size) const {
    set_.gated({buffers_.gate_up, buffers_.gated, batch_.num_rows, ff_size, 2 * ff_size, Activation(model_.activation),
                dtype_});
  }

  // Heads of a row, one after another; stride: elements between rows.
  struct Heads {
    std::byte* data;
    std::int64_t num_heads, stride;
  };

  [[nodiscard]] Heads normed_heads(const Heads& heads, const void* weight, void* out) const {
    const std::int64_t head_dim = model_.head_dim;
    set_.rms_norm({heads.data, weight, nullptr, out, batch_.num_rows, heads.num_heads, head_dim, heads.stride, head_dim,
                   0, model_.eps, model_.weight_offset, dtype_});
    return {static_cast<std::byte*>(out), heads.num_heads, heads.num_heads * head_dim};
  }

  void turn(const StepLayer& layer, const Heads& heads) const {
    if (layer.rotary != nullptr) {
      set_.rotary({heads.data, batch_.positions, layer.rotary, batch_.num_rows, heads.num_heads, layer.rotary_dim,
                   heads.stride, model_.head_dim, layer.rotary_stride, layer.is_interleaved != 0, dtype_});
    }
  }

  void write(const StepLayer& layer, const StepPages& pages, const Heads& heads) const {
    set_.kv_write({heads.data, pages.data, buffers_.slots + layer.group * batch_.num_rows, batch_.num_rows,
                   heads.num_heads, model_.head_dim, model_.block_size, heads.stride, model_.head_dim,
                   pages.page_stride, pages.slot_stride, pages.head_stride, dtype_, DType(model_.page_dtype)});
  }

  void attend(const StepLayer& layer) const {
    const std::int64_t num_heads = model_.num_heads;
    const std::int64_t num_kv_heads = model_.num_kv_heads;
    const std::int64_t stride = (num_heads + 2 * num_kv_heads) * model_.head_dim;
    const std::int64_t head_bytes = model_.head_dim * size_of(dtype_);
    auto* first = static_cast<std::byte*>(buffers_.qkv);
    Heads q{first, num_heads, stride};
    Heads k{first + num_heads * head_bytes, num_kv_heads, stride};
    const Heads v{first + (num_heads + num_kv_heads) * head_bytes, num_kv_heads, stride};
    if (layer.q_norm != nullptr) {
      auto* normed = static_cast<std::byte*>(buffers_.heads);
      q = normed_heads(q, layer.q_norm, normed);
      k = normed_heads(k, layer.k_norm, normed + batch_.num_rows * num_heads * head_bytes);
    }
    turn(layer, q);
    turn(layer, k);
    write(layer, layer.k, k);
    write(layer, layer.v, v);
    const StepTable& table = batch_.tables[layer.group];
    set_.paged_attention({.q = q.data,
                          .k_pages = layer.k.data,
                          .v_pages = layer.v.data,
                          .out = buffers_.attended,
                          .query_start = buffers_.query_start,
                          .seq_lens = batch_.seq_lens,
                          .block_tables = table.blocks,
                          .sinks = nullptr,
                          .num_rows = batch_.num_rows,
                          .num_tokens = batch_.num_rows,
                          .num_heads = num_heads,
                          .num_kv_heads = num_kv_heads,
                          .head_dim = model_.head_dim,
                          .block_size = model_.block_size,
                          .q_token_stride = q.stride,
                          .q_head_stride = model_.head_dim,
                          .k_page_stride = layer.k.page_stride,
                          .k_slot_stride = layer.k.slot_stride,
                          .k_head_stride = layer.k.head_stride,
                          .v_page_stride = layer.v.page_stride,
                          .v_slot_stride = layer.v.slot_stride,
                          .v_head_stride = layer.v.head_stride,
                          .table_stride = table.stride,
                          .scale = model_.scale,
                          .window = layer.window,
                          .soft_cap = 0.0F,
                          .dtype = dtype_,
                          .page_dtype = DType(model_.page_dtype)});
  }

  const Kernels& set_;
  const StepModel& model_;
  const StepBatch& batch_;
  const Buffers& buffers_;
  DType dtype_;
};

}  // namespace

void decode_step(const Kernels& set, const StepModel& model, const StepBatch& batch) {
  if (batch.num_rows == 0) {
    return;
  }
  const Sizes sizes = sizes_of(model, batch);
  const auto num_bytes = static_cast<std::size_t>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  auto* memory = reinterpret_cast<std::byte*>(scratch(kStepSlot, num_bytes / sizeof(float)));
  const Buffers buffers = cut(memory, sizes);
  const LateScope scope;
  Step(set, model, batch, buffers).run();
}

}  // namespace tokenspeed::cpu
