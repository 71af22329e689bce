// SPDX-License-Identifier: Apache-2.0
// Promise 4: the pages of a step in flight are released only through the ledger: what a seat's tables name, with a
// Retirement of the seat; what has expired from them, once the step has retired.
// CASE 0 compiles; each other case must not. Its comment: the expected diagnostic, what it names, and the reason.
#include <optional>
#include <utility>

#include "ledger.h"
#include "partition.h"
#include "states.h"

using namespace tokenspeed::control;
using Kind = kind::SlidingWindow;

struct Given {
  StepLedger& ledger;
  SeatPool& seats;
  SeatHold& seat;
  BlockPool<tier::Device, Kind>& pool;
  CacheGroup<Kind>& group;
  PageTable<Kind>& table;
  Tables& tables;
  Partition& partition;
  Grant& grant;
};

void use(Given& given) {
#if CASE == 0
  const Retirement retirement = given.ledger.retirement(given.grant.seat());
  given.grant.give_back(retirement);
  given.group.give_back(std::move(given.table), retirement);
  given.seats.release(std::move(given.seat), retirement);
  if (std::optional<ExpiredPage<Kind>> expired = given.table.expire_first()) {
    given.group.release_expired(given.ledger.retire(std::move(*expired)));
  }
#elif CASE == 1
  // no-match give_back: a grant comes back with a retirement
  given.grant.give_back();
#elif CASE == 2
  // private Retirement: nobody but the ledger says that nothing in flight uses a seat
  given.grant.give_back(Retirement(Seat(0)));
#elif CASE == 3
  // no-match give_back: a group takes a table back with a retirement
  given.group.give_back(std::move(given.table));
#elif CASE == 4
  // no-match give_back: a table lets go of its pages with a retirement
  given.table.give_back(given.pool);
#elif CASE == 5
  // no-match hold: pages are held only when nothing in flight uses them
  (void)given.grant.hold(Tokens(16));
#elif CASE == 6
  // no-match release: a seat comes back with a retirement
  given.seats.release(std::move(given.seat));
#elif CASE == 7
  // no-match release: what has expired may still be read, and is no page that the pool takes back
  given.pool.release(std::move(*given.table.expire_first()));
#elif CASE == 8
  // no-conversion release_expired: nor does the group
  given.group.release_expired(std::move(*given.table.expire_first()));
#elif CASE == 9
  // private ExpiredPage: its share is the ledger's
  std::optional<ExpiredPage<Kind>> expired = given.table.expire_first();
  given.pool.release(std::move(expired->sealed_));
#elif CASE == 10
  // private Lease: a lease is minted by the ledger only
  given.ledger.retire(Lease(Seat(0)));
#elif CASE == 11
  // discards-const retire: the leases of a step are retired by its result only
  given.ledger.retire(std::move(given.ledger.oldest().rows[0].lease));
#elif CASE == 12
  // deleted Retirement: a retirement is used where it was taken, and not kept
  const Retirement retirement = given.ledger.retirement(given.grant.seat());
  const Retirement kept = retirement;
#elif CASE == 13
  // private HeldPages: pages become held ones through hold() only
  HeldPages held(given.partition, PerKind<KeptOf>());
#elif CASE == 14
  // private Teardown: letting go of everything at once is for the end of the plane
  given.grant.forfeit(Teardown());
#elif CASE == 15
  // no-match take_back: a partition takes seat and tables back with a retirement
  given.partition.take_back(std::move(given.seat), std::move(given.tables));
#endif
}
