// Products of bf16 rows with packed bf16 weights, y = x @ w.T, with the sums of VDPBF16PS.
//
// Every element of y is one chain over K in fp32, from the first pair of inputs to the last, in a
// register. So its bits depend on its own row and column alone: not on the other rows, on how rows
// and columns are cut, nor on the threads.
//
//   packed weights   [panels][K / 2][32 outputs][2 inputs]      the operand of `dot_pairs`
//   a kernel         R rows x a panel, 2 R sums in registers
//
// Many rows take several passes over a panel. The first waits for memory, the others for FMAs. So each of
// the last two prefetches a half of the next panel.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "team.h"
#include "vectors.h"

namespace baton {
namespace {

constexpr int kPanel = 32;       // outputs
constexpr int kMostRows = kIsAvx512 ? 12 : 4;  // of a kernel
constexpr int kTwoPasses = 10;    // rows from which two passes are faster than one
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
  _mm512_mask_storeu_epi16(y, mask, narrow_two(high, low));
}

// With `A`, reads a line of `ahead` for each pair of inputs into the cache.
template <int R, bool A>
void kernel(const Product& p, long row, long panel, const uint16_t* ahead) {
  __m512 low[R], high[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ps();
  const uint16_t* x = p.x + row * p.x_stride;
  const uint16_t* weights = p.weights + panel * p.pairs * kPanel * 2;
  for (long pair = 0; pair < p.pairs; ++pair, weights += 2 * kPanel) {
    if (A) _mm_prefetch(ahead + kPanel * pair, _MM_HINT_T0);
    const __m512i first = _mm512_load_si512(weights);
    const __m512i second = _mm512_load_si512(weights + kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Two both = two(x + r * p.x_stride + 2 * pair);
      low[r] = dot_pairs(low[r], first, both);
      high[r] = dot_pairs(high[r], second, both);
    }
  }
  const long column = panel * kPanel;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    store(p.y + (row + r) * p.y_stride + column, low[r], high[r], p.outputs - column);
}

using Kernel = void (*)(const Product&, long, long, const uint16_t*);
template <bool A>
constexpr Kernel kKernels[] = {
    kernel<1, A>, kernel<2, A>, kernel<3, A>, kernel<4, A>,  kernel<5, A>,  kernel<6, A>,
    kernel<7, A>, kernel<8, A>, kernel<9, A>, kernel<10, A>, kernel<11, A>, kernel<12, A>};

}  // namespace

// Elements of the packed form of a weight [outputs, inputs]; inputs must be even.
extern "C" long baton_packed_size(long outputs, long inputs) {
  return (outputs + kPanel - 1) / kPanel * kPanel * inputs;
}

extern "C" void baton_pack(const uint16_t* weight, long outputs, long inputs, uint16_t* packed,
                           int threads) {
  const long panels = (outputs + kPanel - 1) / kPanel;
  share(threads, panels, [=](long panel) {
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
  // a unit reads neighbouring panels, so that the hardware can read ahead, and only some rows
  const long run = std::max<long>(1, panels / (threads * kUnitsPerThread));
  const long runs = (panels + run - 1) / run;
  const long chunks = (rows + kChunkRows - 1) / kChunkRows;
  const long per_chunk = (rows + chunks - 1) / chunks;
  share(threads, runs * chunks, [&](long unit) {
    const FlushDenormals flush;
    const long first = unit % runs * run, last = std::min(panels, first + run);
    const long begin = unit / runs * per_chunk, end = std::min(rows, begin + per_chunk);
    const long least = end - begin < kTwoPasses ? 1 : 2;
    const long passes = std::max(least, (end - begin + kMostRows - 1) / kMostRows);
    for (long panel = first; panel < last; ++panel) {
      const uint16_t* next = p.weights + std::min(panel + 1, panels - 1) * p.pairs * kPanel * 2;
      long row = begin;
      for (long left = passes; left > 0; --left) {
        const long take = (end - row + left - 1) / left;  // equal shares
        const bool ahead = passes > 1 && left <= 2;
        const Kernel run_pass = ahead ? kKernels<true>[take - 1] : kKernels<false>[take - 1];
        run_pass(p, row, panel, next + (2 - left) * p.pairs * kPanel);
        row += take;
      }
    }
  });
}

}  // namespace baton
