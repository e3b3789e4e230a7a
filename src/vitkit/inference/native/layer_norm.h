// LayerNorm, fused with the conversion to GEMM words.
#pragma once

#include <cmath>

#include "formats.h"

namespace vitkit {

// LayerNorm parameters, zero-padded to whole tiles so that the padding of a row stays zero.
struct LayerNorm {
    AlignedBuffer<float> weight, bias;
    float epsilon = 0;
    size_t width = 0;

    LayerNorm() = default;
    LayerNorm(const float* weight_, const float* bias_, size_t width_, float epsilon_, float scale_by = 1.0f)
        : weight(round_up(width_, tile_columns)),
          bias(round_up(width_, tile_columns)),
          epsilon(epsilon_),
          width(width_) {
        for (size_t i = 0; i < width; i++) weight[i] = weight_[i] * scale_by, bias[i] = bias_[i] * scale_by;
    }
};

// Normalize one row; `to` may equal `from`. With `pad`, zeros up to the next full vector are written after the row.
inline void layer_norm(const LayerNorm& norm, const float* from, float* to, bool pad = true) {
    const size_t width = norm.width, vector_end = width / lanes * lanes;
    Vec sums{};
    for (size_t i = 0; i < vector_end; i += lanes) sums += load(from + i);
    float total = reduce_add(sums);
    for (size_t i = vector_end; i < width; i++) total += from[i];
    const float mean = total / static_cast<float>(width);
    const Vec means = broadcast(mean);
    Vec squares{};
    for (size_t i = 0; i < vector_end; i += lanes) {
        const Vec centered = load(from + i) - means;
        squares = fmadd(centered, centered, squares);
    }
    float square = reduce_add(squares);
    for (size_t i = vector_end; i < width; i++) square += (from[i] - mean) * (from[i] - mean);
    const float scale = 1.0f / std::sqrt(square / static_cast<float>(width) + norm.epsilon);
    const Vec scales = broadcast(scale);
    for (size_t i = 0; i < vector_end; i += lanes) {
        const Vec value = (load(from + i) - means) * scales;
        store(to + i, fmadd(value, load(&norm.weight[i]), load(&norm.bias[i])));
    }
    for (size_t i = vector_end; i < width; i++) to[i] = (from[i] - mean) * scale * norm.weight[i] + norm.bias[i];
    if (pad)
        for (size_t i = width; i < round_up(width, lanes); i++) to[i] = 0.0f;
}

// Convert one row of floats to words. No-op if the format reads float32 in place.
template <class Format>
void convert_row(const float* from, size_t count, const Rows& to, size_t row) {
    if constexpr (!Format::fp32_activations) Format::convert_row(from, count, to, row);
}

// Normalize a row and convert it to words. `scratch` holds one row.
template <class Format>
void norm_and_convert(const LayerNorm& norm, const float* from, const Rows& to, size_t row, float* scratch) {
    if constexpr (Format::fp32_activations) {
        layer_norm(norm, from, reinterpret_cast<float*>(to.words + row * to.stride));
    } else {
        layer_norm(norm, from, scratch);
        Format::convert_row(scratch, norm.width, to, row);
    }
}

}  // namespace vitkit
