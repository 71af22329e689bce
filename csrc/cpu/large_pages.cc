// SPDX-License-Identifier: Apache-2.0
#include "large_pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tokenspeed::cpu {

void prefer_large_pages([[maybe_unused]] void* start, [[maybe_unused]] std::size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kSmallPage = 4096;
  const auto address = reinterpret_cast<std::uintptr_t>(start);
  const std::uintptr_t first = (address + kSmallPage - 1) / kSmallPage * kSmallPage;
  const std::uintptr_t last = (address + size) / kSmallPage * kSmallPage;
  if (last > first) {
    // Where it fails, small pages serve.
    static_cast<void>(madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE));
  }
#endif
}

}  // namespace tokenspeed::cpu
