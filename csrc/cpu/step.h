// SPDX-License-Identifier: Apache-2.0
// A decode step of a whole dense model in one call: see kernels/ops/decode_step. A program of the other kernels, so
// what it computes has the same bits as their calls one by one. Knows no instruction set.
//
// Python writes these structures as arrays of records with the same fields in the same order (ops/decode_step/cpu.py),
// so every field has eight bytes, but for pairs of floats.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace tokenspeed::cpu {

// Numbers of the model's dtype, contiguous, or pieces that stay packed. pieces: null for numbers.
struct StepMatrix {
  const void* weight;
  const PackedPiece* pieces;
  std::int64_t num_pieces;
  const void* bias;  // or null
  std::int64_t num_outputs, num_inputs;
};

// Pages of K or of V, with strides of a page, a token in it and a head.
struct StepPages {
  void* data;
  std::int64_t page_stride, slot_stride, head_stride;
};

struct StepLayer {
  const void* norm_before_attention;
  StepMatrix qkv;
  const void* q_norm;  // or null, and k_norm too
  const void* k_norm;
  const float* rotary;  // or null
  std::int64_t rotary_dim, rotary_stride, is_interleaved;
  StepPages k, v;
  std::int64_t group;
  std::int64_t window;  // 0: none
  StepMatrix out;
  const void* norm_after_attention;  // or null
  const void* norm_before_mlp;
  StepMatrix gate_up;
  StepMatrix down;
  const void* norm_after_mlp;  // or null
};

struct StepModel {
  StepMatrix embed;
  const StepLayer* layers;
  std::int64_t num_layers;
  const void* norm;
  StepMatrix head;
  std::int64_t num_heads, num_kv_heads, head_dim, block_size;
  std::int64_t activation;  // an Activation
  std::int64_t dtype;       // a DType
  std::int64_t page_dtype;  // a DType: of K and V in pages
  float eps, weight_offset;
  float scale, embed_scale;
};

// Block tables of a group of layers: a row for each row of the batch.
struct StepTable {
  const std::int32_t* blocks;
  std::int64_t stride;
};

// One new token of each row. seq_lens: with it.
struct StepBatch {
  const std::int64_t* token_ids;
  const std::int64_t* positions;
  const std::int32_t* seq_lens;
  const StepTable* tables;
  float* logits;            // contiguous; or null, and then of each row the token whose logit is highest
  std::int64_t* token_out;  // see PackedHighestArgs
  std::uint8_t* is_faulty;
  std::int64_t* num_whole;
  std::int64_t num_rows, num_groups;
};

void decode_step(const Kernels& set, const StepModel& model, const StepBatch& batch);

}  // namespace tokenspeed::cpu
