// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <charconv>
#include <cstdint>
#include <limits>
#include <set>
#include <sstream>

namespace tokenspeed::control::sim {

namespace {

constexpr std::int64_t kMostSeeds = 10'000'000;
constexpr std::int64_t kMostJobs = 1024;
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() - kMostSeeds;

std::int64_t number(const std::string& name, const std::string& text, std::int64_t least, std::int64_t most) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || stopped != end || error != std::errc() || value < least || value > most) {
    throw BadUsage(name + " takes a whole number from " + std::to_string(least) + " to " + std::to_string(most) +
                   ", not '" + text + "'");
  }
  return value;
}

std::set<std::int64_t> numbers(const std::string& name, const std::string& text) {
  std::set<std::int64_t> all;
  if (text == "none") {
    return all;
  }
  std::istringstream words(text + ',');
  for (std::string word; std::getline(words, word, ',');) {
    all.insert(number(name, word, 0, kMost));
  }
  return all;
}

void set(Options& options, const std::string& name, const std::string& value) {
  if (name == "--seed") {
    options.seeds.first = static_cast<std::uint64_t>(number(name, value, 0, kMost));
  } else if (name == "--seeds") {
    options.seeds.count = static_cast<std::uint64_t>(number(name, value, 1, kMostSeeds));
  } else if (name == "--jobs") {
    options.seeds.num_jobs = static_cast<std::size_t>(number(name, value, 1, kMostJobs));
  } else if (name == "--html") {
    options.html = value.empty() ? throw BadUsage("--html takes the name of a file") : value;
  } else if (name == "--rounds") {
    options.setup.num_rounds = number(name, value, 0, kMost);
  } else if (name == "--keep") {
    options.setup.kept = numbers(name, value);
  } else {
    throw BadUsage("no such option: " + name);
  }
}

}  // namespace

Options parse(std::span<const std::string> words) {
  Options options;
  for (std::size_t index = 0; index < words.size(); ++index) {
    const std::string& name = words[index];
    if (name == "--show") {
      options.show = true;
    } else if (name == "--trace") {
      options.trace = true;
    } else if (index + 1 < words.size()) {
      set(options, name, words[++index]);
    } else {
      throw BadUsage(name + " lacks a value, or is no option");
    }
  }
  if (options.is_one() && options.seeds.count != 1) {
    throw BadUsage("--trace, --html, --rounds and --keep are of one seed, not of " +
                   std::to_string(options.seeds.count));
  }
  options.setup.seed = options.seeds.first;
  return options;
}

std::ofstream opened(const std::string& path) {
  std::ofstream file(path);
  if (!file) {
    throw BadUsage("cannot write '" + path + "'");
  }
  return file;
}

}  // namespace tokenspeed::control::sim
