// SPDX-License-Identifier: Apache-2.0
#include "workers.h"

#include <algorithm>
#include <deque>
#include <list>
#include <poll.h>
#include <sstream>
#include <utility>
#include <vector>

#include "runner.h"

namespace tokenspeed::control::sim {

namespace {

constexpr std::uint64_t kSeedsAtATime = 25;

// First seed, and the one after the last.
using Range = std::pair<std::uint64_t, std::uint64_t>;

// What the child says, a line each: "seed N", "hash N H", "fail N TEXT", "count N NAME".
void run_range(const Range& range, const Say& say) {
  Coverage coverage;
  for (std::uint64_t seed = range.first; seed < range.second; ++seed) {
    say("seed " + std::to_string(seed) + '\n');
    Setup setup;
    setup.seed = seed;
    const Outcome outcome = run_checked(setup, coverage);
    say("hash " + std::to_string(seed) + ' ' + std::to_string(outcome.report.plan_hash) + '\n');
    if (!outcome.violation.empty()) {
      say("fail " + std::to_string(seed) + ' ' + outcome.violation + '\n');
    }
  }
  for (const auto& [name, times] : coverage.counts()) {
    say("count " + std::to_string(times) + ' ' + name + '\n');
  }
}

// The last seed that was begun.
std::uint64_t take_lines(const std::string& text, Totals& totals) {
  std::istringstream lines(text);
  std::uint64_t last = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string what;
    std::uint64_t number = 0;
    words >> what >> number;
    std::string rest;
    std::getline(words >> std::ws, rest);
    if (what == "seed") {
      last = number;
    } else if (what == "hash") {
      totals.plan_hashes[number] = std::stoull(rest);
    } else if (what == "fail") {
      totals.violations[number] = rest;
    } else if (what == "count") {
      totals.coverage.count(rest, static_cast<std::int64_t>(number));
    }
  }
  return last;
}

}  // namespace

Totals run_seeds(const Seeds& seeds) {
  std::deque<Range> ranges;
  for (std::uint64_t first = 0; first < seeds.count; first += kSeedsAtATime) {
    ranges.emplace_back(seeds.first + first, seeds.first + std::min(first + kSeedsAtATime, seeds.count));
  }
  Totals totals;
  std::list<std::pair<Range, Child>> running;
  while (!ranges.empty() || !running.empty()) {
    while (!ranges.empty() && running.size() < seeds.num_jobs) {
      const Range range = ranges.front();
      ranges.pop_front();
      running.emplace_back(range, Child([&](const Say& say) { run_range(range, say); }, false));
    }
    std::vector<pollfd> files;
    for (const auto& [range, child] : running) {
      files.push_back(pollfd{.fd = child.file(), .events = POLLIN, .revents = 0});
    }
    (void)::poll(files.data(), files.size(), -1);
    auto ready = files.begin();
    for (auto one = running.begin(); one != running.end(); ++ready) {
      auto& [range, child] = *one;
      if (ready->revents == 0 || child.take()) {
        ++one;
        continue;
      }
      const std::uint64_t last = take_lines(child.output().text, totals);
      if (child.output().crashed) {
        totals.violations.try_emplace(last, "crashed");
        if (last + 1 < range.second) {
          ranges.emplace_front(last + 1, range.second);
        }
      }
      one = running.erase(one);
    }
  }
  return totals;
}

}  // namespace tokenspeed::control::sim
