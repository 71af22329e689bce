// SPDX-License-Identifier: Apache-2.0
// Promise 8: what a call acquires cannot be dropped by leaving out its name. A named handle that is dropped later ends
// the process at run time.
// CASE 0 compiles; each other case must not. Its comment: the expected diagnostic, what it names, and the reason.
#include <utility>

#include "ledger.h"
#include "partition.h"
#include "states.h"
#include "transfers.h"
#include "transitions.h"

using namespace tokenspeed::control;
using Kind = kind::FullAttention;

struct Given {
  BlockPool<tier::Device, Kind>& pool;
  CacheGroup<Kind>& group;
  PageTable<Kind>& table;
  SeatPool& seats;
  StepLedger& ledger;
  TransferLedger& transfers;
  Grant& grant;
  Partition& partition;
  const SealedDevicePage<Kind>& sealed;
  const StepReceipt& receipt;
  const Retirement& retirement;
};

void use(Given& given) {
#if CASE == 0
  given.pool.release(given.pool.take_free());
  given.pool.release(given.pool.share(given.sealed));
  given.seats.release(given.seats.take(), given.retirement);
  given.ledger.retire(given.ledger.lease(Seat(0)));
#elif CASE == 1
  // unused take_free: a page is taken
  given.pool.take_free();
#elif CASE == 2
  // unused seal: a page is sealed
  given.pool.seal(given.pool.take_free(), given.receipt);
#elif CASE == 3
  // unused share: a share is counted
  given.pool.share(given.sealed);
#elif CASE == 4
  // unused share_indexed: a share is counted
  given.pool.share_indexed(given.sealed.page(), true);
#elif CASE == 5
  // unused take: a seat is taken
  given.seats.take();
#elif CASE == 6
  // unused lease: a lease keeps its seat
  given.ledger.lease(Seat(0));
#elif CASE == 7
  // unused expire_first: a page leaves a table
  given.table.expire_first();
#elif CASE == 8
  // unused retire: an expired page becomes a share again
  given.ledger.retire(std::move(*given.table.expire_first()));
#elif CASE == 9
  // unused keep_sealed: pages are kept of a table
  given.table.keep_sealed(Blocks(1), given.pool, given.retirement);
#elif CASE == 10
  // unused keep: pages are kept of a table
  given.group.keep(std::move(given.table), Tokens(16), given.retirement);
#elif CASE == 11
  // unused hold: pages are held
  given.grant.hold(Tokens(16), given.retirement);
#elif CASE == 12
  // unused begin: a transfer has begun
  given.transfers.begin(TransferKind::kStore, PartitionId(0));
#elif CASE == 13
  // unused settle: a transfer has ended, and its record holds what it took
  given.transfers.settle(LeaseId(1), true);
#elif CASE == 14
  // unused on: a state is moved on
  Transitions::on(Queued(), signal::Admitted{.grant = std::move(given.grant), .awaits_transfer = false});
#elif CASE == 15
  // unused insert: the index has the block already, and then the page is not in it
  PrefixIndex<DevicePage<Kind>> index((Blocks(1)));
  index.insert(BlockHash(), given.sealed, given.receipt);
#endif
}
