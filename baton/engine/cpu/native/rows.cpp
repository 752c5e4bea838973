// Row-wise operations of a decoder between its products. Each call reads and writes its rows once; each
// row is computed separately, in one fixed order.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "team.h"
#include "vectors.h"

namespace baton {
namespace {

constexpr int kMostLargest = 64;
constexpr long kUnitElements = 16384;  // fewer do not pay for another thread

// Calls each(row) for every row; `width` elements are read and written for each.
template <class F>
void by_rows(int threads, long rows, long width, const F& each) {
  const long per_unit = std::max(1L, kUnitElements / width);
  share(threads, (rows + per_unit - 1) / per_unit, [&](long unit) {
    const long end = std::min(rows, (unit + 1) * per_unit);
    for (long row = unit * per_unit; row < end; ++row) each(row);
  });
}

// Returns 1 / sqrt(mean of squares + eps) of the values get(i) for i = 0, 16, 32 ...
template <class F>
__m512 inverse_rms(long width, float eps, const F& get) {
  __m512 sum = _mm512_setzero_ps();
  for (long i = 0; i < width; i += 16) {
    const __m512 v = get(i);
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  return _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / width + eps));
}

}  // namespace

// x += part, or x += norm(part) * post; then out = norm(x) * weight. Without `part` nothing is
// added, without `weight` there is no output. `width` is a multiple of 16.
extern "C" void baton_residual(float* x, long x_stride, const uint16_t* part, long part_stride,
                               const float* post, const float* weight, float eps, uint16_t* out,
                               long out_stride, long rows, long width, int threads) {
  by_rows(threads, rows, width, [&](long row) {
    float* to = x + row * x_stride;
    if (part) {
      const uint16_t* from = part + row * part_stride;
      const __m512 scale =
          post ? inverse_rms(width, eps, [&](long i) { return load_bf16(from + i); })
               : _mm512_set1_ps(1.0f);
      for (long i = 0; i < width; i += 16) {
        __m512 v = load_bf16(from + i);
        if (post) v = _mm512_mul_ps(_mm512_mul_ps(v, scale), _mm512_loadu_ps(post + i));
        _mm512_storeu_ps(to + i, _mm512_add_ps(_mm512_loadu_ps(to + i), v));
      }
    }
    if (!weight) return;
    const __m512 scale = inverse_rms(width, eps, [&](long i) { return _mm512_loadu_ps(to + i); });
    for (long i = 0; i < width; i += 16) {
      const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(to + i), scale);
      store_bf16(out + row * out_stride + i, _mm512_mul_ps(v, _mm512_loadu_ps(weight + i)));
    }
  });
}

// Q, K and V of each row in place: the bias (if any) is added to all of them; Q and K are normed by
// head (if `norm` [heads, dim] is given) and rotated by `rotation` [rows][dim / 2] (cos, sin).
// `heads` counts Q's and K's, `plain` V's; `dim` is a multiple of 16.
extern "C" void baton_heads(uint16_t* qkv, long stride, const float* bias, const float* norm,
                            float eps, const float* rotation, long rows, int heads, int plain,
                            int dim, int threads) {
  by_rows(threads, rows, static_cast<long>(heads + plain) * dim, [&](long row) {
    for (int head = 0; head < heads; ++head) {
      uint16_t* at = qkv + row * stride + static_cast<long>(head) * dim;
      const float* add = bias ? bias + static_cast<long>(head) * dim : nullptr;
      const auto get = [&](long i) {
        const __m512 v = load_bf16(at + i);
        return add ? _mm512_add_ps(v, _mm512_loadu_ps(add + i)) : v;
      };
      const __m512 scale = norm ? inverse_rms(dim, eps, get) : _mm512_set1_ps(1.0f);
      for (long i = 0; i < dim; i += 16) {
        __m512 v = get(i);
        if (norm)
          v = _mm512_mul_ps(_mm512_mul_ps(v, scale), _mm512_loadu_ps(norm + head * dim + i));
        const __m512 turn = _mm512_loadu_ps(rotation + row * dim + i);
        const __m512 swapped = _mm512_permute_ps(v, 0xb1);
        const __m512 across = _mm512_mul_ps(swapped, _mm512_movehdup_ps(turn));
        store_bf16(at + i, _mm512_fmaddsub_ps(v, _mm512_moveldup_ps(turn), across));
      }
    }
    if (!bias) return;
    uint16_t* at = qkv + row * stride + static_cast<long>(heads) * dim;
    const float* add = bias + static_cast<long>(heads) * dim;
    for (long i = 0; i < static_cast<long>(plain) * dim; i += 16)
      store_bf16(at + i, _mm512_add_ps(load_bf16(at + i), _mm512_loadu_ps(add + i)));
  });
}

// out = act(gate) * up, of rows [gate, up], `width` of each. The activation is SiLU (0), or GELU by
// tanh (1): both are x * sigmoid(something).
extern "C" void baton_gate(const uint16_t* gate_up, long stride, uint16_t* out, long out_stride,
                           long rows, long width, int gelu, int threads) {
  by_rows(threads, rows, width * 2, [&](long row) {
    const uint16_t* from = gate_up + row * stride;
    for (long i = 0; i < width; i += 16) {
      const __mmask16 mask = width - i >= 16 ? 0xffff : (1u << (width - i)) - 1;
      const __m512 x = widen(_mm256_maskz_loadu_epi16(mask, from + i));
      __m512 inner = x;
      if (gelu) {  // 1 + tanh(u) = 2 sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f),
                                             _mm512_set1_ps(1.0f));
        inner = _mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.5957691216057308f));
      }
      const __m512 up = widen(_mm256_maskz_loadu_epi16(mask, from + width + i));
      const __m512 y = _mm512_mul_ps(_mm512_mul_ps(x, sigmoid(inner)), up);
      _mm256_mask_storeu_epi16(out + row * out_stride + i, mask, narrow(y));
    }
  });
}

// out = norm(x) * weight, all fp32.
extern "C" void baton_norm(const float* x, long x_stride, const float* weight, float eps, float* out,
                           long out_stride, long rows, long width, int threads) {
  by_rows(threads, rows, width, [&](long row) {
    const float* from = x + row * x_stride;
    const __m512 scale = inverse_rms(width, eps, [&](long i) { return _mm512_loadu_ps(from + i); });
    for (long i = 0; i < width; i += 16) {
      const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(from + i), scale);
      _mm512_storeu_ps(out + row * out_stride + i, _mm512_mul_ps(v, _mm512_loadu_ps(weight + i)));
    }
  });
}

// For each row 1 if it is free of NaN and Inf, else 0. Elements are bf16, or fp32.
extern "C" void baton_finite(const uint16_t* rows_at, long stride, int fp32, uint8_t* out, long rows,
                             long width, int threads) {
  const long halves = fp32 ? 2 : 1;
  const __m512i exponent = fp32 ? _mm512_set1_epi32(0x7f800000) : _mm512_set1_epi16(0x7f80);
  by_rows(threads, rows, width * halves, [&](long row) {
    const uint16_t* from = rows_at + row * stride * halves;
    uint32_t broken = 0;
    for (long i = 0; i < width * halves; i += 32) {
      const long left = width * halves - i;
      const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
      const __m512i bits = _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, from + i), exponent);
      broken |= fp32 ? _mm512_cmpeq_epi32_mask(bits, exponent)
                     : _mm512_cmpeq_epi16_mask(bits, exponent);
    }
    out[row] = broken == 0;
  });
}

// The `count` largest of each row of bf16, in falling order, equal ones by place; `count` <= width.
extern "C" void baton_largest(const uint16_t* rows_at, long stride, long rows, long width, int count,
                              int64_t* out, int threads) {
  // as signed integers, bf16 sorts by value once the order of negative ones is reversed
  const auto ordered = [](__m512i bits) {
    const __m512i sign = _mm512_srai_epi16(bits, 15);
    return _mm512_xor_si512(bits, _mm512_and_si512(sign, _mm512_set1_epi16(0x7fff)));
  };
  by_rows(threads, rows, width, [&](long row) {
    const uint16_t* from = rows_at + row * stride;
    int64_t* found = out + row * count;
    int16_t values[kMostLargest];
    alignas(64) int16_t keys[32];
    int held = 0;
    for (long i = 0; i < width; i += 32) {
      const long left = width - i;
      const __mmask32 there = left >= 32 ? ~0u : (1u << left) - 1;
      const __m512i key = ordered(_mm512_maskz_loadu_epi16(there, from + i));
      __mmask32 better = there;
      if (held == count)
        better &= _mm512_cmpgt_epi16_mask(key, _mm512_set1_epi16(values[held - 1]));
      if (!better) continue;
      _mm512_store_si512(keys, key);
      for (; better; better &= better - 1) {
        const int lane = __builtin_ctz(better);
        if (held == count && keys[lane] <= values[held - 1]) continue;
        int at = held < count ? held++ : held - 1;
        for (; at > 0 && values[at - 1] < keys[lane]; --at) {
          values[at] = values[at - 1];
          found[at] = found[at - 1];
        }
        values[at] = keys[lane];
        found[at] = i + lane;
      }
    }
  });
}

// out[row][c] = x[row] . table[ids[row][c]] in fp32, for rows of fp32 and a table of bf16.
extern "C" void baton_dots(const float* x, long x_stride, const uint16_t* table, long table_stride,
                           const int64_t* ids, int count, float* out, long rows, long width,
                           int threads) {
  by_rows(threads, rows, width * count, [&](long row) {
    const float* from = x + row * x_stride;
    for (int c = 0; c < count; ++c) {
      const uint16_t* other = table + ids[row * count + c] * table_stride;
      __m512 sum = _mm512_setzero_ps();
      for (long i = 0; i < width; i += 16)
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(from + i), load_bf16(other + i), sum);
      out[row * count + c] = _mm512_reduce_add_ps(sum);
    }
  });
}

}  // namespace baton
