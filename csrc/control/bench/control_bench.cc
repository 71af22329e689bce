// SPDX-License-Identifier: Apache-2.0
// What planning costs. Prints lines for people and, as its last line, one JSON object. Pinned to one core; every time
// is taken on two clocks, since a machine that others use too takes the core away now and then: the wall, and the time
// that this thread ran. The worst wall time is that of the steps in which the core was not taken away, unless it was
// in all of them; the worst of all stands beside it.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <exception>
#include <sched.h>
#include <string>
#include <sys/resource.h>
#include <utility>
#include <vector>

#include "check.h"
#include "scheduler.h"
#include "tests/quick_device.h"

namespace tokenspeed::control {
namespace {

using testing::QuickDevice;

constexpr std::int32_t kRequests = 128;
constexpr std::int64_t kStepTokens = 8192;
constexpr std::int64_t kWindow = 4096;

double read_us(clockid_t clock) {
  timespec now{};
  TS_CHECK(clock_gettime(clock, &now) == 0, "clock", clock);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

// How often the core was taken from this thread.
std::int64_t num_interruptions() {
  rusage usage{};
  TS_CHECK(getrusage(RUSAGE_THREAD, &usage) == 0);
  return usage.ru_nivcsw;
}

struct Span {
  double wall_us = 0;
  double cpu_us = 0;
  bool interrupted = false;

  Span& operator+=(const Span& other) {
    wall_us += other.wall_us;
    cpu_us += other.cpu_us;
    interrupted = interrupted || other.interrupted;
    return *this;
  }
};

template <class Work>
Span timed(Work&& work) {
  const std::int64_t before = num_interruptions();
  const double cpu = read_us(CLOCK_THREAD_CPUTIME_ID);
  const double wall = read_us(CLOCK_MONOTONIC);
  work();
  const double wall_end = read_us(CLOCK_MONOTONIC);
  const double cpu_end = read_us(CLOCK_THREAD_CPUTIME_ID);
  return Span{.wall_us = wall_end - wall, .cpu_us = cpu_end - cpu, .interrupted = num_interruptions() != before};
}

// Median, mean and worst of one clock.
struct Summary {
  double median = 0;
  double mean = 0;
  double worst = 0;
};

Summary summary_of(std::vector<double> values) {
  TS_CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  double sum = 0;
  for (const double value : values) {
    sum += value;
  }
  return Summary{
      .median = values[values.size() / 2], .mean = sum / static_cast<double>(values.size()), .worst = values.back()};
}

struct Times {
  std::vector<double> wall_us;
  std::vector<double> cpu_us;
  double worst_uninterrupted_us = 0;
  std::int64_t num_interrupted = 0;

  void add(const Span& span) {
    wall_us.push_back(span.wall_us);
    cpu_us.push_back(span.cpu_us);
    num_interrupted += span.interrupted ? 1 : 0;
    worst_uninterrupted_us = span.interrupted ? worst_uninterrupted_us : std::max(worst_uninterrupted_us, span.wall_us);
  }
  void add(const Times& more) {
    wall_us.insert(wall_us.end(), more.wall_us.begin(), more.wall_us.end());
    cpu_us.insert(cpu_us.end(), more.cpu_us.begin(), more.cpu_us.end());
    num_interrupted += more.num_interrupted;
    worst_uninterrupted_us = std::max(worst_uninterrupted_us, more.worst_uninterrupted_us);
  }
  // Of the steps that were not interrupted; of all where each was.
  [[nodiscard]] double worst_us() const {
    return std::cmp_equal(num_interrupted, wall_us.size()) ? wall().worst : worst_uninterrupted_us;
  }
  [[nodiscard]] Summary wall() const { return summary_of(wall_us); }
  [[nodiscard]] Summary cpu() const { return summary_of(cpu_us); }
};

// Two groups of full attention with pages of different size, a window, and a state with snapshots. Pools hold so many
// tokens of each request.
Config config_of(std::int64_t tokens_each, std::int64_t max_model_len) {
  Config config;
  const auto full = [&](std::int64_t block_size) {
    return GroupSpec{.kind = GroupKind::kFull,
                     .block_size = Tokens(block_size),
                     .num_blocks = Blocks(kRequests * (tokens_each / block_size + 2)),
                     .num_host_blocks = Blocks(0),
                     .window = Tokens(0)};
  };
  config.groups = {full(16), full(64), full(16), full(256)};
  config.groups[2].kind = GroupKind::kWindow;
  config.groups[2].window = Tokens(kWindow);
  config.groups[3].kind = GroupKind::kRecurrent;
  config.groups[3].num_blocks = Blocks(kRequests * (tokens_each / 256 + 8));
  config.max_num_seqs = kRequests;
  config.max_num_batched_tokens = kStepTokens;
  config.max_model_len = max_model_len;
  config.ageing_steps = 256;
  return config;
}

Submit prompt_of(std::int32_t index, std::int64_t len, std::int64_t max_new, std::uint64_t salt) {
  Submit submit;
  submit.key = RequestKey{.index = index, .generation = 0};
  submit.max_new_tokens = Tokens(max_new);
  submit.token_ids.reserve(static_cast<std::size_t>(len));
  std::uint64_t state = salt * 0x9E3779B97F4A7C15ULL + 1;
  for (std::int64_t position = 0; position < len; ++position) {
    state = state * 6'364'136'223'846'793'005ULL + 1'442'695'040'888'963'407ULL;
    submit.token_ids.push_back(static_cast<std::int32_t>(2 + (state >> 33U) % 50'000));
  }
  return submit;
}

// A plane with its device. Each step is planned while another is in flight.
class Bench {
 public:
  explicit Bench(const Config& config) : plane_(config), device_(config) {}

  void submit(Submit&& request) {
    plane_.enqueue(std::move(request));
    TS_CHECK(plane_.apply().empty(), "a request was refused");
  }

  // Plans a step and takes in the result of the one before it: the time of both.
  Span step() {
    Span spent;
    const StepPlan* plan = nullptr;
    if (device_.num_in_flight() < 2) {
      spent = timed([&] { plan = plane_.next_plan(); });
      rows_ = plan == nullptr ? 0 : plan->rows.num_rows();
    }
    if (plan != nullptr) {
      device_.run(*plan);
    }
    if (device_.num_in_flight() > 1 || (plan == nullptr && device_.num_in_flight() > 0)) {
      const StepResult result = device_.result();
      spent += timed([&] { plane_.advance(result); });
      device_.retire();
    }
    (void)plane_.take_events();
    return spent;
  }

  // Until all that was submitted decodes.
  Span prefill(std::int64_t num_requests) {
    Span spent;
    while (rows_ < static_cast<std::size_t>(num_requests) || !all_decode()) {
      TS_CHECK(plane_.has_work(), "requests ended before all of them ran", num_requests);
      spent += step();
    }
    return spent;
  }

  Times decode(std::int64_t num_steps, std::size_t num_requests) {
    Times times;
    for (std::int64_t index = 0; index < num_steps; ++index) {
      times.add(step());
      TS_CHECK(rows_ == num_requests, "rows", rows_, "step", index);
    }
    return times;
  }

  [[nodiscard]] Scheduler& plane() { return plane_; }

 private:
  [[nodiscard]] bool all_decode() const {
    return std::all_of(plane_.sequences().begin(), plane_.sequences().end(),
                       [](const auto& sequence) { return !sequence || sequence->template is<Decoding>(); });
  }

  Scheduler plane_;
  QuickDevice device_;
  std::size_t rows_ = 0;
};

// spread: prompts differ in length by up to so many tokens, so that they do not cross page boundaries together.
struct Shape {
  const char* name;
  std::int64_t context = 0;
  std::int64_t pool_tokens = 0;
  std::int64_t num_steps = 0;
  std::int64_t spread = 256;
};

// All requests decode, and have for long enough that every kind of page boundary has been crossed.
class SteadyDecode {
 public:
  explicit SteadyDecode(const Shape& shape)
      : bench_(config_of(shape.pool_tokens, shape.context + shape.spread + longest(shape) + 1)) {
    for (std::int32_t index = 0; index < kRequests; ++index) {
      const std::int64_t len = shape.context - shape.spread * index / kRequests;
      bench_.submit(prompt_of(index, len, longest(shape), static_cast<std::uint64_t>(index)));
    }
    (void)bench_.prefill(kRequests);
    (void)bench_.decode(kWarmUp, kRequests);
  }

  Times run(std::int64_t num_steps) { return bench_.decode(num_steps, kRequests); }

 private:
  static constexpr std::int64_t kWarmUp = 600;
  [[nodiscard]] static std::int64_t longest(const Shape& shape) { return shape.num_steps + kWarmUp + 4096; }

  Bench bench_;
};

void print_times(const char* what, const Times& times) {
  const Summary wall = times.wall();
  const Summary cpu = times.cpu();
  std::printf("%-40s wall %6.1f median %6.1f worst (%6.1f with %3lld interrupted) | cpu %6.1f median %6.1f worst µs\n",
              what, wall.median, times.worst_us(), wall.worst, static_cast<long long>(times.num_interrupted),
              cpu.median, cpu.worst);
  (void)std::fflush(stdout);
}

class Json {
 public:
  void add(const std::string& name, double value) {
    std::array<char, 64> text{};
    (void)std::snprintf(text.data(), text.size(), "%.3f", value);
    text_ += (text_.empty() ? "\"" : ", \"") + name + "\": " + text.data();
  }
  void add(const std::string& name, const Times& times) {
    add(name + "_us_median", times.wall().median);
    add(name + "_us_worst", times.worst_us());
    add(name + "_us_worst_interrupted_too", times.wall().worst);
    add(name + "_cpu_us_median", times.cpu().median);
    add(name + "_cpu_us_worst", times.cpu().worst);
  }
  void print() const { std::printf("{%s}\n", text_.c_str()); }

 private:
  std::string text_;
};

void measure_decode(Json& json, std::int64_t num_steps) {
  Shape shape{.name = "plan + advance, 128 x 32k x 4 groups",
              .context = 32'768,
              .pool_tokens = 32'768 + num_steps + 8192,
              .num_steps = num_steps};
  const Times apart = SteadyDecode(shape).run(num_steps);
  print_times(shape.name, apart);
  json.add("plan_advance", apart);
  shape.spread = 0;
  const Times together = SteadyDecode(shape).run(num_steps / 4);
  print_times("  all crossing page boundaries together", together);
  json.add("plan_advance_together", together);
}

// Told by the mean of the thread's time without the worst percent: a median would hide the steps in which pages change,
// and the worst ones are the machine's.
double steady_mean(const Times& times) {
  std::vector<double> values = times.cpu_us;
  std::sort(values.begin(), values.end());
  values.resize(values.size() - values.size() / 100);
  return summary_of(values).mean;
}

// The two take turns of a few steps, so that a slow spell of the machine meets both: the median of the turns' ratios.
double growth(const Shape& small, const Shape& large) {
  constexpr std::int64_t kTurns = 20;
  SteadyDecode before(small);
  SteadyDecode after(large);
  Times small_times;
  Times large_times;
  std::vector<double> ratios;
  for (std::int64_t turn = 0; turn < kTurns; ++turn) {
    const Times one = before.run(small.num_steps / kTurns);
    const Times other = after.run(large.num_steps / kTurns);
    ratios.push_back(steady_mean(other) / steady_mean(one));
    small_times.add(one);
    large_times.add(other);
  }
  print_times(small.name, small_times);
  print_times(large.name, large_times);
  return summary_of(ratios).median;
}

void measure_growth(Json& json, std::int64_t num_steps) {
  const std::int64_t room = num_steps + 8192;
  const Shape brief{.name = "context 1k", .context = 1024, .pool_tokens = 131'072 + room, .num_steps = num_steps};
  Shape extended = brief;
  extended.name = "context 128k";
  extended.context = 131'072;
  json.add("context_1k_to_128k_ratio", growth(brief, extended));
  const Shape tight{.name = "pool", .context = 1024, .pool_tokens = 1024 + room, .num_steps = num_steps};
  Shape roomy = tight;
  roomy.name = "pool x 100";
  roomy.pool_tokens *= 100;
  json.add("pool_x100_ratio", growth(tight, roomy));
}

void measure_prompts(Json& json) {
  constexpr std::int64_t kLong = 100'000;
  Config config = config_of(4096, kLong + 4096);
  Times whole;
  for (std::uint64_t round = 0; round < 9; ++round) {
    Bench bench(config);
    bench.submit(prompt_of(0, kLong, 1000, round));
    whole.add(bench.prefill(1));
  }
  print_times("hash, plan and publish a 100k prompt", whole);
  json.add("hash_publish_100k_ms", whole.wall().median / 1000);
  json.add("hash_publish_100k_cpu_ms", whole.cpu().median / 1000);

  constexpr std::int64_t kShort = 32'768;
  Bench bench(config);
  Times admission;
  for (std::int32_t round = 0; round < 9; ++round) {
    Submit request = prompt_of(round, kShort, 1, 77);
    bench.submit(std::move(request));
    const Span spent = bench.step();
    if (round > 0) {
      admission.add(spent);
    }
    while (bench.plane().has_work()) {
      (void)bench.step();
    }
  }
  TS_CHECK(bench.plane().stats().prefix_hit_tokens == 8 * (kShort - 256), bench.plane().stats().prefix_hit_tokens);
  print_times("admission of a 32k prompt, all of it cached", admission);
  json.add("admission_32k_hit_us", admission.wall().median);
}

void measure_stats(Json& json) {
  for (const std::int32_t num_requests : {1, kRequests}) {
    Bench bench(config_of(8192, 4096));
    for (std::int32_t index = 0; index < num_requests; ++index) {
      bench.submit(prompt_of(index, 1000, 2000, static_cast<std::uint64_t>(index)));
    }
    (void)bench.prefill(num_requests);
    constexpr int kCalls = 100'000;
    std::int64_t sum = 0;
    const Span spent = timed([&] {
      for (int call = 0; call < kCalls; ++call) {
        sum += bench.plane().stats().num_running;
      }
    });
    TS_CHECK(sum == std::int64_t{kCalls} * num_requests, sum);
    const double ns = spent.cpu_us * 1000 / kCalls;
    std::printf("stats() with %3d running: %.0f ns\n", num_requests, ns);
    json.add("stats_ns_" + std::to_string(num_requests) + "_running", ns);
  }
}

void pin_to_one_core() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  TS_CHECK(sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
  std::size_t last = 0;
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core) {
    last = CPU_ISSET(core, &allowed) ? core : last;
  }
  CPU_ZERO(&allowed);
  CPU_SET(last, &allowed);
  TS_CHECK(sched_setaffinity(0, sizeof(allowed), &allowed) == 0, "core", last);
}

void run(std::int64_t num_steps) {
  pin_to_one_core();
  std::printf("groups: full 16, full 64, window 4096 in 16, state every 256; one step in flight; %lld steps\n",
              static_cast<long long>(num_steps));
  std::printf(
      "interrupted: the machine took the core away in that step, so its wall time is not the plane's; 'worst' is\n"
      "  that of the other steps, or of all where each was interrupted\n");
  Json json;
  measure_decode(json, num_steps);
  measure_growth(json, std::min<std::int64_t>(num_steps, 2000));
  measure_prompts(json);
  measure_stats(json);
  json.print();
}

}  // namespace
}  // namespace tokenspeed::control

// The argument: steps of steady decode.
int main(int argc, char** argv) {
  try {
    tokenspeed::control::run(argc > 1 ? std::stoll(argv[1]) : 10'000);
  } catch (const std::exception& error) {
    (void)std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
