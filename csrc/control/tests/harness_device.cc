// SPDX-License-Identifier: Apache-2.0
// The harness's device: seats, page tables, what each page holds, transfers.
#include <algorithm>

#include "harness.h"

namespace tokenspeed::control::testing {

namespace {

constexpr std::uint64_t kGarbage = 0xBADBADBADBADULL;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

std::uint64_t with_text(std::uint64_t value, const std::string& text) {
  for (const char letter : text) {
    value = scramble(value ^ static_cast<unsigned char>(letter));
  }
  return scramble(value ^ text.size());
}

}  // namespace

// Contents of spans count where their placeholders are.
std::uint64_t Harness::extend(const Submit& submit, std::uint64_t history, std::int64_t position,
                              std::int32_t token) const {
  if (position == 0) {
    history = with_text(with_text(1, submit.name_space), submit.adapter);
  }
  for (const ContentSpan& span : submit.spans) {
    if (position >= span.start.value() && position < (span.start + span.length).value()) {
      history = scramble(history ^ span.hash_high ^ (span.hash_low << 1U));
    }
  }
  return scramble(history ^ (static_cast<std::uint64_t>(static_cast<std::uint32_t>(token)) << 20U));
}

void Harness::say(Seated& seat, std::int32_t token) const {
  const auto position = static_cast<std::int64_t>(seat.token_ids.size());
  const std::uint64_t before = seat.history.empty() ? 0 : seat.history.back();
  seat.token_ids.push_back(token);
  seat.history.push_back(extend(known_.at({seat.key.index, seat.key.generation}).submit, before, position, token));
}

std::int32_t Harness::sample(Seated& seat) const {
  const std::size_t nth =
      seat.token_ids.size() - known_.at({seat.key.index, seat.key.generation}).submit.token_ids.size();
  const auto script = forced.find(seat.key.index);
  const bool is_forced = script != forced.end() && script->second.contains(nth);
  say(seat, is_forced ? script->second.at(nth) : static_cast<std::int32_t>(2 + seat.history.back() % 9973));
  return seat.token_ids.back();
}

std::size_t Harness::group_number(std::int32_t seat, std::size_t group) const {
  return at(seat / plane_.config().max_num_seqs) * plane_.config().groups.size() + group;
}

const GroupSpec& Harness::spec(std::size_t number) const {
  return plane_.config().groups[number % plane_.config().groups.size()];
}

Harness::Cells& Harness::device_cells(std::size_t number, std::int32_t page) {
  EXPECT(page >= 1 && page <= spec(number).num_blocks.value(), "group", number, "page", page);
  Cells& cells = device_[{number, page}];
  cells.resize(spec(number).kind == GroupKind::kRecurrent ? 1 : at(spec(number).block_size.value()), kGarbage);
  return cells;
}

void Harness::take_seats(const StepPlan& plan) {
  for (std::size_t index = 0; index < plan.seated.num_rows(); ++index) {
    const auto row = plan.seated.row(index);
    for (const InFlight& step : in_flight_) {
      EXPECT(!step.tables.contains(row[0]), "seat", row[0], "was taken while step", step.step_id, "uses it");
    }
    Known& request = known_.at({row[1], row[2]});
    ++request.num_seatings;
    request.seat = row[0];
    Seated& seat = seats_[row[0]];
    seat = Seated{};
    seat.key = request.submit.key;
    seat.tables.resize(plane_.config().groups.size());
    for (const std::int32_t token : joined(request.submit.token_ids, request.generated)) {
      say(seat, token);
    }
  }
}

void Harness::move_pages(const StepPlan& plan) {
  for (std::size_t index = 0; index < plan.page_delta.num_rows(); ++index) {
    const auto row = plan.page_delta.row(index);
    Table& table = seats_.at(row[0]).tables[at(row[1])];
    table.resize(std::max(table.size(), at(row[2]) + 1), 0);
    EXPECT((row[3] == 0) == (table[at(row[2])] != 0), "seat", row[0], "block", row[2], "page", row[3]);
    table[at(row[2])] = row[3];
  }
}

void Harness::begin_transfers(const FlatBuffer<4>& rows, bool is_load) {
  for (std::size_t index = 0; index < rows.num_rows(); ++index) {
    const auto row = rows.row(index);
    Moving& moving = moving_[row[0]];
    moving.is_load = is_load;
    moving.rows.push_back({row[0], row[1], row[2], row[3]});
    Cells& cells = device_cells(at(row[1]), row[2]);
    if (is_load) {
      moving.content.push_back(row[3] == 0 ? Cells() : host_.at({at(row[1]), row[3]}));
      std::fill(cells.begin(), cells.end(), kGarbage);
    } else {
      moving.content.push_back(cells);
    }
  }
}

// What it read may not have changed meanwhile.
void Harness::end_transfer(const Moving& moving, bool ok) {
  for (std::size_t index = 0; index < moving.rows.size(); ++index) {
    const std::size_t number = at(moving.rows[index][1]);
    const std::int32_t device_page = moving.rows[index][2];
    const std::int32_t host_page = moving.rows[index][3];
    Cells& cells = device_cells(number, device_page);
    if (!moving.is_load) {
      EXPECT(cells == moving.content[index], "page", device_page, "was written while it was copied");
    }
    if (moving.is_load && host_page == 0) {
      if (ok) {
        fill_from_peer(number, device_page);
      }
    } else if (moving.is_load) {
      EXPECT(host_.at({number, host_page}) == moving.content[index], "host page", host_page, "was written meanwhile");
      cells = ok ? moving.content[index] : Cells(cells.size(), kGarbage);
    } else if (host_page != 0) {
      host_[{number, host_page}] = ok ? cells : Cells(cells.size(), kGarbage);
    }
  }
}

void Harness::fill_from_peer(std::size_t number, std::int32_t page) {
  const auto size = spec(number).block_size.value();
  Cells& cells = device_cells(number, page);
  for (const auto& [id, seat] : seats_) {
    for (std::size_t group = 0; group < seat.tables.size(); ++group) {
      const Table& table = seat.tables[group];
      const auto found = std::find(table.begin(), table.end(), page);
      if (group_number(id, group) != number || found == table.end()) {
        continue;
      }
      const std::int64_t block = found - table.begin();
      for (std::size_t cell = 0; cell < cells.size(); ++cell) {
        const std::int64_t position =
            cells.size() == 1 ? (block + 1) * size - 1 : block * size + static_cast<std::int64_t>(cell);
        cells[cell] = seat.history.at(at(position));
      }
    }
  }
}

void Harness::run_rows(const StepPlan& plan) {
  InFlight result;
  result.step_id = plan.step_id;
  result.fault = step_fault;
  result.offsets.push_back(0);
  std::span<const std::int32_t> token_ids = plan.token_ids.values();
  for (std::size_t index = 0; index < plan.rows.num_rows(); ++index) {
    const auto row = plan.rows.row(index);
    const std::size_t count = row[1] == static_cast<std::int32_t>(RowKind::kDecode) ? 0 : at(row[3]);
    run_row(row, token_ids.first(count), result);
    token_ids = token_ids.subspan(count);
  }
  EXPECT(token_ids.empty(), "surplus tokens", token_ids.size());
  in_flight_.push_back(std::move(result));
}

void Harness::run_row(std::span<const std::int32_t> row, std::span<const std::int32_t> token_ids, InFlight& result) {
  Seated& seat = seats_.at(row[0]);
  Known& request = known_.at({seat.key.index, seat.key.generation});
  EXPECT(!result.tables.contains(row[0]), "seat", row[0], "has two rows");
  request.num_computed += row[3];
  const bool row_fault = faulty.contains(seat.key.index);
  seat.failed = seat.failed || row_fault || step_fault;
  result.tables.emplace(row[0], seat.tables);
  const std::size_t before = result.token_ids.size();
  if (row[1] == static_cast<std::int32_t>(RowKind::kDecode)) {
    const std::int32_t count = accepts(row[4]);
    EXPECT(row[2] <= seat.len && row[3] == 1 + row[4], "context", row[2], "of", seat.len, "query", row[3]);
    // Of the drafts all are right but the last of those that are accepted, which the model says itself.
    const std::int64_t start = seat.len;
    for (std::int32_t token = 0; token < count; ++token) {
      result.token_ids.push_back(sample(seat));
    }
    touch(row[0], seat, start, row[3], count);
    seat.len += count;
  } else {
    const std::int64_t start = row[2];
    EXPECT(seat.len < 0 || seat.len == start, "chunk at", start, "after", seat.len);
    EXPECT(std::equal(token_ids.begin(), token_ids.end(), seat.token_ids.begin() + start), "request", seat.key);
    touch(row[0], seat, start, row[3], row[3]);
    seat.len = start + row[3];
    const bool last = row[1] == static_cast<std::int32_t>(RowKind::kPrefillLast);
    EXPECT(last == (at(seat.len) == seat.token_ids.size()), "chunk to", seat.len, "of", seat.token_ids.size());
    if (last) {
      result.token_ids.push_back(sample(seat));
    }
  }
  if (row_fault) {
    result.token_ids.resize(before);
  }
  result.offsets.push_back(static_cast<std::int32_t>(result.token_ids.size()));
  result.faults.push_back(row_fault ? 1 : 0);
}

// A row computes `count` tokens from `start`, of which the first `good` are of the sequence.
void Harness::touch(std::int32_t id, Seated& seat, std::int64_t start, std::int64_t count, std::int64_t good) {
  for (std::size_t group = 0; group < seat.tables.size(); ++group) {
    const std::size_t number = group_number(id, group);
    const std::int64_t size = spec(number).block_size.value();
    const Table& table = seat.tables[group];
    const auto page_at = [&](std::int64_t position) {
      const std::size_t block = at(position / size);
      EXPECT(block < table.size() && table[block] != 0, "request", seat.key, "has no page at", position, "group",
             group);
      return table[block];
    };
    if (spec(number).kind == GroupKind::kRecurrent) {
      if (start > 0) {
        read(seat, number, page_at(start - 1), 0, start - 1);
      }
      write(id, number, page_at(start + count - 1), 0, seat.history[at(start + count - 1)]);
      continue;
    }
    const std::int64_t back = spec(number).kind == GroupKind::kWindow ? spec(number).window.value() - 1 : start;
    for (std::int64_t position = std::max<std::int64_t>(0, start - back); position < start; ++position) {
      read(seat, number, page_at(position), at(position % size), position);
    }
    for (std::int64_t position = start; position < start + count; ++position) {
      const bool known_good = position < start + good;
      write(id, number, page_at(position), at(position % size), known_good ? seat.history[at(position)] : kGarbage);
    }
  }
}

void Harness::write(std::int32_t id, std::size_t number, std::int32_t page, std::size_t cell, std::uint64_t value) {
  const Seated& seat = seats_.at(id);
  for (const InFlight& step : in_flight_) {
    for (const auto& [other, tables] : step.tables) {
      for (std::size_t group = 0; other != id && group < tables.size(); ++group) {
        const bool reads = group_number(other, group) == number &&
                           std::find(tables[group].begin(), tables[group].end(), page) != tables[group].end();
        EXPECT(!reads, "page", page, "is written while step", step.step_id, "may read it");
      }
    }
  }
  for (const auto& [lease, moving] : moving_) {
    for (const auto& row : moving.rows) {
      EXPECT(at(row[1]) != number || row[2] != page, "page", page, "is written while transfer", lease, "uses it");
    }
  }
  device_cells(number, page)[cell] = seat.failed ? kGarbage : value;
}

void Harness::read(const Seated& seat, std::size_t number, std::int32_t page, std::size_t cell, std::int64_t position) {
  const std::uint64_t value = device_cells(number, page)[cell];
  EXPECT(seat.failed || value == seat.history[at(position)], "request", seat.key, "group", number,
         "reads foreign K/V at", position, "page", page);
}

}  // namespace tokenspeed::control::testing
