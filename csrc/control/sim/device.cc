// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <algorithm>
#include <set>
#include <utility>

namespace tokenspeed::control::sim {

namespace {

constexpr std::uint64_t kGarbage = 0xBADBADBADBADULL;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

bool is_prefill(std::span<const std::int32_t> row) { return row[1] != static_cast<std::int32_t>(RowKind::kDecode); }

bool samples(std::span<const std::int32_t> row) { return row[1] != static_cast<std::int32_t>(RowKind::kPrefill); }

}  // namespace

Device::Device(const Config& config, std::int64_t fault_percent)
    : config_(config),
      fault_percent_(fault_percent),
      seats_(at(config.max_num_seqs)),
      cells_(at((config.num_blocks + 1) * config.block_size), kGarbage) {}

void Device::run(const StepPlan& plan, Oracle& oracle, Random& random) {
  check_shape(plan);
  apply_seats(plan, oracle);
  apply_pages(plan);
  DeviceResult result;
  result.step_id = plan.step_id.value();
  result.fault = random.chance(fault_percent_);
  result.offsets.push_back(0);
  std::span<const std::int32_t> token_ids = plan.token_ids.values();
  for (std::size_t index = 0; index < plan.rows.num_rows(); ++index) {
    const auto row = plan.rows.row(index);
    SeatState& seat = seats_[at(row[0])];
    const bool row_fault = random.chance(fault_percent_);
    const std::size_t count = is_prefill(row) ? at(row[3]) : 0;
    run_row(row, token_ids.first(count), result.fault || row_fault || seat.failed);
    token_ids = token_ids.subspan(count);
    if (samples(row)) {
      seat.last_token = next_token(seat.history.back());
      if (!row_fault) {
        result.token_ids.push_back(seat.last_token);
      }
    }
    if (result.fault || row_fault) {
      fail(seat, oracle);
    }
    result.offsets.push_back(static_cast<std::int32_t>(result.token_ids.size()));
    result.row_faults.push_back(row_fault ? 1 : 0);
    result.tables.push_back(seat.table);
    result.seats.push_back(row[0]);
  }
  require(token_ids.empty(), "plan", plan.step_id, "has surplus tokens", token_ids.size());
  in_flight_.push_back(std::move(result));
}

DeviceResult Device::take_result() {
  DeviceResult result = std::move(in_flight_.front());
  in_flight_.pop_front();
  return result;
}

void Device::check_shape(const StepPlan& plan) const {
  std::int64_t num_tokens = 0;
  bool prefill_seen = false;
  std::set<std::int32_t> seats;
  for (std::size_t index = 0; index < plan.rows.num_rows(); ++index) {
    const auto row = plan.rows.row(index);
    require(row[0] >= 0 && row[0] < config_.max_num_seqs && seats.insert(row[0]).second, "seat", row[0], "twice");
    require(!prefill_seen || is_prefill(row), "plan", plan.step_id, "has a decode row after a prefill row");
    require(row[3] >= 1 && row[2] >= 0 && row[4] == 0, "row", row[2], row[3], row[4]);
    prefill_seen = prefill_seen || is_prefill(row);
    num_tokens += row[3];
  }
  require(num_tokens <= config_.max_num_batched_tokens, "plan", plan.step_id, "has", num_tokens, "tokens");
}

void Device::apply_seats(const StepPlan& plan, Oracle& oracle) {
  for (std::size_t index = 0; index < plan.seated.num_rows(); ++index) {
    const auto row = plan.seated.row(index);
    for (const DeviceResult& step : in_flight_) {
      const bool in_use = std::find(step.seats.begin(), step.seats.end(), row[0]) != step.seats.end();
      require(!in_use, "seat", row[0], "was taken while step", step.step_id, "uses it");
    }
    const Request& request = oracle.at(row[1]);
    require(request.submit.key.generation == row[2], "seated", row[1], '#', row[2]);
    SeatState& seat = seats_[at(row[0])];
    seat = SeatState{};
    seat.request = row[1];
    seat.generation = row[2];
    seat.root = root_history(request.submit.name_space);
    std::uint64_t history = seat.root;
    for (const std::int32_t token_id : request.token_ids) {
      history = extend(history, token_id);
      seat.history.push_back(history);
    }
  }
}

void Device::apply_pages(const StepPlan& plan) {
  for (std::size_t index = 0; index < plan.page_delta.num_rows(); ++index) {
    const auto row = plan.page_delta.row(index);
    require(row[1] == 0 && row[3] >= 1 && row[3] <= config_.num_blocks, "page", row[3], "group", row[1]);
    auto& table = seats_[at(row[0])].table;
    table.resize(std::max(table.size(), at(row[2]) + 1), 0);
    table[at(row[2])] = row[3];
  }
}

void Device::run_row(std::span<const std::int32_t> row, std::span<const std::int32_t> token_ids, bool garbage) {
  SeatState& seat = seats_[at(row[0])];
  const std::int64_t context = row[2];
  if (is_prefill(row)) {
    const bool last = row[1] == static_cast<std::int32_t>(RowKind::kPrefillLast);
    const auto len = static_cast<std::int64_t>(seat.history.size());
    require(last ? context + row[3] == len : context + row[3] < len, "prefill", context, row[3], "of", len);
    for (std::int64_t offset = 0; offset < row[3]; ++offset) {
      write(seat, context + offset, token_ids[at(offset)], garbage);
    }
  } else {
    // The device's own length is exact; the plan's is a lower bound.
    const auto len = static_cast<std::int64_t>(seat.history.size());
    require(context <= len && row[3] == 1, "decode", context, "of", len);
    seat.history.push_back(extend(seat.history.back(), seat.last_token));
    write(seat, len, seat.last_token, garbage);
  }
  if (!garbage) {
    check_reads(seat, context + row[3]);
  }
}

void Device::write(SeatState& seat, std::int64_t position, std::int32_t token_id, bool garbage) {
  const std::uint64_t before = position == 0 ? seat.root : seat.history[at(position - 1)];
  require(extend(before, token_id) == seat.history[at(position)], "request", seat.request, "was given token", token_id,
          "at", position);
  std::uint64_t& target = cell(seat, position);
  check_writer(seat, seat.table[at(position / config_.block_size)]);
  target = garbage ? kGarbage : seat.history[at(position)];
}

void Device::check_reads(const SeatState& seat, std::int64_t until) const {
  for (std::int64_t position = 0; position < until; ++position) {
    const std::int32_t page = seat.table[at(position / config_.block_size)];
    const std::uint64_t read = cells_[at(page * config_.block_size + position % config_.block_size)];
    require(read == seat.history[at(position)], "request", seat.request, "reads foreign K/V at", position, "page",
            page);
  }
}

// A page that one sequence writes is in no table of a step in flight but that sequence's own.
void Device::check_writer(const SeatState& seat, std::int32_t page) const {
  for (const DeviceResult& step : in_flight_) {
    for (std::size_t row = 0; row < step.tables.size(); ++row) {
      const bool other = &seats_[at(step.seats[row])] != &seat;
      const bool touched = std::find(step.tables[row].begin(), step.tables[row].end(), page) != step.tables[row].end();
      require(!(other && touched), "page", page, "is written while step", step.step_id, "may touch it");
    }
  }
}

void Device::fail(SeatState& seat, Oracle& oracle) const {
  seat.failed = true;
  const auto found = oracle.live().find(seat.request);
  if (found != oracle.live().end() && found->second.submit.key.generation == seat.generation) {
    oracle.at(seat.request).faulted = true;
  }
}

std::uint64_t& Device::cell(const SeatState& seat, std::int64_t position) {
  const std::size_t block = at(position / config_.block_size);
  require(block < seat.table.size() && seat.table[block] != 0, "request", seat.request, "has no page at", position);
  return cells_[at(seat.table[block] * config_.block_size + position % config_.block_size)];
}

}  // namespace tokenspeed::control::sim
