// SPDX-License-Identifier: Apache-2.0
// Taking in the result of a step: tokens, seals, ends, and what drains.
#include <algorithm>

#include "books.h"
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
  check_whole();
  check_result(result);
  half_made_ = true;
  take_in(result);
  half_made_ = false;
}

void Scheduler::take_in(const StepResult& result) {
  const std::size_t num_rows = ledger_.oldest().rows.size();
  ledger_.begin_settling(result.step_id, result.fault);
  for (std::size_t row = 0; row < num_rows; ++row) {
    const RowWork& settled = ledger_.settle_next();
    if (result.fault || result.row_faults[row] != 0) {
      fail(settled);
    } else {
      settle(settled, accepted_by(result, row));
    }
  }
  release_expired();
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
    const std::int32_t least = result.row_faults[row] != 0 ? 0 : step.rows[row].work.least_accepted;
    TS_CHECK(accepted >= least && accepted <= step.rows[row].work.most_accepted, "step", step.step_id, "row", row,
             "accepted", accepted);
  }
  const bool valid = std::all_of(result.token_ids.begin(), result.token_ids.end(), [](auto id) { return id >= 0; });
  TS_CHECK(valid, "step", step.step_id, "has a negative token id");
}

void Scheduler::settle(const RowWork& row, std::span<const std::int32_t> accepted) {
  Sequence& sequence = at(row.slot);
  sequence.handle(signal::RowDone());
  if (sequence.has_ended()) {
    drain_if_idle(row.slot);
    return;
  }
  const auto num_accepted = static_cast<std::int32_t>(accepted.size());
  if (row.is_decode) {
    sequence.commit_decode(row.most_accepted - 1, num_accepted);
  } else {
    sequence.commit_prefill(row.query_len, num_accepted > 0);
  }
  FinishCode code = FinishCode::kNone;
  std::size_t num_kept = 0;
  while (num_kept < accepted.size() && code == FinishCode::kNone) {
    code = sequence.accept(accepted[num_kept]);
    ++num_kept;
  }
  counters_.generated_tokens += static_cast<std::int64_t>(num_kept);
  seal_computed(sequence, ledger_.receipt());
  if (code != FinishCode::kNone) {
    end_told(sequence, accepted.first(num_kept), code);
    end_by_itself(row.slot, code);
    return;
  }
  if (num_kept > 0) {
    emit(sequence, accepted.first(num_kept), code);
  }
  if (sequence.has_expired_pages()) {
    expiring_.push_back(row.slot);
  }
  drain_if_idle(row.slot);
}

void Scheduler::end_by_itself(Slot slot, FinishCode code) {
  const Sequence& sequence = at(slot);
  const bool sends = sequence.request().remote == Remote::kSend && code != FinishCode::kFault;
  const bool holds = sequence.hold().has_value() && code != FinishCode::kFault;
  send(slot, signal::Ended{.reason = code, .holds = holds, .sends = sends});
}

void Scheduler::fail(const RowWork& row) {
  Sequence& sequence = at(row.slot);
  if (sequence.has_ended()) {
    drain_if_idle(row.slot);
    return;
  }
  end_told(sequence, {}, FinishCode::kFault);
  end_by_itself(row.slot, FinishCode::kFault);
}

void Scheduler::seal_computed(Sequence& sequence, const StepReceipt& receipt) {
  const Tokens computed = sequence.computed();
  if (computed < sequence.seals_at()) {
    return;
  }
  const BlockHashes hashes = sequence.block_hashes(computed, base_size_);
  Grant& grant = sequence.grant();
  grant.home().each(grant.tables(), [&](auto& group, auto& table) {
    group.seal(table, computed, hashes, sequence.token_ids(), receipt);
  });
  sequence.set_seals_at(Tokens((computed.value() / base_size_.value() + 1) * base_size_.value()));
}

// Pages that this step was the last to have in its tables.
void Scheduler::release_expired() {
  ledger_.expired().each([&]<class Kind>(std::vector<Expired<Kind>>& pages) {
    for (Expired<Kind>& expired : pages) {
      Partition& partition = partitions_[static_cast<std::size_t>(expired.partition.value())];
      partition.group<Kind>(expired.group).release_expired(ledger_.retire(std::move(expired.page)));
    }
    if (!pages.empty()) {
      blocked_.reset();
    }
    pages.clear();
  });
}

}  // namespace tokenspeed::control
