// SPDX-License-Identifier: Apache-2.0
#include "picture.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>
#include <variant>

#include "audit.h"

namespace tokenspeed::control::sim {

namespace {

constexpr double kLeft = 90;
constexpr double kRowHeight = 10;
constexpr double kPageHeight = 6;
constexpr double kAxisHeight = 10;
constexpr double kTickDistance = 40;

// State or kind of page, colour, words.
struct Colour {
  const char* name;
  const char* fill;
  const char* words;
};

constexpr std::array<Colour, 8> kStates{{{"Queued", "#d9d9d9", "queued"},
                                         {"AwaitingTransfer", "#fdb462", "awaits a transfer"},
                                         {"Prefilling", "#80b1d3", "computes its prompt"},
                                         {"Decoding", "#4daf4a", "decodes"},
                                         {"Held", "#bebada", "held"},
                                         {"Preempted", "#e41a1c", "preempted"},
                                         {"SendingKv", "#ff7f00", "a peer takes its pages"},
                                         {"Draining", "#8c6d31", "drains"}}};

constexpr std::array<Colour, 4> kPages{{{"m", "#6a3d9a", "shared by several"},
                                        {"c", "#e8e8e8", "cached, nobody uses it"},
                                        {"t", "#222222", "a transfer has it"},
                                        {"e", "#b15928", "expired, waits for its step"}}};

template <std::size_t N>
std::string fill_of(const std::array<Colour, N>& colours, const std::string& name) {
  const auto found = std::find_if(colours.begin(), colours.end(), [&](const Colour& one) { return name == one.name; });
  return found == colours.end() ? "" : found->fill;
}

// What stands before the names of those who own a page.
constexpr std::array<Colour, 4> kOwned{{{"w", "", "written by "},
                                        {"s", "", "sealed, read by "},
                                        {"m", "", "sealed, shared by "},
                                        {"h", "", "held for the next turn after "}}};

template <std::size_t N>
std::string words_of(const std::array<Colour, N>& colours, const std::string& name) {
  const auto found = std::find_if(colours.begin(), colours.end(), [&](const Colour& one) { return name == one.name; });
  return found == colours.end() ? "" : found->words;
}

std::string page_words(const std::string& kind, const std::string& owner) {
  return owner.empty() ? words_of(kPages, kind) : words_of(kOwned, kind) + owner;
}

// A hue for each request; the lighter, the less it may do with the page.
std::string page_fill(const std::string& kind, const std::string& owner) {
  std::string fixed = fill_of(kPages, kind);
  if (!fixed.empty()) {
    return fixed;
  }
  std::uint64_t hash = 7;
  for (const char letter : owner) {
    hash = scramble(hash ^ static_cast<unsigned char>(letter));
  }
  const char* lightness = kind == "w" ? "42%" : kind == "s" ? "62%" : "82%";
  return "hsl(" + std::to_string(hash % 360) + ",65%," + lightness + ")";
}

std::string name_of(const RequestKey& key) {
  std::ostringstream text;
  text << key;
  return text.str();
}

const char* kind_name(GroupKind kind) {
  return kind == GroupKind::kFull ? "full attention" : kind == GroupKind::kWindow ? "sliding window" : "recurrent";
}

template <std::size_t N>
void add_legend(std::ostringstream& out, const std::array<Colour, N>& colours) {
  for (const Colour& one : colours) {
    out << "<span><i style=\"background:" << one.fill << "\"></i>" << one.words << "</span>";
  }
}

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char letter : text) {
    safe += letter == '<' ? "&lt;" : letter == '&' ? "&amp;" : std::string(1, letter);
  }
  return safe;
}

constexpr const char* kHead =
    "<!doctype html><meta charset=\"utf-8\"><style>body{font:13px system-ui,sans-serif;margin:16px}"
    "span{margin-right:14px;white-space:nowrap}i{display:inline-block;width:12px;height:12px;margin-right:4px;"
    "vertical-align:-2px}text{font:8px system-ui,sans-serif}p{margin:6px 0}</style>";

}  // namespace

void Picture::add(const Scheduler& scheduler, const Layout& layout, std::int64_t round) {
  const std::size_t column = rounds_.size();
  rounds_.push_back(round);
  add_requests(scheduler, column);
  std::vector<std::map<std::int32_t, Cell>> device(static_cast<std::size_t>(layout.num_numbers()));
  std::vector<std::map<std::int32_t, Cell>> host(device.size());
  const auto own = [](std::map<std::int32_t, Cell>& pages, std::int32_t page, Cell cell) {
    const auto [found, is_new] = pages.try_emplace(page, cell);
    if (!is_new && found->second.owner != cell.owner) {
      found->second = Cell{.kind = "m", .owner = found->second.owner + ", " + cell.owner};
    }
  };
  for (const auto& sequence : scheduler.sequences()) {
    if (sequence && sequence->is<Held>()) {
      each_of(sequence->held().home(), sequence->held().pages(), [&](const auto& group, const auto& pages) {
        for (const auto& page : pages) {
          own(device[static_cast<std::size_t>(group.number())], page.page().value(),
              Cell{.kind = "h", .owner = name_of(sequence->key())});
        }
      });
    } else if (sequence && sequence->is_seated()) {
      each_of(sequence->grant().home(), sequence->grant().tables(), [&](const auto& group, const auto& table) {
        for (Blocks block = table.first(); block < table.size(); block += Blocks(1)) {
          if (!table.page(block).is_null()) {
            own(device[static_cast<std::size_t>(group.number())], table.page(block).value(),
                Cell{.kind = table.is_writable(block) ? "w" : "s", .owner = name_of(sequence->key())});
          }
        }
      });
    }
  }
  for (const Partition& partition : scheduler.partitions()) {
    partition.each_group([&](const auto& group) {
      const GroupSpec& spec = layout.spec(group.number());
      const auto index = static_cast<std::size_t>(group.number());
      const std::string where = "Partition " + std::to_string(partition.id().value()) + ", group " +
                                std::to_string(group.id().value()) + " (" + kind_name(spec.kind) + ", " +
                                std::to_string(spec.block_size.value()) + " tokens a page): ";
      add_pool(pools_[where + "device"], group.device(), device[index], column);
      add_pool(pools_[where + "host"], group.host(), host[index], column);
    });
  }
}

void Picture::add_requests(const Scheduler& scheduler, std::size_t column) {
  for (const auto& sequence : scheduler.sequences()) {
    if (!sequence) {
      continue;
    }
    const std::string name = name_of(sequence->key());
    const auto [found, is_new] = row_of_.try_emplace(name, requests_.rows.size());
    if (is_new) {
      requests_.rows.push_back(Row{.name = name, .cells = {}});
    }
    const std::string state = std::visit([](const auto& one) { return std::string(one.kName); }, sequence->state());
    const std::string done = std::to_string(sequence->computed().value()) + " of " +
                             std::to_string(sequence->len().value()) + " tokens computed";
    requests_.rows[found->second].cells[column] = Cell{.kind = state, .owner = done};
  }
}

template <class Pool>
void Picture::add_pool(Section& section, const Pool& pool, const std::map<std::int32_t, Cell>& owners,
                       std::size_t column) {
  section.rows.resize(static_cast<std::size_t>(pool.total().value()));
  for (std::int32_t page = 1; page <= pool.total().value(); ++page) {
    Row& row = section.rows[static_cast<std::size_t>(page) - 1];
    row.name = page % 5 == 0 || page == 1 ? std::to_string(page) : "";
    const typename Pool::P name(page);
    const auto owner = owners.find(page);
    if (owner != owners.end()) {
      row.cells[column] = owner->second;
    } else if (pool.is_writable(name)) {
      row.cells[column] = Cell{.kind = "t", .owner = ""};
    } else if (pool.indexed_as(name)) {
      row.cells[column] = Cell{.kind = pool.is_shared(name) ? "t" : "c", .owner = ""};
    } else if (!pool.is_free(name)) {
      row.cells[column] = Cell{.kind = "e", .owner = ""};
    }
  }
}

std::string Picture::words_of(const Cell& cell, bool states) {
  if (states) {
    return sim::words_of(kStates, cell.kind) + " (at first with " + cell.owner + ")";
  }
  return page_words(cell.kind, cell.owner);
}

// The rounds of the columns, where there is room to write them.
std::string Picture::axis(double width, double top) const {
  std::ostringstream out;
  const auto every = static_cast<std::size_t>(kTickDistance / width) + 1;
  out << "<text x=\"" << kLeft - 4 << "\" y=\"" << top + 7 << "\" text-anchor=\"end\">round</text>";
  for (std::size_t column = 0; column < rounds_.size(); column += every) {
    const double x = kLeft + static_cast<double>(column) * width;
    out << "<rect x=\"" << x << "\" y=\"" << top << "\" width=\"1\" height=\"" << kAxisHeight
        << "\" fill=\"#999999\"/><text x=\"" << x + 3 << "\" y=\"" << top + 7 << "\">" << rounds_[column] << "</text>";
  }
  return out.str();
}

std::string Picture::svg_of(const Section& section, double width, bool states, double& top) const {
  std::ostringstream out;
  const double height = states ? kRowHeight : kPageHeight;
  out << "<text x=\"0\" y=\"" << top + 9 << "\" style=\"font-size:11px;font-weight:600\">" << section.title
      << "</text>";
  top += 14;
  out << axis(width, top);
  top += kAxisHeight;
  std::size_t number = 0;
  for (const Row& row : section.rows) {
    const std::string name = states ? "request " + row.name : "page " + std::to_string(++number);
    if (states) {
      out << "<rect x=\"" << kLeft - 50 << "\" y=\"" << top << "\" width=\"8\" height=\"" << height - 1 << "\" fill=\""
          << page_fill("s", row.name) << "\"/>";
    }
    out << "<text x=\"" << kLeft - 4 << "\" y=\"" << top + height - 1 << "\" text-anchor=\"end\">" << row.name
        << "</text>";
    for (auto cell = row.cells.begin(); cell != row.cells.end();) {
      // What stays the same is one rectangle.
      auto last = cell;
      auto next = std::next(cell);
      const auto same = [&](const Cell& other) {
        return other.kind == cell->second.kind && (states || other.owner == cell->second.owner);
      };
      while (next != row.cells.end() && next->first == last->first + 1 && same(next->second)) {
        last = next++;
      }
      const double x = kLeft + static_cast<double>(cell->first) * width;
      const double wide = static_cast<double>(last->first - cell->first + 1) * width;
      const std::string fill =
          states ? fill_of(kStates, cell->second.kind) : page_fill(cell->second.kind, cell->second.owner);
      out << "<rect x=\"" << x << "\" y=\"" << top << "\" width=\"" << wide << "\" height=\"" << height - 1
          << "\" fill=\"" << fill << "\"><title>" << name << ": " << words_of(cell->second, states) << ", rounds "
          << rounds_[cell->first] << " to " << rounds_[last->first] << "</title></rect>";
      cell = next;
    }
    top += height;
  }
  top += 10;
  return out.str();
}

std::string Picture::html(std::uint64_t seed, const std::string& violation) const {
  const double width = std::max(4.0, 1200.0 / static_cast<double>(std::max<std::size_t>(1, rounds_.size())));
  std::ostringstream body;
  double top = 0;
  body << svg_of(requests_, width, true, top);
  for (const auto& [title, section] : pools_) {
    if (!section.rows.empty()) {
      Section titled = section;
      titled.title = title;
      body << svg_of(titled, width, false, top);
    }
  }
  std::ostringstream out;
  out << kHead << "<title>Seed " << seed << "</title><h1>Seed " << seed
      << "</h1><p>Each column is what holds after the "
      << "plan of a round. Point at a rectangle to read it.</p><p><b>Requests</b> ";
  add_legend(out, kStates);
  out << "</p><p><b>Pages</b> <span>the hue beside each request: dark where it writes the page, middle it shares a "
         "sealed page, "
      << "light it is held</span>";
  add_legend(out, kPages);
  out << "<span>white: free</span></p>";
  if (!violation.empty()) {
    out << "<p style=\"color:#c00\"><b>Violation:</b> " << escaped(violation) << "</p>";
  }
  out << "<svg width=\"" << kLeft + width * static_cast<double>(rounds_.size()) + 10 << "\" height=\"" << top << "\">"
      << body.str() << "</svg>\n";
  return out.str();
}

}  // namespace tokenspeed::control::sim
