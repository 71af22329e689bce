// SPDX-License-Identifier: Apache-2.0
// Whoever uses the plane: sessions that take turns, fork, hold their pages while a tool runs, change their mind, run
// out of time. All choices come from the random numbers of the one event that is being made.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "event.h"
#include "layout.h"
#include "oracle.h"
#include "random.h"
#include "scheduler.h"

namespace tokenspeed::control::sim {

// How a seed's sessions behave, in percent of their events or requests.
struct Mood {
  explicit Mood(Random& random);

  std::int64_t typical_len = 0;
  std::int64_t end_percent = 0;
  std::int64_t hold_percent = 0;
  std::int64_t tick_percent = 0;
  std::int64_t retain_percent = 0;
  std::int64_t remote_percent = 0;
  std::int64_t draft_percent = 0;
  std::int64_t deadline_percent = 0;
  std::int64_t span_percent = 0;
  std::int64_t priority_percent = 0;
};

class Sessions {
 public:
  Sessions(const Layout& layout, const Mood& mood);

  // Adds one event, or several that belong together.
  void add_event(Random& random, const Oracle& oracle, const Scheduler& scheduler, std::vector<Event>& batch);
  // One that makes any batch invalid.
  [[nodiscard]] Event invalid_event(Random& random, const Oracle& oracle) const;

 private:
  struct Session {
    std::string name;
    std::vector<RequestKey> requests;  // the last one is where the next turn goes on
  };

  void add_submits(Random& random, const Oracle& oracle, std::vector<Event>& batch);
  [[nodiscard]] bool add_submit(Random& random, const Oracle& oracle, Submit submit, Session& session,
                                std::vector<Event>& batch);
  // The prompt, its spans, and what it is in the cache for.
  [[nodiscard]] Submit fresh(Random& random) const;
  [[nodiscard]] Submit next_turn(Random& random, const Request& before) const;
  [[nodiscard]] Submit fork_of(Random& random, const Request& before) const;
  void add_tokens(Random& random, Submit& submit, std::int64_t count) const;
  void set_wishes(Random& random, const Oracle& oracle, Submit& submit, const Session& session) const;
  void add_end(Random& random, const Oracle& oracle, const Scheduler& scheduler, std::vector<Event>& batch);
  void add_hold(Random& random, const Oracle& oracle, const Scheduler& scheduler, std::vector<Event>& batch);
  [[nodiscard]] std::optional<RequestKey> any_request(Random& random, const Oracle& oracle, const Scheduler& scheduler,
                                                      const std::vector<Event>& batch) const;

  Layout layout_;
  Mood mood_;
  std::vector<Session> sessions_;
  std::vector<std::int32_t> generations_;
  std::int64_t num_sessions_ = 0;
};

}  // namespace tokenspeed::control::sim
