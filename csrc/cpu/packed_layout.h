// SPDX-License-Identifier: Apache-2.0
// Weights of few bits as they lie in a file, and as the kernels read them. Knows no instruction set.
//
// A packed matrix is cut into tiles of kTileRows rows, one after another, each a run of blocks along the inputs (32 of
// them, or 256 where a format shares scales over so many); the last tile is filled up with rows of zeros. A block holds
// what the file's blocks of its rows hold, in as many bytes: first scales, then the codes of each 32 inputs. There the
// codes of inputs 4 j ... 4 j + 3 of row r are bytes 4 r ... 4 r + 3 of vector j, so that one vector meets four inputs
// of all rows:
//   4 low bits   128 bytes   vector j is the lower halves of bytes 32 j ... (j < 4), or the upper of 32 (j - 4) ...
//   1 high bit    32 bytes   vector j is bit j
//   2 bits        64 bytes   vector j is bits 2 (j mod 4) ... of bytes 32 (j / 4) ...
//   8 bits       256 bytes
// A format in planes keeps the lower bits of codes apart, in a plane of their own behind all the rest, so that a reader
// who wants the upper four alone meets nothing else. There kSecondTiles tiles lie together: the first block of
// each of them, then the second of each, so that a few blocks of every tile can be read by themselves. A third plane
// has a byte for each row, its blur: by how much the row's codes differ from the middle of what their upper bits allow,
// at most: the root of the sum of squares over the inputs that share a scale, in steps of the upper bits, times
// kBlurScale, rounded up and at least that. Scales and minima of 6 bits (8 rows, 16 each) are 96 bytes: four vectors of
// 32 numbers, of which three are the lower six bits of 32 bytes each, and the fourth is in the upper two bits of all
// three, lowest first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokenspeed::cpu {

constexpr std::int64_t kTileRows = 8;
constexpr std::int64_t kBlockInputs = 32;  // inputs that share a scale of the activations
constexpr std::int64_t kSuperInputs = 256;

enum class PackedFormat : std::int64_t {
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kIq4Nl,
  kQ2K,
  kQ3K,
  kQ4K,
  kQ5K,
  kQ6K,
  kQ8_0Planes,
  kQ6KPlanes
};
constexpr std::int64_t kNumPackedFormats = 13;
constexpr std::int64_t kBlurScale = 96;
constexpr std::int64_t kSecondTiles = 16;

// inputs, bytes: of one block of the file.
struct PackedShape {
  std::int64_t inputs, bytes;
};
PackedShape packed_shape(PackedFormat format);

constexpr std::int64_t tiles_of(std::int64_t num_outputs) { return (num_outputs + kTileRows - 1) / kTileRows; }

// Of the second plane: which of its blocks is a tile's first.
constexpr std::int64_t second_place(std::int64_t tile, std::int64_t num_blocks) {
  return tile / kSecondTiles * kSecondTiles * num_blocks + tile % kSecondTiles;
}

// Bytes of a packed matrix.
std::size_t packed_size(PackedFormat format, std::int64_t num_outputs, std::int64_t num_inputs);

// From blocks as in the file, row after row and row_bytes apart, to tiles. num_inputs is a multiple of the format's.
struct PackArgs {
  const std::uint8_t* blocks;
  std::uint8_t* out;
  std::int64_t num_outputs, num_inputs, row_bytes;
  PackedFormat format;
};
void pack(const PackArgs& args);

}  // namespace tokenspeed::cpu
