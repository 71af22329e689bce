// SPDX-License-Identifier: Apache-2.0
// Pages with contents, on the device and on the host. Each remembers for each position which history it was written
// with; a page of a recurrent group keeps one state. Also knows which pages a transfer reads or writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "history.h"
#include "layout.h"

namespace tokenspeed::control::sim {

class Memory {
 public:
  struct Page {
    std::vector<History> cells;
    std::uint32_t version = 0;     // of the contents
    std::int32_t num_readers = 0;  // transfers that read it
    bool is_target = false;        // a transfer writes it
  };

  explicit Memory(const Layout& layout);

  // Page 0 is there, too, and must stay as it is.
  [[nodiscard]] Page& device(std::int64_t number, std::int32_t page);
  [[nodiscard]] Page& host(std::int64_t number, std::int32_t page);
  [[nodiscard]] const Page& device(std::int64_t number, std::int32_t page) const;
  [[nodiscard]] const Page& host(std::int64_t number, std::int32_t page) const;

  // One position of a page; for a state the only one.
  void write(std::int64_t number, std::int32_t page, std::size_t cell, History history);
  // Whatever a write that went wrong leaves.
  void spoil(Page& page);
  [[nodiscard]] History garbage();

  // What a block of `history` looks like in a page of the group: its positions, or the state after its last.
  [[nodiscard]] std::vector<History> image(std::int64_t number, std::span<const History> history) const;

 private:
  Layout layout_;
  std::vector<std::vector<Page>> device_;
  std::vector<std::vector<Page>> host_;
  std::uint64_t num_garbage_ = 0;
};

}  // namespace tokenspeed::control::sim
