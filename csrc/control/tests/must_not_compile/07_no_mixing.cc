// SPDX-License-Identifier: Apache-2.0
// Promise 7: tiers, kinds of cache groups, units and ids do not mix.
// CASE 0 compiles; each other case must not. Its comment: the expected diagnostic, what it names, and the reason.
#include <utility>

#include "ledger.h"
#include "partition.h"
#include "prefix_index.h"
#include "transfers.h"

using namespace tokenspeed::control;
using Full = kind::FullAttention;
using Window = kind::SlidingWindow;

struct Given {
  BlockPool<tier::Device, Full>& pool;
  BlockPool<tier::Host, Full>& host;
  PageTable<Full>& table;
  PrefixIndex<HostPage<Full>>& host_index;
  CacheGroup<Full>& group;
  CacheGroup<Window>& window_group;
  StepLedger& ledger;
  Partition& partition;
  const StepReceipt& receipt;
  const Retirement& retirement;
};

Tokens use(Given& given) {
#if CASE == 0
  given.table.reserve(given.group.blocks_covering(Tokens(16) + Tokens(1)));
  given.table.append(given.pool.take_free());
  (void)given.ledger.is_idle(Seat(0));
  return given.group.tokens_in(Blocks(1));
#elif CASE == 1
  // no-conversion is_free: a host page is no device page
  return Tokens(given.pool.is_free(HostPage<Full>(1)) ? 1 : 0);
#elif CASE == 2
  // no-match append: a table lists pages of the device
  given.table.append(given.host.take_free());
#elif CASE == 3
  // no-match insert: the host's index names host pages
  (void)given.host_index.insert(BlockHash(), given.pool.seal(given.pool.take_free(), given.receipt), given.receipt);
#elif CASE == 4
  // no-match release: a page returns to the tier that it came from
  given.host.release(given.pool.take_free());
#elif CASE == 5
  // no-conversion give_back: a full-attention table is not given back to a sliding-window group
  given.window_group.give_back(std::move(given.table), given.retirement);
#elif CASE == 6
  // no-conversion is_free: pages of two kinds of groups are numbered apart
  return Tokens(given.pool.is_free(DevicePage<Window>(1)) ? 1 : 0);
#elif CASE == 7
  // no-match append: a table lists pages of its kind
  BlockPool<tier::Device, Window> windows((Blocks(1)));
  given.table.append(windows.take_free());
#elif CASE == 8
  // no-operator Quantity: tokens and blocks do not add up
  return Tokens(16) + Blocks(1);
#elif CASE == 9
  // no-operator Quantity: nor do they compare
  return Tokens(Tokens(16) < Blocks(1) ? 1 : 0);
#elif CASE == 10
  // no-conversion reserve: a table is sized in blocks
  given.table.reserve(Tokens(16));
#elif CASE == 11
  // no-conversion Quantity: a bare number has no unit
  return 16;
#elif CASE == 12
  // no-conversion is_idle: slots of the scheduler are no seats of the device
  return Tokens(given.ledger.is_idle(Slot(0)) ? 1 : 0);
#elif CASE == 13
  // no-conversion dispatch: leases of transfers are no steps
  given.ledger.dispatch(LeaseId(1));
#elif CASE == 14
  // no-conversion group: partitions are no groups
  (void)given.partition.group<Full>(PartitionId(0));
#elif CASE == 15
  // no-conversion tier::Device: a load reads a page of the host
  const LoadItem<Full> load{
      .group = Group(0), .block = Blocks(0), .source = given.pool.seal(given.pool.take_free(), given.receipt)};
#elif CASE == 16
  // no-operator Page: pages of two tiers do not compare
  return Tokens(DevicePage<Full>(1) == HostPage<Full>(1) ? 1 : 0);
#elif CASE == 17
  // no-operator StrongId: ids are no numbers to count with
  return Tokens((Seat(1) + 1).value());
#endif
}
