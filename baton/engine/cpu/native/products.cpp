// Products of bf16 rows with packed bf16 weights, y = x @ w.T, with the sums of VDPBF16PS.
//
// Every element of y is one chain over K in fp32, from the first pair of inputs to the last, in a
// register. So its bits depend on its own row and column alone: not on the other rows, on how rows
// and columns are cut, nor on the threads.
//
//   packed weights   [panels][K / 2][32 outputs][2 inputs]      the operand of `dot_pairs`
//   a kernel         R rows x P panels, 2 R P sums in registers

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr int kPanel = 32;       // outputs
constexpr int kMostRows = 12;    // of a kernel with one panel; half as many with two
constexpr long kChunkRows = 96;   // rows of a unit: they stay in the L2 cache
constexpr long kUnitsPerThread = 4;

struct Product {
  const uint16_t* x;
  long x_stride;
  const uint16_t* weights;
  uint16_t* y;
  long y_stride;
  long rows, outputs, pairs;
};

inline void store(uint16_t* y, __m512 low, __m512 high, long columns) {
  const __mmask32 mask = columns >= kPanel ? ~0u : (1u << columns) - 1;
  _mm512_mask_storeu_epi16(y, mask, baton::narrow_two(high, low));
}

template <int R, int P>
void kernel(const Product& p, long row, long panel) {
  __m512 sums[R][2 * P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < 2 * P; ++v) sums[r][v] = _mm512_setzero_ps();
  const uint16_t* x = p.x + row * p.x_stride;
  const long next = p.pairs * kPanel * 2;  // elements of a panel
  const uint16_t* weights = p.weights + panel * next;
  for (long pair = 0; pair < p.pairs; ++pair, weights += 2 * kPanel) {
    __m512i w[2 * P];
#pragma GCC unroll 16
    for (int v = 0; v < 2 * P; ++v) {
      const uint16_t* from = weights + (v / 2) * next + (v % 2) * kPanel;
      w[v] = _mm512_load_si512(from);
    }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
      const __m512i both = baton::two(x + r * p.x_stride + 2 * pair);
#pragma GCC unroll 16
    for (int v = 0; v < 2 * P; ++v) sums[r][v] = baton::dot_pairs(sums[r][v], w[v], both);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int q = 0; q < P; ++q) {
      const long column = (panel + q) * kPanel;
      store(p.y + (row + r) * p.y_stride + column, sums[r][2 * q], sums[r][2 * q + 1],
            p.outputs - column);
    }
}

using Kernel = void (*)(const Product&, long, long);
constexpr Kernel kOne[kMostRows] = {kernel<1, 1>, kernel<2, 1>, kernel<3, 1>,  kernel<4, 1>,
                                    kernel<5, 1>, kernel<6, 1>, kernel<7, 1>,  kernel<8, 1>,
                                    kernel<9, 1>, kernel<10, 1>, kernel<11, 1>, kernel<12, 1>};
constexpr Kernel kTwo[kMostRows / 2] = {kernel<1, 2>, kernel<2, 2>, kernel<3, 2>,
                                        kernel<4, 2>, kernel<5, 2>, kernel<6, 2>};

}  // namespace

// Elements of the packed form of a weight [outputs, inputs]; inputs must be even.
extern "C" long baton_packed_size(long outputs, long inputs) {
  return (outputs + kPanel - 1) / kPanel * kPanel * inputs;
}

extern "C" void baton_pack(const uint16_t* weight, long outputs, long inputs, uint16_t* packed,
                           int threads) {
  const long panels = (outputs + kPanel - 1) / kPanel;
  baton::share(threads, panels, [=](long panel) {
    uint16_t* to = packed + panel * kPanel * inputs;
    for (long pair = 0; pair < inputs / 2; ++pair)
      for (int column = 0; column < kPanel; ++column, to += 2) {
        const long output = panel * kPanel + column;
        if (output < outputs)
          std::memcpy(to, weight + output * inputs + 2 * pair, 4);
        else
          std::memset(to, 0, 4);
      }
  });
}

// Strides count elements; `weights` is aligned to 64 bytes.
extern "C" void baton_product(const uint16_t* x, long x_stride, const uint16_t* weights,
                              uint16_t* y, long y_stride, long rows, long outputs, long inputs,
                              int threads) {
  if (rows == 0) return;
  const Product p{x, x_stride, weights, y, y_stride, rows, outputs, inputs / 2};
  const long panels = (outputs + kPanel - 1) / kPanel;
  const int wide = rows <= kMostRows / 2 ? 2 : 1;
  // a unit reads neighbouring panels, so that the hardware can read ahead, and only some rows
  const long run = std::max<long>(wide, panels / (threads * kUnitsPerThread) / wide * wide);
  const long runs = (panels + run - 1) / run;
  const long chunks = (rows + kChunkRows - 1) / kChunkRows;
  const long per_chunk = (rows + chunks - 1) / chunks;
  baton::share(threads, runs * chunks, [&](long unit) {
    const baton::FlushDenormals flush;
    const long first = unit % runs * run, last = std::min(panels, first + run);
    const long begin = unit / runs * per_chunk, end = std::min(rows, begin + per_chunk);
    for (long panel = first; panel < last; panel += wide) {
      const bool pair = wide == 2 && panel + 1 < panels;
      const int most = pair ? kMostRows / 2 : kMostRows;
      for (long row = begin; row < end;) {
        const long left = end - row, calls = (left + most - 1) / most;
        const long take = (left + calls - 1) / calls;  // equal shares
        (pair ? kTwo : kOne)[take - 1](p, row, panel);
        row += take;
      }
    }
  });
}
