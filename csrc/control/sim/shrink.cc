// SPDX-License-Identifier: Apache-2.0
#include "shrink.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <sstream>
#include <vector>

#include "coverage.h"
#include "runner.h"

namespace tokenspeed::control::sim {

namespace {

constexpr int kMostAttempts = 400;

// The text without its numbers, and without the values that follow a failed CHECK.
std::string class_of(const std::string& violation) {
  std::string text;
  const std::size_t end = violation.find(") failed");
  for (const char letter : violation.substr(0, end)) {
    if (std::isdigit(static_cast<unsigned char>(letter)) == 0 && letter != '-') {
      text.push_back(letter);
    }
  }
  return text;
}

struct Attempt {
  std::string violation;
  std::int64_t num_rounds = 0;
  std::vector<std::int64_t> event_ids;
};

Attempt attempt(const Setup& setup) {
  const ChildOutput output = in_child(
      [&](const Say& say) {
        Coverage coverage;
        const Outcome outcome = run_checked(setup, coverage);
        std::ostringstream text;
        text << outcome.num_rounds;
        for (const std::int64_t id : outcome.event_ids) {
          text << ' ' << id;
        }
        text << '\n' << outcome.violation;
        say(text.str());
      },
      true);
  Attempt result;
  std::istringstream text(output.text);
  std::string numbers;
  std::getline(text, numbers);
  std::istringstream ids(numbers);
  ids >> result.num_rounds;
  for (std::int64_t id = 0; ids >> id;) {
    result.event_ids.push_back(id);
  }
  std::getline(text, result.violation);
  if (output.crashed) {
    result.violation = "crashed";
  }
  return result;
}

class Shrinker {
 public:
  explicit Shrinker(const Setup& setup) {
    best_.setup = setup;
    best_.setup.trace = nullptr;
    best_.setup.picture = nullptr;
    first_ = attempt(best_.setup);
    best_.violation = first_.violation;
  }

  Shrunk run() {
    if (first_.violation.empty()) {
      return best_;
    }
    fewer_rounds();
    // What a crash had done by then is not known, so all events that could have been are candidates.
    std::vector<std::int64_t> ids = first_.event_ids;
    if (ids.empty()) {
      for (std::int64_t id = 0; id < kMostIds; ++id) {
        ids.push_back(id);
      }
    }
    fewer_events(std::move(ids));
    return best_;
  }

 private:
  static constexpr std::int64_t kMostIds = 1200;

  bool still_fails(const Setup& setup) {
    if (best_.num_attempts >= kMostAttempts) {
      return false;
    }
    ++best_.num_attempts;
    const Attempt tried = attempt(setup);
    if (tried.violation.empty() || class_of(tried.violation) != class_of(first_.violation)) {
      return false;
    }
    best_.setup = setup;
    best_.violation = tried.violation;
    return true;
  }

  void fewer_rounds() {
    std::int64_t num_rounds = first_.num_rounds > 0 ? first_.num_rounds : 300;
    const auto fails_with = [this](std::int64_t rounds) {
      Setup setup = best_.setup;
      setup.num_rounds = rounds;
      return still_fails(setup);
    };
    if (!fails_with(num_rounds)) {
      return;
    }
    for (std::int64_t step = num_rounds / 2; step > 0; step /= 2) {
      num_rounds -= fails_with(num_rounds - step) ? step : 0;
    }
  }

  // Delta debugging: ever smaller parts of the events go, as long as some part can.
  void fewer_events(std::vector<std::int64_t> kept) {
    for (std::size_t part = std::max<std::size_t>(1, kept.size() / 2); part > 0;) {
      bool any = false;
      for (std::size_t start = 0; start < kept.size();) {
        std::vector<std::int64_t> fewer = kept;
        const std::size_t end = std::min(start + part, fewer.size());
        fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(start),
                    fewer.begin() + static_cast<std::ptrdiff_t>(end));
        Setup setup = best_.setup;
        setup.kept = std::set<std::int64_t>(fewer.begin(), fewer.end());
        if (still_fails(setup)) {
          kept = std::move(fewer);
          any = true;
        } else {
          start += part;
        }
      }
      part = any && part == 1 ? 1 : part / 2;
    }
  }

  Attempt first_;
  Shrunk best_;
};

}  // namespace

Shrunk shrink(const Setup& setup) { return Shrinker(setup).run(); }

std::string replay_arguments(const Setup& setup) {
  std::ostringstream text;
  text << "--seed " << setup.seed;
  if (setup.num_rounds) {
    text << " --rounds " << *setup.num_rounds;
  }
  if (setup.kept) {
    text << " --keep ";
    const char* comma = "";
    for (const std::int64_t id : *setup.kept) {
      text << comma << id;
      comma = ",";
    }
    if (setup.kept->empty()) {
      text << "none";
    }
  }
  return text.str();
}

}  // namespace tokenspeed::control::sim
