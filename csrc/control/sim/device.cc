// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <algorithm>

#include "violation.h"

namespace tokenspeed::control::sim {

namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

bool is_prefill(std::span<const std::int32_t> row) { return row[1] != static_cast<std::int32_t>(RowKind::kDecode); }

bool samples(std::span<const std::int32_t> row) { return row[1] != static_cast<std::int32_t>(RowKind::kPrefill); }

}  // namespace

Device::Device(const Layout& layout, Memory& memory, std::int64_t fault_percent)
    : layout_(layout),
      memory_(memory),
      fault_percent_(fault_percent),
      seats_(at(layout.config().max_num_seqs * layout.config().num_partitions)) {}

void Device::seat(const StepPlan& plan, const Oracle& oracle) {
  check_shape(plan);
  for (std::size_t index = 0; index < plan.seated.num_rows(); ++index) {
    const auto row = plan.seated.row(index);
    for (const DeviceStep& step : in_flight_) {
      const bool in_use = std::find(step.seats.begin(), step.seats.end(), row[0]) != step.seats.end();
      require(!in_use, "seat", row[0], "was taken while a step in flight uses it");
    }
    const Request* request = oracle.find(RequestKey{.index = row[1], .generation = row[2]});
    require(request != nullptr && !request->has_ended(), "seated", row[1], '#', row[2], "which does not live");
    Seated& seat = seats_[at(row[0])];
    seat = Seated{};
    seat.key = request->submit.key;
    seat.tables.resize(at(layout_.num_groups()));
    seat.root = request->root;
    seat.history = request->history;
    for (std::size_t position = 0; position < request->history.size(); ++position) {
      seat.contents.push_back(content_at(request->submit.spans, static_cast<std::int64_t>(position)));
    }
  }
  apply_pages(plan);
}

void Device::check_shape(const StepPlan& plan) const {
  std::vector<std::int64_t> num_tokens(at(layout_.config().num_partitions));
  std::vector<std::int64_t> num_prefill_tokens(num_tokens.size());
  bool prefill_seen = false;
  bool decodes = false;
  std::set<std::int32_t> seats;
  for (std::size_t index = 0; index < plan.rows.num_rows(); ++index) {
    const auto row = plan.rows.row(index);
    require(row[0] >= 0 && row[0] < num_seats() && seats.insert(row[0]).second, "seat", row[0], "twice");
    require(!prefill_seen || is_prefill(row), "a decode row after a prefill row");
    require(row[3] >= 1 && row[2] >= 0, "row", row[2], row[3]);
    require(is_prefill(row) ? row[4] == 0 : row[3] == 1 + row[4], "row", row[3], "drafts", row[4]);
    prefill_seen = prefill_seen || is_prefill(row);
    decodes = decodes || !is_prefill(row);
    num_tokens[at(partition_of(row[0]))] += row[3];
    num_prefill_tokens[at(partition_of(row[0]))] += is_prefill(row) ? row[3] : 0;
  }
  for (const std::int64_t count : num_tokens) {
    require(count <= layout_.config().max_num_batched_tokens, "a plan with", count, "tokens in a partition");
  }
  for (const std::int64_t count : num_prefill_tokens) {
    require(!decodes || count <= layout_.config().max_num_mixed_prefill_tokens.value_or(count),
            "a step that decodes with", count, "prompt tokens in a partition");
  }
}

void Device::apply_pages(const StepPlan& plan) {
  std::set<std::array<std::int32_t, 3>> named;
  for (std::size_t index = 0; index < plan.page_delta.num_rows(); ++index) {
    const auto row = plan.page_delta.row(index);
    require(row[0] >= 0 && row[0] < num_seats() && row[1] >= 0 && row[1] < layout_.num_groups() && row[2] >= 0,
            "delta of seat", row[0], "group", row[1], "block", row[2]);
    require(row[3] >= 0 && row[3] <= layout_.spec(row[1]).num_blocks.value(), "group", row[1], "page", row[3]);
    require(named.insert({row[0], row[1], row[2]}).second, "seat", row[0], "group", row[1], "block", row[2],
            "twice in a plan");
    Seated& seat = seats_[at(row[0])];
    require(!seat.tables.empty(), "delta of seat", row[0], "where nobody ever sat");
    auto& table = seat.tables[at(row[1])];
    table.resize(std::max(table.size(), at(row[2]) + 1), kUntold);
    const bool was_free = table[at(row[2])] == kUntold;
    require(was_free || row[3] == 0, "seat", row[0], "group", row[1], "block", row[2], "has a page already");
    require(row[3] != 0 || layout_.spec(row[1]).kind != GroupKind::kFull, "full attention never lets a block go");
    table[at(row[2])] = row[3];
  }
}

void Device::run(const StepPlan& plan, Random& random) {
  DeviceStep step;
  step.step_id = plan.step_id.value();
  step.fault = random.chance(fault_percent_);
  std::span<const std::int32_t> token_ids = plan.token_ids.values();
  for (std::size_t index = 0; index < plan.rows.num_rows(); ++index) {
    const auto row = plan.rows.row(index);
    const std::size_t count = is_prefill(row) ? at(row[3]) : 0;
    require(count <= token_ids.size(), "plan lacks tokens for", row[3]);
    run_row(step, row, token_ids.first(count), random);
    token_ids = token_ids.subspan(count);
  }
  require(token_ids.empty(), "plan has surplus tokens", token_ids.size());
  in_flight_.push_back(std::move(step));
}

DeviceStep Device::take_step() {
  DeviceStep step = std::move(in_flight_.front());
  in_flight_.pop_front();
  return step;
}

void Device::run_row(DeviceStep& step, Row row, std::span<const std::int32_t> token_ids, Random& random) {
  Seated& seat = seats_[at(row[0])];
  std::set<PageName> touched;
  for (std::int64_t group = 0; group < layout_.num_groups(); ++group) {
    for (const std::int32_t page : seat.tables.at(at(group))) {
      if (page > 0) {
        const PageName name(first_number(row[0]) + group, page);
        require(!memory_.device(name.first, page).is_target, "request", seat.key, "has a row while page", page,
                "of group", name.first, "is still being loaded");
        touched.insert(name);
      }
    }
  }
  RowResult result{.key = seat.key, .fault = random.chance(fault_percent_), .token_ids = {}};
  const bool fails = step.fault || result.fault;
  seat.failed = seat.failed || fails;
  const std::int64_t start = is_prefill(row) ? row[2] : seat.len;
  if (is_prefill(row)) {
    run_prompt(seat, row, token_ids);
  } else {
    result.token_ids = run_decode(seat, row, random);
  }
  if (!seat.failed) {
    check_reads(row[0], start, seat.len);
  }
  write(step, row[0], start, start + row[3], seat.failed ? 0 : seat.len);
  if (is_prefill(row) && samples(row)) {
    seat.last_token = next_token(seat.history.back());
    result.token_ids.push_back(seat.last_token);
  }
  if (fails) {
    // Whatever it says it sampled is nobody's.
    result.fault = true;
    result.token_ids.resize(at(random.between(0, static_cast<std::int64_t>(result.token_ids.size()))));
  }
  step.rows.push_back(std::move(result));
  step.seats.push_back(row[0]);
  step.touched.push_back(std::move(touched));
}

void Device::run_prompt(Seated& seat, Row row, std::span<const std::int32_t> token_ids) {
  const auto known = static_cast<std::int64_t>(seat.history.size());
  require(row[2] == seat.len || !seat.has_run, "request", seat.key, "prefill at", row[2], "after", seat.len);
  require(seat.has_run || row[2] % layout_.unit() == 0, "request", seat.key, "resumes at", row[2]);
  seat.has_run = true;
  const std::int64_t end = row[2] + row[3];
  require(samples(row) ? end == known : end < known, "prefill", row[2], row[3], "of", known);
  for (std::int64_t position = row[2]; position < end; ++position) {
    const History before = position == 0 ? seat.root : seat.history[at(position - 1)];
    const std::int32_t token_id = token_ids[at(position - row[2])];
    require(extend(before, token_id, seat.contents[at(position)]) == seat.history[at(position)], "request", seat.key,
            "was given token", token_id, "at", position);
  }
  seat.len = end;
}

std::vector<std::int32_t> Device::run_decode(Seated& seat, Row row, Random& random) {
  // The device's own length is exact; the plan's is a lower bound.
  require(row[2] <= seat.len && at(seat.len) == seat.history.size(), "decode", row[2], "of", seat.len);
  require(row[4] == 0 || !layout_.keeps_states(), "drafts beside a state that cannot be taken back");
  std::vector<std::int32_t> accepted;
  const std::int64_t count = random.between(1, 1 + row[4]);
  for (std::int64_t index = 0; index < count; ++index) {
    seat.history.push_back(extend(seat.history.back(), seat.last_token, 0));
    seat.last_token = next_token(seat.history.back());
    accepted.push_back(seat.last_token);
  }
  seat.len += count;
  return accepted;
}

// All that the queries at [start, end) see of what is there already.
void Device::check_reads(std::int32_t seat_number, std::int64_t start, std::int64_t end) const {
  const Seated& seat = seats_[at(seat_number)];
  for (std::int64_t group = 0; group < layout_.num_groups(); ++group) {
    const std::int64_t number = first_number(seat_number) + group;
    const GroupSpec& spec = layout_.spec(number);
    if (spec.kind == GroupKind::kRecurrent) {
      check_state(seat_number, number, start);
      continue;
    }
    const std::int64_t size = spec.block_size.value();
    const bool full = spec.kind == GroupKind::kFull;
    const std::int64_t first = full ? 0 : std::max<std::int64_t>(0, start - spec.window.value() + 1);
    for (std::int64_t position = first; position < start; ++position) {
      const std::int32_t page = entry(seat, number, position / size);
      require(page > 0, "request", seat.key, "reads a hole at", position, "group", number, "of", end);
      require(memory_.device(number, page).cells[at(position % size)] == seat.history[at(position)], "request",
              seat.key, "reads foreign K/V at", position, "group", number, "page", page);
    }
  }
}

void Device::check_state(std::int32_t seat_number, std::int64_t number, std::int64_t start) const {
  const Seated& seat = seats_[at(seat_number)];
  if (start == 0) {
    return;
  }
  const std::int32_t page = entry(seat, number, (start - 1) / layout_.spec(number).block_size.value());
  require(page > 0, "request", seat.key, "reads no state at", start, "group", number);
  require(memory_.device(number, page).cells[0] == seat.history[at(start - 1)], "request", seat.key,
          "reads a foreign state at", start, "group", number, "page", page);
}

// What lies at `valid` or beyond is garbage: rejected drafts, and all that a failed step writes.
void Device::write(DeviceStep& step, std::int32_t seat_number, std::int64_t start, std::int64_t end,
                   std::int64_t valid) {
  Seated& seat = seats_[at(seat_number)];
  for (std::int64_t group = 0; group < layout_.num_groups(); ++group) {
    const std::int64_t number = first_number(seat_number) + group;
    const bool is_state = layout_.spec(number).kind == GroupKind::kRecurrent;
    for (std::int64_t position = is_state ? end - 1 : start; position < end; ++position) {
      const History history = position < valid ? seat.history[at(position)] : memory_.garbage();
      write_cell(step, seat_number, number, position, history);
    }
  }
}

void Device::write_cell(DeviceStep& step, std::int32_t seat_number, std::int64_t number, std::int64_t position,
                        History history) {
  const Seated& seat = seats_[at(seat_number)];
  const GroupSpec& spec = layout_.spec(number);
  const std::int32_t page = entry(seat, number, position / spec.block_size.value());
  require(page > 0, "request", seat.key, "has no page to write at", position, "group", number);
  const PageName name(number, page);
  if (step.written.insert(name).second) {
    check_writer(step, seat_number, name);
  }
  memory_.write(number, page, spec.kind == GroupKind::kRecurrent ? 0 : at(position % spec.block_size.value()), history);
}

// A page that one sequence writes is in no table of a row in flight but that sequence's own.
void Device::check_writer(const DeviceStep& step, std::int32_t seat_number, const PageName& name) const {
  const auto check = [&](const DeviceStep& other) {
    for (std::size_t row = 0; row < other.touched.size(); ++row) {
      require(other.seats[row] == seat_number || !other.touched[row].contains(name), "page", name.second, "of group",
              name.first, "is written while another row in flight may touch it");
    }
  };
  std::for_each(in_flight_.begin(), in_flight_.end(), check);
  check(step);
}

std::int32_t Device::entry(const Seated& seat, std::int64_t number, std::int64_t block) const {
  const auto& table = seat.tables[at(number % layout_.num_groups())];
  return at(block) < table.size() ? table[at(block)] : kUntold;
}

}  // namespace tokenspeed::control::sim
