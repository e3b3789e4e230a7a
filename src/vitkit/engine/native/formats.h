// Floats go in, the words that the matrix product multiplies come out: float32, bfloat16 or int8.
//
// A word is four bytes: one float, two bfloat16, or int8 as two numbers of 16 bits or four of 8. A format says how a
// word of activations, the same in all lanes, times a word of weights, one for each column, is added to sums. All else
// of the product is the same for all.
#pragma once

#include <cmath>
#include <type_traits>

#include "memory.h"
#include "simd.h"

namespace vitkit {

// Register tile: `tile_rows` × `tile_columns` sums, which with two words of weights and one of activations is what the
// registers hold: 24 + 3 of 32 on AVX-512, 12 + 3 of 16 elsewhere.
constexpr int tile_rows = lanes == 16 ? 12 : 6;
constexpr int tile_vectors = 2;
constexpr int tile_columns = tile_vectors * lanes;

VITKIT_INLINE size_t rounded_up(size_t count, size_t step) { return (count + step - 1) / step * step; }

// Weights of a linear layer, packed once into panels of `tile_columns` columns: panel, step, column, word.
template <class Format>
struct Weights {
    size_t in = 0, out = 0, steps = 0, panels = 0;
    Block<uint32_t> words;
    Block<float> bias, scale, sums;  // the last two where weights are integers: a column's scale, and what it adds up to

    size_t bytes() const { return words.bytes() + bias.bytes() + scale.bytes() + sums.bytes(); }
};

// Activations as words, one row a token. Integer rows are scale × q + least.
struct Rows {
    Word* words = nullptr;
    size_t stride = 0;
    float* scale = nullptr;
    float* least = nullptr;
};

VITKIT_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The nearest bfloat16, ties to even.
VITKIT_INLINE uint32_t to_bfloat16(float value) {
    const uint32_t bits = bits_of(value);
    if (value != value) return 0x7fc0u;  // rounded, some would be a number
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

struct Float32 {
    using Sum = Vec;
    static constexpr int values = 1;     // in a word of weights
    static constexpr int row_words = 1;  // of activations for a word of weights
    static constexpr bool as_they_are = true;  // rows of floats are rows of words

    static VITKIT_INLINE_MEMBER Sum add_product(Sum sum, const Int* row, Int weights) {
        return multiply_add((Vec)row[0], (Vec)weights, sum);
    }
    static Word packed(const float* values, const float*) { return bits_of(values[0]); }
    static void convert(const float*, size_t, const Rows&, size_t) {}
    static VITKIT_INLINE_MEMBER Vec value(Sum sum, const Rows&, size_t, const Weights<Float32>&, size_t) { return sum; }
};

// bfloat16 weights against float32 activations: what is fastest where the machine has no product of bfloat16. The
// weights take half the memory, and unfolding them two instructions of 48.
struct HalfWeights {
    using Sum = Vec;
    static constexpr int values = 2;
    static constexpr int row_words = 2;
    static constexpr bool as_they_are = true;

    static VITKIT_INLINE_MEMBER Sum add_product(Sum sum, const Int* row, Int weights) {
        sum = multiply_add((Vec)row[0], (Vec)(weights << 16), sum);
        return multiply_add((Vec)row[1], (Vec)(weights & same_word(0xffff0000u)), sum);
    }
    static Word packed(const float* values, const float*) {
        return to_bfloat16(values[0]) | to_bfloat16(values[1]) << 16;
    }
    static void convert(const float*, size_t, const Rows&, size_t) {}
    static VITKIT_INLINE_MEMBER Vec value(Sum sum, const Rows&, size_t, const Weights<HalfWeights>&, size_t) { return sum; }
};

// bfloat16 against bfloat16, added up in float32.
struct BFloat16 {
    using Sum = Vec;
    static constexpr int values = 2;
    static constexpr int row_words = 1;
    static constexpr bool as_they_are = false;

    static VITKIT_INLINE_MEMBER Sum add_product(Sum sum, const Int* row, Int weights) {
#if VITKIT_AVX512 && defined(__AVX512BF16__)
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row[0], (__m512bh)weights);
#else
        sum = multiply_add((Vec)(row[0] << 16), (Vec)(weights << 16), sum);
        const Int upper = same_word(0xffff0000u);
        return multiply_add((Vec)(row[0] & upper), (Vec)(weights & upper), sum);
#endif
    }
    static Word packed(const float* values, const float* scale) { return HalfWeights::packed(values, scale); }
    static void convert(const float* from, size_t count, const Rows& to, size_t row) {
        // `count` may be odd: the float after it is part of the row's padding, and zero.
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
    // Words of two rows at once: the same place of the one below that of the other.
    static VITKIT_INLINE_MEMBER Int pairs(Vec lower, Vec upper) {
        return ((rounded(lower) >> 16) & same_word(0xffffu)) | (rounded(upper) & same_word(0xffff0000u));
    }
    static VITKIT_INLINE_MEMBER Int rounded(Vec values) {
        const Int bits = (Int)values;
        return bits + same_word(0x7fffu) + ((bits >> 16) & same_word(1u));
    }
    static VITKIT_INLINE_MEMBER Vec value(Sum sum, const Rows&, size_t, const Weights<BFloat16>&, size_t) { return sum; }
};

// int8 weights with a scale for each column, unsigned activations with a scale and a least value for each token, found
// as they come. Σ x w = Σ (s q + l) (t p) = t (s Σ q p + l Σ p): the product of integers, and the sums of the weights.
//
// With VNNI a word is four bytes. Elsewhere it is two numbers of 16 bits: what multiplies bytes there adds two products
// in 16 bits, which is one bit too few. The sums are the same.
#if VITKIT_AVX512 && defined(__AVX512VNNI__)
#define VITKIT_BYTES 1
#endif

struct Int8 {
    using Sum = Int;
#if VITKIT_BYTES
    using Whole = uint8_t;
#else
    using Whole = uint16_t;
#endif
    static constexpr int values = sizeof(Word) / sizeof(Whole);
    static constexpr int row_words = 1;
    static constexpr bool as_they_are = false;

    static VITKIT_INLINE_MEMBER Sum add_product(Sum sum, const Int* row, Int weights) {
#if VITKIT_BYTES
        return (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)row[0], (__m512i)weights);
#elif VITKIT_AVX512
        return sum + (Int)_mm512_madd_epi16((__m512i)row[0], (__m512i)weights);
#elif VITKIT_AVX2
        return sum + (Int)_mm256_madd_epi16((__m256i)row[0], (__m256i)weights);
#else
        return sum + (row[0] & same_word(0xffffu)) * ((weights << 16) >> 16) + (row[0] >> 16) * (weights >> 16);
#endif
    }
    static int whole(float value, float scale) {
        return scale > 0.0f ? static_cast<int>(std::lrint(value / scale)) : 0;
    }
    static Word packed(const float* values, const float* scale) {
        Whole wholes[Int8::values];
        for (int at = 0; at < Int8::values; at++) wholes[at] = static_cast<Whole>(whole(values[at], *scale));
        uint32_t word;
        std::memcpy(&word, wholes, sizeof word);
        return word;
    }
    static void convert(const float* from, size_t count, const Rows& to, size_t row) {
        const size_t whole_vectors = count / lanes * lanes;
        float least = from[0], most = from[0], total = 0.0f;
        if (whole_vectors) {
            Vec low = load(from), high = low, sums = low;
            for (size_t at = lanes; at < whole_vectors; at += lanes) {
                const Vec some = load(from + at);
                low = smaller(low, some), high = larger(high, some), sums += some;
            }
            least = smallest_of(low), most = largest_of(high), total = sum_of(sums);
        }
        for (size_t at = whole_vectors; at < count; at++) {
            least = from[at] < least ? from[at] : least;
            most = from[at] > most ? from[at] : most;
            total += from[at];
        }
        // What is not a number has no place between least and most, and must not come out as one.
        const float scale = std::isfinite(total) ? (most - least) / 255.0f : NAN;
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        to.scale[row] = scale, to.least[row] = least;
        Whole* wholes = reinterpret_cast<Whole*>(to.words + row * to.stride);
        const Vec factor = same(inverse), shift = same(-least);
        size_t at = 0;
        for (; at < whole_vectors; at += lanes)
            store_wholes(wholes + at, smaller((load(from + at) + shift) * factor, same(255.0f)));
        for (; at < count; at++) {
            const float scaled = (from[at] - least) * inverse;
            wholes[at] = static_cast<Whole>(std::lrint(scaled < 255.0f ? scaled : 255.0f));
        }
    }
    // The nearest whole numbers of floats from 0 to 255.
    static VITKIT_INLINE_MEMBER void store_wholes(Whole* to, Vec scaled) {
#if VITKIT_BYTES
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32((__m512)scaled)));
#elif VITKIT_AVX512
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtusepi32_epi16(_mm512_cvtps_epi32((__m512)scaled)));
#elif VITKIT_AVX2
        const __m256i wholes = _mm256_cvtps_epi32((__m256)scaled);
        const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(wholes), _mm256_extracti128_si256(wholes, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
#else
        const Int wholes = to_int(nearest(scaled));
        for (int lane = 0; lane < lanes; lane++) to[lane] = static_cast<Whole>(wholes[lane]);
#endif
    }
    static VITKIT_INLINE_MEMBER Vec value(Sum sum, const Rows& rows, size_t row, const Weights<Int8>& weights, size_t column) {
        const Vec offset = same(rows.least[row]) * load(weights.sums.data() + column);
        return multiply_add(to_float(sum), same(rows.scale[row]), offset) * load(weights.scale.data() + column);
    }
};

// A linear layer's weights, out × in as torch has them with `stride` floats a row, and its bias or none. `factor`, if
// there is one, scales each output: LayerScale, or the attention's 1/√K.
template <class Format>
Weights<Format> pack(const float* weight, size_t stride, const float* bias, size_t in, size_t out, const float* factor) {
    Weights<Format> to;
    to.in = in, to.out = out;
    to.steps = (in + Format::values - 1) / Format::values;
    to.panels = (out + tile_columns - 1) / tile_columns;
    const size_t padded = to.panels * tile_columns;
    to.words = Block<uint32_t>(padded * to.steps);
    to.bias = Block<float>(padded);
    constexpr bool integers = std::is_same<Format, Int8>::value;
    if (integers) to.scale = Block<float>(padded), to.sums = Block<float>(padded);
    Block<float> row(rounded_up(in, 4));
    for (size_t column = 0; column < out; column++) {
        const float by = factor ? factor[column] : 1.0f;
        float most = 0, none = 0;
        for (size_t k = 0; k < in; k++) {
            row[k] = weight[column * stride + k] * by;
            most = std::fabs(row[k]) > most ? std::fabs(row[k]) : most;
            none += row[k] * 0.0f;  // NaN once a weight is not finite: so must be what comes of it, as with floats
        }
        const float scale = most / 127.0f + none;
        if (integers) {
            to.scale[column] = scale;
            for (size_t k = 0; k < in; k++) to.sums[column] += static_cast<float>(Int8::whole(row[k], scale));
        }
        Word* words = &to.words[column / tile_columns * to.steps * tile_columns + column % tile_columns];
        for (size_t step = 0; step < to.steps; step++)
            words[step * tile_columns] = Format::packed(&row[step * Format::values], &scale);
        if (bias) to.bias[column] = bias[column] * by;
    }
    return to;
}

#if (VITKIT_AVX512 && defined(__AVX512BF16__)) || defined(VITKIT_EMULATE_BF16)
#define VITKIT_HAS_BF16 1
#endif

// The format of "bf16", and that of attention beside each format of weights. Attention is never in int8: a weight of
// less than 1/255 of the largest would be lost, and there are many of them.
#if VITKIT_HAS_BF16
using Half = BFloat16;
template <class Format> struct AttentionFormat { using type = BFloat16; };
template <> struct AttentionFormat<Float32> { using type = Float32; };
#else
using Half = HalfWeights;
template <class Format> struct AttentionFormat { using type = Float32; };
#endif

}  // namespace vitkit
