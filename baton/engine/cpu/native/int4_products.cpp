// Products of rows with weights of 4 bits, fastest with VNNI.
//
//   a row of x      digits and a scale (``digits.h``)
//   32 inputs of an output (a group)    levels from 0 to 15, a scale and an offset: w = scale * level + offset
//   y               row scale * sum over groups of (scale * (levels . digits) + offset * (sum of digits))
//
// Sums inside a group are of integers, and the groups of an element are added in order, in fp32; so
// its bits depend on its own row and column alone.
//
//   packed weights  [panels of 16 outputs][groups][4 x 64 bytes of levels][16 scales][16 offsets]   fp16
//
// A byte of levels has one of a quad of inputs in its low half, and one of the next quad in its high
// half. Its place in the vector gives one of 16 outputs, then one of the quad's 4 inputs.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "digits.h"
#include "kernels.h"
#include "scratch.h"
#include "team.h"
#include "vectors.h"

namespace baton {
namespace {

constexpr int kPanel = 16;   // outputs
constexpr int kGroup = 32;   // inputs
constexpr int kQuads = 8;    // of a group
constexpr int kDigits = 2;
constexpr long kLevelBytes = kPanel * kGroup / 2;
constexpr long kGroupBytes = kLevelBytes + 4 * kPanel;
constexpr int kTogether = kIsAvx512 ? 6 : 2;  // rows of a kernel

struct Product {
  DigitRows x;
  const float* digit_sums;  // [rows][groups], in units of the row's scale
  const uint8_t* weights;
  uint16_t* y;
  long y_stride;
  long rows, outputs;

  long groups() const { return x.inputs / kGroup; }
  long panels() const { return (outputs + kPanel - 1) / kPanel; }
};

inline __m512 combined(__m512i high, __m512i low) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), _mm512_set1_ps(1.0f / kDigit),
                         _mm512_cvtepi32_ps(high));
}

// The sum of the digits of each group of a row.
void add_up(const Product& p, long row, float* to) {
  const long bytes = p.x.row_bytes();
  const uint8_t* at = p.x.packed + row * kDigits * bytes;
  const auto sum = [](const uint8_t* digits) {
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(digits));
    const __m512i pairs = _mm512_madd_epi16(_mm512_cvtepi8_epi16(all), _mm512_set1_epi16(1));
    return static_cast<float>(_mm512_reduce_add_epi32(pairs));
  };
  for (long group = 0; group < p.groups(); ++group, at += kGroup)
    to[group] = sum(at) + sum(at + bytes) * (1.0f / kDigit);
}

inline __m512 halves(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
}

template <int R>
void kernel(const Product& p, long row, long panel) {
  const long groups = p.groups(), bytes = p.x.row_bytes();
  const uint8_t* w = p.weights + panel * groups * kGroupBytes;
  const uint8_t* x = p.x.packed + row * kDigits * bytes;
  const float* digit_sums = p.digit_sums + row * groups;
  const __m512i low_half = _mm512_set1_epi8(0x0f);
  __m512 found[R];
  for (__m512& of_row : found) of_row = _mm512_setzero_ps();
  for (long group = 0; group < groups; ++group, w += kGroupBytes, x += kGroup) {
    __m512i levels[kQuads];
#pragma GCC unroll 4
    for (int v = 0; v < kQuads / 2; ++v) {
      const __m512i both = _mm512_load_si512(w + 64 * v);
      levels[2 * v] = _mm512_and_si512(both, low_half);
      levels[2 * v + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
    }
    const __m512 scale = halves(w + kLevelBytes), offset = halves(w + kLevelBytes + 2 * kPanel);
    __m512i sums[R][kDigits];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int d = 0; d < kDigits; ++d) {
          int32_t four;
          std::memcpy(&four, x + (r * kDigits + d) * bytes + quad * 4, 4);
          sums[r][d] = add_products(sums[r][d], levels[quad], _mm512_set1_epi32(four));
        }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      found[r] = _mm512_fmadd_ps(scale, combined(sums[r][0], sums[r][1]), found[r]);
      const __m512 digits = _mm512_set1_ps(digit_sums[r * groups + group]);
      found[r] = _mm512_fmadd_ps(offset, digits, found[r]);
    }
  }
  const __mmask16 mask = lanes(p.outputs - panel * kPanel);
  for (int r = 0; r < R; ++r) {
    const __m512 y = _mm512_mul_ps(found[r], _mm512_set1_ps(p.x.scales[row + r]));
    uint16_t* to = p.y + (row + r) * p.y_stride + panel * kPanel;
    _mm256_mask_storeu_epi16(to, mask, narrow(y));
  }
}

using Kernel = void (*)(const Product&, long, long);
constexpr Kernel kKernels[] = {kernel<1>, kernel<2>, kernel<3>,
                               kernel<4>, kernel<5>, kernel<6>};

}  // namespace

// Bytes of the packed form of a weight [outputs, inputs]; inputs are whole groups.
extern "C" long baton_int4_packed_size(long outputs, long inputs) {
  return (outputs + kPanel - 1) / kPanel * (inputs / kGroup) * kGroupBytes;
}

// levels [outputs, inputs] from 0 to 15; scales and offsets [outputs, groups], fp16.
extern "C" void baton_int4_pack(const uint8_t* levels, const uint16_t* scales,
                                const uint16_t* offsets, long outputs, long inputs,
                                uint8_t* packed, int threads) {
  const long panels = (outputs + kPanel - 1) / kPanel, groups = inputs / kGroup;
  share(threads, panels, [=](long panel) {
    uint8_t* to = packed + panel * groups * kGroupBytes;
    std::memset(to, 0, groups * kGroupBytes);
    const long here = std::min<long>(kPanel, outputs - panel * kPanel);
    for (long group = 0; group < groups; ++group, to += kGroupBytes)
      for (long column = 0; column < here; ++column) {
        const long output = panel * kPanel + column;
        const uint8_t* from = levels + output * inputs + group * kGroup;
        for (int i = 0; i < kGroup; ++i) {
          const int quad = i / 4;
          to[quad / 2 * 64 + column * 4 + i % 4] |= from[i] << (quad % 2 * 4);
        }
        std::memcpy(to + kLevelBytes + 2 * column, scales + output * groups + group, 2);
        std::memcpy(to + kLevelBytes + 2 * kPanel + 2 * column, offsets + output * groups + group,
                    2);
      }
  });
}

// Strides count elements; x and y are bf16, `weights` is aligned to 64 bytes.
extern "C" void baton_int4_product(const uint16_t* x, long x_stride, const uint8_t* weights,
                                   uint16_t* y, long y_stride, long rows, long outputs,
                                   long inputs, int threads) {
  if (rows == 0) return;
  static thread_local Scratch packed, row_scales, sums;
  Product p{{x, x_stride, true, inputs, kDigits, nullptr, row_scales.take<float>(rows)},
            nullptr, weights, y, y_stride, rows, outputs};
  p.x.packed = packed.take<uint8_t>(rows * kDigits * p.x.row_bytes());
  float* const digit_sums = sums.take<float>(rows * p.groups());
  p.digit_sums = digit_sums;
  const bool large = rows * inputs > (1 << 15);
  share(large ? threads : 1, rows, [&](long row) {
    p.x.quantise(row, 0);
    add_up(p, row, digit_sums + row * p.groups());
  });
  share_product(threads, p.panels(), rows, kTogether, [&](long row, long count, long panel) {
    kKernels[count - 1](p, row, panel);
  });
}

}  // namespace baton
