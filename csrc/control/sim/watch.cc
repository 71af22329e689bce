// SPDX-License-Identifier: Apache-2.0
#include "watch.h"

#include <algorithm>
#include <tuple>
#include <variant>

#include "violation.h"

namespace tokenspeed::control::sim {

namespace {

// Plans without a row that a decoding request may see in a row while its partition has no transfer in flight.
constexpr std::int64_t kMostWaits = 64;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

std::string_view name_of(const Sequence& sequence) {
  return std::visit([](const auto& state) -> std::string_view { return state.kName; }, sequence.state());
}

bool was(const Snapshot& snapshot, const RequestKey& key, std::string_view state) {
  const auto found = snapshot.states.find(key);
  return found != snapshot.states.end() && found->second == state;
}

bool is_running(const Snapshot& snapshot, const RequestKey& key) {
  return was(snapshot, key, "Prefilling") || was(snapshot, key, "Decoding");
}

std::string_view state_or_done(const Snapshot& snapshot, const RequestKey& key) {
  const auto found = snapshot.states.find(key);
  return found == snapshot.states.end() ? "Done" : found->second;
}

}  // namespace

Snapshot snapshot(const Scheduler& scheduler) {
  Snapshot taken;
  taken.now_ms = scheduler.now_ms();
  std::vector<const Sequence*> first(at(scheduler.config().num_partitions));
  std::vector<const Sequence*> first_prompt(first.size());
  for (const auto& sequence : scheduler.sequences()) {
    if (!sequence) {
      continue;
    }
    const RequestKey key = sequence->key();
    taken.states.emplace(key, name_of(*sequence));
    if (sequence->is<Held>()) {
      const HoldWish wish = sequence->hold().value_or(HoldWish{});
      taken.held.emplace(key, HeldThen{.partition = sequence->held().home().id().value(),
                                       .priority = wish.priority,
                                       .deadline_ms = wish.deadline_ms.value_or(0)});
    }
    if (sequence->is_running()) {
      const Sequence*& front = first[at(sequence->grant().home().id().value())];
      front = front == nullptr || sequence->rank() < front->rank() ? &*sequence : front;
      // One whose pages reach far enough waits for nothing.
      const bool has_pages = sequence->planned_high() + Tokens(1) <= sequence->covered();
      if (sequence->is<Decoding>() && sequence->wants_decode() && has_pages) {
        taken.must_decode.insert(key);
      }
      const Sequence*& prompt = first_prompt[at(sequence->grant().home().id().value())];
      if (sequence->is<Prefilling>() && (prompt == nullptr || sequence->rank() < prompt->rank())) {
        prompt = &*sequence;
      }
    }
  }
  for (const Sequence* prompt : first_prompt) {
    if (prompt != nullptr && prompt->covered() >= prompt->len()) {
      taken.must_prefill.push_back(prompt->key());
    }
  }
  for (const Sequence* front : first) {
    if (front != nullptr) {
      taken.first.push_back(front->key());
    }
  }
  for (const Transfer& transfer : scheduler.transfers().records()) {
    if (transfer.slot && transfer.id.value() > 0) {
      const auto& sequence = scheduler.sequences()[at(transfer.slot->value())];
      require(sequence.has_value(), "lease", transfer.id, "of a sequence that is gone");
      if (sequence) {
        taken.waiting_for.emplace(transfer.id.value(), sequence->key());
      }
    }
  }
  return taken;
}

void Watch::see_states(const Snapshot& before, const Snapshot& after, Oracle& oracle) {
  for (const auto& [key, state] : after.states) {
    coverage_.count(std::string("in ") + std::string(state));
    Request& request = oracle.at(key);
    if (state == "Held" && !request.held_since_ms) {
      require(request.may_hold, "request", key, "is held and must not be");
      request.held_since_ms = before.now_ms;
      request.held_by_ms = oracle.now_ms();
    }
  }
  for (const auto& [key, state] : before.states) {
    if (state == "Draining" && !was(after, key, "Draining")) {
      coverage_.saw("Draining", "Drained");
    }
    // Only what was told to end may be gone.
    require(after.states.contains(key) || oracle.at(key).has_ended(), "request", key, "is lost");
  }
}

void Watch::check_holds(const Snapshot& after, const Oracle& oracle) const {
  for (const auto& [key, state] : after.states) {
    if (state == "Held") {
      const Request* request = oracle.find(key);
      require(request->may_hold, "request", key, "is held though it was let go");
    }
  }
}

void Watch::see_tick(const Snapshot& before, const Tick& tick, const Oracle& oracle,
                     const std::set<RequestKey, KeyOrder>& touched) {
  for (const auto& [key, state] : before.states) {
    const Request* request = oracle.find(key);
    if (touched.contains(key)) {
      continue;
    }
    const std::int64_t deadline_ms = request->submit.deadline_ms.value_or(-1);
    const bool hold_ended = state == "Held" && request->hold_may_end_ms() <= tick.now_ms;
    const bool is_late = request->code == FinishCode::kDeadline && deadline_ms >= 0 && deadline_ms <= tick.now_ms;
    if (hold_ended || is_late) {
      coverage_.saw(state, "Expired");
    }
  }
}

void Watch::batch(const Snapshot& before, std::span<const Event> events, const Snapshot& after, Oracle& oracle) {
  std::set<RequestKey, KeyOrder> touched;
  bool ticked = false;
  const auto see = [&](const RequestKey& key, std::string_view signal) {
    coverage_.count(std::string("event ") + std::string(signal));
    if (oracle.find(key) != nullptr && touched.insert(key).second && !ticked) {
      coverage_.saw(state_or_done(before, key), signal);
    }
  };
  for (const Event& event : events) {
    if (const auto* cancel = std::get_if<Cancel>(&event)) {
      see(cancel->key, "Cancelled");
    } else if (const auto* finish = std::get_if<Finish>(&event)) {
      see(finish->key, "Finished");
    } else if (const auto* retain = std::get_if<Retain>(&event)) {
      see(retain->key, "Retained");
    } else if (const auto* release = std::get_if<Release>(&event)) {
      see(release->key, "Released");
    } else if (const auto* done = std::get_if<TransferDone>(&event)) {
      const auto found = before.waiting_for.find(done->lease.value());
      if (found != before.waiting_for.end()) {
        see(found->second, "TransferEnded");
      }
    } else if (const auto* tick = std::get_if<Tick>(&event)) {
      see_tick(before, *tick, oracle, touched);
      ticked = true;
    } else if (const auto* submit = std::get_if<Submit>(&event)) {
      coverage_.count(std::string("submit, remote ") + std::to_string(static_cast<int>(submit->remote)));
      touched.insert(submit->key);
    }
  }
  see_states(before, after, oracle);
  check_holds(after, oracle);
  for (const auto& [key, held] : before.held) {
    const Request& request = oracle.at(key);
    const bool may_end = !request.may_hold || (ticked && request.hold_may_end_ms() <= oracle.now_ms());
    const bool must_end = !request.may_hold || (ticked && request.hold_must_end_ms() <= oracle.now_ms());
    require(after.held.contains(key) || may_end || touched.contains(key), "request", key,
            "was let go though nobody asked");
    require(!after.held.contains(key) || !must_end || touched.contains(key), "request", key,
            "is held past its deadline", request.hold_must_end_ms());
  }
}

void Watch::plan(const Snapshot& before, const StepPlan* plan, const Snapshot& after, const Scheduler& scheduler,
                 Oracle& oracle) {
  see_states(before, after, oracle);
  coverage_.count(plan == nullptr ? "plan: none" : plan->rows.num_rows() == 0 ? "plan: no rows" : "plan");
  for (const auto& [key, state] : before.states) {
    if (is_running(before, key) && !is_running(after, key)) {
      coverage_.saw(state, "GaveWay");
      require(state == "Decoding" || state == "Prefilling", "request", key, "gave way as", state);
    }
    require(after.states.contains(key) || state == "Held", "planning ended request", key, state);
  }
  // Whoever is first in line gets on; only others give way.
  for (const RequestKey& key : before.first) {
    require(is_running(after, key), "request", key, "is first in line and was preempted");
  }
  if (plan != nullptr) {
    see_rows(before, *plan, after);
  }
  check_progress(before, plan, after, scheduler);
  check_reclaimed(before, plan, after, oracle);
}

void Watch::see_rows(const Snapshot& before, const StepPlan& plan, const Snapshot& after) {
  for (std::size_t index = 0; index < plan.seated.num_rows(); ++index) {
    const RequestKey key{.index = plan.seated.row(index)[1], .generation = plan.seated.row(index)[2]};
    coverage_.saw(is_running(before, key) ? "Preempted" : state_or_done(before, key), "Admitted");
    if (was(after, key, "Decoding")) {
      coverage_.saw("Prefilling", "PromptPlanned");
    }
    coverage_.count(was(after, key, "AwaitingTransfer") ? "admitted, awaits transfer" : "admitted, runs");
  }
  for (const auto& [key, state] : before.states) {
    if (state == "Prefilling" && was(after, key, "Decoding")) {
      coverage_.saw("Prefilling", "PromptPlanned");
    }
  }
  for (std::size_t index = 0; index < plan.rows.num_rows(); ++index) {
    const auto row = plan.rows.row(index);
    coverage_.count(row[4] > 0    ? "row: drafts"
                    : row[1] == 2 ? "row: decode"
                    : row[1] == 1 ? "row: last"
                                  : "row: chunk");
  }
  for (std::size_t index = 0; index < plan.store.num_rows(); ++index) {
    coverage_.count(plan.store.row(index)[3] == 0 ? "block sent" : "block stored");
  }
  for (std::size_t index = 0; index < plan.load.num_rows(); ++index) {
    coverage_.count(plan.load.row(index)[3] == 0 ? "block received" : "block loaded");
  }
  for (std::size_t index = 0; index < plan.page_delta.num_rows(); ++index) {
    coverage_.count("block expired", plan.page_delta.row(index)[3] == 0 ? 1 : 0);
  }
}

void Watch::check_progress(const Snapshot& before, const StepPlan* plan, const Snapshot& after,
                           const Scheduler& scheduler) {
  // What waits in one partition is no reason to wait in another.
  std::set<std::int32_t> moving;
  for (const Transfer& transfer : scheduler.transfers().records()) {
    if (transfer.id.value() > 0) {
      moving.insert(transfer.partition.value());
    }
  }
  std::set<RequestKey, KeyOrder> has_row;
  std::set<RequestKey, KeyOrder> calm;
  for (const auto& sequence : scheduler.sequences()) {
    if (sequence && sequence->is_running() && !moving.contains(sequence->grant().home().id().value())) {
      calm.insert(sequence->key());
    }
    if (sequence && sequence->is_running() && plan != nullptr) {
      for (std::size_t index = 0; index < plan->rows.num_rows(); ++index) {
        if (plan->rows.row(index)[0] == sequence->grant().seat().value()) {
          has_row.insert(sequence->key());
        }
      }
    }
  }
  for (const RequestKey& key : before.must_decode) {
    require(!was(after, key, "Decoding") || has_row.contains(key), "request", key,
            "decodes, has its pages, and got no row");
  }
  // However many decode. One that gave way in this very plan may have been seated again, behind others.
  const auto is_seated_anew = [&](const RequestKey& key) {
    for (std::size_t index = 0; plan != nullptr && index < plan->seated.num_rows(); ++index) {
      const auto row = plan->seated.row(index);
      if (key == RequestKey{.index = row[1], .generation = row[2]}) {
        return true;
      }
    }
    return false;
  };
  for (const RequestKey& key : before.must_prefill) {
    require(!is_running(after, key) || has_row.contains(key) || is_seated_anew(key), "request", key,
            "is the first of the prompts, has its pages, and got no row");
  }
  for (const auto& [key, state] : after.states) {
    if (state != "Decoding" || has_row.contains(key)) {
      num_waits_.erase(key);
    } else if (calm.contains(key) && was(before, key, "Decoding")) {
      require(++num_waits_[key] <= kMostWaits, "request", key, "decodes and got no row for", kMostWaits, "plans");
    }
  }
}

// Under pressure the first in the order of retention goes first; a session's next turn ends its own hold.
void Watch::check_reclaimed(const Snapshot& before, const StepPlan* plan, const Snapshot& after, const Oracle& oracle) {
  std::set<std::string> seated;
  for (std::size_t index = 0; plan != nullptr && index < plan->seated.num_rows(); ++index) {
    const auto row = plan->seated.row(index);
    const Request* request = oracle.find(RequestKey{.index = row[1], .generation = row[2]});
    if (request->submit.retain) {
      seated.insert(request->submit.retain->session);
    }
  }
  const auto order = [](const HeldThen& held) { return std::tuple(-held.priority, held.deadline_ms); };
  for (const auto& [key, held] : before.held) {
    if (after.states.contains(key)) {
      continue;
    }
    coverage_.saw("Held", "Reclaimed");
    const std::optional<Retention>& retain = oracle.find(key)->submit.retain;
    if (retain && seated.contains(retain->session)) {
      coverage_.count("held, superseded or reclaimed");
      continue;
    }
    coverage_.count("held, reclaimed");
    for (const auto& [other, kept] : after.held) {
      require(kept.partition != held.partition || order(kept) >= order(held), "request", key, "was reclaimed before",
              other, "which goes first");
    }
  }
}

void Watch::result(const Snapshot& before, const DeviceStep& step, const Snapshot& after, Oracle& oracle) {
  for (const RowResult& row : step.rows) {
    const auto found = before.states.find(row.key);
    require(found != before.states.end(), "request", row.key, "is gone while a step has its row");
    if (!row.fault) {
      coverage_.saw(found->second, "RowDone");
    }
    const Request& request = oracle.at(row.key);
    if (oracle.ended_now(row.key)) {
      coverage_.saw(found->second, "Ended");
      coverage_.count(std::string("ended with ") + std::to_string(static_cast<int>(request.code)));
      // A good end keeps its pages where that was wished.
      require(!request.may_hold || was(after, row.key, "Draining") || was(after, row.key, "SendingKv") ||
                  was(after, row.key, "Held"),
              "request", row.key, "ended well and is not held");
    }
  }
  see_states(before, after, oracle);
  for (const auto& [key, held] : before.held) {
    require(after.held.contains(key), "request", key, "was let go by a result");
  }
  check_holds(after, oracle);
}

}  // namespace tokenspeed::control::sim
