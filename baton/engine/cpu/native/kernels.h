// Exported functions that other parts of the library call; each is described at its definition.

#pragma once

#include <algorithm>
#include <cstdint>

extern "C" {
void baton_product(const uint16_t* x, long x_stride, const uint16_t* weights, uint16_t* y,
                   long y_stride, long rows, long outputs, long inputs, int threads);
long baton_tile_packed_size(long outputs, long inputs);
void baton_tile_pack(const uint16_t* weight, long outputs, long inputs, uint16_t* packed,
                     int threads);
void baton_tile_product(const uint16_t* x, long x_stride, const uint16_t* weights, uint16_t* y,
                        long y_stride, long rows, long outputs, long inputs, int threads,
                        int tiles);
void baton_int8_product(const void* x, long x_stride, int is_bf16, const int8_t* weights,
                        const float* scales, const int32_t* offsets, void* y, long y_stride,
                        long rows, long outputs, long inputs, int digits, int threads);
void baton_int4_product(const uint16_t* x, long x_stride, const uint8_t* weights, uint16_t* y,
                        long y_stride, long rows, long outputs, long inputs, int threads);
void baton_store(const uint16_t* new_keys, const uint16_t* new_values, long new_stride,
                 uint8_t* keys, uint8_t* values, long token_bytes, long head_bytes, int format,
                 const int32_t* spans, int num_spans, const int32_t* tables, int num_kv_heads,
                 int dim, int threads);
void baton_attention(const uint16_t* q, long q_stride, uint8_t* keys, uint8_t* values,
                     long token_bytes, long head_bytes, int format, const int32_t* spans,
                     int num_spans, const int32_t* tables, int num_heads, int num_kv_heads, int dim,
                     int window, float scale, uint16_t* out, long out_stride, int threads,
                     int sums, const float* sinks);
void baton_residual(float* x, long x_stride, const uint16_t* part, long part_stride,
                    const float* post, const float* weight, float eps, uint16_t* out,
                    long out_stride, long rows, long width, int threads);
void baton_heads(uint16_t* qkv, long stride, const float* bias, const float* norm, float eps,
                 const float* rotation, long rows, int heads, int plain, int dim, int threads);
void baton_gate(const uint16_t* gate_up, long stride, uint16_t* out, long out_stride, long rows,
                long width, int gelu, int threads);
}
