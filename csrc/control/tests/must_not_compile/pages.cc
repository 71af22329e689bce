// SPDX-License-Identifier: Apache-2.0
// CASE 0 compiles; each other case must not, for the reason its comment gives.
#include <type_traits>
#include <utility>

#include "block_pool.h"
#include "page_table.h"

using namespace tokenspeed::control;

SealedDevicePage seal_one(BlockPool& pool, const StepReceipt& receipt) {
  WritableDevicePage page = pool.take_free();
#if CASE == 0
  return pool.seal(std::move(page), receipt);
#elif CASE == 1   // a writable page cannot be duplicated
  WritableDevicePage twin = page;
  return pool.seal(std::move(twin), receipt);
#elif CASE == 2   // a writer gives up the page to seal it
  return pool.seal(page, receipt);
#elif CASE == 3   // nothing is sealed without the receipt of a step
  return pool.seal(std::move(page));
#elif CASE == 4   // nobody but the ledger makes a receipt
  return pool.seal(std::move(page), StepReceipt(StepId(1)));
#elif CASE == 5   // a sealed page is shared by share() only
  SealedDevicePage sealed = pool.seal(std::move(page), receipt);
  SealedDevicePage twin = sealed;
  return sealed;
#elif CASE == 6   // a sealed page is no write target
  WritableDevicePage again = pool.seal(std::move(page), receipt);
  return pool.seal(std::move(again), receipt);
#elif CASE == 7   // a writable page is minted by the pool only
  return pool.seal(WritableDevicePage(DevicePage(1)), receipt);
#elif CASE == 8   // an acquired page cannot be dropped silently
  pool.take_free();
  return pool.seal(std::move(page), receipt);
#elif CASE == 9   // tiers do not mix
  pool.is_free(Page<tier::Host, kind::FullAttention>(1));
  return pool.seal(std::move(page), receipt);
#elif CASE == 10  // a page table cannot be duplicated
  PageTable table;
  PageTable twin = table;
  return pool.seal(std::move(page), receipt);
#elif CASE == 11  // units do not mix
  PageTable table;
  table.reserve(Tokens(16));
  return pool.seal(std::move(page), receipt);
#endif
}
