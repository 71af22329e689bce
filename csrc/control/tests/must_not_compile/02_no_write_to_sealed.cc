// SPDX-License-Identifier: Apache-2.0
// Promise 2: a sealed page cannot be a write target.
// CASE 0 compiles; each other case must not. Its comment: the expected diagnostic, what it names, and the reason.
#include <utility>

#include "block_pool.h"
#include "page_table.h"
#include "transfers.h"

using namespace tokenspeed::control;
using Kind = kind::FullAttention;
using DevicePool = BlockPool<tier::Device, Kind>;
using HostPool = BlockPool<tier::Host, Kind>;

struct Given {
  DevicePool& pool;
  HostPool& host;
  const StepReceipt& receipt;
  const TransferReceipt& written;
};

StoreItem<Kind> use(Given& given) {
  WritableDevicePage<Kind> page = given.pool.take_free();
#if CASE == 0
  SealedDevicePage<Kind> sealed = given.pool.seal(std::move(page), given.receipt);
  return {.group = Group(0), .source = std::move(sealed), .target = given.host.take_free(), .hash = BlockHash()};
#elif CASE == 1
  // no-conversion WritablePage: the right to write does not come back from a share
  SealedDevicePage<Kind> sealed = given.pool.seal(std::move(page), given.receipt);
  WritableDevicePage<Kind> again = std::move(sealed);
#elif CASE == 2
  // no-conversion WritablePage: sealing gives no right to write
  WritableDevicePage<Kind> again = given.pool.seal(std::move(page), given.receipt);
#elif CASE == 3
  // private WritablePage: nobody but the pool says that a page may be written
  SealedDevicePage<Kind> sealed = given.pool.seal(std::move(page), given.receipt);
  WritableDevicePage<Kind> again(sealed.page());
#elif CASE == 4
  // no-match seal: the writer gives up the page to seal it
  SealedDevicePage<Kind> sealed = given.pool.seal(page, given.receipt);
#elif CASE == 5
  // no-match seal: what is sealed is not sealed again, since nobody may have written it since
  SealedDevicePage<Kind> sealed = given.pool.seal(std::move(page), given.receipt);
  SealedDevicePage<Kind> again = given.pool.seal(std::move(sealed), given.receipt);
#elif CASE == 6
  // no-conversion SealedPage: a store writes a page of its own, never one that is published in the host tier
  SealedDevicePage<Kind> sealed = given.pool.seal(std::move(page), given.receipt);
  SealedPage<HostPage<Kind>> copy = given.host.seal(given.host.take_free(), given.written);
  return {.group = Group(0), .source = std::move(sealed), .target = std::move(copy), .hash = BlockHash()};
#elif CASE == 7
  // no-conversion WritablePage: a page that may still be written is not shared
  SealedDevicePage<Kind> share = given.pool.share(page);
#elif CASE == 8
  // no-conversion WritablePage: a page that may still be written is no source of a store
  return {.group = Group(0), .source = std::move(page), .target = given.host.take_free(), .hash = BlockHash()};
#endif
}
