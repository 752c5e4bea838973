// Products of rows with weights of 8 bits, fastest with VNNI.
//
//   a row of x      one scale, and one or two digits of 8 bits for each input: x = scale (d0 + d1 / 254)
//   an output       one scale, and integers of 8 bits: w = scale * integer
//   y               scale * scale * (sum of d0 integers + sum of d1 integers / 254)
//
// Sums of integers are the same in any order, so a row's bits depend on the row alone.
//
//   packed weights  [panels][K / 4][32 outputs][4 inputs]     signed: VPDPBUSD's second operand
//   packed digits   [digits][K / 4][4 inputs], plus 128       unsigned: its first operand
//
// The contribution of the 128 to each sum is known beforehand, and subtracted.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "digits.h"
#include "kernels.h"
#include "scratch.h"
#include "team.h"
#include "vectors.h"

namespace baton {
namespace {

constexpr int kPanel = 32;   // outputs
constexpr int kQuad = 4;     // inputs of one lane
constexpr int kShift = 128;  // makes a digit unsigned

struct Product {
  DigitRows x;
  const int8_t* weights;
  const float* scales;     // of outputs
  const int32_t* offsets;  // contribution of the shift
  void* y;
  long y_stride;
  long rows, outputs;

  long quads() const { return (x.inputs + kQuad - 1) / kQuad; }
  long panels() const { return (outputs + kPanel - 1) / kPanel; }
};

inline void store(const Product& p, long row, long column, __m512 values) {
  const __mmask16 mask = lanes(std::max(0L, p.outputs - column));
  if (p.x.is_bf16) {
    auto* y = static_cast<uint16_t*>(p.y) + row * p.y_stride + column;
    _mm256_mask_storeu_epi16(y, mask, narrow(values));
  } else {
    _mm512_mask_storeu_ps(static_cast<float*>(p.y) + row * p.y_stride + column, mask, values);
  }
}

template <int R, int D>  // rows, digits
void kernel(const Product& p, long row, long panel) {
  __m512i sums[R][D][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int d = 0; d < D; ++d) sums[r][d][0] = sums[r][d][1] = _mm512_setzero_si512();
  const long quads = p.quads(), bytes = p.x.row_bytes();
  const int8_t* w = p.weights + panel * quads * kPanel * kQuad;
  const uint8_t* x = p.x.packed + row * D * bytes;
  for (long quad = 0; quad < quads; ++quad, w += kPanel * kQuad, x += kQuad) {
    const __m512i low = _mm512_load_si512(w), high = _mm512_load_si512(w + 64);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int d = 0; d < D; ++d) {
        int32_t four;
        std::memcpy(&four, x + (r * D + d) * bytes, 4);
        const __m512i digits = _mm512_set1_epi32(four);
        sums[r][d][0] = add_products(sums[r][d][0], digits, low);
        sums[r][d][1] = add_products(sums[r][d][1], digits, high);
      }
  }
  for (int half = 0; half < 2; ++half) {
    const long column = panel * kPanel + 16 * half;
    const __m512i offset = _mm512_loadu_si512(p.offsets + column);
    const __m512 scale = _mm512_loadu_ps(p.scales + column);
    for (int r = 0; r < R; ++r) {
      __m512 y = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][0][half], offset));
      if (D == 2) {
        const __m512 low = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][D - 1][half], offset));
        y = _mm512_fmadd_ps(low, _mm512_set1_ps(1.0f / kDigit), y);
      }
      const __m512 both = _mm512_mul_ps(y, scale);
      store(p, row + r, column, _mm512_mul_ps(both, _mm512_set1_ps(p.x.scales[row + r])));
    }
  }
}

using Kernel = void (*)(const Product&, long, long);
constexpr Kernel kOne[12] = {kernel<1, 1>, kernel<2, 1>, kernel<3, 1>,  kernel<4, 1>,
                             kernel<5, 1>, kernel<6, 1>, kernel<7, 1>,  kernel<8, 1>,
                             kernel<9, 1>, kernel<10, 1>, kernel<11, 1>, kernel<12, 1>};
constexpr Kernel kTwo[6] = {kernel<1, 2>, kernel<2, 2>, kernel<3, 2>,
                            kernel<4, 2>, kernel<5, 2>, kernel<6, 2>};

}  // namespace

// Bytes of the packed form of a weight [outputs, inputs]; its scales and offsets are padded to
// whole panels too.
extern "C" long baton_int8_packed_size(long outputs, long inputs) {
  return (outputs + kPanel - 1) / kPanel * kPanel * ((inputs + kQuad - 1) / kQuad * kQuad);
}

extern "C" void baton_int8_pack(const int8_t* weight, long outputs, long inputs, int8_t* packed,
                                int32_t* offsets, int threads) {
  const long panels = (outputs + kPanel - 1) / kPanel, quads = (inputs + kQuad - 1) / kQuad;
  share(threads, panels, [=](long panel) {
    int8_t* to = packed + panel * quads * kPanel * kQuad;
    for (long quad = 0; quad < quads; ++quad)
      for (int column = 0; column < kPanel; ++column)
        for (int i = 0; i < kQuad; ++i, ++to) {
          const long output = panel * kPanel + column, input = quad * kQuad + i;
          *to = output < outputs && input < inputs ? weight[output * inputs + input] : 0;
        }
    for (long output = panel * kPanel; output < (panel + 1) * kPanel; ++output) {
      int32_t sum = 0;
      for (long i = 0; output < outputs && i < inputs; ++i) sum += weight[output * inputs + i];
      offsets[output] = kShift * sum;
    }
  });
}

// Strides count elements; `weights` is aligned to 64 bytes, `digits` is 1 or 2, and x and y are
// bf16 or fp32.
extern "C" void baton_int8_product(const void* x, long x_stride, int is_bf16,
                                   const int8_t* weights, const float* scales,
                                   const int32_t* offsets, void* y, long y_stride, long rows,
                                   long outputs, long inputs, int digits, int threads) {
  if (rows == 0) return;
  static thread_local Scratch packed, row_scales;
  Product p{{x, x_stride, is_bf16 != 0, inputs, digits, nullptr, row_scales.take<float>(rows)},
            weights, scales, offsets, y, y_stride, rows, outputs};
  p.x.packed = packed.take<uint8_t>(rows * digits * p.x.row_bytes());
  const bool large = rows * inputs > (1 << 15);
  share(large ? threads : 1, rows, [&](long row) { p.x.quantise(row, kShift); });
  const long most = (kIsAvx512 ? 12 : 4) / digits;
  share_product(threads, p.panels(), rows, most, [&](long row, long count, long panel) {
    (digits == 2 ? kTwo : kOne)[count - 1](p, row, panel);
  });
}

}  // namespace baton
