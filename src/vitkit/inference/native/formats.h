// Number formats of the GEMM: float32, bfloat16 and int8.
//
// A word is four bytes: one float, two bfloat16 values, or int8 stored as two 16-bit or four 8-bit codes. A format
// defines how a broadcast word of activations times a vector of weight words is accumulated; the rest of the GEMM is
// shared.
#pragma once

#include <cmath>
#include <type_traits>

#include "memory.h"
#include "simd.h"

namespace vitkit {

// Register tile of `tile_rows` × `tile_columns` accumulators. With two weight vectors and one activation vector it fills
// the register file: 24 + 3 of 32 registers on AVX-512, 12 + 3 of 16 elsewhere.
constexpr int tile_rows = lanes == 16 ? 12 : 6;
constexpr int tile_vectors = 2;
constexpr int tile_columns = tile_vectors * lanes;

VITKIT_INLINE size_t round_up(size_t count, size_t step) { return (count + step - 1) / step * step; }

// Weights of a linear layer, packed once into panels of `tile_columns` columns: [panel][step][column].
template <class Format>
struct Weights {
    size_t in = 0, out = 0, steps = 0, panels = 0;
    AlignedBuffer<uint32_t> words;
    AlignedBuffer<float> bias, scale, sums;  // int8 only: scale and sum of each column's codes

    size_t bytes() const { return words.bytes() + bias.bytes() + scale.bytes() + sums.bytes(); }
};

// Activations as words, one row per token. int8 rows represent scale × code + offset.
struct Rows {
    Word* words = nullptr;
    size_t stride = 0;
    float* scale = nullptr;
    float* offset = nullptr;
};

VITKIT_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Round to the nearest bfloat16, ties to even.
VITKIT_INLINE uint32_t to_bfloat16(float value) {
    const uint32_t bits = bits_of(value);
    if (value != value) return 0x7fc0u;  // rounding could turn a NaN into an infinity
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Type of the accumulators, values in a word of weights, words of activations per word of weights, and whether float32
// rows are read in place.
template <class Accumulators, int values, int words, bool in_place>
struct Layout {
    using Sum = Accumulators;
    static constexpr int values_per_word = values;
    static constexpr int words_per_step = words;
    static constexpr bool fp32_activations = in_place;
};

struct Float32 : Layout<Vec, 1, 1, true> {
    static VITKIT_INLINE_MEMBER Sum add_product(Sum sum, const Int* row, Int weights) {
        return fmadd((Vec)row[0], (Vec)weights, sum);
    }
    static Word pack_word(const float* values, const float*) { return bits_of(values[0]); }
    static void convert_row(const float*, size_t, const Rows&, size_t) {}
    static VITKIT_INLINE_MEMBER Vec value(Sum sum, const Rows&, size_t, const Weights<Float32>&, size_t) { return sum; }
};

// bfloat16 weights with float32 activations: fastest on CPUs without a bfloat16 dot product. Weights take half the
// memory bandwidth; unpacking costs 2 of 48 instructions.
struct BFloat16Weights : Layout<Vec, 2, 2, true> {
    static VITKIT_INLINE_MEMBER Sum add_product(Sum sum, const Int* row, Int weights) {
        sum = fmadd((Vec)row[0], (Vec)(weights << 16), sum);
        return fmadd((Vec)row[1], (Vec)(weights & broadcast_word(0xffff0000u)), sum);
    }
    static Word pack_word(const float* values, const float*) {
        return to_bfloat16(values[0]) | to_bfloat16(values[1]) << 16;
    }
    static void convert_row(const float*, size_t, const Rows&, size_t) {}
    static VITKIT_INLINE_MEMBER Vec value(Sum sum, const Rows&, size_t, const Weights<BFloat16Weights>&, size_t) {
        return sum;
    }
};

// bfloat16 inputs with float32 accumulation.
struct BFloat16 : Layout<Vec, 2, 1, false> {
    static VITKIT_INLINE_MEMBER Sum add_product(Sum sum, const Int* row, Int weights) {
#if VITKIT_AVX512 && defined(__AVX512BF16__)
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row[0], (__m512bh)weights);
#else
        sum = fmadd((Vec)(row[0] << 16), (Vec)(weights << 16), sum);
        const Int upper = broadcast_word(0xffff0000u);
        return fmadd((Vec)(row[0] & upper), (Vec)(weights & upper), sum);
#endif
    }
    static Word pack_word(const float* values, const float* scale) { return BFloat16Weights::pack_word(values, scale); }
    static void convert_row(const float* from, size_t count, const Rows& to, size_t row) {
        // `count` may be odd: the next float is zero padding.
        Word* words = to.words + row * to.stride;
        size_t word = 0;
#if VITKIT_AVX512
        for (; 2 * word + lanes <= count; word += lanes / 2) {
#if defined(__AVX512BF16__)
            const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)load(from + 2 * word));
#else
            const __m256i halves = _mm512_cvtepi32_epi16((__m512i)(rounded(load(from + 2 * word)) >> 16));
#endif
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + word), halves);
        }
#endif
        for (; word < (count + 1) / 2; word++)
            words[word] = to_bfloat16(from[2 * word]) | to_bfloat16(from[2 * word + 1]) << 16;
    }
    // Interleave two rows: `lower` in the low halves of the words, `upper` in the high halves.
    static VITKIT_INLINE_MEMBER Int pairs(Vec lower, Vec upper) {
        return ((rounded(lower) >> 16) & broadcast_word(0xffffu)) | (rounded(upper) & broadcast_word(0xffff0000u));
    }
    static VITKIT_INLINE_MEMBER Int rounded(Vec values) {
        const Int bits = (Int)values;
        return bits + broadcast_word(0x7fffu) + ((bits >> 16) & broadcast_word(1u));
    }
    static VITKIT_INLINE_MEMBER Vec value(Sum sum, const Rows&, size_t, const Weights<BFloat16>&, size_t) {
        return sum;
    }
};

// int8 weights with one scale per column; unsigned 8-bit activations with a scale and an offset per token (dynamic
// quantization): Σ x w = Σ (s q + o) (t p) = t (s Σ q p + o Σ p), an integer dot product plus the column sums.
//
// With VNNI a word holds four bytes. Without it a word holds two 16-bit codes, because the byte multiply of older CPUs
// saturates its 16-bit sums. Both give the same integers.
#if VITKIT_AVX512 && defined(__AVX512VNNI__)
#define VITKIT_BYTES 1
using Code = uint8_t;
#else
using Code = uint16_t;
#endif

struct Int8 : Layout<Int, sizeof(Word) / sizeof(Code), 1, false> {
    static VITKIT_INLINE_MEMBER Sum add_product(Sum sum, const Int* row, Int weights) {
#if VITKIT_BYTES
        return (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)row[0], (__m512i)weights);
#elif VITKIT_AVX512
        return sum + (Int)_mm512_madd_epi16((__m512i)row[0], (__m512i)weights);
#elif VITKIT_AVX2
        return sum + (Int)_mm256_madd_epi16((__m256i)row[0], (__m256i)weights);
#else
        return sum + (row[0] & broadcast_word(0xffffu)) * ((weights << 16) >> 16) + (row[0] >> 16) * (weights >> 16);
#endif
    }
    static int quantize(float value, float scale) {
        return scale > 0.0f ? static_cast<int>(std::lrint(value / scale)) : 0;
    }
    static Word pack_word(const float* values, const float* scale) {
        Code codes[Int8::values_per_word];
        for (int i = 0; i < Int8::values_per_word; i++) codes[i] = static_cast<Code>(quantize(values[i], *scale));
        uint32_t word;
        std::memcpy(&word, codes, sizeof word);
        return word;
    }
    static void convert_row(const float* from, size_t count, const Rows& to, size_t row) {
        const size_t vector_end = count / lanes * lanes;
        float offset = from[0], maximum = from[0], total = 0.0f;
        if (vector_end) {
            Vec low = load(from), high = low, sums = low;
            for (size_t i = lanes; i < vector_end; i += lanes) {
                const Vec values = load(from + i);
                low = vec_min(low, values), high = vec_max(high, values), sums += values;
            }
            offset = reduce_min(low), maximum = reduce_max(high), total = reduce_add(sums);
        }
        for (size_t i = vector_end; i < count; i++) {
            offset = from[i] < offset ? from[i] : offset;
            maximum = from[i] > maximum ? from[i] : maximum;
            total += from[i];
        }
        // A row with NaN or infinity must yield NaN, not a number within the range of the others.
        const float scale = std::isfinite(total) ? (maximum - offset) / 255.0f : NAN;
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        to.scale[row] = scale, to.offset[row] = offset;
        Code* codes = reinterpret_cast<Code*>(to.words + row * to.stride);
        const Vec output_scale = broadcast(inverse), shift = broadcast(-offset);
        size_t i = 0;
        for (; i < vector_end; i += lanes)
            store_codes(codes + i, vec_min((load(from + i) + shift) * output_scale, broadcast(255.0f)));
        for (; i < count; i++) {
            const float scaled = (from[i] - offset) * inverse;
            codes[i] = static_cast<Code>(std::lrint(scaled < 255.0f ? scaled : 255.0f));
        }
    }
    // Round floats in 0…255 to the nearest codes.
    static VITKIT_INLINE_MEMBER void store_codes(Code* to, Vec scaled) {
#if VITKIT_BYTES
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32((__m512)scaled)));
#elif VITKIT_AVX512
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                            _mm512_cvtusepi32_epi16(_mm512_cvtps_epi32((__m512)scaled)));
#elif VITKIT_AVX2
        const __m256i codes = _mm256_cvtps_epi32((__m256)scaled);
        const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
#else
        const Int codes = to_int(round_nearest(scaled));
        for (int lane = 0; lane < lanes; lane++) to[lane] = static_cast<Code>(codes[lane]);
#endif
    }
    static VITKIT_INLINE_MEMBER Vec value(Sum sum, const Rows& rows, size_t row, const Weights<Int8>& weights,
                                          size_t column) {
        const Vec offset = broadcast(rows.offset[row]) * load(weights.sums.data() + column);
        return fmadd(to_float(sum), broadcast(rows.scale[row]), offset) * load(weights.scale.data() + column);
    }
};

// Pack a linear layer: weights out × in as in torch, `stride` floats per row; `bias` may be null. `output_scale`, if not
// null, multiplies each output: LayerScale, or attention's 1/√d_k.
template <class Format>
Weights<Format> pack(const float* weight, size_t stride, const float* bias, size_t in, size_t out,
                     const float* output_scale) {
    Weights<Format> to;
    to.in = in, to.out = out;
    to.steps = (in + Format::values_per_word - 1) / Format::values_per_word;
    to.panels = (out + tile_columns - 1) / tile_columns;
    const size_t padded = to.panels * tile_columns;
    to.words = AlignedBuffer<uint32_t>(padded * to.steps);
    to.bias = AlignedBuffer<float>(padded);
    constexpr bool integers = std::is_same<Format, Int8>::value;
    if (integers) to.scale = AlignedBuffer<float>(padded), to.sums = AlignedBuffer<float>(padded);
    AlignedBuffer<float> row(round_up(in, 4));
    for (size_t column = 0; column < out; column++) {
        const float multiplier = output_scale ? output_scale[column] : 1.0f;
        float maximum = 0, nan_guard = 0;
        for (size_t k = 0; k < in; k++) {
            row[k] = weight[column * stride + k] * multiplier;
            maximum = std::fabs(row[k]) > maximum ? std::fabs(row[k]) : maximum;
            nan_guard += row[k] * 0.0f;  // NaN if any weight is not finite, so that outputs are NaN as in float32
        }
        const float scale = maximum / 127.0f + nan_guard;
        if (integers) {
            to.scale[column] = scale;
            for (size_t k = 0; k < in; k++) to.sums[column] += static_cast<float>(Int8::quantize(row[k], scale));
        }
        Word* words = &to.words[column / tile_columns * to.steps * tile_columns + column % tile_columns];
        for (size_t step = 0; step < to.steps; step++)
            words[step * tile_columns] = Format::pack_word(&row[step * Format::values_per_word], &scale);
        if (bias) to.bias[column] = bias[column] * multiplier;
    }
    return to;
}

#if (VITKIT_AVX512 && defined(__AVX512BF16__)) || defined(VITKIT_EMULATE_BF16)
#define VITKIT_HAS_BF16 1
#endif

// The format behind "bf16", and the attention format that goes with each weight format. Attention never runs in int8:
// softmax weights below 1/255 of the largest, which are many, would become zero.
#if VITKIT_HAS_BF16
using Bf16Format = BFloat16;
template <class Format>
struct AttentionFormat {
    using type = BFloat16;
};
template <>
struct AttentionFormat<Float32> {
    using type = Float32;
};
#else
using Bf16Format = BFloat16Weights;
template <class Format>
struct AttentionFormat {
    using type = Float32;
};
#endif

}  // namespace vitkit
