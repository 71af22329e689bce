// SPDX-License-Identifier: Apache-2.0
// The feed-forward blocks of experts. Pairs of a token and an expert are sorted by expert, so that all rows of an
// expert meet its matrices together, and a product of all experts is one loop, an item of which is some outputs of one
// of them. What is computed of a row is what linear_body.h, packed_body.h and elementwise_body.h compute, to the same
// bits.
#pragma once

#include "elementwise_body.h"
#include "linear_body.h"
#include "packed_body.h"

namespace tokenspeed::cpu {
namespace {

// Scratch of the caller while other kernels' loops use 0 and 2: rows of activations, and all else; of every thread: a
// row between both products.
constexpr int kExpertInputsSlot = 1;
constexpr int kExpertsSlot = 3;
constexpr int kGatedRowSlot = 4;

constexpr std::int64_t kExpertBytesMax = 128 << 20;  // between the products; of more tokens some come after the others

// Rows of one expert, which are the first ... of all that are sorted.
struct ExpertRows {
  std::int64_t expert, first, count;
};

// Who computes what. tokens, group_of: of each row. rows: of each pair, or -1 where its expert is not here.
struct ExpertPlan {
  ExpertRows* groups;
  std::int64_t* tokens;
  std::int64_t* group_of;
  std::int64_t* rows;
  std::int64_t num_groups, num_rows, most_rows;
};

// Rows of an expert are in the order of the tokens.
TOKENSPEED_INLINE void sort_pairs(const ExpertsArgs& args, ExpertPlan& plan) {
  const ExpertLayer& layer = *args.layer;
  const std::int64_t num_pairs = args.num_tokens * args.num_chosen;
  const auto is_here = [&](std::int64_t expert) { return expert >= 0 && expert < layer.num_experts; };
  for (std::int64_t expert = 0; expert < layer.num_experts; ++expert) {
    plan.groups[expert] = {expert, 0, 0};
  }
  for (std::int64_t pair = 0; pair < num_pairs; ++pair) {
    const std::int64_t expert = args.experts[pair] - layer.first_expert;
    if (is_here(expert)) {
      plan.groups[expert].count += 1;
    }
  }
  for (std::int64_t expert = 0; expert < layer.num_experts; ++expert) {
    ExpertRows& group = plan.groups[expert];
    group.first = plan.num_rows;
    plan.num_rows += group.count;
    plan.most_rows = plan.most_rows > group.count ? plan.most_rows : group.count;
    group.count = 0;
  }
  for (std::int64_t pair = 0; pair < num_pairs; ++pair) {
    const std::int64_t expert = args.experts[pair] - layer.first_expert;
    plan.rows[pair] = -1;
    if (is_here(expert)) {
      ExpertRows& group = plan.groups[expert];
      plan.rows[pair] = group.first + group.count;
      plan.tokens[plan.rows[pair]] = pair / args.num_chosen;
      group.count += 1;
    }
  }
  for (std::int64_t expert = 0; expert < layer.num_experts; ++expert) {
    const ExpertRows group = plan.groups[expert];
    for (std::int64_t row = group.first; row < group.first + group.count; ++row) {
      plan.group_of[row] = plan.num_groups;
    }
    if (group.count > 0) {
      plan.groups[plan.num_groups] = group;
      plan.num_groups += 1;
    }
  }
}

// The last of `count` numbers, in order, that is not above `item`.
TOKENSPEED_INLINE std::int64_t group_at(const std::int64_t* firsts, std::int64_t count, std::int64_t item) {
  std::int64_t low = 0;
  for (std::int64_t high = count; high - low > 1;) {
    const std::int64_t middle = (low + high) / 2;
    (firsts[middle] <= item ? low : high) = middle;
  }
  return low;
}

TOKENSPEED_INLINE std::int64_t aligned(std::int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

// Where a product's results go: rows in the order of the plan, contiguous.
struct ExpertOut {
  void* data;
  DType dtype;
};

// What belongs to one expert, and to its rows, of a product.
template <typename T>
struct ExpertPart {
  const ExpertMatrices& matrices;
  const ExpertRows& group;
  const ExpertOut& out;

  [[nodiscard]] const void* bias() const {
    return matrices.bias == nullptr ? nullptr
                                    : static_cast<const T*>(matrices.bias) + group.expert * matrices.num_outputs;
  }

  [[nodiscard]] void* results() const {
    const std::int64_t item_size = out.dtype == DType::kFloat32 ? 4 : 2;
    return static_cast<std::byte*>(out.data) + group.first * matrices.num_outputs * item_size;
  }

  [[nodiscard]] static DType dtype() { return sizeof(T) == sizeof(float) ? DType::kFloat32 : DType::kBFloat16; }
};

// Calls of packed_linear, one an expert, whose items are those of one loop.
struct PackedGroups : BackupTask {
  PackedJob* jobs;
  std::int64_t* firsts;
  std::int64_t num_jobs;

  template <typename Use>
  void with_job(std::int64_t item, Use use) const {
    const std::int64_t index = group_at(firsts, num_jobs, item);
    use(jobs[index], item - firsts[index]);
  }
};

TOKENSPEED_INLINE PackedGroups packed_groups(std::byte* memory, std::int64_t num_jobs) {
  PackedGroups groups{{[](const BackupTask& own, std::int64_t item, float* result) {
                         static_cast<const PackedGroups&>(own).with_job(
                             item, [&](const PackedJob& job, std::int64_t place) { job.compute(place, result); });
                       },
                       [](const BackupTask& own, std::int64_t item, const float* result) {
                         static_cast<const PackedGroups&>(own).with_job(
                             item, [&](const PackedJob& job, std::int64_t place) { job.commit(place, result); });
                       },
                       0, 0},
                      nullptr,
                      nullptr,
                      num_jobs};
  groups.jobs = reinterpret_cast<PackedJob*>(memory);
  groups.firsts = reinterpret_cast<std::int64_t*>(groups.jobs + num_jobs);
  return groups;
}

// Where every expert has few rows, late threads are not waited for: what they read is in lasting memory.
template <typename T, typename Read>
void multiply_packed(const ExpertPlan& plan, const ExpertMatrices& matrices, const ExpertOut& out, Read read) {
  const auto job_of = [&](const ExpertRows& group, std::int64_t& num_blocks) {
    const ExpertPart<T> part{matrices, group, out};
    const PackedLinearArgs args{nullptr,
                                matrices.pieces + group.expert * matrices.num_pieces,
                                part.bias(),
                                part.results(),
                                matrices.num_pieces,
                                group.count,
                                matrices.num_outputs,
                                matrices.num_inputs,
                                0,
                                part.dtype(),
                                out.dtype};
    return PackedJob{args, shape_of(args, num_blocks), {}, 0, 1, 0};
  };
  std::int64_t all_blocks = 0;
  for (std::int64_t index = 0; index < plan.num_groups; ++index) {
    std::int64_t num_blocks = 0;
    job_of(plan.groups[index], num_blocks);
    all_blocks += num_blocks;
  }
  constexpr auto kTaskBytes = (static_cast<std::int64_t>(sizeof(PackedGroups)) + 63) / 64 * 64;
  const std::int64_t job_bytes =
      aligned(plan.num_groups * static_cast<std::int64_t>(sizeof(PackedJob) + sizeof(std::int64_t)));
  const auto num_bytes =
      static_cast<std::size_t>(kTaskBytes + job_bytes) + static_cast<std::size_t>(all_blocks) * kBytesABlock;
  const bool is_few = plan.most_rows <= kFewRows;
  std::byte* memory =
      is_few
          ? lasting_memory(num_bytes)
          : reinterpret_cast<std::byte*>(scratch(kExpertInputsSlot, (num_bytes + sizeof(float) - 1) / sizeof(float)));
  auto* task = reinterpret_cast<PackedGroups*>(memory);
  *task = packed_groups(memory + kTaskBytes, plan.num_groups);
  std::byte* inputs = memory + kTaskBytes + job_bytes;
  std::int64_t most_results = 0;
  for (std::int64_t index = 0; index < plan.num_groups; ++index) {
    PackedJob& job = task->jobs[index];
    std::int64_t num_blocks = 0;
    job = job_of(plan.groups[index], num_blocks);
    place_rows(inputs, num_blocks, job.rows);
    inputs += static_cast<std::size_t>(num_blocks) * kBytesABlock;
    share_out(job, plan.num_groups);
    task->firsts[index] = task->count;
    task->count += job.num_items;
    const std::int64_t num_results = job.most_tiles_an_item * job.args.num_rows * kTileRows;
    most_results = job.args.num_rows <= kFewRows && num_results > most_results ? num_results : most_results;
  }
  task->num_result_floats = static_cast<std::size_t>(most_results);
  for_rows(plan.num_rows, matrices.num_inputs, [&](std::int64_t row) {
    const std::int64_t index = plan.group_of[row];
    quantize_row(read(row), matrices.num_inputs / kBlockInputs, task->jobs[index].rows, row - plan.groups[index].first);
  });
  if (is_few) {
    parallel_with_backup(*task);
    return;
  }
  auto some = [&](std::int64_t item) {
    task->with_job(item, [&](const PackedJob& job, std::int64_t place) {
      if (job.args.num_rows > kFewRows) {
        job(place);
      } else {
        float* results = scratch(0, task->num_result_floats);
        job.compute(place, results);
        job.commit(place, results);
      }
    });
  };
  parallel(task->count, some);
}

// A row as floats, as Unpack<T> has them.
TOKENSPEED_INLINE void widen_row(const float* source, std::int64_t size, float* target) {
  __builtin_memcpy(target, source, static_cast<std::size_t>(size) * sizeof(float));
}

TOKENSPEED_INLINE void widen_row(const Bf16* source, std::int64_t size, float* target) {
  unpack_row(source, size, target);
}

template <typename T, typename Read>
void multiply_numbers(const ExpertPlan& plan, const ExpertMatrices& matrices, const ExpertOut& out, Read read) {
  const std::int64_t num_inputs = matrices.num_inputs;
  const std::int64_t num_outputs = matrices.num_outputs;
  constexpr std::int64_t kStep = Unpack<T>::kStep;
  const std::int64_t stride = sizeof(T) == sizeof(float) ? num_inputs : (num_inputs + kStep - 1) / kStep * kStep;
  const std::int64_t arg_bytes =
      aligned(plan.num_groups * static_cast<std::int64_t>(sizeof(LinearArgs) + sizeof(std::int64_t)));
  float* memory = scratch(kExpertInputsSlot, static_cast<std::size_t>(arg_bytes / 4 + plan.num_rows * stride));
  auto* calls = reinterpret_cast<LinearArgs*>(memory);
  auto* firsts = reinterpret_cast<std::int64_t*>(calls + plan.num_groups);
  float* inputs = memory + arg_bytes / 4;
  std::int64_t num_items = 0;
  for (std::int64_t index = 0; index < plan.num_groups; ++index) {
    const ExpertRows& group = plan.groups[index];
    const ExpertPart<T> part{matrices, group, out};
    calls[index] = {inputs + group.first * stride,
                    static_cast<const T*>(matrices.weight) + group.expert * num_outputs * num_inputs,
                    part.bias(),
                    part.results(),
                    group.count,
                    num_outputs,
                    num_inputs,
                    stride,
                    num_inputs,
                    part.dtype(),
                    out.dtype};
    firsts[index] = num_items;
    num_items += num_linear_items(calls[index]);
  }
  for_rows(plan.num_rows, num_inputs,
           [&](std::int64_t row) { widen_row(read(row), num_inputs, inputs + row * stride); });
  auto some = [&](std::int64_t item) {
    const std::int64_t index = group_at(firsts, plan.num_groups, item);
    const LinearArgs& call = calls[index];
    linear_job<T>(call, static_cast<const float*>(call.x), stride)(item - firsts[index]);
  };
  parallel(num_items, some);
}

// Gate and up stand in turn; what is not a number stays so.
template <typename T>
__attribute__((noinline)) void clamped_row(const ExpertLayer& layer, const T* x, std::int64_t size, T* out) {
  for_vectors(size, [&](std::int64_t i, int count) {
    T gates[kLanes] = {};
    T ups[kLanes] = {};
    for (int lane = 0; lane < count; ++lane) {
      gates[lane] = x[2 * (i + lane)];
      ups[lane] = x[2 * (i + lane) + 1];
    }
    const Vec limit = splat(layer.limit);
    Vec gate = load(gates);
    Vec up = load(ups);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    store_upto(out + i, gate / (exp(gate * -layer.alpha) + 1.0F) * (up + 1.0F), count);
  });
}

// Some tokens of a call. gate_up: of each row. branches: what each row comes to.
template <typename T>
struct ExpertsRun {
  const ExpertsArgs& args;
  ExpertPlan plan;
  T* gate_up;
  float* branches;

  template <typename Read>
  void multiply(const ExpertMatrices& matrices, const ExpertOut& out, Read read) const {
    matrices.pieces != nullptr ? multiply_packed<T>(plan, matrices, out, read)
                               : multiply_numbers<T>(plan, matrices, out, read);
  }

  const T* gated(std::int64_t row) const {
    const ExpertLayer& layer = *args.layer;
    const std::int64_t size = layer.down.num_inputs;
    const T* x = gate_up + row * 2 * size;
    T* out = reinterpret_cast<T*>(scratch(kGatedRowSlot, static_cast<std::size_t>(size)));
    if (layer.gate == ExpertGate::kClampedSwiglu) {
      clamped_row(layer, x, size, out);
    } else {
      gated_row(layer.gate == ExpertGate::kSilu ? Activation::kSilu : Activation::kGeluTanh, x, size, out);
    }
    return out;
  }

  void add_up() const {
    const std::int64_t size = args.layer->down.num_outputs;
    for_rows(args.num_tokens, args.num_chosen * size, [&](std::int64_t token) {
      const std::int64_t first = token * args.num_chosen;
      for_vectors(size, [&](std::int64_t i, int count) {
        Vec sum = {};
        for (std::int64_t pair = first; pair < first + args.num_chosen; ++pair) {
          if (plan.rows[pair] >= 0) {
            sum = multiply_add(load_upto(branches + plan.rows[pair] * size + i, count), splat(args.weights[pair]), sum);
          }
        }
        store_upto(static_cast<T*>(args.out) + token * size + i, sum, count);
      });
    });
  }

  void run() const {
    const ExpertLayer& layer = *args.layer;
    if (plan.num_rows > 0) {
      const auto* x = static_cast<const T*>(args.x);
      multiply(layer.gate_up, {gate_up, ExpertPart<T>::dtype()},
               [&](std::int64_t row) { return x + plan.tokens[row] * args.x_stride; });
      multiply(layer.down, {branches, DType::kFloat32}, [&](std::int64_t row) { return gated(row); });
    }
    add_up();
  }
};

template <typename T>
void experts_of(const ExpertsArgs& args) {
  const ExpertLayer& layer = *args.layer;
  const std::int64_t num_pairs = args.num_tokens * args.num_chosen;
  const std::int64_t group_bytes = aligned(layer.num_experts * static_cast<std::int64_t>(sizeof(ExpertRows)));
  const std::int64_t number_bytes = aligned(num_pairs * 8);
  const std::int64_t gate_up_bytes = aligned(num_pairs * layer.gate_up.num_outputs * std::int64_t{sizeof(T)});
  const std::int64_t branch_bytes = num_pairs * layer.down.num_outputs * 4;
  const std::int64_t num_bytes = group_bytes + 3 * number_bytes + gate_up_bytes + branch_bytes;
  auto* memory = reinterpret_cast<std::byte*>(scratch(kExpertsSlot, static_cast<std::size_t>(num_bytes / 4)));
  auto take = [&](std::int64_t size) {
    std::byte* taken = memory;
    memory += size;
    return taken;
  };
  ExpertPlan plan{};
  plan.groups = reinterpret_cast<ExpertRows*>(take(group_bytes));
  plan.tokens = reinterpret_cast<std::int64_t*>(take(number_bytes));
  plan.group_of = reinterpret_cast<std::int64_t*>(take(number_bytes));
  plan.rows = reinterpret_cast<std::int64_t*>(take(number_bytes));
  sort_pairs(args, plan);
  auto* gate_up = reinterpret_cast<T*>(take(gate_up_bytes));
  ExpertsRun<T>{args, plan, gate_up, reinterpret_cast<float*>(memory)}.run();
}

void experts(const ExpertsArgs& args) {
  const ExpertLayer& layer = *args.layer;
  const bool is_float = layer.dtype == static_cast<std::int64_t>(DType::kFloat32);
  const std::int64_t item_size = is_float ? 4 : 2;
  const std::int64_t row_bytes = layer.gate_up.num_outputs * item_size + (layer.gate_up.num_inputs * 2) * 4;
  const std::int64_t most = kExpertBytesMax / (args.num_chosen * row_bytes) + 1;
  const std::int64_t num_parts = (args.num_tokens + most - 1) / most;
  const LateScope scope;
  for (std::int64_t part = 0; part < num_parts; ++part) {
    const std::int64_t first = args.num_tokens * part / num_parts;
    ExpertsArgs some = args;
    some.x = static_cast<const std::byte*>(args.x) + first * args.x_stride * item_size;
    some.experts = args.experts + first * args.num_chosen;
    some.weights = args.weights + first * args.num_chosen;
    some.out = static_cast<std::byte*>(args.out) + first * layer.down.num_outputs * item_size;
    some.num_tokens = args.num_tokens * (part + 1) / num_parts - first;
    is_float ? experts_of<float>(some) : experts_of<Bf16>(some);
  }
}

}  // namespace
}  // namespace tokenspeed::cpu
