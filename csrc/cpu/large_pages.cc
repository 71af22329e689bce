// SPDX-License-Identifier: Apache-2.0
#include "large_pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tokenspeed::cpu {

void prefer_large_pages([[maybe_unused]] void* start, [[maybe_unused]] std::size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::size_t kSmallPage = 4096;
  const std::size_t before = (kSmallPage - reinterpret_cast<std::uintptr_t>(start) % kSmallPage) % kSmallPage;
  if (size > before) {
    // Where it fails, small pages serve.
    static_cast<void>(
        madvise(static_cast<std::byte*>(start) + before, (size - before) / kSmallPage * kSmallPage, MADV_HUGEPAGE));
  }
#endif
}

}  // namespace tokenspeed::cpu
