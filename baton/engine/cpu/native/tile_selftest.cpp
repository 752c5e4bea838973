// Test that tiles compute here what FMAs do: products and attention, bit for bit.
//
// It uses data whose sums cancel, so that only their roundings remain, and data whose products are
// about as small as a number can be.

#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "kernels.h"

namespace baton {
namespace {

class Noise {
 public:
  // A bf16 of either sign, with one of `exponents` exponents from `least`; some are zero.
  uint16_t next(int least, int exponents) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    const uint32_t bits = state_ >> 33;
    if (bits % 16 == 0) return 0;
    const uint32_t exponent = least + (bits >> 8) % exponents;
    return static_cast<uint16_t>((bits & 1) << 15 | exponent << 7 | ((bits >> 20) & 0x7f));
  }

  // To cancel, half of every row is the other half with the other sign.
  std::vector<uint16_t> rows(long rows, long width, int least, int exponents, bool cancel) {
    std::vector<uint16_t> found(rows * width);
    for (long i = 0; i < rows * width; ++i) found[i] = next(least, exponents);
    if (cancel)
      for (long row = 0; row < rows; ++row)
        for (long i = width / 2; i < width / 2 * 2; ++i)
          found[row * width + i] = found[row * width + i - width / 2] ^ 0x8000;
    return found;
  }

 private:
  uint64_t state_ = 1;
};

bool products_agree(int tiles, long rows, long outputs, long inputs, bool tiny) {
  Noise noise;
  const int least = tiny ? 60 : 120, exponents = tiny ? 8 : 12;
  const auto x = noise.rows(rows, inputs, least, exponents, false);
  const auto weight = noise.rows(outputs, inputs, least, exponents, !tiny);
  const long size = baton_tile_packed_size(outputs, inputs);
  std::vector<uint16_t> memory(size + 32), found[2];
  auto* packed = reinterpret_cast<uint16_t*>(
      (reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  baton_tile_pack(weight.data(), outputs, inputs, packed, 1);
  for (int way = 0; way < 2; ++way) {
    found[way].assign(rows * outputs, 0);
    baton_tile_product(x.data(), inputs, packed, found[way].data(), outputs, rows, outputs, inputs,
                       1, way ? tiles : 0);
  }
  return found[0] == found[1];
}

bool attention_agrees(int tiles, int group, int dim, int start, int count, int window) {
  Noise noise;
  const int tokens = start + count, blocks = (tokens + 15) / 16;
  const auto q = noise.rows(count, group * dim, 120, 8, false);
  auto keys = noise.rows(blocks * 16, dim, 118, 8, false);
  auto values = noise.rows(blocks * 16, dim, 110, 16, false);
  std::vector<int32_t> table(blocks);
  for (int i = 0; i < blocks; ++i) table[i] = blocks - 1 - i;
  const int32_t span[4] = {0, start, count, 0};
  std::vector<uint16_t> found[2];
  for (int way = 0; way < 2; ++way) {
    found[way].assign(count * group * dim, 0);
    baton_attention(q.data(), group * dim, reinterpret_cast<uint8_t*>(keys.data()),
                    reinterpret_cast<uint8_t*>(values.data()), 2 * dim, 2 * dim, kBf16, span,
                    1, table.data(), group, 1, dim, window, 0.125f, found[way].data(), group * dim,
                    1, way ? tiles : 0, nullptr);
  }
  return found[0] == found[1];
}

}  // namespace

// Returns 0 if they agree, else the number of the first case that differs.
extern "C" int baton_tiles_agree(int tiles) {
  int number = 0;
  for (const bool tiny : {false, true})
    for (const long rows : {1L, 2L, 16L, 17L, 31L, 33L, 64L, 70L})
      for (const long outputs : {1L, 33L, 96L})
        for (const long inputs : {2L, 33L, 64L, 100L, 576L}) {
          ++number;
          if (!products_agree(tiles, rows, outputs, inputs, tiny)) return number;
        }
  for (const int dim : {32, 64, 96, 128, 256})
    for (const int group : {1, 3, 5})
      for (const int count : {1, 7, 40})
        for (const int start : {0, 21, 90})
          for (const int window : {0, 50}) {
            ++number;
            if (!attention_agrees(tiles, group, dim, start, count, window)) return number;
          }
  return 0;
}

}  // namespace baton
