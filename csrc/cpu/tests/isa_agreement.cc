// SPDX-License-Identifier: Apache-2.0
// Runs every instruction set that this machine has on the same random inputs and compares it with the portable set.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "random_inputs.h"

namespace tokenspeed::cpu {
namespace {

float value_at(const std::vector<char>& bytes, std::size_t index, DType dtype) {
  float value = 0.0F;
  if (dtype == DType::kFloat32) {
    std::memcpy(&value, bytes.data() + index * 4, 4);
  } else {
    std::uint16_t half = 0;
    std::memcpy(&half, bytes.data() + index * 2, 2);
    const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    std::memcpy(&value, &bits, 4);
  }
  return value;
}

int num_failures = 0;

void compare(const char* what, const Kernels& set, const std::vector<char>& expected, const std::vector<char>& actual,
             DType dtype) {
  const float tolerance = dtype == DType::kFloat32 ? 1e-4F : 2e-2F;
  const std::size_t count = expected.size() / (dtype == DType::kFloat32 ? 4 : 2);
  for (std::size_t i = 0; i < count; ++i) {
    const float a = value_at(expected, i, dtype);
    const float b = value_at(actual, i, dtype);
    if (!(std::fabs(a - b) <= tolerance * (1.0F + std::fabs(a)))) {
      std::printf("%s: %s differs from portable at %zu: %g, not %g\n", what, set.isa, i, static_cast<double>(b),
                  static_cast<double>(a));
      num_failures += 1;
      return;
    }
  }
}

// Runs `call(set, out)` with the portable set and with `set`.
template <typename Call>
void check(const char* what, const Kernels& set, std::size_t out_count, DType dtype, Call call) {
  std::vector<char> expected(out_count * (dtype == DType::kFloat32 ? 4 : 2));
  std::vector<char> actual = expected;
  call(portable_kernels(), expected.data());
  call(set, actual.data());
  compare(what, set, expected, actual, dtype);
}

void check_linear(const Kernels& set, DType dtype, std::int64_t m, std::int64_t n, std::int64_t k) {
  const auto x = random_values(static_cast<std::size_t>(m * k), dtype);
  const auto weight = random_values(static_cast<std::size_t>(n * k), dtype);
  const auto bias = random_values(static_cast<std::size_t>(n), dtype);
  check("linear", set, static_cast<std::size_t>(m * n), dtype, [&](const Kernels& kernels, void* out) {
    kernels.linear({x.data(), weight.data(), bias.data(), out, m, n, k, k, k, dtype, dtype});
  });
}

// Agreement with portable, and each row alone with the row among the others.
void check_packed(const Kernels& set, PackedFormat format, DType dtype, std::int64_t m, std::int64_t n,
                  std::int64_t k) {
  const RandomWeight weight(format, n, k);
  const auto x = random_values(static_cast<std::size_t>(m * k), dtype);
  const auto bias = random_values(static_cast<std::size_t>(n), dtype);
  const PackedPiece& piece = weight.piece();
  const std::size_t itemsize = dtype == DType::kFloat32 ? 4 : 2;
  std::vector<char> whole(static_cast<std::size_t>(m * n) * itemsize);
  check("packed_linear", set, static_cast<std::size_t>(m * n), dtype, [&](const Kernels& kernels, void* out) {
    kernels.packed_linear({x.data(), &piece, bias.data(), out, 1, m, n, k, k, dtype, dtype});
    std::memcpy(whole.data(), out, whole.size());
  });
  std::vector<char> alone(static_cast<std::size_t>(n) * itemsize);
  for (std::int64_t row = 0; row < m; ++row) {
    const char* own = x.data() + static_cast<std::size_t>(row * k) * itemsize;
    set.packed_linear({own, &piece, bias.data(), alone.data(), 1, 1, n, k, k, dtype, dtype});
    if (std::memcmp(alone.data(), whole.data() + static_cast<std::size_t>(row) * alone.size(), alone.size()) != 0) {
      std::printf("packed_linear: %s: a row depends on its batch (format %d)\n", set.isa, static_cast<int>(format));
      num_failures += 1;
      return;
    }
  }
  std::vector<std::int64_t> ids{n - 1, 0, n / 2};
  check("packed_rows", set, ids.size() * static_cast<std::size_t>(k), dtype, [&](const Kernels& kernels, void* out) {
    kernels.packed_rows({piece.data, ids.data(), out, 3, n, k, format, dtype});
  });
}

// What packed_linear of the same set says is highest, of the same bits.
void check_highest(const Kernels& set, PackedFormat format, DType dtype, std::int64_t m, std::int64_t n,
                   std::int64_t k) {
  const RandomWeight weight(format, n, k);
  const auto x = random_values(static_cast<std::size_t>(m * k), dtype);
  const PackedPiece& piece = weight.piece();
  const auto rows = static_cast<std::size_t>(m);
  std::vector<float> all(rows * static_cast<std::size_t>(n));
  set.packed_linear({x.data(), &piece, nullptr, all.data(), 1, m, n, k, k, dtype, DType::kFloat32});
  std::vector<std::int64_t> ids(rows, -1);
  std::vector<std::uint8_t> is_faulty(rows, 2);
  for (std::int64_t num_whole = 0; num_whole < 12; num_whole += 5) {
    std::int64_t wanted = num_whole;
    set.packed_highest({x.data(), &piece, ids.data(), is_faulty.data(), &wanted, m, k, k, dtype});
    for (std::size_t row = 0; row < rows; ++row) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(row) * n;
      const auto expected = std::max_element(first, first + n) - first;
      if (ids[row] != expected || is_faulty[row] != 0) {
        std::printf("packed_highest: %s: %d, not %d (format %d)\n", set.isa, static_cast<int>(ids[row]),
                    static_cast<int>(expected), static_cast<int>(format));
        num_failures += 1;
        return;
      }
    }
  }
}

// Every gate, biases, an expert without rows and one with more than a panel of them; each token alone as among others.
void check_experts(const Kernels& set, DType dtype, bool is_packed, ExpertGate gate, std::int64_t num_tokens) {
  constexpr std::int64_t kExperts = 4, kChosen = 2, kHidden = 96, kFf = 64, kFirst = 5;
  constexpr auto kFormat = PackedFormat::kQ5_1;
  const std::size_t item_size = dtype == DType::kFloat32 ? 4 : 2;
  std::vector<RandomWeight> packed;
  std::vector<std::vector<char>> numbers;
  std::vector<std::vector<PackedPiece>> pieces;
  const auto matrices = [&](std::int64_t num_outputs, std::int64_t num_inputs) {
    numbers.push_back(random_values(static_cast<std::size_t>(kExperts * num_outputs), dtype));
    ExpertMatrices result{nullptr, nullptr, numbers.back().data(), 1, num_outputs, num_inputs};
    if (!is_packed) {
      numbers.push_back(random_values(static_cast<std::size_t>(kExperts * num_outputs * num_inputs), dtype));
      result.weight = numbers.back().data();
      return result;
    }
    std::vector<PackedPiece> table;
    for (std::int64_t expert = 0; expert < kExperts; ++expert) {
      packed.emplace_back(kFormat, num_outputs, num_inputs);
      table.push_back(packed.back().piece());
    }
    pieces.push_back(table);
    result.pieces = pieces.back().data();
    return result;
  };
  const ExpertLayer layer{matrices(2 * kFf, kHidden),      matrices(kHidden, kFf), kFirst, kExperts, gate, 1.7F, 2.0F,
                          static_cast<std::int64_t>(dtype)};
  const auto x = random_values(static_cast<std::size_t>(num_tokens * kHidden), dtype);
  std::vector<std::int64_t> experts;
  std::vector<float> weights;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    experts.insert(experts.end(), {kFirst + (token % 5 == 0 ? 2 : 0), token % 3 == 0 ? kFirst - 1 : kFirst + 3});
    weights.insert(weights.end(), {0.0078125F, 0.0009765625F});  // what an expert gives is in the hundreds
  }
  const auto count = static_cast<std::size_t>(num_tokens * kHidden);
  std::vector<char> whole(count * item_size);
  check("experts", set, count, dtype, [&](const Kernels& kernels, void* out) {
    kernels.experts({&layer, x.data(), experts.data(), weights.data(), out, num_tokens, kChosen, kHidden});
    std::memcpy(whole.data(), out, whole.size());
  });
  std::vector<char> alone(whole.size());
  const auto row_size = static_cast<std::size_t>(kHidden) * item_size;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const std::size_t at = static_cast<std::size_t>(token) * row_size;
    set.experts({&layer, x.data() + at, experts.data() + token * kChosen, weights.data() + token * kChosen,
                 alone.data() + at, 1, kChosen, kHidden});
  }
  if (alone != whole) {
    std::printf("experts: %s: a token depends on its batch (packed %d)\n", set.isa, static_cast<int>(is_packed));
    num_failures += 1;
  }
}

constexpr float kSinks[] = {0.5F, -3.0F, 40.0F, -100.0F, 1.0F, 0.0F};  // one for each head

// Of queries, and of keys and values.
struct AttentionDTypes {
  DType dtype, page_dtype;
};

template <std::int64_t kKvHeads = 2>
void check_attention(const Kernels& set, AttentionDTypes dtypes, std::int64_t query_len, std::int64_t seq_len,
                     std::int64_t head_dim, std::int64_t window, const float* sinks = nullptr) {
  const auto [dtype, page_dtype] = dtypes;
  constexpr std::int64_t kHeads = 6, kBlock = 16;
  const std::int64_t num_pages = (seq_len + kBlock - 1) / kBlock;
  const auto q = random_values(static_cast<std::size_t>(query_len * kHeads * head_dim), dtype);
  const std::int64_t num_heads_kept = num_pages * kBlock * kKvHeads;
  const auto k = random_pages(num_heads_kept, head_dim, page_dtype);
  const auto v = random_pages(num_heads_kept, head_dim, page_dtype);
  std::vector<std::int32_t> table;
  for (std::int64_t page = num_pages; page > 0; --page) {
    table.push_back(static_cast<std::int32_t>(page - 1));
  }
  const std::int64_t page_dim = page_dtype == DType::kInt8 ? head_dim + 4 : head_dim;
  const std::int64_t slot = kKvHeads * page_dim;
  const std::int64_t item_size = dtype == DType::kFloat32 ? 4 : 2;
  const std::int64_t token_bytes = kHeads * head_dim * item_size;
  auto attend = [&](const Kernels& kernels, std::int64_t first, std::int64_t count, void* out) {
    const std::vector<std::int32_t> starts{0, static_cast<std::int32_t>(count)};
    const std::vector<std::int32_t> lens{static_cast<std::int32_t>(seq_len - query_len + first + count)};
    kernels.paged_attention({.q = q.data() + first * token_bytes,
                             .k_pages = k.data(),
                             .v_pages = v.data(),
                             .out = out,
                             .query_start = starts.data(),
                             .seq_lens = lens.data(),
                             .block_tables = table.data(),
                             .sinks = sinks,
                             .num_rows = 1,
                             .num_tokens = count,
                             .num_heads = kHeads,
                             .num_kv_heads = kKvHeads,
                             .head_dim = head_dim,
                             .block_size = kBlock,
                             .q_token_stride = kHeads * head_dim,
                             .q_head_stride = head_dim,
                             .k_page_stride = kBlock * slot,
                             .k_slot_stride = slot,
                             .k_head_stride = page_dim,
                             .v_page_stride = kBlock * slot,
                             .v_slot_stride = slot,
                             .v_head_stride = page_dim,
                             .table_stride = num_pages,
                             .scale = 0.2F,
                             .window = window,
                             .soft_cap = 0.0F,
                             .dtype = dtype,
                             .page_dtype = page_dtype});
  };
  const auto out_count = static_cast<std::size_t>(query_len * kHeads * head_dim);
  check("paged_attention", set, out_count, dtype,
        [&](const Kernels& kernels, void* out) { attend(kernels, 0, query_len, out); });
  // Many queries meet keys in another layout than one does.
  std::vector<char> whole(static_cast<std::size_t>(query_len * token_bytes));
  std::vector<char> alone(whole.size());
  attend(set, 0, query_len, whole.data());
  for (std::int64_t token = 0; token < query_len; ++token) {
    attend(set, token, 1, alone.data() + token * token_bytes);
  }
  if (std::memcmp(alone.data(), whole.data(), whole.size()) != 0) {
    std::printf("paged_attention: %s: a token depends on its chunk (head_dim %d)\n", set.isa,
                static_cast<int>(head_dim));
    num_failures += 1;
  }
}

// float32 in pages of bfloat16: the same bits from every set, and as numbers that lie between two are rounded.
void check_kv_write(const Kernels& set) {
  constexpr std::int64_t kHeadDim = 37;
  auto source = random_floats(2 * kHeadDim);
  const std::uint32_t bits[] = {0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFF800000, 0x80000001};
  const std::uint16_t rounded[] = {0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFF80, 0x8000};
  std::memcpy(source.data(), bits, sizeof(bits));
  const std::vector<std::int64_t> slots{5, 2};
  auto write = [&](const Kernels& kernels) {
    std::vector<std::uint16_t> pages(8 * kHeadDim);
    kernels.kv_write({source.data(), pages.data(), slots.data(), 2, 1, kHeadDim, 4, kHeadDim, kHeadDim, 4 * kHeadDim,
                      kHeadDim, kHeadDim, DType::kFloat32, DType::kBFloat16});
    return pages;
  };
  const auto pages = write(set);
  if (pages != write(portable_kernels()) || std::memcmp(pages.data() + 5 * kHeadDim, rounded, sizeof(rounded)) != 0) {
    std::printf("kv_write: %s rounds otherwise\n", set.isa);
    num_failures += 1;
  }
}

// Codes and scales: the same bits from every set; of halves the even code, zeros and NaN as such.
void check_codes(const Kernels& set) {
  constexpr std::int64_t kHeadDim = 21, kPageDim = kHeadDim + 4;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    auto source = random_values(4 * kHeadDim, dtype);
    auto fill = [&](std::int64_t head, std::int64_t first, std::int64_t count, float value) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      const std::uint16_t half = static_cast<std::uint16_t>(bits >> 16);
      for (std::int64_t i = head * kHeadDim + first; i < head * kHeadDim + first + count; ++i) {
        dtype == DType::kFloat32 ? std::memcpy(source.data() + 4 * i, &value, 4)
                                 : std::memcpy(source.data() + 2 * i, &half, 2);
      }
    };
    fill(0, 0, kHeadDim, 2.5F);
    fill(0, 1, 1, -3.5F);
    fill(0, kHeadDim - 1, 1, 127.0F);
    fill(1, 0, kHeadDim, 0.0F);
    fill(2, 20, 1, NAN);
    const std::vector<std::int64_t> slots{3, 0, 1, 2};
    auto write = [&](const Kernels& kernels) {
      std::vector<std::int8_t> pages(4 * kPageDim);
      kernels.kv_write({source.data(), pages.data(), slots.data(), 4, 1, kHeadDim, 4, kHeadDim, kHeadDim, 0, kPageDim,
                        kPageDim, dtype, DType::kInt8});
      return pages;
    };
    const auto pages = write(set);
    auto scale = [&](std::int64_t slot) {
      float value = 0.0F;
      std::memcpy(&value, pages.data() + slot * kPageDim + kHeadDim, sizeof(value));
      return value;
    };
    const std::int8_t* halves = pages.data() + 3 * kPageDim;
    const bool is_even = halves[0] == 2 && halves[1] == -4 && halves[kHeadDim - 1] == 127 && scale(3) == 1.0F;
    const std::vector<std::int8_t> zeros(kPageDim);
    const bool has_zeros = std::memcmp(pages.data(), zeros.data(), kPageDim) == 0;
    if (pages != write(portable_kernels()) || !is_even || !has_zeros || !std::isnan(scale(1))) {
      std::printf("kv_write: %s has other codes\n", set.isa);
      num_failures += 1;
    }
  }
}

// Open, filtered and greedy rows; of two scores as near as rounding either may win, which these are not.
void check_sampling(const Kernels& set, std::int64_t rows, std::int64_t size) {
  const auto count = static_cast<std::size_t>(rows);
  const auto logits = random_floats(count * static_cast<std::size_t>(size));
  std::vector<float> temperatures;
  std::vector<float> top_ps;
  std::vector<float> min_ps;
  std::vector<std::int64_t> top_ks;
  std::vector<std::int64_t> seeds;
  for (std::int64_t row = 0; row < rows; ++row) {
    temperatures.push_back(row % 7 == 6 ? 0.0F : 0.8F);
    top_ps.push_back(row % 3 == 1 ? 0.9F : 1.0F);
    min_ps.push_back(row % 5 == 2 ? 0.1F : 0.0F);
    top_ks.push_back(row % 4 == 3 ? 9 : 0);
    seeds.push_back(row * 7919 - 5);
  }
  std::vector<std::int64_t> expected(count, -1);
  std::vector<std::int64_t> actual = expected;
  std::vector<std::uint8_t> is_faulty(count);
  SamplingArgs args{};
  args.logits = logits.data();
  args.is_faulty = is_faulty.data();
  args.num_rows = rows;
  args.size = size;
  args.stride = size;
  args.temperatures = temperatures.data();
  args.seeds = args.positions = seeds.data();
  args.top_ks = top_ks.data();
  args.top_ps = top_ps.data();
  args.min_ps = min_ps.data();
  args.token_ids = expected.data();
  portable_kernels().sampling(args);
  args.token_ids = actual.data();
  set.sampling(args);
  if (actual != expected) {
    std::printf("FAILED %s sampling of %d x %d\n", set.isa, static_cast<int>(rows), static_cast<int>(size));
    ++num_failures;
  }
}

void check_elementwise(const Kernels& set, DType dtype, std::int64_t rows, std::int64_t size) {
  const auto count = static_cast<std::size_t>(rows * size);
  const auto x = random_values(2 * count, dtype);
  const auto weight = random_values(static_cast<std::size_t>(size), dtype);
  check("rms_norm", set, count, dtype, [&](const Kernels& kernels, void* out) {
    kernels.rms_norm({x.data(), weight.data(), nullptr, out, rows, 1, size, size, 0, 0, 1e-6F, 1.0F, dtype});
  });
  for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
    check("gated", set, count, dtype, [&](const Kernels& kernels, void* out) {
      kernels.gated({x.data(), out, rows, size, 2 * size, activation, dtype});
    });
  }
  const std::int64_t rotary_dim = size / 2 * 2;
  const auto table = random_floats(static_cast<std::size_t>(rows * rotary_dim));
  std::vector<std::int64_t> positions;
  for (std::int64_t row = rows; row > 0; --row) {
    positions.push_back(row - 1);
  }
  for (const bool is_interleaved : {false, true}) {
    check("rotary", set, count, dtype, [&](const Kernels& kernels, void* out) {
      std::memcpy(out, x.data(), count * (dtype == DType::kFloat32 ? 4 : 2));
      kernels.rotary(
          {out, positions.data(), table.data(), rows, 1, rotary_dim, size, size, rotary_dim, is_interleaved, dtype});
    });
  }
}

void check_set(const Kernels& set) {
  for (const std::int64_t size : {1, 7, 64, 577, 20000}) {
    check_sampling(set, 1, size);
    check_sampling(set, 40, size);
  }
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t rows : {1, 2, 3, 5, 17, 100}) {
      for (const std::int64_t inputs : {1, 15, 64, 577, 1100}) {
        check_linear(set, dtype, rows, 37, inputs);
      }
      for (const std::int64_t size : {2, 7, 33, 576}) {
        check_elementwise(set, dtype, rows, size);
      }
    }
    for (std::int64_t format = 0; format < kNumPackedFormats; ++format) {
      for (const std::int64_t rows : {1, 3, 4, 7, 140}) {
        check_packed(set, PackedFormat(format), dtype, rows, 37, 768);
        if (format >= static_cast<std::int64_t>(PackedFormat::kQ8_0Planes)) {
          check_highest(set, PackedFormat(format), dtype, rows, 999, 768);
        }
      }
    }
  }
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const ExpertGate gate : {ExpertGate::kSilu, ExpertGate::kGeluTanh, ExpertGate::kClampedSwiglu}) {
      for (const std::int64_t num_tokens : {1, 2, 9, 200}) {
        check_experts(set, dtype, false, gate, num_tokens);
        check_experts(set, dtype, true, gate, num_tokens);
      }
    }
  }
  for (const AttentionDTypes dtypes : {AttentionDTypes{DType::kFloat32, DType::kFloat32},
                                       {DType::kFloat32, DType::kBFloat16},
                                       {DType::kFloat32, DType::kInt8},
                                       {DType::kBFloat16, DType::kBFloat16},
                                       {DType::kBFloat16, DType::kInt8}}) {
    for (const std::int64_t head_dim : {20, 64, 128, 256}) {
      check_attention(set, dtypes, 1, 1300, head_dim, 0);
      check_attention(set, dtypes, 40, 70, head_dim, 0);
      check_attention(set, dtypes, 20, 700, head_dim, 50);
      check_attention(set, dtypes, 3, 40, head_dim, 0, kSinks);
      check_attention<1>(set, dtypes, 3, 300, head_dim, 0);
      check_attention<3>(set, dtypes, 3, 300, head_dim, 0);
      check_attention<6>(set, dtypes, 3, 300, head_dim, 0);
    }
  }
  check_kv_write(set);
  check_codes(set);
  std::printf("%s: compared with portable\n", set.isa);
}

}  // namespace
}  // namespace tokenspeed::cpu

int main() {
  using namespace tokenspeed::cpu;  // NOLINT: a test program
  for (const Kernels& set : kernel_sets()) {
    check_set(set);
  }
  return num_failures == 0 ? 0 : 1;
}
