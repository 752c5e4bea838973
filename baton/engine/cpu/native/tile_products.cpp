// Products of bf16 rows with packed bf16 weights, y = x @ w.T, with the sums of AMX tiles
// (``tiles.h``): by AMX, and with the same bits by FMA.
//
// An element's sums run over K in steps of 32 inputs, padded with zeros. So its bits depend on its
// own row and column alone: not on the other rows, on how rows and columns are cut, nor on threads.
//
//   packed weights   [panels][K / 32][2 tiles][16 pairs][16 outputs][2 inputs]
//   by AMX           2 tiles of rows x 2 of outputs; up to 16 rows: 1 x 2
//   by FMA           R rows x P panels, even and odd sums in registers; x is widened once to fp32

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "scratch.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace baton {
namespace {

constexpr int kPanel = 32;  // outputs
constexpr long kStepBytes = 2 * kTileBytes;  // of a panel
constexpr long kUnitsPerThread = 4;
constexpr long kMostTileRows = 512;      // of a unit by AMX,
constexpr long kMostTileBytes = 1 << 20;  // and their bytes: they stay in the L2 cache
constexpr long kMostFmaRows = 96;
constexpr int kTogether = kIsAvx512 ? 6 : 2;  // rows x panels of a kernel by FMA: 24 sums, or 16
constexpr long kAhead = 8192;  // bytes of weights prefetched where they are only read

struct Product {
  const uint16_t* x;
  long x_stride;
  const char* weights;
  uint16_t* y;
  long y_stride;
  long rows, outputs, inputs;

  long steps() const { return (inputs + kStepInputs - 1) / kStepInputs; }
  long panels() const { return (outputs + kPanel - 1) / kPanel; }
  const char* panel(long index) const { return weights + index * steps() * kStepBytes; }
};

inline void store(const Product& p, long row, long panel, __m512 low, __m512 high) {
  const long left = p.outputs - panel * kPanel;
  const __mmask32 mask = left >= kPanel ? ~0u : (1u << left) - 1;
  uint16_t* y = p.y + row * p.y_stride + panel * kPanel;
  _mm512_mask_storeu_epi16(y, mask, narrow_two(high, low));
}

// ---- by tiles

// Rows as A operands, 16 at a time. They are read in place where that is as fast as a copy: only
// whole tiles, no cache line crossed, and not all rows in the same sets of the cache.
class TiledRows {
 public:
  struct Operand {
    const char* at;
    long stride, step;
  };

  explicit TiledRows(const Product& p, int threads) : p_(p) {
    const bool in_place = p.inputs % kStepInputs == 0 && p.x_stride % 32 == 0 &&
                          p.x_stride % 2048 != 0 && reinterpret_cast<uintptr_t>(p.x) % 64 == 0;
    whole_ = in_place ? p.rows / kTileRows : 0;
    const long tiles = (p.rows + kTileRows - 1) / kTileRows - whole_;
    static thread_local Scratch copies;
    copied_ = copies.take<char>(tiles * p.steps() * kTileBytes);
    const bool large = tiles * kTileRows * p.inputs > (1 << 15);
    share(large ? threads : 1, tiles, [&](long tile) { copy(tile); });
  }

  Operand operator[](long tile) const {
    if (tile >= whole_) return {copied_ + (tile - whole_) * p_.steps() * kTileBytes, 64, kTileBytes};
    const uint16_t* x = p_.x + tile * kTileRows * p_.x_stride;
    return {reinterpret_cast<const char*>(x), 2 * p_.x_stride, 64};
  }

 private:
  void copy(long tile) {
    char* to = copied_ + tile * p_.steps() * kTileBytes;
    for (long step = 0; step < p_.steps(); ++step)
      for (int r = 0; r < kTileRows; ++r, to += 64) {
        const long row = (whole_ + tile) * kTileRows + r, left = p_.inputs - step * kStepInputs;
        const __mmask32 mask = row >= p_.rows ? 0 : left >= 32 ? ~0u : (1u << left) - 1;
        const uint16_t* from = p_.x + row * p_.x_stride + step * kStepInputs;
        _mm512_store_si512(to, _mm512_maskz_loadu_epi16(mask, from));
      }
  }

  const Product& p_;
  long whole_ = 0;
  char* copied_ = nullptr;
};

template <int Low, int High, class Tiles>
void put(Tiles& tiles, const Product& p, long tile, long panel) {
  alignas(64) float low[16][16], high[16][16];
  tiles.template store<Low>(low, 64);
  tiles.template store<High>(high, 64);
  const long row = tile * kTileRows;
  for (int r = 0; r < std::min<long>(kTileRows, p.rows - row); ++r)
    store(p, row + r, panel, _mm512_load_ps(low[r]), _mm512_load_ps(high[r]));
}

// Two tiles of rows by one panel; prefetches `lines` lines at `ahead` in each step.
template <class Tiles>
void two_by_two(Tiles& tiles, const Product& p, const TiledRows& rows, long tile, long panel,
                const char* ahead, int lines) {
  const TiledRows::Operand upper = rows[tile], lower = rows[tile + 1];
  const char* w = p.panel(panel);
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
  for (long step = 0; step < p.steps(); ++step, w += kStepBytes) {
    tiles.template load<6>(w, 64);
    tiles.template load<4>(upper.at + step * upper.step, upper.stride);
    tiles.template load<7>(w + kTileBytes, 64);
    tiles.template dot<0, 4, 6>();
    tiles.template load<5>(lower.at + step * lower.step, lower.stride);
    tiles.template dot<1, 4, 7>();
    for (int line = 0; line < lines; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    tiles.template dot<2, 5, 6>();
    tiles.template dot<3, 5, 7>();
  }
  put<0, 1>(tiles, p, tile, panel);
  put<2, 3>(tiles, p, tile + 1, panel);
}

template <class Tiles>
void one_by_two(Tiles& tiles, const Product& p, const TiledRows& rows, long tile, long panel) {
  const TiledRows::Operand a = rows[tile];
  const char* w = p.panel(panel);
  tiles.template zero<0>();
  tiles.template zero<1>();
  for (long step = 0; step < p.steps(); ++step, w += kStepBytes) {
    tiles.template load<4>(a.at + step * a.step, a.stride);
    for (long line = 0; line < kStepBytes; line += 64)
      _mm_prefetch(w + kAhead + line, _MM_HINT_T0);
    tiles.template load<6>(w, 64);
    tiles.template dot<0, 4, 6>();
    tiles.template load<7>(w + kTileBytes, 64);
    tiles.template dot<1, 4, 7>();
  }
  put<0, 1>(tiles, p, tile, panel);
}

template <class Tiles>
void by_tiles(const Product& p, int threads) {
  const TiledRows rows(p, threads);
  const long row_tiles = (p.rows + kTileRows - 1) / kTileRows, panels = p.panels();
  const long row_bytes = p.steps() * 64;
  const long fitting = std::max(64L, std::min(kMostTileRows, kMostTileBytes / row_bytes));
  const long most = fitting / (2 * kTileRows) * 2;  // tiles of a unit
  const long chunks = (row_tiles + most - 1) / most;
  const long each = ((row_tiles + chunks - 1) / chunks + 1) / 2 * 2;
  const long run = std::clamp<long>(panels / (threads * kUnitsPerThread), 1, 16);
  const long runs = (panels + run - 1) / run;
  share(threads, runs * chunks, [&](long unit) {
    const long first = unit % runs * run, last = std::min(panels, first + run);
    const long begin = unit / runs * each, end = std::min(row_tiles, begin + each);
    if (begin >= end) return;
    Tiles tiles;
    // the next panel is prefetched in parts, spread over this one's row blocks
    const long blocks = (end - begin) / 2;
    const int lines = blocks ? static_cast<int>((kStepBytes / 64 + blocks - 1) / blocks) : 0;
    for (long panel = first; panel < last; ++panel) {
      const char* ahead = p.panel(panel + 1);
      long tile = begin;
      for (; tile + 1 < end; tile += 2, ahead += lines * 64 * p.steps())
        two_by_two(tiles, p, rows, tile, panel, ahead, lines);
      if (tile < end) one_by_two(tiles, p, rows, tile, panel);
    }
  });
}

// ---- by FMA

// R rows x P panels; with `kAsk` weights are prefetched, since they come from memory.
template <int R, int P, bool kAsk>
void kernel(const Product& p, const float* x, long row, long panel) {
  constexpr int kVectors = 2 * P;
  const long steps = p.steps(), width = steps * kStepInputs;
  __m512 sums[R][kVectors];
  for (auto& of_row : sums)
    for (__m512& sum : of_row) sum = _mm512_setzero_ps();
  const char* weights = p.panel(panel);
  const long next = steps * kStepBytes;
  for (long step = 0; step < steps; ++step, weights += kStepBytes, x += kStepInputs) {
    __m512 even[R][kVectors], odd[R][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (int pair = 0; pair < 16; ++pair) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        if (kAsk) {
          const char* here = weights + v / 2 * next + v % 2 * kTileBytes + 64 * pair;
          _mm_prefetch(here + kAhead / 2, _MM_HINT_T0);
        }
        const __m512i w =
            _mm512_load_si512(weights + v / 2 * next + v % 2 * kTileBytes + 64 * pair);
        const __m512 w_even = even_of(w), w_odd = odd_of(w);
        const float* inputs = x + 2 * pair;
        hide(inputs);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const float* at = inputs + r * width;
          even[r][v] = _mm512_fmadd_ps(_mm512_set1_ps(at[0]), w_even, even[r][v]);
          odd[r][v] = _mm512_fmadd_ps(_mm512_set1_ps(at[1]), w_odd, odd[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = _mm512_add_ps(sums[r][v], _mm512_add_ps(even[r][v], odd[r][v]));
  }
  for (int r = 0; r < R; ++r)
    for (int q = 0; q < P; ++q) store(p, row + r, panel + q, sums[r][2 * q], sums[r][2 * q + 1]);
}

using Kernel = void (*)(const Product&, const float*, long, long);
constexpr Kernel kFew[] = {kernel<1, 2, true>, kernel<2, 2, true>, kernel<3, 2, true>};
constexpr Kernel kFirst[] = {kernel<1, 1, true>, kernel<2, 1, true>, kernel<3, 1, true>,
                             kernel<4, 1, true>, kernel<5, 1, true>, kernel<6, 1, true>};
constexpr Kernel kNext[] = {kernel<1, 1, false>, kernel<2, 1, false>, kernel<3, 1, false>,
                            kernel<4, 1, false>, kernel<5, 1, false>, kernel<6, 1, false>};

// Rows begin ... end - 1 as fp32, each padded with zeros to whole steps.
const float* widened(const Product& p, long begin, long end) {
  const long width = p.steps() * kStepInputs;
  static thread_local Scratch rows;
  auto* to = rows.take<float>((end - begin) * width);
  for (long row = begin; row < end; ++row)
    for (long i = 0; i < width; i += 16) {
      const long left = p.inputs - i;
      const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
      const __m256i x = _mm256_maskz_loadu_epi16(mask, p.x + row * p.x_stride + i);
      _mm512_store_ps(to + (row - begin) * width + i, widen(x));
    }
  return to;
}

void by_fma(const Product& p, int threads) {
  const long panels = p.panels(), width = p.steps() * kStepInputs;
  const int wide = p.rows <= kTogether / 2 ? 2 : 1;
  const long run = std::max<long>(wide, panels / (threads * kUnitsPerThread) / wide * wide);
  const long runs = (panels + run - 1) / run;
  const long chunks = (p.rows + kMostFmaRows - 1) / kMostFmaRows;
  const long each = (p.rows + chunks - 1) / chunks;
  share(threads, runs * chunks, [&](long unit) {
    const FlushAll flush;
    const long first = unit % runs * run, last = std::min(panels, first + run);
    const long begin = unit / runs * each, end = std::min(p.rows, begin + each);
    if (begin >= end) return;
    const float* x = widened(p, begin, end);
    for (long panel = first; panel < last; panel += wide) {
      if (wide == 2 && panel + wide <= panels) {
        kFew[p.rows - 1](p, x, 0, panel);
        continue;
      }
      for (long row = begin; row < end;) {
        const long left = end - row, calls = (left + kTogether - 1) / kTogether;
        const long take = (left + calls - 1) / calls;  // equal shares
        const auto& kernels = row == begin ? kFirst : kNext;
        kernels[take - 1](p, x + (row - begin) * width, row, panel);
        row += take;
      }
    }
  });
}

}  // namespace

extern "C" int baton_tiles_permitted() { return HardwareTiles::permitted(); }

// Elements of the packed form of a weight [outputs, inputs].
extern "C" long baton_tile_packed_size(long outputs, long inputs) {
  const Product p{nullptr, 0, nullptr, nullptr, 0, 0, outputs, inputs};
  return p.panels() * p.steps() * kStepBytes / 2;
}

extern "C" void baton_tile_pack(const uint16_t* weight, long outputs, long inputs,
                                uint16_t* packed, int threads) {
  const Product p{nullptr, 0, nullptr, nullptr, 0, 0, outputs, inputs};
  share(threads, p.panels(), [=](long panel) {
    uint16_t* to = packed + panel * p.steps() * kStepBytes / 2;
    for (long step = 0; step < p.steps(); ++step)
      for (int tile = 0; tile < 2; ++tile)
        for (int pair = 0; pair < 16; ++pair)
          for (int column = 0; column < 16; ++column)
            for (int half = 0; half < 2; ++half) {
              const long output = panel * kPanel + tile * 16 + column;
              const long input = step * kStepInputs + 2 * pair + half;
              const bool there = output < outputs && input < inputs;
              *to++ = there ? weight[output * inputs + input] : 0;
            }
  });
}

// Strides count elements; `weights` is aligned to 64 bytes. `tiles`: 0 by FMA, 1 by AMX, 2 by tiles
// in software. All three have the same bits.
extern "C" void baton_tile_product(const uint16_t* x, long x_stride, const uint16_t* weights,
                                   uint16_t* y, long y_stride, long rows, long outputs,
                                   long inputs, int threads, int tiles) {
  if (rows == 0) return;
  const Product p{x, x_stride, reinterpret_cast<const char*>(weights), y, y_stride, rows, outputs,
                  inputs};
  if (tiles == 1)
    by_tiles<HardwareTiles>(p, threads);
  else if (tiles == 2)
    by_tiles<SoftwareTiles>(p, threads);
  else
    by_fma(p, threads);
}

}  // namespace baton
