// SPDX-License-Identifier: Apache-2.0
// Taking in the result of a step: tokens, seals, ends, and what drains.
#include <algorithm>

#include "check.h"
#include "scheduler.h"

namespace tokenspeed::control {

namespace {

std::span<const std::int32_t> accepted_by(const StepResult& result, std::size_t row) {
  const auto first = static_cast<std::size_t>(result.accepted_offsets[row]);
  const auto last = static_cast<std::size_t>(result.accepted_offsets[row + 1]);
  return result.token_ids.subspan(first, last - first);
}

}  // namespace

void Scheduler::advance(const StepResult& result) {
  check_result(result);
  const std::size_t num_rows = ledger_.oldest().rows.size();
  ledger_.begin_settling(result.step_id, result.fault);
  for (std::size_t row = 0; row < num_rows; ++row) {
    const StepRow& settled = ledger_.settle_next();
    if (result.fault || result.row_faults[row] != 0) {
      fail(settled);
    } else {
      settle(settled, accepted_by(result, row));
    }
  }
  ledger_.end_settling();
}

// Whole, before anything changes.
void Scheduler::check_result(const StepResult& result) const {
  const StepRecord& step = ledger_.oldest();
  TS_CHECK(result.step_id == step.step_id, "expected step", step.step_id, "got", result.step_id);
  if (result.fault) {
    return;
  }
  const std::size_t num_rows = step.rows.size();
  const auto& offsets = result.accepted_offsets;
  TS_CHECK(offsets.size() == num_rows + 1 && result.row_faults.size() == num_rows, "step", step.step_id, "rows",
           num_rows, "offsets", offsets.size(), "row_faults", result.row_faults.size());
  TS_CHECK(offsets[0] == 0 && std::cmp_equal(offsets[num_rows], result.token_ids.size()), "step", step.step_id,
           "offsets", offsets[0], offsets[num_rows], "tokens", result.token_ids.size());
  for (std::size_t row = 0; row < num_rows; ++row) {
    const std::int32_t accepted = offsets[row + 1] - offsets[row];
    const std::int32_t most = step.rows[row].samples ? 1 : 0;
    const std::int32_t least = result.row_faults[row] != 0 ? 0 : most;
    TS_CHECK(accepted >= least && accepted <= most, "step", step.step_id, "row", row, "accepted", accepted);
  }
  const bool valid = std::all_of(result.token_ids.begin(), result.token_ids.end(), [](auto id) { return id >= 0; });
  TS_CHECK(valid, "step", step.step_id, "has a negative token id");
}

void Scheduler::settle(const StepRow& row, std::span<const std::int32_t> accepted) {
  Sequence& sequence = at(row.slot);
  if (sequence.has_ended()) {
    drain_if_idle(row.slot);
    return;
  }
  sequence.commit(row.query_len, row.samples);
  FinishCode code = FinishCode::kNone;
  std::size_t num_kept = 0;
  while (num_kept < accepted.size() && code == FinishCode::kNone) {
    code = sequence.accept(accepted[num_kept]);
    ++num_kept;
  }
  counters_.generated_tokens += static_cast<std::int64_t>(num_kept);
  seal_computed(sequence, ledger_.receipt());
  if (num_kept > 0) {
    emit(sequence, accepted.first(num_kept), code);
  }
  if (code != FinishCode::kNone) {
    end(row.slot, code);
  } else {
    drain_if_idle(row.slot);
  }
}

void Scheduler::fail(const StepRow& row) {
  const Sequence& sequence = at(row.slot);
  if (sequence.has_ended()) {
    drain_if_idle(row.slot);
    return;
  }
  emit(sequence, {}, FinishCode::kFault);
  end(row.slot, FinishCode::kFault);
}

void Scheduler::seal_computed(Sequence& sequence, const StepReceipt& receipt) {
  const Blocks full = group_.full_blocks(sequence.computed());
  PageTable& pages = sequence.grant().pages();
  if (pages.num_sealed() == full) {
    return;
  }
  const auto hashes = sequence.block_hashes(full, group_.block_size());
  while (pages.num_sealed() < full) {
    group_.seal_next(pages, hashes[static_cast<std::size_t>(pages.num_sealed().value())], receipt);
  }
}

}  // namespace tokenspeed::control
