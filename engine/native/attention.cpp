// Attention over a paged bf16 pool, for CPUs with AVX-512 BF16.
//
// Every query row is computed by itself: keys in blocks of 16 from position 0 (or from the block in
// which its window begins), one online softmax step per block, sums over head dims and over keys in
// a fixed order. So a row's bits depend on its own position and keys alone, whatever shares its
// tile, its chunk, or its batch. A tile only shares the work of reading K and V.
//
//   rows of a tile: the queries of one KV head (G heads each) of up to kTileQueries positions
//   K block  [16 tokens, D]  ->  pairs of dims by token, the operand of VDPBF16PS
//   V block  [16 tokens, D]  ->  fp32

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int kBlock = 16;
constexpr int kMaxDim = 256;
constexpr int kMaxRows = 128;
constexpr int kTileQueries = 16;

struct Span {      // one sequence's queries
  int32_t row;     // of the first query in q and out
  int32_t start;   // its position
  int32_t count;   // how many
  int32_t table;   // where its block table begins in `tables`
};

struct Row {
  const uint16_t* q;
  uint16_t* out;
  int position;
  float max;
  __m512 sum;
};

// exp(x) for x <= 0; 0 below the smallest normal number.
inline __m512 exp_nonpositive(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(f, f), p, _mm512_add_ps(f, _mm512_set1_ps(1.0f)));
  const __m512 value = _mm512_scalef_ps(p, n);
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(value, tiny, _mm512_setzero_ps());
}

// K of 16 tokens: dword `pair` of every token side by side, for each of the D / 2 pairs.
inline void pack_keys(const uint16_t* keys, long token_stride, int dim, int valid, __m512i* packed) {
  alignas(64) int32_t lines[kBlock][16];
  for (int chunk = 0; chunk < dim / 32; ++chunk) {
    for (int t = 0; t < kBlock; ++t) {
      const __m512i line = t < valid ? _mm512_loadu_si512(keys + t * token_stride + chunk * 32)
                                     : _mm512_setzero_si512();
      _mm512_store_si512(lines[t], line);
    }
    __m512i r[16], s[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(lines[i]);
    for (int i = 0; i < 8; ++i) {
      s[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
      s[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
      r[4 * i] = _mm512_unpacklo_epi64(s[4 * i], s[4 * i + 2]);
      r[4 * i + 1] = _mm512_unpackhi_epi64(s[4 * i], s[4 * i + 2]);
      r[4 * i + 2] = _mm512_unpacklo_epi64(s[4 * i + 1], s[4 * i + 3]);
      r[4 * i + 3] = _mm512_unpackhi_epi64(s[4 * i + 1], s[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
      s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
      s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
      s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
      packed[chunk * 16 + i] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88);
      packed[chunk * 16 + i + 8] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd);
      packed[chunk * 16 + i + 4] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88);
      packed[chunk * 16 + i + 12] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xdd);
    }
  }
}

inline void widen_values(const uint16_t* values, long token_stride, int dim, int valid, float* wide) {
  for (int t = 0; t < kBlock; ++t) {
    for (int d = 0; d < dim; d += 16) {
      __m512i bits = _mm512_setzero_si512();
      if (t < valid) {
        const __m256i half =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + t * token_stride + d));
        bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
      }
      _mm512_store_ps(wide + t * dim + d, _mm512_castsi512_ps(bits));
    }
  }
}

inline __m512 dot_pairs(__m512 sum, const uint16_t* q, int pair, __m512i keys) {
  int32_t two;
  std::memcpy(&two, q + 2 * pair, 4);
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(keys),
                          reinterpret_cast<__m512bh>(_mm512_set1_epi32(two)));
}

// Scores of `N` rows against one block; the sum over dims of a row has a fixed order.
template <int N>
inline void scores(Row* rows, const __m512i* keys, int pairs, __m512* found) {
  __m512 sums[N];
  for (int n = 0; n < N; ++n) sums[n] = _mm512_setzero_ps();
  for (int pair = 0; pair < pairs; ++pair)
    for (int n = 0; n < N; ++n) sums[n] = dot_pairs(sums[n], rows[n].q, pair, keys[pair]);
  for (int n = 0; n < N; ++n) found[n] = sums[n];
}

// One step of the online softmax of one row.
template <int V>  // dim / 16
inline void update(Row& row, float* sums, __m512 raw, __mmask16 seen, float scale,
                   const float* values) {
  const __m512 score = _mm512_mask_mov_ps(_mm512_set1_ps(-std::numeric_limits<float>::infinity()),
                                          seen, _mm512_mul_ps(raw, _mm512_set1_ps(scale)));
  const float max = std::max(row.max, _mm512_reduce_max_ps(score));
  const __m512 fix = exp_nonpositive(_mm512_set1_ps(row.max - max));
  alignas(64) float weights[kBlock];
  const __m512 weight = exp_nonpositive(_mm512_sub_ps(score, _mm512_set1_ps(max)));
  _mm512_store_ps(weights, weight);
  row.max = max;
  row.sum = _mm512_fmadd_ps(row.sum, fix, weight);
  __m512 acc[V];
  for (int v = 0; v < V; ++v) acc[v] = _mm512_mul_ps(_mm512_load_ps(sums + 16 * v), fix);
  for (int t = 0; t < kBlock; ++t) {
    const __m512 w = _mm512_set1_ps(weights[t]);
    for (int v = 0; v < V; ++v)
      acc[v] = _mm512_fmadd_ps(w, _mm512_load_ps(values + (t * V + v) * 16), acc[v]);
  }
  for (int v = 0; v < V; ++v) _mm512_store_ps(sums + 16 * v, acc[v]);
}

struct Call {
  const uint16_t* q;
  long q_stride;
  const uint16_t* keys;
  const uint16_t* values;
  long token_stride;
  long head_stride;
  const int32_t* tables;
  int group, window;
  float scale;
  uint16_t* out;
  long out_stride;
};

template <int V>
void tile(const Call& c, const Span& span, int kv_head, int first, int count) {
  constexpr int dim = V * 16;
  Row rows[kMaxRows];
  alignas(64) float sums[kMaxRows * dim];
  alignas(64) __m512i packed[dim / 2];
  alignas(64) float wide[kBlock * dim];
  const int total = count * c.group;
  for (int i = 0; i < total; ++i) {
    const int query = first + i / c.group, head = kv_head * c.group + i % c.group;
    rows[i].q = c.q + (span.row + query) * c.q_stride + head * dim;
    rows[i].out = c.out + (span.row + query) * c.out_stride + head * dim;
    rows[i].position = span.start + query;
    rows[i].max = -std::numeric_limits<float>::infinity();
    rows[i].sum = _mm512_setzero_ps();
  }
  std::memset(sums, 0, sizeof(float) * total * dim);
  const int last = span.start + first + count - 1;
  const int earliest = c.window ? std::max(0, span.start + first - c.window + 1) : 0;
  const int32_t* table = c.tables + span.table;
  for (int block = earliest / kBlock; block <= last / kBlock; ++block) {
    const int begin = block * kBlock;
    const int valid = std::min(kBlock, last - begin + 1);
    const long place = static_cast<long>(table[block]) * kBlock * c.token_stride +
                       kv_head * c.head_stride;
    pack_keys(c.keys + place, c.token_stride, dim, valid, packed);
    widen_values(c.values + place, c.token_stride, dim, valid, wide);
    for (int i = 0; i < total;) {
      if (rows[i].position < begin) {  // this row ends before the block
        ++i;
        continue;
      }
      const int together = total - i >= 4 ? 4 : 1;
      __m512 found[4];
      if (together == 4)
        scores<4>(rows + i, packed, dim / 2, found);
      else
        scores<1>(rows + i, packed, dim / 2, found);
      for (int n = 0; n < together; ++n) {
        Row& row = rows[i + n];
        const int upto = row.position - begin;  // last key seen in this block
        if (upto < 0) continue;
        unsigned seen = upto >= kBlock - 1 ? 0xffffu : (2u << upto) - 1u;
        if (c.window) {
          const int from = row.position - c.window + 1 - begin;
          if (from >= kBlock) continue;
          if (from > 0) seen &= ~((1u << from) - 1u);
        }
        update<V>(row, sums + (i + n) * dim, found[n], static_cast<__mmask16>(seen), c.scale, wide);
      }
      i += together;
    }
  }
  for (int i = 0; i < total; ++i) {
    const __m512 inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(rows[i].sum));
    for (int v = 0; v < V; ++v) {
      const __m512 value = _mm512_mul_ps(_mm512_load_ps(sums + i * dim + 16 * v), inverse);
      const __m256bh half = _mm512_cvtneps_pbh(value);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[i].out + 16 * v),
                          reinterpret_cast<const __m256i&>(half));
    }
  }
}

using TileFn = void (*)(const Call&, const Span&, int, int, int);

TileFn tile_for(int dim) {
  switch (dim) {
    case 32: return tile<2>;
    case 64: return tile<4>;
    case 96: return tile<6>;
    case 128: return tile<8>;
    case 256: return tile<16>;
    default: return nullptr;
  }
}

}  // namespace

extern "C" int baton_attention_supports(int dim, int group) {
  return tile_for(dim) != nullptr && group >= 1 && group <= kMaxRows &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw");
}

// Strides count elements. `tables` holds block numbers; a block is 16 tokens.
extern "C" void baton_attention(const uint16_t* q, long q_stride, const uint16_t* keys,
                                const uint16_t* values, long token_stride, long head_stride,
                                const int32_t* spans, int num_spans, const int32_t* tables,
                                int num_heads, int num_kv_heads, int dim, int window, float scale,
                                uint16_t* out, long out_stride, int threads) {
  const int group = num_heads / num_kv_heads;
  const Call call{q,     q_stride, keys,   values, token_stride, head_stride,
                  tables, group,   window, scale,  out,          out_stride};
  const auto* list = reinterpret_cast<const Span*>(spans);
  const int per_tile = std::max(1, std::min(kTileQueries, kMaxRows / group));
  const TileFn run = tile_for(dim);
  long units = 0;
  for (int s = 0; s < num_spans; ++s)
    units += static_cast<long>((list[s].count + per_tile - 1) / per_tile) * num_kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && units > 1)
  for (long unit = 0; unit < units; ++unit) {
    long rest = unit;
    int s = 0;
    long here = 0;
    while (true) {
      here = static_cast<long>((list[s].count + per_tile - 1) / per_tile) * num_kv_heads;
      if (rest < here) break;
      rest -= here;
      ++s;
    }
    const Span& span = list[s];
    const long tiles = here / num_kv_heads;
    // the last tiles have most keys: begin with them, so that threads end together
    const int number = static_cast<int>(tiles - 1 - rest / num_kv_heads);
    const int first = number * per_tile;
    run(call, span, static_cast<int>(rest % num_kv_heads), first,
        std::min(per_tile, span.count - first));
  }
}
