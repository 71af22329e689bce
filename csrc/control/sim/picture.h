// SPDX-License-Identifier: Apache-2.0
// A seed as one self-contained page: what each request did over the steps, and below who had which page.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "layout.h"
#include "oracle.h"
#include "scheduler.h"

namespace tokenspeed::control::sim {

class Picture {
 public:
  // One column more: what is the case after a plan.
  void add(const Scheduler& scheduler, const Layout& layout, std::int64_t round);

  [[nodiscard]] std::string html(std::uint64_t seed, const std::string& violation) const;

 private:
  // What a page is, and whose: "w" written, "s" shared, "m" shared by many, "h" held, "c" cached, "t" in a transfer,
  // "e" expired, "" free.
  struct Cell {
    std::string kind;
    std::string owner;
    bool operator==(const Cell&) const = default;
  };
  struct Row {
    std::string name;
    std::map<std::size_t, Cell> cells;  // by column; free where there is none
  };
  struct Section {
    std::string title;
    std::vector<Row> rows;
  };

  void add_requests(const Scheduler& scheduler, std::size_t column);
  template <class Pool>
  void add_pool(Section& section, const Pool& pool, const std::map<std::int32_t, Cell>& owners, std::size_t column);
  [[nodiscard]] static std::string words_of(const Cell& cell, bool states);
  [[nodiscard]] std::string axis(double width, double top) const;
  [[nodiscard]] std::string svg_of(const Section& section, double width, bool states, double& top) const;

  Section requests_{.title = "Requests", .rows = {}};
  std::map<std::string, std::size_t> row_of_;
  std::map<std::string, Section> pools_;
  std::vector<std::int64_t> rounds_;
};

}  // namespace tokenspeed::control::sim
