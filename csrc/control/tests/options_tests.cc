// SPDX-License-Identifier: Apache-2.0
// The simulator's command line: what is meant is done, and a word that is not understood is no success.
#include <array>
#include <string>
#include <vector>

#include "sim/options.h"
#include "testing.h"

namespace tokenspeed::control::testing {
namespace {

using sim::BadUsage;
using sim::Options;

// What is said about them; empty where they are fine.
std::string complaint(const std::vector<std::string>& words) {
  try {
    (void)sim::parse(words);
  } catch (const BadUsage& bad) {
    return bad.what();
  }
  return "";
}

void what_is_meant_is_done() {
  const Options all = sim::parse(std::vector<std::string>{"--seeds", "1000", "--seed", "7", "--jobs", "2", "--show"});
  EXPECT(all.seeds.count == 1000 && all.seeds.first == 7 && all.seeds.num_jobs == 2 && all.show && !all.is_one());
  const Options one = sim::parse(std::vector<std::string>{"--seed", "0", "--trace", "--rounds", "9", "--keep", "3,8"});
  EXPECT(one.setup.seed == 0 && one.trace && one.setup.num_rounds == 9 && one.is_one());
  EXPECT(one.setup.kept.has_value() && one.setup.kept->size() == 2 && one.setup.kept->contains(8));
  const Options none = sim::parse(std::vector<std::string>{"--keep", "none"});
  EXPECT(none.setup.kept.has_value() && none.setup.kept->empty());
}

void a_number_that_is_none_is_refused_by_its_name() {
  for (const char* name : {"--seeds", "--seed", "--jobs", "--rounds", "--keep"}) {
    for (const char* value : {"", "seven", "1k", "1 000", "7 ", "+7", "0x7", "1e3", "1.5", "-1", "18446744073709551616",
                              "99999999999999999999999", "--show"}) {
      const std::string said = complaint({name, value});
      EXPECT(said.starts_with(name) && said.find(std::string("'") + value + "'") != std::string::npos, name, value,
             said);
    }
  }
  for (const char* value : {"1,000", "0", "10000001"}) {
    EXPECT(!complaint({"--seeds", value}).empty(), value);
  }
  EXPECT(!complaint({"--jobs", "0"}).empty() && !complaint({"--keep", "1,,2"}).empty());
  EXPECT(complaint({"--seeds", "10000000", "--seed", "9223372036844775807"}).empty());
}

void an_option_that_is_none_is_refused() {
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{{"--sed", "7"},
                                                                                     {"7"},
                                                                                     {"--seeds"},
                                                                                     {"--seeds", "1", "000"},
                                                                                     {"--seeds", "5", "--trace"},
                                                                                     {"--html", ""},
                                                                                     {""}}) {
    EXPECT(!complaint(words).empty(), words.front());
  }
}

void a_page_that_cannot_be_written_is_refused() {
  for (const char* path : {"/nowhere/at/all.html", "/", ""}) {
    bool refused = false;
    try {
      (void)sim::opened(path);
    } catch (const BadUsage& bad) {
      refused = std::string(bad.what()).find(path) != std::string::npos;
    }
    EXPECT(refused, path);
  }
}

constexpr std::array kTests{
    Test{.name = "what is meant is done", .run = what_is_meant_is_done},
    Test{.name = "a number that is none is refused by its name", .run = a_number_that_is_none_is_refused_by_its_name},
    Test{.name = "an option that is none is refused", .run = an_option_that_is_none_is_refused},
    Test{.name = "a page that cannot be written is refused", .run = a_page_that_cannot_be_written_is_refused},
};

}  // namespace

std::span<const Test> options_tests() { return kTests; }

}  // namespace tokenspeed::control::testing
