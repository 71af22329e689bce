// SPDX-License-Identifier: Apache-2.0
// Promise 1: a page or a page table cannot be duplicated, nor can anything that owns one.
// CASE 0 compiles; each other case must not. Its comment: the expected diagnostic, what it names, and the reason.
#include <optional>
#include <utility>

#include "partition.h"
#include "sequence.h"

using namespace tokenspeed::control;
using Kind = kind::FullAttention;

struct Given {
  BlockPool<tier::Device, Kind>& pool;
  PageTable<Kind>& table;
  Grant& grant;
  HeldPages& held;
  Lease& lease;
  SeatHold& seat;
  Decoding& decoding;
  const StepReceipt& receipt;
};

void use(Given& given) {
#if CASE == 0
  WritableDevicePage<Kind> page = given.pool.take_free();
  WritableDevicePage<Kind> moved = std::move(page);
  SealedDevicePage<Kind> sealed = given.pool.seal(std::move(moved), given.receipt);
  SealedDevicePage<Kind> share = given.pool.share(sealed);
  given.table.append(std::move(sealed));
  given.table.append(std::move(share));
#elif CASE == 1
  // deleted WritablePage: two writers of one page would overwrite each other
  WritableDevicePage<Kind> page = given.pool.take_free();
  WritableDevicePage<Kind> twin = page;
#elif CASE == 2
  // deleted WritablePage: nor by assignment
  WritableDevicePage<Kind> page = given.pool.take_free();
  WritableDevicePage<Kind> other = given.pool.take_free();
  other = page;
#elif CASE == 3
  // deleted SealedPage: a share that nobody counted would outlive its page
  SealedDevicePage<Kind> sealed = given.pool.seal(given.pool.take_free(), given.receipt);
  SealedDevicePage<Kind> twin = sealed;
#elif CASE == 4
  // deleted PageTable: a table owns its pages
  PageTable<Kind> twin = given.table;
#elif CASE == 5
  // deleted PageTable: a table that is overwritten would lose its pages, so not even a move may assign
  given.table = PageTable<Kind>();
#elif CASE == 6
  // deleted ExpiredPage: a page that has left a table comes back once
  std::optional<ExpiredPage<Kind>> expired = given.table.expire_first();
  ExpiredPage<Kind> twin = *expired;
#elif CASE == 7
  // deleted Grant: a grant is a seat and its pages
  Grant twin = given.grant;
#elif CASE == 8
  // deleted HeldPages: what a held session keeps has one owner
  HeldPages twin = given.held;
#elif CASE == 9
  // deleted Lease: a lease retires once
  Lease twin = given.lease;
#elif CASE == 10
  // deleted SeatHold: two sequences would share a row of the device
  SeatHold twin = given.seat;
#elif CASE == 11
  // deleted Decoding: a state owns its grant
  Decoding twin = given.decoding;
#elif CASE == 12
  // deleted SealedPage: a const handle cannot be moved from, which would be a copy
  const SealedDevicePage<Kind> sealed = given.pool.seal(given.pool.take_free(), given.receipt);
  given.table.append(SealedDevicePage<Kind>(std::move(sealed)));
#endif
}
