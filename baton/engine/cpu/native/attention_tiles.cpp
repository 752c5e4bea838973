// Attention with the sums of AMX tiles (``tiles.h``): by AMX, and with the same bits by FMA.
//
//   scores     a chain over the head's dims, 32 to a step
//   blending   sums * fix, and then a chain over the step's keys, 32 to a step; keys that a row does
//              not see have weights of zero, so a step without visible keys may be omitted: it could
//              only have changed the sign of zeros, which is cleared at the end

#include "attention.h"
#include "tiles.h"

namespace baton {
namespace {

constexpr int kTogether = 4;  // rows of a group by FMA
constexpr int kHalf = kStep / 2;

// Scores of R rows of fp32 queries against B blocks.
template <int R, int B, int V>
inline void scores(const float* queries, const __m512i* keys, Ahead& ahead,
                   __m512 found[][kStepBlocks], int block) {
  constexpr int kDim = V * 16, kPairs = kDim / 2;
  __m512 sums[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) sums[r][b] = _mm512_setzero_ps();
  for (int step = 0; step < kPairs; step += 16) {
    __m512 even[R][B], odd[R][B];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) even[r][b] = odd[r][b] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (int pair = step; pair < step + 16; ++pair) {
      ahead.fetch();
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const __m512i k = _mm512_load_si512(keys + (block + b) * kPairs + pair);
        const __m512 k_even = even_of(k), k_odd = odd_of(k);
        const float* inputs = queries + 2 * pair;
        hide(inputs);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const float* q = inputs + r * kDim;
          even[r][b] = _mm512_fmadd_ps(_mm512_set1_ps(q[0]), k_even, even[r][b]);
          odd[r][b] = _mm512_fmadd_ps(_mm512_set1_ps(q[1]), k_odd, odd[r][b]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
        sums[r][b] = _mm512_add_ps(sums[r][b], _mm512_add_ps(even[r][b], odd[r][b]));
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) found[r][block + b] = sums[r][b];
}

// sums = sums * fix + weights @ V for R rows and C vectors of 16 dims each; the first `halves`
// halves of the step's keys.
template <int R, int C, int V>
inline void blend(float* sums, const float* fix, const float (*weights)[kStep],
                  const __m512i* values, int halves, Ahead& ahead) {
  __m512 acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      acc[r][c] =
          _mm512_mul_ps(_mm512_load_ps(sums + r * V * 16 + 16 * c), _mm512_set1_ps(fix[r]));
  for (int half = 0; half < halves; ++half) {
    __m512 even[R][C], odd[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) even[r][c] = odd[r][c] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (int pair = half * kHalf / 2; pair < (half + 1) * kHalf / 2; ++pair) {
      ahead.fetch();
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const __m512i v = _mm512_load_si512(values + pair * V + c);
        const __m512 v_even = even_of(v), v_odd = odd_of(v);
        const float* inputs = weights[0] + 2 * pair;
        hide(inputs);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const float* w = inputs + r * kStep;
          even[r][c] = _mm512_fmadd_ps(_mm512_set1_ps(w[0]), v_even, even[r][c]);
          odd[r][c] = _mm512_fmadd_ps(_mm512_set1_ps(w[1]), v_odd, odd[r][c]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c)
        acc[r][c] = _mm512_add_ps(acc[r][c], _mm512_add_ps(even[r][c], odd[r][c]));
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) _mm512_store_ps(sums + r * V * 16 + 16 * c, acc[r][c]);
}

// Clears the sign of zeros.
inline __m512 unsigned_zero(__m512 sum) { return _mm512_add_ps(sum, _mm512_setzero_ps()); }

// Weights of R rows, with zeros up to a whole half.
template <int R, class W>
inline void weigh_halves(Row* rows, const __m512 (*found)[kStepBlocks], int blocks, int begin,
                         float scale, W (*weights)[kStep], float* fix) {
  weigh<R>(rows, found, blocks, begin, scale, weights, fix);
  for (int r = 0; r < R && blocks % 2; ++r)
    std::memset(weights[r] + blocks * kBlock, 0, kBlock * sizeof(W));
}

// See `attend`: by FMA.
template <int V>
class FmaSums {
 public:
  FmaSums(const Row* rows, int total, float scale) : scale_(scale) {
    for (int i = 0; i < total; ++i)
      for (int d = 0; d < kDim; d += 16)
        _mm512_store_ps(queries_ + i * kDim + d, load_bf16(rows[i].q + d));
  }

  static constexpr int kInPlace = 0;
  static __m512 whole(__m512 sum) { return unsigned_zero(sum); }

  void take_in(Row* rows, int total, float* sums, const __m512i* keys, const __m512i* values,
               int begin, Ahead& ahead) const {
    by_groups(rows, total, kTogether, begin, [&](int i, int together, int blocks) {
      Row* const group = rows + i;
      const float* const q = queries_ + i * kDim;
      float* const at = sums + i * kDim;
      switch (together) {
        case 1: advance<1>(group, q, at, keys, values, begin, blocks, ahead); break;
        case 2: advance<2>(group, q, at, keys, values, begin, blocks, ahead); break;
        case 3: advance<3>(group, q, at, keys, values, begin, blocks, ahead); break;
        default: advance<4>(group, q, at, keys, values, begin, blocks, ahead);
      }
    });
  }

 private:
  static constexpr int kDim = V * 16;

  template <int R>
  void advance(Row* rows, const float* queries, float* sums, const __m512i* keys,
               const __m512i* values, int begin, int blocks, Ahead& ahead) const {
    __m512 found[R][kStepBlocks];
    int block = 0;
    for (; block + 1 < blocks; block += 2) scores<R, 2, V>(queries, keys, ahead, found, block);
    if (block < blocks) scores<R, 1, V>(queries, keys, ahead, found, block);
    alignas(64) float weights[R][kStep];
    float fix[R];
    weigh_halves<R>(rows, found, blocks, begin, scale_, weights, fix);
    for (int v = 0; v < V; v += 2)
      blend<R, 2, V>(sums + 16 * v, fix, weights, values + v, (blocks + 1) / 2, ahead);
  }

  const float scale_;
  const FlushAll flush_;
  alignas(64) float queries_[kMaxRows * kDim];
};

// See `attend`: by tiles, 16 rows at a time.
template <class Tiles, int V>
class TileSums {
 public:
  TileSums(const Row* rows, int total, float scale) : scale_(scale) {
    const int padded = (total + kTileRows - 1) / kTileRows * kTileRows;
    for (int i = 0; i < padded; ++i)
      if (i < total)
        std::memcpy(queries_ + i * kDim, rows[i].q, 2 * kDim);
      else
        std::memset(queries_ + i * kDim, 0, 2 * kDim);
  }

  static constexpr int kInPlace = 0;
  static __m512 whole(__m512 sum) { return unsigned_zero(sum); }

  // The scores of a group are started before the softmax of the group before it, so that tiles and
  // vectors work at the same time.
  void take_in(Row* rows, int total, float* sums, const __m512i* keys, const __m512i* values,
               int begin, Ahead& ahead) const {
    Group groups[kMaxRows / kTileRows];
    int count = 0;
    by_groups(rows, total, kTileRows, begin, [&](int i, int together, int blocks) {
      groups[count++] = Group{i, together, blocks};
    });
    for (int g = 0; g < count; ++g) {
      if (g == 0) score(groups[0], keys, found_[0]);
      if (g + 1 < count) score(groups[g + 1], keys, found_[(g + 1) % 2]);
      const Group& group = groups[g];
      float* const at = sums + group.first * kDim;
      for (int r = 0; r < group.rows; ++r) {
        ahead.fetch();
        ahead.fetch();
        float fix;
        weigh_halves<1>(rows + group.first + r, found_[g % 2] + r, group.blocks, begin, scale_,
                        weights_ + r, &fix);
        for (int d = 0; d < kDim; d += 16) {
          float* const sum = at + r * kDim + d;
          _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), _mm512_set1_ps(fix)));
        }
      }
      for (int v = 0; v < V; v += 2) blend(at + 16 * v, values + v, (group.blocks + 1) / 2);
    }
  }

 private:
  static constexpr int kDim = V * 16;

  struct Group {
    int first, rows, blocks;
  };

  template <int B>
  void score_block(const char* q, const __m512i* keys) const {
    tiles_.template load<6>(keys + B * kDim / 2, 64);
    tiles_.template dot<B, 4, 6>();
  }

  void score(const Group& group, const __m512i* keys, __m512 (*found)[kStepBlocks]) const {
    const char* q = reinterpret_cast<const char*>(queries_ + group.first * kDim);
    tiles_.template zero<0>();
    tiles_.template zero<1>();
    tiles_.template zero<2>();
    tiles_.template zero<3>();
    for (int step = 0; step < kDim / kStepInputs; ++step, q += 64, keys += 16) {
      tiles_.template load<4>(q, 2 * kDim);
      score_block<0>(q, keys);
      if (group.blocks > 1) score_block<1>(q, keys);
      if (group.blocks > 2) score_block<2>(q, keys);
      if (group.blocks > 3) score_block<3>(q, keys);
    }
    constexpr long kRowBytes = kStepBlocks * sizeof(__m512);
    tiles_.template store<0>(&found[0][0], kRowBytes);
    tiles_.template store<1>(&found[0][1], kRowBytes);
    tiles_.template store<2>(&found[0][2], kRowBytes);
    tiles_.template store<3>(&found[0][3], kRowBytes);
  }

  // Two vectors of dims of a group's rows.
  void blend(float* sums, const __m512i* values, int halves) const {
    constexpr long kRowBytes = kDim * sizeof(float), kPairBytes = V * sizeof(__m512i);
    tiles_.template load<0>(sums, kRowBytes);
    tiles_.template load<1>(sums + 16, kRowBytes);
    for (int half = 0; half < halves; ++half) {
      const __m512i* v = values + half * kHalf / 2 * V;
      tiles_.template load<4>(weights_[0] + half * kHalf, 2 * kStep);
      tiles_.template load<6>(v, kPairBytes);
      tiles_.template dot<0, 4, 6>();
      tiles_.template load<7>(v + 1, kPairBytes);
      tiles_.template dot<1, 4, 7>();
    }
    tiles_.template store<0>(sums, kRowBytes);
    tiles_.template store<1>(sums + 16, kRowBytes);
  }

  const float scale_;
  const FlushAll flush_;
  mutable Tiles tiles_;
  alignas(64) uint16_t queries_[kMaxRows * kDim];
  alignas(64) mutable __m512 found_[2][kTileRows][kStepBlocks];
  alignas(64) mutable uint16_t weights_[kTileRows][kStep];
};

template <int V>
using HardwareSums = TileSums<HardwareTiles, V>;
template <int V>
using SoftwareSums = TileSums<SoftwareTiles, V>;

}  // namespace

AttendFn attend_by_tiles(int dim, int tiles) {
  if (tiles == 1) return attend_for<HardwareSums>(dim);
  return tiles == 2 ? attend_for<SoftwareSums>(dim) : attend_for<FmaSums>(dim);
}

}  // namespace baton
