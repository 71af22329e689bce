// SPDX-License-Identifier: Apache-2.0
// Python face of the CPU kernels: addresses as integers, no logic. The caller owns the memory for the time of the call.
#include <nanobind/nanobind.h>

#include "kernels.h"
#include "large_pages.h"
#include "step.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace tokenspeed::cpu {
namespace {

using Int = std::int64_t;

// Small calls keep the interpreter lock: giving it away costs more than they take.
constexpr Int kUnlockSize = 65536;

template <typename Args>
void call(void (*kernel)(const Args&), const Args& args, Int size) {
  if (size < kUnlockSize) {
    kernel(args);
    return;
  }
  const nb::gil_scoped_release unlocked;
  kernel(args);
}

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

template <typename T>
const T* array_at(std::uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

void bind_sets(nb::module_& module) {
  module.def("isa", [] { return kernels().isa; });
  module.def("isas", [] {
    nb::list names;
    for (const Kernels& set : kernel_sets()) {
      names.append(set.isa);
    }
    return names;
  });
  module.def("choose_isa", [](const char* isa) { return choose_kernels(isa); });
}

void bind_linear(nb::module_& module) {
  module.def("linear",
             [](std::uintptr_t x, std::uintptr_t weight, std::uintptr_t bias, std::uintptr_t out, Int num_rows,
                Int num_outputs, Int num_inputs, Int x_stride, Int weight_stride, int dtype, int out_dtype) {
               const LinearArgs args{at(x),      at(weight), at(bias),      at(out),      num_rows,        num_outputs,
                                     num_inputs, x_stride,   weight_stride, DType(dtype), DType(out_dtype)};
               call(kernels().linear, args, num_rows * num_outputs * num_inputs);
             });
}

void bind_packed(nb::module_& module) {
  module.def("prefer_large_pages",
             [](std::uintptr_t start, Int size) { prefer_large_pages(at(start), static_cast<std::size_t>(size)); });
  module.def("packed_size", [](Int format, Int num_outputs, Int num_inputs) {
    return packed_size(PackedFormat(format), num_outputs, num_inputs);
  });
  module.def("pack",
             [](std::uintptr_t blocks, std::uintptr_t out, Int num_outputs, Int num_inputs, Int row_bytes, Int format) {
               const nb::gil_scoped_release unlocked;
               pack({array_at<std::uint8_t>(blocks), static_cast<std::uint8_t*>(at(out)), num_outputs, num_inputs,
                     row_bytes, PackedFormat(format)});
             });
  module.def("packed_linear",
             [](std::uintptr_t x, std::uintptr_t pieces, std::uintptr_t bias, std::uintptr_t out, Int num_pieces,
                Int num_rows, Int num_outputs, Int num_inputs, Int x_stride, int dtype, int out_dtype) {
               const PackedLinearArgs args{at(x),           array_at<PackedPiece>(pieces),
                                           at(bias),        at(out),
                                           num_pieces,      num_rows,
                                           num_outputs,     num_inputs,
                                           x_stride,        DType(dtype),
                                           DType(out_dtype)};
               call(kernels().packed_linear, args, num_rows * num_outputs * num_inputs);
             });
  module.def("packed_rows", [](std::uintptr_t data, std::uintptr_t ids, std::uintptr_t out, Int num_ids,
                               Int num_outputs, Int num_inputs, Int format, int out_dtype) {
    const PackedRowsArgs args{
        array_at<std::uint8_t>(data), array_at<Int>(ids), at(out), num_ids, num_outputs, num_inputs,
        PackedFormat(format),         DType(out_dtype)};
    call(kernels().packed_rows, args, num_ids * num_inputs);
  });
}

void bind_highest(nb::module_& module) {
  module.def("few_rows", [] { return kernels().few_rows; });
  module.def("packed_highest", [](std::uintptr_t x, std::uintptr_t piece, std::uintptr_t ids, std::uintptr_t is_faulty,
                                  std::uintptr_t num_whole, Int num_rows, Int num_inputs, Int x_stride, int dtype) {
    const PackedHighestArgs args{at(x),
                                 array_at<PackedPiece>(piece),
                                 static_cast<Int*>(at(ids)),
                                 static_cast<std::uint8_t*>(at(is_faulty)),
                                 static_cast<Int*>(at(num_whole)),
                                 num_rows,
                                 num_inputs,
                                 x_stride,
                                 DType(dtype)};
    call(kernels().packed_highest, args, num_rows * args.piece->num_outputs * num_inputs);
  });
}

void bind_experts(nb::module_& module) {
  module.def("experts_size", [] { return sizeof(ExpertLayer); });
  module.def("experts", [](std::uintptr_t layer, std::uintptr_t x, std::uintptr_t experts, std::uintptr_t weights,
                           std::uintptr_t out, Int num_tokens, Int num_chosen, Int x_stride) {
    const ExpertsArgs args{array_at<ExpertLayer>(layer),
                           at(x),
                           array_at<Int>(experts),
                           array_at<float>(weights),
                           at(out),
                           num_tokens,
                           num_chosen,
                           x_stride};
    call(kernels().experts, args, kUnlockSize);
  });
}

void bind_attention(nb::module_& module) {
  module.def("paged_attention",
             [](std::uintptr_t q, std::uintptr_t k_pages, std::uintptr_t v_pages, std::uintptr_t out,
                std::uintptr_t query_start, std::uintptr_t seq_lens, std::uintptr_t block_tables, std::uintptr_t sinks,
                Int num_rows, Int num_tokens, Int num_heads, Int num_kv_heads, Int head_dim, Int block_size,
                Int q_token_stride, Int q_head_stride, Int k_page_stride, Int k_slot_stride, Int k_head_stride,
                Int v_page_stride, Int v_slot_stride, Int v_head_stride, Int table_stride, float scale, Int window,
                float soft_cap, int dtype, int page_dtype) {
               const AttentionArgs args{at(q),
                                        at(k_pages),
                                        at(v_pages),
                                        at(out),
                                        array_at<std::int32_t>(query_start),
                                        array_at<std::int32_t>(seq_lens),
                                        array_at<std::int32_t>(block_tables),
                                        array_at<float>(sinks),
                                        num_rows,
                                        num_tokens,
                                        num_heads,
                                        num_kv_heads,
                                        head_dim,
                                        block_size,
                                        q_token_stride,
                                        q_head_stride,
                                        k_page_stride,
                                        k_slot_stride,
                                        k_head_stride,
                                        v_page_stride,
                                        v_slot_stride,
                                        v_head_stride,
                                        table_stride,
                                        scale,
                                        window,
                                        soft_cap,
                                        DType(dtype),
                                        DType(page_dtype)};
               call(kernels().paged_attention, args, kUnlockSize);
             });
}

void bind_elementwise(nb::module_& module) {
  module.def("rms_norm", [](std::uintptr_t x, std::uintptr_t weight, std::uintptr_t residual, std::uintptr_t out,
                            Int num_outer, Int num_inner, Int size, Int outer_stride, Int inner_stride,
                            Int residual_stride, float eps, float weight_offset, int dtype) {
    const RmsNormArgs args{at(x),        at(weight),   at(residual),    at(out), num_outer,     num_inner,   size,
                           outer_stride, inner_stride, residual_stride, eps,     weight_offset, DType(dtype)};
    call(kernels().rms_norm, args, num_outer * num_inner * size);
  });
  module.def("rotary",
             [](std::uintptr_t x, std::uintptr_t positions, std::uintptr_t table, Int num_tokens, Int num_heads,
                Int rotary_dim, Int token_stride, Int head_stride, Int table_stride, bool is_interleaved, int dtype) {
               const RotaryArgs args{at(x),
                                     array_at<Int>(positions),
                                     array_at<float>(table),
                                     num_tokens,
                                     num_heads,
                                     rotary_dim,
                                     token_stride,
                                     head_stride,
                                     table_stride,
                                     is_interleaved,
                                     DType(dtype)};
               call(kernels().rotary, args, num_tokens * num_heads * rotary_dim);
             });
  module.def("gated",
             [](std::uintptr_t x, std::uintptr_t out, Int num_rows, Int size, Int x_stride, int activation, int dtype) {
               const GatedArgs args{at(x), at(out), num_rows, size, x_stride, Activation(activation), DType(dtype)};
               call(kernels().gated, args, num_rows * size);
             });
  module.def("kv_write", [](std::uintptr_t source, std::uintptr_t pages, std::uintptr_t slots, Int num_tokens,
                            Int num_heads, Int head_dim, Int block_size, Int token_stride, Int head_stride,
                            Int page_stride, Int slot_stride, Int page_head_stride, int dtype, int page_dtype) {
    const KvWriteArgs args{at(source),  at(pages),        array_at<Int>(slots), num_tokens,       num_heads,
                           head_dim,    block_size,       token_stride,         head_stride,      page_stride,
                           slot_stride, page_head_stride, DType(dtype),         DType(page_dtype)};
    call(kernels().kv_write, args, num_tokens * num_heads * head_dim);
  });
}

void bind_sampling(nb::module_& module) {
  module.def("sampling_size", [] { return sizeof(SamplingArgs); });
  module.def("sampling", [](std::uintptr_t described) {
    const auto& args = *array_at<SamplingArgs>(described);
    call(kernels().sampling, args, args.num_rows * args.size);
  });
}

void bind_step(nb::module_& module) {
  module.def("step_sizes", [] { return nb::make_tuple(sizeof(StepModel), sizeof(StepLayer)); });
  module.def("decode_step",
             [](std::uintptr_t model, std::uintptr_t token_ids, std::uintptr_t positions, std::uintptr_t seq_lens,
                std::uintptr_t tables, std::uintptr_t logits, std::uintptr_t token_out, std::uintptr_t is_faulty,
                std::uintptr_t num_whole, Int num_rows, Int num_groups) {
               const StepBatch batch{array_at<Int>(token_ids),
                                     array_at<Int>(positions),
                                     array_at<std::int32_t>(seq_lens),
                                     array_at<StepTable>(tables),
                                     static_cast<float*>(at(logits)),
                                     static_cast<Int*>(at(token_out)),
                                     static_cast<std::uint8_t*>(at(is_faulty)),
                                     static_cast<Int*>(at(num_whole)),
                                     num_rows,
                                     num_groups};
               const nb::gil_scoped_release unlocked;
               decode_step(kernels(), *array_at<StepModel>(model), batch);
             });
}

}  // namespace
}  // namespace tokenspeed::cpu

NB_MODULE(_cpu, module) {
  module.doc() = "CPU kernels over plain addresses; see csrc/cpu/kernels.h for what each computes.";
  tokenspeed::cpu::bind_sets(module);
  module.def("num_threads", tokenspeed::cpu::num_threads);
  module.def("set_num_threads", tokenspeed::cpu::set_num_threads);
  tokenspeed::cpu::bind_linear(module);
  tokenspeed::cpu::bind_packed(module);
  tokenspeed::cpu::bind_highest(module);
  tokenspeed::cpu::bind_experts(module);
  tokenspeed::cpu::bind_attention(module);
  tokenspeed::cpu::bind_elementwise(module);
  tokenspeed::cpu::bind_sampling(module);
  tokenspeed::cpu::bind_step(module);
}
