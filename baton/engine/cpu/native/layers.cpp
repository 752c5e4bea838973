// A run of decoder layers in one call: the same kernels in the same order as in
// ``baton/engine/cpu/decoder.py``, without Python between them.

#include <cstdint>
#include <cstdlib>

#include "kernels.h"
#include "scratch.h"

namespace {

struct Matrix {  // one of a layer's four
  int64_t kind;  // 0 bf16 for VDPBF16PS, 1 bf16 for tiles, 2 of 8 bits, 3 of 4 bits
  const void* packed;
  const float* scales;
  const int32_t* offsets;
  int64_t digits, outputs, inputs;
};

struct Layer {
  Matrix qkv, o, gate_up, down;
  const float* bias;       // of Q, K and V; null: none, as for all vectors
  const float* head_norm;
  const float* attn_post_norm;
  const float* mlp_norm;
  const float* mlp_post_norm;
  const float* next_norm;  // of the following layer; null after the last
  uint8_t* keys;
  uint8_t* values;
  int64_t window, frequencies;  // index of the rotations
};

struct Model {
  int64_t hidden, heads, kv_heads, dim, inner;
  int64_t gelu, sums, format, token_bytes, head_bytes;
  double eps, scale;
};

struct Step {
  const int32_t* spans;
  const int32_t* tables;
  const float* rotations[2];
  int64_t num_spans, rows, threads;
};

void multiply(const Matrix& m, const Model& model, const uint16_t* x, long x_stride, uint16_t* y,
              long rows, int threads) {
  const auto* bf16 = static_cast<const uint16_t*>(m.packed);
  if (m.kind == 0)
    baton_product(x, x_stride, bf16, y, m.outputs, rows, m.outputs, m.inputs, threads);
  else if (m.kind == 1)
    baton_tile_product(x, x_stride, bf16, y, m.outputs, rows, m.outputs, m.inputs, threads,
                       static_cast<int>(model.sums));
  else if (m.kind == 3)
    baton_int4_product(x, x_stride, static_cast<const uint8_t*>(m.packed), y, m.outputs, rows,
                       m.outputs, m.inputs, threads);
  else
    baton_int8_product(x, x_stride, 1, static_cast<const int8_t*>(m.packed), m.scales, m.offsets, y,
                       m.outputs, rows, m.outputs, m.inputs, static_cast<int>(m.digits), threads);
}

}  // namespace

// x [rows, hidden] is the sum over the layers, fp32 and changed. h [rows, hidden] is its norm for the
// first of these layers, and afterwards for the layer that follows them.
extern "C" void baton_layers(const Model* model_at, const Layer* layers, long count,
                             const Step* step_at, float* x, uint16_t* h) {
  const Model& m = *model_at;
  const Step& s = *step_at;
  static thread_local baton::Scratch wide_rows, inner_rows;
  const int threads = static_cast<int>(s.threads), dim = static_cast<int>(m.dim);
  const long width = m.heads * dim, qkv_width = width + 2 * m.kv_heads * dim;
  const long widest = std::max<long>(qkv_width, 2 * m.inner);
  uint16_t* const wide = wide_rows.take<uint16_t>(s.rows * widest);
  uint16_t* const inner = inner_rows.take<uint16_t>(s.rows * std::max<long>(width, m.inner));
  const float eps = static_cast<float>(m.eps);
  for (const Layer* layer = layers; layer < layers + count; ++layer) {
    const Layer& l = *layer;
    multiply(l.qkv, m, h, m.hidden, wide, s.rows, threads);
    baton_heads(wide, qkv_width, l.bias, l.head_norm, eps, s.rotations[l.frequencies], s.rows,
                static_cast<int>(m.heads + m.kv_heads), static_cast<int>(m.kv_heads), dim, threads);
    const uint16_t* keys = wide + width;
    baton_store(keys, keys + m.kv_heads * dim, qkv_width, l.keys, l.values, m.token_bytes,
                m.head_bytes, static_cast<int>(m.format), s.spans, static_cast<int>(s.num_spans),
                s.tables, static_cast<int>(m.kv_heads), dim, threads);
    baton_attention(wide, qkv_width, l.keys, l.values, m.token_bytes, m.head_bytes,
                    static_cast<int>(m.format), s.spans, static_cast<int>(s.num_spans), s.tables,
                    static_cast<int>(m.heads), static_cast<int>(m.kv_heads), dim,
                    static_cast<int>(l.window), static_cast<float>(m.scale), inner, width, threads,
                    static_cast<int>(m.sums), nullptr);
    multiply(l.o, m, inner, width, wide, s.rows, threads);
    baton_residual(x, m.hidden, wide, m.hidden, l.attn_post_norm, l.mlp_norm, eps, h, m.hidden,
                   s.rows, m.hidden, threads);
    multiply(l.gate_up, m, h, m.hidden, wide, s.rows, threads);
    baton_gate(wide, 2 * m.inner, inner, m.inner, s.rows, m.inner, static_cast<int>(m.gelu),
               threads);
    multiply(l.down, m, inner, m.inner, wide, s.rows, threads);
    baton_residual(x, m.hidden, wide, m.hidden, l.mlp_post_norm, l.next_norm, eps, h, m.hidden,
                   s.rows, m.hidden, threads);
  }
}
