// SPDX-License-Identifier: Apache-2.0
// Promise 3: nothing is sealed or enters the prefix index without the receipt of a step, or of a transfer, that ended
// well.
// CASE 0 compiles; each other case must not. Its comment: the expected diagnostic, what it names, and the reason.
#include <utility>

#include "block_pool.h"
#include "page_table.h"
#include "prefix_index.h"

using namespace tokenspeed::control;
using Kind = kind::FullAttention;

struct Given {
  BlockPool<tier::Device, Kind>& pool;
  PrefixIndex<DevicePage<Kind>>& index;
  PageTable<Kind>& table;
  const BlockHash& hash;
  const StepReceipt& receipt;
  const TransferReceipt& written;
  const Retirement& retirement;
};

SealedDevicePage<Kind> use(Given& given) {
  WritableDevicePage<Kind> page = given.pool.take_free();
#if CASE == 0
  SealedDevicePage<Kind> sealed = given.pool.seal(std::move(page), given.receipt);
  (void)given.index.insert(given.hash, sealed, given.receipt);
  (void)given.index.insert(given.hash, given.table.seal(Blocks(0), given.pool, given.written), given.written);
  return sealed;
#elif CASE == 1
  // no-match seal: a page is sealed with a receipt
  return given.pool.seal(std::move(page));
#elif CASE == 2
  // private StepReceipt: nobody but the ledger says that a step ended well
  return given.pool.seal(std::move(page), StepReceipt(StepId(1)));
#elif CASE == 3
  // private TransferReceipt: nobody but the ledger of transfers says that a transfer ended well
  return given.pool.seal(std::move(page), TransferReceipt(LeaseId(1)));
#elif CASE == 4
  // private SealedPage: a sealed page is minted by the pool only
  return SealedDevicePage<Kind>(page.page());
#elif CASE == 5
  // no-match insert: the index takes a receipt, too
  SealedDevicePage<Kind> sealed = given.pool.seal(std::move(page), given.receipt);
  (void)given.index.insert(given.hash, sealed);
#elif CASE == 6
  // no-match insert: the index takes no page that may still be written
  (void)given.index.insert(given.hash, page, given.receipt);
#elif CASE == 7
  // no-match insert: the index takes no bare number
  (void)given.index.insert(given.hash, page.page(), given.receipt);
#elif CASE == 8
  // no-match seal: that a seat is idle does not say that its step ended well
  return given.pool.seal(std::move(page), given.retirement);
#elif CASE == 9
  // no-match seal: a table seals with a receipt
  (void)given.table.seal(Blocks(0), given.pool);
#elif CASE == 10
  // deleted StepReceipt: a receipt cannot be kept for a later step
  StepReceipt kept = given.receipt;
#elif CASE == 11
  // private StepReceipt: not through braces either
  return given.pool.seal(std::move(page), StepReceipt{StepId(1)});
#endif
}
