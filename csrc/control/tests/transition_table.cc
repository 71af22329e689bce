// SPDX-License-Identifier: Apache-2.0
// Prints what transitions.h declares: the table of states and signals as markdown, and the moves as an SVG. With a
// folder as argument it rewrites control-plane.md (between its markers) and control-states.svg there.
#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "transitions.h"

namespace tokenspeed::control {
namespace {

using Names = std::vector<std::string>;

// What becomes of one pair: where it leads, or why it leads nowhere.
struct Outcome {
  Names next;
  std::string why;
  bool legal = true;
};

template <class Result>
struct OutcomeFrom;
template <class... Next>
struct OutcomeFrom<To<Next...>> {
  static Outcome get() { return {.next = {Next::kName...}, .why = {}, .legal = true}; }
};
template <Why Reason>
struct OutcomeFrom<Ignore<Reason>> {
  static Outcome get() { return {.next = {}, .why = std::string(Reason.view()), .legal = true}; }
};
template <Why Reason>
struct OutcomeFrom<Illegal<Reason>> {
  static Outcome get() { return {.next = {}, .why = std::string(Reason.view()), .legal = false}; }
};

struct Row {
  std::string signal;
  std::vector<Outcome> by_state;
};
struct Table {
  Names states;
  std::vector<Row> rows;
};

template <class Signal, class... S>
Row row_of(const std::variant<S...>*) {
  return {.signal = Signal::kName, .by_state = {OutcomeFrom<OutcomeOf<Transitions, S, Signal>>::get()...}};
}

template <class... S, class... Signal>
Table table_of(const std::variant<S...>* states, TypeList<Signal...>) {
  return {.states = {S::kName...}, .rows = {row_of<Signal>(states)...}};
}

std::string joined(const Names& names, std::string_view between) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : std::string(between)) + name;
  }
  return text;
}

std::string cell(const Outcome& outcome) {
  if (!outcome.next.empty()) {
    return joined(outcome.next, ", ");
  }
  return outcome.legal ? "·" : "✗";
}

// The states that have the same reason, for one signal.
std::string reasons(const Table& table, const Row& row, bool legal) {
  std::vector<std::pair<std::string, Names>> groups;
  for (std::size_t index = 0; index < table.states.size(); ++index) {
    const Outcome& outcome = row.by_state[index];
    if (!outcome.next.empty() || outcome.legal != legal) {
      continue;
    }
    auto group =
        std::find_if(groups.begin(), groups.end(), [&](const auto& other) { return other.first == outcome.why; });
    if (group == groups.end()) {
      group = groups.insert(groups.end(), {outcome.why, {}});
    }
    group->second.push_back(table.states[index]);
  }
  Names parts;
  for (const auto& [why, states] : groups) {
    parts.push_back(joined(states, ", ") + ": " + why);
  }
  return joined(parts, "; ");
}

std::string markdown(const Table& table) {
  std::string text = "| | " + joined(table.states, " | ") + " |\n|---|";
  for (std::size_t count = 0; count < table.states.size(); ++count) {
    text += "---|";
  }
  text += "\n";
  for (const Row& row : table.rows) {
    text += "| **" + row.signal + "** |";
    for (const Outcome& outcome : row.by_state) {
      text += " " + cell(outcome) + " |";
    }
    text += "\n";
  }
  text +=
      "\nA name: the state that follows. ·: in order, nothing moves. ✗: a bug of the sender, refused by a CHECK.\n\n";
  for (const Row& row : table.rows) {
    const std::string ignored = reasons(table, row, true);
    const std::string illegal = reasons(table, row, false);
    text += "* **" + row.signal + "**" + (ignored.empty() ? "" : " · " + ignored + ".") +
            (illegal.empty() ? "" : " ✗ " + illegal + ".") + "\n";
  }
  return text;
}

// The drawing: where boxes, arrows and their labels stand is laid out by hand; which arrows there are and what they are
// called is read from the table, and the two must agree.
struct Box {
  const char* state;
  int x;
  int y;
};
struct Arrow {
  const char* from;
  const char* to;
  const char* path;
  int label_x;
  int label_y;
  bool in_a_line;
};

constexpr int kHalfWidth = 72;
constexpr int kHalfHeight = 20;
constexpr std::array kBoxes{
    Box{"Queued", 110, 90},     Box{"AwaitingTransfer", 390, 90}, Box{"Prefilling", 660, 90}, Box{"Decoding", 930, 90},
    Box{"Preempted", 300, 290}, Box{"Draining", 660, 310},        Box{"SendingKv", 930, 310}, Box{"Held", 660, 500},
    Box{"Done", 110, 500}};
constexpr std::array kArrows{
    Arrow{"Queued", "AwaitingTransfer", "M182 90 H316", 222, 83, true},
    Arrow{"Queued", "Prefilling", "M110 70 C110 20 660 20 660 68", 360, 28, true},
    Arrow{"Queued", "Done", "M80 110 V478", 10, 260, false},
    Arrow{"AwaitingTransfer", "Prefilling", "M462 90 H586", 478, 83, true},
    Arrow{"AwaitingTransfer", "Draining", "M400 110 L590 290", 562, 192, false},
    Arrow{"Prefilling", "Decoding", "M732 90 H856", 748, 83, true},
    Arrow{"Prefilling", "Draining", "M660 110 V288", 668, 170, false},
    Arrow{"Decoding", "Draining", "M920 110 L722 289", 884, 165, false},
    Arrow{"Preempted", "AwaitingTransfer", "M290 270 L368 112", 268, 190, true},
    Arrow{"Preempted", "Prefilling", "M350 270 L600 112", 398, 262, true},
    Arrow{"Preempted", "Done", "M270 310 L140 478", 136, 385, false},
    Arrow{"Draining", "Preempted", "M588 304 L374 291", 450, 290, true},
    Arrow{"Draining", "SendingKv", "M732 302 H856", 765, 296, true},
    Arrow{"SendingKv", "Draining", "M858 320 H734", 752, 336, true},
    Arrow{"Draining", "Held", "M640 330 V478", 582, 420, true},
    Arrow{"Draining", "Done", "M600 330 L184 490", 400, 426, true},
    Arrow{"Draining", "Draining", "M690 330 C690 400 760 390 722 332", 745, 372, false},
    Arrow{"SendingKv", "SendingKv", "M960 330 C960 400 1030 390 992 332", 960, 402, false},
    Arrow{"Held", "Done", "M588 500 H184", 270, 518, true},
};

std::map<std::pair<std::string, std::string>, Names> moves_of(const Table& table) {
  std::map<std::pair<std::string, std::string>, Names> moves;
  for (const Row& row : table.rows) {
    for (std::size_t index = 0; index < table.states.size(); ++index) {
      for (const std::string& next : row.by_state[index].next) {
        moves[{table.states[index], next}].push_back(row.signal);
      }
    }
  }
  return moves;
}

std::string text_at(int x, int y, const std::string& text, const std::string& kind) {
  return "<text class=\"" + kind + "\" x=\"" + std::to_string(x) + "\" y=\"" + std::to_string(y) + "\">" + text +
         "</text>\n";
}

std::string drawn(const Arrow& arrow, const Names& signals) {
  std::string text = "<path d=\"" + std::string(arrow.path) + "\"/>\n";
  int y = arrow.label_y;
  for (const std::string& line : arrow.in_a_line ? Names{joined(signals, ", ")} : signals) {
    text += text_at(arrow.label_x, y, line, "label");
    y += 15;
  }
  return text;
}

std::string svg(const Table& table) {
  auto moves = moves_of(table);
  std::string text =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1050 540\" font-family=\"sans-serif\">\n"
      "<title>States of a sequence</title>\n"
      "<style>path{fill:none;stroke:#555;stroke-width:1.3;marker-end:url(#tip)} rect{fill:#eef3fa;stroke:#2c5282}\n"
      ".state{font-size:15px;text-anchor:middle;fill:#1a202c}\n"
      ".label{font-size:12px;fill:#333;stroke:#fff;stroke-width:4px;paint-order:stroke}</style>\n"
      "<defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"8\" markerHeight=\"8\" "
      "orient=\"auto\"><polygon points=\"0,0 8,4 0,8\" fill=\"#555\"/></marker></defs>\n"
      "<rect width=\"1050\" height=\"540\" style=\"fill:#fff;stroke:none\"/>\n";
  for (const Arrow& arrow : kArrows) {
    const auto found = moves.find({arrow.from, arrow.to});
    if (found == moves.end()) {
      throw std::runtime_error(std::string("no signal leads from ") + arrow.from + " to " + arrow.to);
    }
    text += drawn(arrow, found->second);
    moves.erase(found);
  }
  if (!moves.empty()) {
    const auto& [from, to] = moves.begin()->first;
    throw std::runtime_error("no arrow is laid out from " + from + " to " + to);
  }
  if (table.states.size() != kBoxes.size()) {
    throw std::runtime_error("a state has no box");
  }
  for (const Box& box : kBoxes) {
    text += "<rect x=\"" + std::to_string(box.x - kHalfWidth) + "\" y=\"" + std::to_string(box.y - kHalfHeight) +
            "\" width=\"" + std::to_string(2 * kHalfWidth) + "\" height=\"" + std::to_string(2 * kHalfHeight) +
            "\" rx=\"6\"/>\n" + text_at(box.x, box.y + 5, box.state, "state");
  }
  return text + "</svg>\n";
}

void write(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  if (!file.flush()) {
    throw std::runtime_error("cannot write " + path);
  }
}

void rewrite(const std::string& folder, const Table& table) {
  const std::string path = folder + "/control-plane.md";
  std::ifstream file(path, std::ios::binary);
  std::string page((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::string first = "<!-- transitions: written by make docs-control -->\n";
  const std::string last = "<!-- end of transitions -->";
  const std::size_t start = page.find(first);
  const std::size_t end = page.find(last);
  if (start == std::string::npos || end == std::string::npos || end < start) {
    throw std::runtime_error(path + " lacks the markers of the table");
  }
  page.replace(start + first.size(), end - start - first.size(), "\n" + markdown(table) + "\n");
  write(path, page);
  write(folder + "/control-states.svg", svg(table));
}

}  // namespace
}  // namespace tokenspeed::control

int main(int argc, char** argv) {
  using namespace tokenspeed::control;
  try {
    const Table table = table_of(static_cast<const State*>(nullptr), Signals());
    if (argc > 1) {
      rewrite(argv[1], table);
    } else {
      (void)std::fputs((markdown(table) + "\n" + svg(table)).c_str(), stdout);
    }
  } catch (const std::exception& error) {
    (void)std::fprintf(stderr, "transition_table: %s\n", error.what());
    return 1;
  }
  return 0;
}
