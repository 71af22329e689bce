// SPDX-License-Identifier: Apache-2.0
// Carries calls and arrays between Python and the scheduler. Decides nothing.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "check.h"
#include "event.h"
#include "plan.h"
#include "scheduler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tokenspeed::control {
namespace {

// Taken as it is: an array of another type would be cast in silence.
using Int32Input = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::int32_t> span_of(const Int32Input& array) { return {array.data(), array.size()}; }

// The memory of an int32 array that is contiguous. Asked for by itself where it is asked for in every step: a caster
// goes a longer way, which is cold by then.
class Int32Values {
 public:
  Int32Values(nb::handle array, const char* name) {
    if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_ND | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      throw nb::type_error(name);
    }
    if (buffer_.ndim != 1 || buffer_.itemsize != sizeof(std::int32_t) || std::string_view(buffer_.format) != "i") {
      PyBuffer_Release(&buffer_);
      throw nb::type_error(name);
    }
  }
  ~Int32Values() { PyBuffer_Release(&buffer_); }
  Int32Values(const Int32Values&) = delete;
  Int32Values& operator=(const Int32Values&) = delete;

  [[nodiscard]] std::span<const std::int32_t> values() const {
    return {static_cast<const std::int32_t*>(buffer_.buf), static_cast<std::size_t>(buffer_.shape[0])};
  }

 private:
  Py_buffer buffer_{};
};

template <std::size_t Width>
nb::object view(FlatBuffer<Width>& buffer, nb::handle owner, nb::handle nothing) {
  if (buffer.num_rows() == 0) {
    return nb::borrow(nothing);
  }
  if constexpr (Width == 1) {
    return nb::cast(nb::ndarray<nb::numpy, std::int32_t>(buffer.data(), {buffer.num_rows()}, owner));
  } else {
    return nb::cast(nb::ndarray<nb::numpy, std::int32_t>(buffer.data(), {buffer.num_rows(), Width}, owner));
  }
}

nb::tuple plan_tuple(StepPlan& plan, nb::handle owner, const nb::tuple& nothing) {
  return nb::make_tuple(plan.step_id.value(), view(plan.rows, owner, nothing[0]),
                        view(plan.token_ids, owner, nothing[1]), view(plan.seated, owner, nothing[2]),
                        view(plan.page_delta, owner, nothing[3]), view(plan.zero, owner, nothing[4]),
                        view(plan.copy, owner, nothing[5]), view(plan.load, owner, nothing[6]),
                        view(plan.store, owner, nothing[7]));
}

// nothing: what stands for each array that has no rows. Most have none, and to make one takes longer than to plan.
nb::object next_plan(nb::handle_t<Scheduler> self, const nb::tuple& nothing) {
  auto& scheduler = nb::cast<Scheduler&>(self);
  StepPlan* plan = nullptr;
  {
    const nb::gil_scoped_release release;
    plan = scheduler.next_plan();
  }
  return plan == nullptr ? nb::none() : nb::object(plan_tuple(*plan, self, nothing));
}

void advance(Scheduler& scheduler, std::int64_t step_id, nb::handle accepted_offsets, nb::handle token_ids,
             nb::handle row_faults, bool fault) {
  const Int32Values offsets(accepted_offsets, "accepted_offsets is no contiguous int32 array of one dimension");
  const Int32Values tokens(token_ids, "token_ids is no contiguous int32 array of one dimension");
  const Int32Values faults(row_faults, "row_faults is no contiguous int32 array of one dimension");
  const StepResult result{.step_id = StepId(step_id),
                          .accepted_offsets = offsets.values(),
                          .token_ids = tokens.values(),
                          .row_faults = faults.values(),
                          .fault = fault};
  const nb::gil_scoped_release release;
  scheduler.advance(result);
}

nb::list apply(Scheduler& scheduler, std::optional<std::int64_t> now_ms) {
  if (now_ms) {
    scheduler.enqueue(Tick{.now_ms = *now_ms});
  }
  std::vector<Refusal> refusals;
  {
    const nb::gil_scoped_release release;
    refusals = scheduler.apply();
  }
  nb::list rows;
  for (const Refusal& refusal : refusals) {
    rows.append(
        nb::make_tuple(refusal.key.index, refusal.key.generation, refusal.needed.value(), refusal.capacity.value()));
  }
  return rows;
}

// (start, length, hash high, hash low)
using SpanTuple = std::tuple<std::int64_t, std::int64_t, std::uint64_t, std::uint64_t>;
// (session, ttl_ms, priority)
using RetentionTuple = std::tuple<std::string, std::int64_t, std::int32_t>;

struct Wishes {
  std::string adapter;
  std::vector<SpanTuple> spans;
  std::optional<RetentionTuple> retain;
  std::optional<std::int64_t> deadline_ms;
  std::int32_t draft_width = 0;
  std::optional<std::int32_t> partition_hint;
};

void set_wishes(Submit& event, const Wishes& wishes) {
  event.adapter = wishes.adapter;
  for (const auto& [start, length, high, low] : wishes.spans) {
    event.spans.push_back(
        ContentSpan{.start = Tokens(start), .length = Tokens(length), .hash_high = high, .hash_low = low});
  }
  if (wishes.retain) {
    const auto& [session, ttl_ms, priority] = *wishes.retain;
    event.retain = Retention{.session = session, .ttl_ms = ttl_ms, .priority = priority};
  }
  event.deadline_ms = wishes.deadline_ms;
  event.draft_width = wishes.draft_width;
  event.partition_hint = wishes.partition_hint;
}

void submit(Scheduler& scheduler, std::int32_t index, std::int32_t generation, const Int32Input& token_ids,
            std::int64_t max_new_tokens, std::int64_t min_new_tokens, const std::vector<std::int32_t>& end_token_ids,
            std::int32_t priority, const std::string& name_space, std::optional<std::int64_t> match_limit,
            const std::string& adapter, const std::vector<SpanTuple>& spans, std::optional<RetentionTuple> retain,
            std::optional<std::int64_t> deadline_ms, std::int32_t draft_width,
            std::optional<std::int32_t> partition_hint) {
  const std::span<const std::int32_t> tokens = span_of(token_ids);
  Submit event;
  event.key = RequestKey{.index = index, .generation = generation};
  event.token_ids.assign(tokens.begin(), tokens.end());
  event.max_new_tokens = Tokens(max_new_tokens);
  event.min_new_tokens = Tokens(min_new_tokens);
  event.end_token_ids = end_token_ids;
  event.priority = priority;
  event.name_space = name_space;
  if (match_limit) {
    event.match_limit = Tokens(*match_limit);
  }
  set_wishes(event, Wishes{.adapter = adapter,
                           .spans = spans,
                           .retain = std::move(retain),
                           .deadline_ms = deadline_ms,
                           .draft_width = draft_width,
                           .partition_hint = partition_hint});
  scheduler.enqueue(std::move(event));
}

// Copies: events are few and whoever takes them keeps them.
template <class T>
nb::object copied(const std::vector<T>& values, std::size_t width) {
  auto* data = new std::vector<T>(values);
  nb::capsule owner(data, [](void* held) noexcept { delete static_cast<std::vector<T>*>(held); });
  if (width == 1) {
    return nb::cast(nb::ndarray<nb::numpy, T>(data->data(), {data->size()}, owner));
  }
  return nb::cast(nb::ndarray<nb::numpy, T>(data->data(), {data->size() / width, width}, owner));
}

constexpr std::size_t kEventWidth = 5;

nb::tuple take_events(Scheduler& scheduler) {
  const SequenceEvents& events = scheduler.take_events();
  nb::list rows;
  for (std::size_t at = 0; at < events.rows.size(); at += kEventWidth) {
    const std::int32_t* row = events.rows.data() + at;
    rows.append(nb::make_tuple(row[0], row[1], row[2], row[3], row[4]));
  }
  nb::list token_ids;
  for (const std::int32_t token_id : events.token_ids) {
    token_ids.append(token_id);
  }
  return nb::make_tuple(rows, token_ids);
}

nb::tuple take_kv_events(Scheduler& scheduler) {
  const KvEvents& events = scheduler.take_kv_events();
  return nb::make_tuple(copied(events.rows, KvEvents::kWidth), copied(events.token_ids, 1));
}

nb::tuple stats(const Scheduler& scheduler) {
  const Stats stats = scheduler.stats();
  return nb::make_tuple(stats.num_running, stats.num_waiting, stats.num_held, stats.used_blocks, stats.cached_blocks,
                        stats.total_blocks, stats.num_preemptions, stats.prefix_query_tokens, stats.prefix_hit_tokens,
                        stats.prompt_tokens, stats.generated_tokens, stats.num_steps, stats.host_used_blocks,
                        stats.host_total_blocks, stats.loaded_tokens, stats.stored_blocks, stats.num_transfers);
}

RequestKey key_of(std::int32_t index, std::int32_t generation) {
  return RequestKey{.index = index, .generation = generation};
}

// (kind, block_size, num_blocks, num_host_blocks, window)
using GroupTuple = std::tuple<std::int32_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

void construct(Scheduler* self, const std::vector<GroupTuple>& groups, std::int32_t num_partitions,
               std::int32_t max_num_seqs, std::int64_t max_num_batched_tokens,
               std::optional<std::int64_t> max_num_mixed_prefill_tokens, std::optional<std::int64_t> mixed_step_unit,
               std::int64_t max_model_len, std::int64_t ageing_steps, bool prefix_caching, std::int32_t host_store,
               bool kv_events) {
  Config config;
  for (const auto& [kind, block_size, num_blocks, num_host_blocks, window] : groups) {
    config.groups.push_back(GroupSpec{.kind = static_cast<GroupKind>(kind),
                                      .block_size = Tokens(block_size),
                                      .num_blocks = Blocks(num_blocks),
                                      .num_host_blocks = Blocks(num_host_blocks),
                                      .window = Tokens(window)});
  }
  config.num_partitions = num_partitions;
  config.max_num_seqs = max_num_seqs;
  config.max_num_batched_tokens = max_num_batched_tokens;
  config.max_num_mixed_prefill_tokens = max_num_mixed_prefill_tokens;
  config.mixed_step_unit = mixed_step_unit;
  config.max_model_len = max_model_len;
  config.ageing_steps = ageing_steps;
  config.prefix_caching = prefix_caching;
  config.host_store = static_cast<HostStore>(host_store);
  config.kv_events = kv_events;
  new (self) Scheduler(config);
}

void bind(nb::module_& module) {
  module.doc() = "The control plane's state machine.";
  // Both an AssertionError (a bug, not a user's mistake) and a RuntimeError (survives `python -O` conventions).
  const nb::tuple bases = nb::make_tuple(nb::handle(PyExc_AssertionError), nb::handle(PyExc_RuntimeError));
  nb::exception<CheckError>(module, "CheckError", bases);

  nb::class_<Scheduler>(module, "Scheduler")
      .def("__init__", &construct, nb::kw_only(), "groups"_a, "num_partitions"_a, "max_num_seqs"_a,
           "max_num_batched_tokens"_a, "max_num_mixed_prefill_tokens"_a.none(), "mixed_step_unit"_a.none(),
           "max_model_len"_a, "ageing_steps"_a, "prefix_caching"_a, "host_store"_a, "kv_events"_a)
      .def("submit", &submit, "index"_a, "generation"_a, "token_ids"_a.noconvert(), "max_new_tokens"_a,
           "min_new_tokens"_a, "end_token_ids"_a, "priority"_a, "namespace"_a, "match_limit"_a.none(), "adapter"_a,
           "spans"_a, "retain"_a.none(), "deadline_ms"_a.none(), "draft_width"_a, "partition_hint"_a.none())
      .def("cancel", [](Scheduler& self, std::int32_t index,
                        std::int32_t generation) { self.enqueue(Cancel{.key = key_of(index, generation)}); })
      .def("finish",
           [](Scheduler& self, std::int32_t index, std::int32_t generation, std::int64_t keep_tokens) {
             self.enqueue(Finish{.key = key_of(index, generation), .keep_tokens = Tokens(keep_tokens)});
           })
      .def("retain",
           [](Scheduler& self, std::int32_t index, std::int32_t generation, std::int64_t deadline_ms) {
             self.enqueue(Retain{.key = key_of(index, generation), .deadline_ms = deadline_ms});
           })
      .def("release", [](Scheduler& self, std::int32_t index,
                         std::int32_t generation) { self.enqueue(Release{.key = key_of(index, generation)}); })
      .def("transfer_done", [](Scheduler& self, std::int64_t lease,
                               bool ok) { self.enqueue(TransferDone{.lease = LeaseId(lease), .ok = ok}); })
      .def("tick", [](Scheduler& self, std::int64_t now_ms) { self.enqueue(Tick{.now_ms = now_ms}); })
      .def("apply", &apply, "now_ms"_a.none())
      .def("next_plan", &next_plan, "nothing"_a)
      .def("advance", &advance, "step_id"_a, "accepted_offsets"_a, "token_ids"_a, "row_faults"_a, "fault"_a)
      .def("take_events", &take_events)
      .def("take_kv_events", &take_kv_events)
      .def("stats", &stats)
      .def("has_work", &Scheduler::has_work);
}

}  // namespace
}  // namespace tokenspeed::control

NB_MODULE(_control, module) { tokenspeed::control::bind(module); }
