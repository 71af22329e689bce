// SPDX-License-Identifier: Apache-2.0
#include "runner.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

namespace tokenspeed::control::sim {

namespace {

constexpr std::uint64_t kRepeatEvery = 16;

void write_all(int file, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(file, text.data() + done, text.size() - done);
    if (count <= 0) {
      return;
    }
    done += static_cast<std::size_t>(count);
  }
}

}  // namespace

Outcome run_once(const Setup& setup, Coverage& coverage) {
  Outcome outcome;
  try {
    Simulation simulation(setup, coverage);
    const auto note = [&] {
      outcome.num_rounds = simulation.num_rounds();
      outcome.event_ids = simulation.event_ids();
    };
    try {
      outcome.report = simulation.run();
    } catch (...) {
      note();
      throw;
    }
    note();
  } catch (const std::exception& error) {
    outcome.violation = error.what();
  }
  return outcome;
}

Outcome run_checked(const Setup& setup, Coverage& coverage) {
  Outcome outcome = run_once(setup, coverage);
  if (!outcome.violation.empty() || setup.seed % kRepeatEvery != 0) {
    return outcome;
  }
  for (const bool shuffles : {false, true}) {
    Setup again = setup;
    again.shuffles = shuffles;
    again.trace = nullptr;
    again.picture = nullptr;
    const Outcome second = run_once(again, coverage);
    if (!second.violation.empty()) {
      outcome.violation = second.violation + " (when run again)";
    } else if (second.report.plan_hash != outcome.report.plan_hash) {
      outcome.violation = shuffles ? "acknowledgements in another order made different plans"
                                   : "two runs of the same events made different plans";
    }
  }
  return outcome;
}

Child::Child(const Work& work, bool quiet) {
  std::array<int, 2> ends{};
  (void)std::fflush(nullptr);
  if (::pipe(ends.data()) != 0) {
    throw std::runtime_error("no pipe");
  }
  process_ = ::fork();
  if (process_ < 0) {
    throw std::runtime_error("no process");
  }
  if (process_ == 0) {
    (void)::close(ends[0]);
    if (quiet && std::freopen("/dev/null", "w", stderr) == nullptr) {
      ::_exit(1);
    }
    work([&](const std::string& text) { write_all(ends[1], text); });
    std::exit(0);  // in the ordinary way, so that leaks are looked for
  }
  (void)::close(ends[1]);
  file_ = ends[0];
}

bool Child::take() {
  std::array<char, 4096> buffer{};
  const ssize_t count = ::read(file_, buffer.data(), buffer.size());
  if (count > 0) {
    output_.text.append(buffer.data(), static_cast<std::size_t>(count));
    return true;
  }
  (void)::close(file_);
  int status = 0;
  (void)::waitpid(process_, &status, 0);
  output_.crashed = status != 0;
  return false;
}

ChildOutput in_child(const Work& work, bool quiet) {
  Child child(work, quiet);
  while (child.take()) {
  }
  return child.output();
}

}  // namespace tokenspeed::control::sim
