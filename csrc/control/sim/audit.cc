// SPDX-License-Identifier: Apache-2.0
#include "audit.h"

#include <algorithm>
#include <cstddef>

#include "violation.h"

namespace tokenspeed::control::sim {

namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

template <class Kind>
void count_table(const CacheGroup<Kind>& group, const PageTable<Kind>& table, Books& books) {
  Handles& handles = books.device[at(group.number())];
  handles.charged += table.charged().value();
  for (Blocks block = table.first(); block < table.size(); block += Blocks(1)) {
    const DevicePage<Kind> page = table.page(block);
    if (!page.is_null()) {
      ++(table.is_writable(block) ? handles.writers : handles.shares)[at(page.value())];
      ++handles.in_use;
    }
  }
}

void count_sequence(const Sequence& sequence, Books& books) {
  ++books.num_sequences;
  books.num_running += sequence.is_running() ? 1 : 0;
  const bool gives_way = sequence.is<Draining>() && !sequence.has_ended();
  books.num_waiting += sequence.is_waiting() || sequence.is<AwaitingTransfer>() || gives_way ? 1 : 0;
  if (sequence.is<Held>()) {
    ++books.num_held;
    each_of(sequence.held().home(), sequence.held().pages(), [&](const auto& group, const auto& pages) {
      for (const auto& page : pages) {
        ++books.device[at(group.number())].shares[at(page.page().value())];
      }
    });
  } else if (sequence.is_seated()) {
    each_of(sequence.grant().home(), sequence.grant().tables(),
            [&](const auto& group, const auto& table) { count_table(group, table, books); });
  }
}

void count_transfers(const Layout& layout, const Scheduler& scheduler, Books& books) {
  for (const Transfer& transfer : scheduler.transfers().records()) {
    const std::int64_t first = transfer.partition.value() * layout.num_groups();
    transfer.stores.each([&](const auto& items) {
      for (const auto& item : items) {
        ++books.device[at(first + item.group.value())].shares[at(item.source.page().value())];
        ++books.host[at(first + item.group.value())].writers[at(item.target.page().value())];
      }
    });
    transfer.loads.each([&](const auto& items) {
      for (const auto& item : items) {
        if (item.source) {
          ++books.host[at(first + item.group.value())].shares[at(item.source->page().value())];
        }
      }
    });
  }
}

template <class Pool, class Index>
void check_pool(std::int64_t number, const Pool& pool, const Index& index, const Handles& handles) {
  std::int64_t num_free = 0;
  std::int64_t num_writable = 0;
  std::int64_t num_shared = 0;
  std::int64_t num_cached = 0;
  std::int64_t num_unsaved = 0;
  std::size_t num_indexed = 0;
  for (std::int32_t value = 1; value <= pool.total().value(); ++value) {
    const typename Pool::P page(value);
    const auto writers = handles.writers[at(value)];
    const auto shares = handles.shares[at(value)];
    require(writers <= 1 && (writers == 0 || shares == 0), "group", number, "page", page, "writers", writers, "shares",
            shares);
    require(pool.is_writable(page) == (writers == 1), "group", number, "page", page, "writers", writers);
    require(pool.num_shares(page) == shares, "group", number, "page", page, "shares", shares, "counted",
            pool.num_shares(page));
    const auto hash = pool.indexed_as(page);
    num_free += pool.is_free(page) ? 1 : 0;
    num_writable += writers;
    num_shared += shares > 0 ? 1 : 0;
    if (hash) {
      require(!pool.is_free(page) && writers == 0, "group", number, "page", page, "is indexed while it is not sealed");
      const auto found = index.find(*hash);
      require(found && *found == page, "group", number, "page", page, "is not where its hash says");
      ++num_indexed;
      num_cached += shares == 0 ? 1 : 0;
      num_unsaved += shares == 0 && !pool.is_saved(page) ? 1 : 0;
    } else {
      require(pool.is_free(page) || writers + shares > 0, "group", number, "page", page, "is lost");
    }
  }
  require(num_free + num_writable + num_shared + num_cached == pool.total().value(), "group", number, "free", num_free,
          "writable", num_writable, "shared", num_shared, "cached", num_cached, "of", pool.total());
  require(num_indexed == index.size(), "group", number, "index", index.size(), "indexed pages", num_indexed);
  require(pool.num_free().value() == num_free && pool.num_writable().value() == num_writable &&
              pool.num_shared().value() == num_shared && pool.num_cached().value() == num_cached &&
              pool.num_unsaved().value() == num_unsaved,
          "group", number, "counters of the pool", pool.num_free(), pool.num_writable(), pool.num_shared(),
          pool.num_cached(), pool.num_unsaved());
}

template <class Kind>
void check_group(const Layout& layout, const CacheGroup<Kind>& group, const Books& books) {
  const std::int64_t number = group.number();
  const Handles& device = books.device[at(number)];
  check_pool(number, group.device(), group.index(), device);
  check_pool(number, group.host(), group.host_index(), books.host[at(number)]);
  require((group.chargeable() - group.charge_room()).value() == device.charged, "group", number, "charged",
          group.charge_room(), "of", group.chargeable(), "tables", device.charged);
  require(group.charge_room() >= Blocks(0), "group", number, "charged beyond its pages", group.charge_room());
  const std::int64_t margin = layout.margin(layout.spec(number));
  require(group.kKeepsAll || device.in_use <= device.charged + margin, "group", number, "uses", device.in_use,
          "charged", device.charged, "margin", margin);
  // What has a copy on the host may go at once.
  for (std::int32_t value = 1; value <= group.device().total().value(); ++value) {
    const DevicePage<Kind> page(value);
    const auto hash = group.device().indexed_as(page);
    const bool has_copy = hash && group.host_index().find(*hash).has_value();
    require(!has_copy || group.device().is_saved(page), "group", number, "page", page, "has a copy and is not saved");
  }
}

}  // namespace

Books count_handles(const Layout& layout, const Scheduler& scheduler) {
  Books books;
  for (std::int64_t number = 0; number < layout.num_numbers(); ++number) {
    const auto make = [](Blocks blocks) {
      Handles handles;
      handles.writers.resize(at(blocks.value()) + 1);
      handles.shares.resize(at(blocks.value()) + 1);
      return handles;
    };
    books.device.push_back(make(layout.spec(number).num_blocks));
    books.host.push_back(make(layout.spec(number).num_host_blocks));
  }
  for (const auto& sequence : scheduler.sequences()) {
    if (sequence) {
      count_sequence(*sequence, books);
    }
  }
  for (const StepRecord& record : scheduler.ledger().records()) {
    record.expired.each([&](const auto& pages) {
      for (const auto& expired : pages) {
        const std::int64_t number = expired.partition.value() * layout.num_groups() + expired.group.value();
        ++books.device[at(number)].shares[at(expired.page.page().value())];
      }
    });
  }
  count_transfers(layout, scheduler, books);
  return books;
}

void check_pools(const Layout& layout, const Scheduler& scheduler, const Books& books) {
  for (const Partition& partition : scheduler.partitions()) {
    partition.each_group([&](const auto& group) { check_group(layout, group, books); });
  }
}

void check_tables(const Scheduler& scheduler, const Device& device) {
  for (const auto& sequence : scheduler.sequences()) {
    if (!sequence || !sequence->is_seated()) {
      continue;
    }
    const std::int32_t seat = sequence->grant().seat().value();
    require(device.seated(seat).key == sequence->key(), "seat", seat, "is of", device.seated(seat).key, "not",
            sequence->key());
    each_of(sequence->grant().home(), sequence->grant().tables(), [&](const auto& group, const auto& table) {
      const auto& told = device.seated(seat).tables[at(group.id().value())];
      require(std::cmp_less_equal(told.size(), table.size().value()), "seat", seat, "group", group.id(), "device",
              told.size(), "blocks, plane", table.size());
      for (Blocks block; block < table.size(); block += Blocks(1)) {
        const std::size_t index = at(block.value());
        const std::int32_t entry = index < told.size() ? std::max(told[index], 0) : 0;
        require(table.page(block).value() == entry, "seat", seat, "group", group.id(), "block", block, "page",
                table.page(block), "device", entry);
      }
    });
  }
}

void check_stats(const Scheduler& scheduler, const Books& books, const Oracle& oracle, const Transport& transport) {
  const Stats stats = scheduler.stats();
  require(stats.num_running == books.num_running && stats.num_waiting == books.num_waiting &&
              stats.num_held == books.num_held,
          "running", stats.num_running, books.num_running, "waiting", stats.num_waiting, books.num_waiting, "held",
          stats.num_held, books.num_held);
  require(scheduler.has_work() == (books.num_held < books.num_sequences), "work", scheduler.has_work());
  std::int64_t used = 0;
  std::int64_t cached = 0;
  std::int64_t host_used = 0;
  for (const Partition& partition : scheduler.partitions()) {
    partition.each_group([&](const auto& group) {
      const bool counts = group.id() == Group(0);
      used += counts ? (group.device().num_writable() + group.device().num_shared()).value() : 0;
      cached += counts ? group.device().num_cached().value() : 0;
      host_used += counts ? (group.host().total() - group.host().num_free()).value() : 0;
    });
  }
  require(stats.used_blocks == used && stats.cached_blocks == cached && stats.host_used_blocks == host_used, "used",
          stats.used_blocks, used, "cached", stats.cached_blocks, cached, "host", stats.host_used_blocks, host_used);
  require(stats.generated_tokens == oracle.num_tokens(), "generated", stats.generated_tokens, oracle.num_tokens());
  require(std::cmp_equal(stats.num_transfers, transport.num_in_flight()), "transfers", stats.num_transfers,
          transport.num_in_flight());
  require(stats.stored_blocks == transport.stored_blocks() && stats.loaded_tokens == transport.loaded_tokens(),
          "stored", stats.stored_blocks, transport.stored_blocks(), "loaded", stats.loaded_tokens,
          transport.loaded_tokens());
}

void check_baseline(const Layout& layout, const Scheduler& scheduler) {
  const Books books = count_handles(layout, scheduler);
  require(books.num_sequences == 0, books.num_sequences, "sequences are left");
  require(scheduler.num_transfers() == 0 && scheduler.num_in_flight() == 0, "something is in flight for ever");
  for (const Partition& partition : scheduler.partitions()) {
    require(std::cmp_equal(partition.seats().num_free(), layout.config().max_num_seqs), "seats",
            partition.seats().num_free());
    partition.each_group([&](const auto& group) {
      require(group.device().num_used() == Blocks(0) && group.host().num_used() == Blocks(0), "group", group.number(),
              "blocks that never came back", group.device().num_used(), "host", group.host().num_used());
      require(group.charge_room() == group.chargeable(), "group", group.number(), "is still charged",
              group.charge_room());
    });
  }
}

}  // namespace tokenspeed::control::sim
