// SPDX-License-Identifier: Apache-2.0
// The CPU kernels: arguments as plain pointers, one implementation an instruction set, chosen at run time.
// Strides count elements; the last dimension of every tensor is contiguous.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "packed_layout.h"

namespace tokenspeed::cpu {

// kInt8: of pages alone. A head of a token, transformed (hadamard.h), is head_dim codes and, behind them, a float32
// scale that multiplies them.
enum class DType : std::uint8_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

// out[m, n] = sum over k of x[m, k] * weight[n, k], plus bias[n]. An output's bits depend on its own row only.
struct LinearArgs {
  const void* x;
  const void* weight;
  const void* bias;  // or null
  void* out;         // contiguous
  std::int64_t num_rows, num_outputs, num_inputs;
  std::int64_t x_stride, weight_stride;
  DType dtype;  // of x, weight and bias
  DType out_dtype;
};

// See kernels/ops/paged_attention. A token's bits depend on its own row only, and not on how the row is cut into steps.
// Pages are of dtype, or bfloat16, or int8.
struct AttentionArgs {
  const void* q;
  const void* k_pages;
  const void* v_pages;
  void* out;  // contiguous
  const std::int32_t* query_start;
  const std::int32_t* seq_lens;
  const std::int32_t* block_tables;
  const float* sinks;  // one for each query head, or null
  std::int64_t num_rows, num_tokens, num_heads, num_kv_heads, head_dim, block_size;
  std::int64_t q_token_stride, q_head_stride;
  std::int64_t k_page_stride, k_slot_stride, k_head_stride;
  std::int64_t v_page_stride, v_slot_stride, v_head_stride;
  std::int64_t table_stride;
  float scale;
  std::int64_t window;  // 0: none
  float soft_cap;       // 0: none
  DType dtype;          // of q and out
  DType page_dtype;
};

// x is (num_outer, num_inner, size) with two strides; residual is (num_outer, size) and used where num_inner is 1.
struct RmsNormArgs {
  const void* x;
  const void* weight;
  void* residual;  // or null
  void* out;       // contiguous
  std::int64_t num_outer, num_inner, size;
  std::int64_t outer_stride, inner_stride, residual_stride;
  float eps, weight_offset;
  DType dtype;
};

struct RotaryArgs {
  void* x;
  const std::int64_t* positions;
  const float* table;
  std::int64_t num_tokens, num_heads, rotary_dim;
  std::int64_t token_stride, head_stride, table_stride;
  bool is_interleaved;  // pairs are neighbours, not half a rotation apart
  DType dtype;
};

enum class Activation : std::uint8_t { kSilu = 0, kGeluTanh = 1 };

struct GatedArgs {
  const void* x;
  void* out;  // contiguous
  std::int64_t num_rows, size, x_stride;
  Activation activation;
  DType dtype;
};

// See kernels/ops/sampling, whose parts these are: addresses are null and numbers 0 where there is no such part. Rows
// without temperatures are greedy, rows without filters have none. Every field has eight bytes.
struct SamplingArgs {
  const float* logits;
  std::int64_t* token_ids;
  std::uint8_t* is_faulty;
  std::int64_t num_rows, size, stride;

  const float* temperatures;
  const std::int64_t* seeds;
  const std::int64_t* positions;
  const std::int64_t* top_ks;
  const float* top_ps;
  const float* min_ps;

  float* edited;  // memory for the logits of all rows; null where none of the following parts is there
  const std::int64_t* penalty_rows;
  const std::int32_t* output_counts;
  const std::uint8_t* prompt_masks;  // or null
  const float* presences;
  const float* frequencies;
  const float* repetitions;
  std::int64_t num_penalties, counts_stride, prompt_stride;
  const std::int64_t* edit_rows;
  const std::int64_t* edit_ids;
  const float* edit_values;
  std::int64_t num_edits;
  const std::int64_t* mask_rows;
  const std::int32_t* mask_bits;
  std::int64_t num_masks, mask_stride;
};

constexpr float kGreedyBelow = 1e-5F;  // the same as GREEDY_BELOW there

// Pages are of dtype, or bfloat16, or int8, where the largest code is 127. Rounded to the
// nearest, of two to the even one.
struct KvWriteArgs {
  const void* source;
  void* pages;
  const std::int64_t* slots;
  std::int64_t num_tokens, num_heads, head_dim, block_size;
  std::int64_t token_stride, head_stride;
  std::int64_t page_stride, slot_stride, page_head_stride;
  DType dtype;  // of source
  DType page_dtype;
};

// Some rows of a weight that stays packed: a whole matrix as packed_layout.h has it.
struct PackedPiece {
  const std::uint8_t* data;
  std::int64_t num_outputs;
  std::int64_t format;  // a PackedFormat
};

// As LinearArgs, of a weight whose rows are those of up to eight pieces, one after another; bias is of x's dtype. x is
// rounded to bytes, 32 inputs to a scale, but for a few inputs that are kept as they are (packed_inputs.h). An output's
// bits depend on its own row only.
struct PackedLinearArgs {
  const void* x;
  const PackedPiece* pieces;
  const void* bias;  // or null
  void* out;         // contiguous
  std::int64_t num_pieces, num_rows, num_outputs, num_inputs, x_stride;
  DType dtype, out_dtype;
};

// Rows of a packed matrix as numbers: out is (num_ids, num_inputs), contiguous.
struct PackedRowsArgs {
  const std::uint8_t* data;
  const std::int64_t* ids;
  void* out;
  std::int64_t num_ids, num_outputs, num_inputs;
  PackedFormat format;
  DType out_dtype;
};

// Of each row the output that is highest, the first of several, and whether it is faulty: an output is NaN or +inf, or
// all are -inf. As packed_linear and looking would find it, but of a piece in planes, and most of the plane of lower
// bits is not read. num_whole: of blocks of 32 inputs of which it is read all the same, so many whose activations are
// largest; more where it turned out that too many outputs could not be told apart, fewer where hardly any. It starts as
// anything, and no result depends on it.
struct PackedHighestArgs {
  const void* x;
  const PackedPiece* piece;
  std::int64_t* ids;
  std::uint8_t* is_faulty;
  std::int64_t* num_whole;
  std::int64_t num_rows, num_inputs, x_stride;
  DType dtype;
};

// A matrix (num_outputs, num_inputs) of each expert, one behind another: numbers, or num_pieces pieces to a matrix, as
// PackedLinearArgs has them. Addresses are null where there is no such part. Every field has eight bytes.
struct ExpertMatrices {
  const void* weight;
  const PackedPiece* pieces;
  const void* bias;  // (experts, num_outputs), of the activations' dtype
  std::int64_t num_pieces, num_outputs, num_inputs;
};

enum class ExpertGate : std::int64_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2 };

// The experts of a layer, or those of them that are here, numbered from first_expert on. See kernels/ops/moe_experts.
struct ExpertLayer {
  ExpertMatrices gate_up, down;
  std::int64_t first_expert, num_experts;
  ExpertGate gate;
  float alpha, limit;
  std::int64_t dtype;  // of x, weights, biases and out
};

// x is (num_tokens, D); experts and weights are (num_tokens, num_chosen), contiguous. A token's bits depend on its own
// row only.
struct ExpertsArgs {
  const ExpertLayer* layer;
  const void* x;
  const std::int64_t* experts;
  const float* weights;
  void* out;  // contiguous
  std::int64_t num_tokens, num_chosen, x_stride;
};

struct Kernels {
  const char* isa;
  std::int64_t few_rows;  // up to which packed_linear reads a weight once for all of them
  void (*linear)(const LinearArgs&);
  void (*packed_linear)(const PackedLinearArgs&);
  void (*packed_rows)(const PackedRowsArgs&);
  void (*packed_highest)(const PackedHighestArgs&);
  void (*experts)(const ExpertsArgs&);
  void (*paged_attention)(const AttentionArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*gated)(const GatedArgs&);
  void (*kv_write)(const KvWriteArgs&);
  void (*sampling)(const SamplingArgs&);
};

// The sets that this machine runs, the best one first.
std::span<const Kernels> kernel_sets();

// The set in use: the best one until another is chosen, which may not happen during a call of a kernel.
const Kernels& kernels();

// Whether this machine runs a set of that name, which is then the one in use.
bool choose_kernels(std::string_view isa);

Kernels portable_kernels();
#if defined(__x86_64__)
Kernels avx2_kernels();
Kernels avx512_kernels();
Kernels avx512vnni_kernels();
#endif

}  // namespace tokenspeed::cpu
