// SPDX-License-Identifier: Apache-2.0
// One step as execution reads it: flat int32 arrays in buffers that are reused and never move.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "check.h"
#include "types.h"

namespace tokenspeed::control {

enum class RowKind : std::int32_t { kPrefill = 0, kPrefillLast = 1, kDecode = 2 };

// Rows of a fixed width in memory that is allocated once: views of it stay valid as long as the buffer lives.
template <std::size_t Width>
class FlatBuffer {
 public:
  explicit FlatBuffer(std::size_t max_rows) : max_rows_(max_rows) { data_.reserve(max_rows * Width); }

  void clear() { data_.clear(); }

  void push(const std::array<std::int32_t, Width>& row) {
    TS_CHECK(room() >= 1, "capacity", max_rows_, "width", Width);
    data_.insert(data_.end(), row.begin(), row.end());
  }

  // All rows that begin with the value go.
  void drop(std::int32_t first) {
    std::size_t kept = 0;
    for (std::size_t index = 0; index < data_.size(); index += Width) {
      if (data_[index] != first) {
        std::copy_n(data_.begin() + static_cast<std::ptrdiff_t>(index), Width,
                    data_.begin() + static_cast<std::ptrdiff_t>(kept));
        kept += Width;
      }
    }
    data_.resize(kept);
  }

  void append(std::span<const std::int32_t> values)
    requires(Width == 1)
  {
    TS_CHECK(room() >= values.size(), "capacity", max_rows_, "rows", num_rows(), "more", values.size());
    data_.insert(data_.end(), values.begin(), values.end());
  }

  [[nodiscard]] std::size_t num_rows() const { return data_.size() / Width; }
  [[nodiscard]] std::size_t room() const { return max_rows_ - num_rows(); }
  [[nodiscard]] std::int32_t* data() { return data_.data(); }
  [[nodiscard]] std::span<const std::int32_t> values() const { return data_; }
  [[nodiscard]] std::span<const std::int32_t> row(std::size_t index) const {
    return std::span<const std::int32_t>(data_).subspan(index * Width, Width);
  }

 private:
  std::size_t max_rows_;
  std::vector<std::int32_t> data_;
};

struct PlanLimits {
  std::size_t rows = 0;
  std::size_t token_ids = 0;
  std::size_t page_delta = 0;
  std::size_t transfers = 0;
};

// rows: seat, kind, context_len, query_len, draft_len. seated: seat, request index, generation.
// page_delta: seat, group, block index, page (0 where the block has expired), no block twice. load, store: lease, group
// numbered over all partitions, device page, host page (0 for a peer). zero (group, page) and copy (group, source,
// target) are there for execution; no group needs them today.
struct StepPlan {
  explicit StepPlan(const PlanLimits& limits)
      : rows(limits.rows),
        token_ids(limits.token_ids),
        seated(limits.rows),
        page_delta(limits.page_delta),
        zero(0),
        copy(0),
        load(limits.transfers),
        store(limits.transfers) {}

  void clear() {
    rows.clear();
    token_ids.clear();
    seated.clear();
    page_delta.clear();
    load.clear();
    store.clear();
  }

  [[nodiscard]] bool is_empty() const {
    return rows.num_rows() + seated.num_rows() + page_delta.num_rows() + load.num_rows() + store.num_rows() == 0;
  }

  StepId step_id;
  FlatBuffer<5> rows;
  FlatBuffer<1> token_ids;
  FlatBuffer<3> seated;
  FlatBuffer<4> page_delta;
  FlatBuffer<2> zero;
  FlatBuffer<3> copy;
  FlatBuffer<4> load;
  FlatBuffer<4> store;
};

}  // namespace tokenspeed::control
