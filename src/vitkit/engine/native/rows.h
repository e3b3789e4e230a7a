// Rows of floats go in, rows come out: LayerNorm, and what becomes of a row before a matrix product.
#pragma once

#include <cmath>

#include "formats.h"

namespace vitkit {

// A LayerNorm's parameters, padded with zeros to whole tiles, so that what pads a row stays zero.
struct Norm {
    Block<float> weight, bias;
    float epsilon = 0;
    size_t width = 0;

    Norm() = default;
    Norm(const float* weight_, const float* bias_, size_t width_, float epsilon_, float factor = 1.0f)
        : weight(rounded_up(width_, tile_columns)), bias(rounded_up(width_, tile_columns)), epsilon(epsilon_),
          width(width_) {
        for (size_t at = 0; at < width; at++) weight[at] = weight_[at] * factor, bias[at] = bias_[at] * factor;
    }
};

// One row; `to` may be `from`. It writes whole vectors, up to `lanes` - 1 values past the row's end, unless told not to.
inline void normalise(const Norm& norm, const float* from, float* to, bool pads = true) {
    const size_t width = norm.width, whole = width / lanes * lanes;
    Vec sums{};
    for (size_t at = 0; at < whole; at += lanes) sums += load(from + at);
    float total = sum_of(sums);
    for (size_t at = whole; at < width; at++) total += from[at];
    const float mean = total / static_cast<float>(width);
    const Vec means = same(mean);
    Vec squares{};
    for (size_t at = 0; at < whole; at += lanes) {
        const Vec apart = load(from + at) - means;
        squares = multiply_add(apart, apart, squares);
    }
    float square = sum_of(squares);
    for (size_t at = whole; at < width; at++) square += (from[at] - mean) * (from[at] - mean);
    const float scale = 1.0f / std::sqrt(square / static_cast<float>(width) + norm.epsilon);
    const Vec scales = same(scale);
    for (size_t at = 0; at < whole; at += lanes) {
        const Vec value = (load(from + at) - means) * scales;
        store(to + at, multiply_add(value, load(&norm.weight[at]), load(&norm.bias[at])));
    }
    for (size_t at = whole; at < width; at++) to[at] = (from[at] - mean) * scale * norm.weight[at] + norm.bias[at];
    if (pads)
        for (size_t at = width; at < rounded_up(width, lanes); at++) to[at] = 0.0f;
}

// The words of one row of floats. Where rows are words as they are, `to` is those rows already.
template <class Format>
void convert(const float* from, size_t count, const Rows& to, size_t row) {
    if constexpr (!Format::as_they_are) Format::convert(from, count, to, row);
}

// The words of a row after LayerNorm. `scratch` has room for a row.
template <class Format>
void normalise_and_convert(const Norm& norm, const float* from, const Rows& to, size_t row, float* scratch) {
    if constexpr (Format::as_they_are) {
        normalise(norm, from, reinterpret_cast<float*>(to.words + row * to.stride));
    } else {
        normalise(norm, from, scratch);
        Format::convert(scratch, norm.width, to, row);
    }
}

}  // namespace vitkit
