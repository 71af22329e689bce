// SPDX-License-Identifier: Apache-2.0
// Memory that is read from end to end again and again lies best in pages of megabytes: fewer addresses to translate,
// and the hardware fetches ahead up to the end of a page.
#pragma once

#include <cstddef>

namespace tokenspeed::cpu {

// Asks for large pages within this memory, of which nothing was touched yet. Only a wish.
void prefer_large_pages(void* start, std::size_t size);

}  // namespace tokenspeed::cpu
