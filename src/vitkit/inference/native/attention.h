// Fused multi-head self-attention (equation 2).
//
// The scores of one tile of queries against all keys stay in the L1 cache; the L × L matrix is never materialized.
#pragma once

#include "gemm.h"

namespace vitkit {

// Queries, keys and values of one image, one token per row, `stride` floats apart. Queries are already scaled by
// log2(e) / √d_k, so that softmax needs exp2 instead of exp.
struct Projections {
    const float* rows;
    size_t stride, width, tokens, head_width;

    const float* at(size_t which, size_t head, size_t token) const {
        return rows + token * stride + which * width + head * head_width;
    }
};

#if VITKIT_AVX512
VITKIT_INLINE void transpose(const float* from, size_t from_stride, float* to, size_t to_stride) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * from_stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2)
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
            a[i + 2 * j + 1] = _mm512_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {  // gather column j of every 4×4 block
        const __m512 low = _mm512_shuffle_f32x4(a[j], a[j + 4], 0x88),
                     high = _mm512_shuffle_f32x4(a[j], a[j + 4], 0xdd);
        const __m512 last_low = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0x88);
        const __m512 last_high = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0xdd);
        _mm512_storeu_ps(to + j * to_stride, _mm512_shuffle_f32x4(low, last_low, 0x88));
        _mm512_storeu_ps(to + (j + 8) * to_stride, _mm512_shuffle_f32x4(low, last_low, 0xdd));
        _mm512_storeu_ps(to + (j + 4) * to_stride, _mm512_shuffle_f32x4(high, last_high, 0x88));
        _mm512_storeu_ps(to + (j + 12) * to_stride, _mm512_shuffle_f32x4(high, last_high, 0xdd));
    }
}
#else
VITKIT_INLINE void transpose(const float* from, size_t from_stride, float* to, size_t to_stride) {
    for (int row = 0; row < lanes; row++)
        for (int column = 0; column < lanes; column++) to[column * to_stride + row] = from[row * from_stride + column];
}
#endif

// One head: transposed keys and contiguous values, plus buffers for one tile of scores. `Format` is that of both
// products: float32 or bfloat16.
template <class Format>
class AttentionHead {
  public:
    AttentionHead(size_t tokens, size_t head_width)
        : tokens_(tokens),
          head_width_(head_width),
          padded_tokens_(round_up(tokens, lanes)),
          padded_width_(round_up(head_width, lanes)),
          key_steps_(steps_of(head_width)),
          keys_(key_steps_ * padded_tokens_),
          values_(steps_of(tokens) * padded_width_),
          scores_(tile_rows * padded_tokens_),
          mask_(lanes) {
        for (size_t lane = 0; lane < lanes; lane++)
            mask_[lane] = padded_tokens_ - lanes + lane < tokens_ ? 0.0f : -1e30f;  // padding
        if (Format::fp32_activations) return;
        row_ = AlignedBuffer<float>(padded_width_);
        rows_ = AlignedBuffer<uint32_t>(padded_tokens_ * key_stride());
        queries_ = AlignedBuffer<uint32_t>(tile_rows * key_stride());
        weights_ = AlignedBuffer<uint32_t>(tile_rows * padded_tokens_);
    }

    void load_head(const Projections& of, size_t head) {
        load_keys(to_words(of, 1, head, 0, tokens_, rows_));
        if constexpr (Format::fp32_activations) {
            for (size_t token = 0; token < tokens_; token++)
                std::memcpy(&values_[token * padded_width_], of.at(2, head, token), head_width_ * sizeof(float));
        } else {
            // The reduction runs over tokens, so two tokens share a word.
            for (size_t token = 0; token < tokens_; token += 2)
                for (size_t i = 0; i < head_width_; i += lanes) {
                    const Vec lower = load_padded(of.at(2, head, token), i);
                    const Vec upper = token + 1 < tokens_ ? load_padded(of.at(2, head, token + 1), i) : Vec{};
                    const Int pairs = Format::pairs(lower, upper);
                    std::memcpy(&values_[token / 2 * padded_width_ + i], &pairs, sizeof pairs);
                }
        }
    }

    // Compute softmax(q kᵀ) v for `rows` queries starting at `token`.
    void attend(const Projections& of, size_t head, size_t token, int rows, float* to, size_t to_stride) {
        dispatch(std::make_integer_sequence<int, tile_rows>(), rows, to_words(of, 0, head, token, rows, queries_), to,
                 to_stride);
    }

  private:
    static size_t steps_of(size_t count) { return (count + Format::values_per_word - 1) / Format::values_per_word; }
    size_t key_stride() const { return round_up(key_steps_, lanes); }

    // Load one vector of this head's columns, zero-padded past the head.
    Vec load_padded(const float* row, size_t i) const {
        if (i + lanes <= head_width_) return load(row + i);
        Vec values{};
        std::memcpy(&values, row + i, (head_width_ - i) * sizeof(float));
        return values;
    }

    // Return this head's columns of some rows as words, converted unless the format reads float32 in place.
    Rows to_words(const Projections& of, size_t which, size_t head, size_t token, size_t rows,
                  const AlignedBuffer<uint32_t>& buffer) {
        if constexpr (Format::fp32_activations) {
            float* from = const_cast<float*>(of.at(which, head, token));
            return {reinterpret_cast<Word*>(from), of.stride, nullptr, nullptr};
        } else {
            const Rows to{buffer.data(), key_stride(), nullptr, nullptr};
            for (size_t row = 0; row < rows; row++) {
                const float* from = of.at(which, head, token + row);
                if (head_width_ % 2) {  // the next float belongs to another head and is not zero
                    std::memcpy(row_.data(), from, head_width_ * sizeof(float));
                    from = row_.data();
                }
                Format::convert_row(from, head_width_, to, row);
            }
            return to;
        }
    }

    void load_keys(const Rows& from) {
        const size_t whole_tokens = tokens_ / lanes * lanes, whole_steps = key_steps_ / lanes * lanes;
        for (size_t token = 0; token < whole_tokens; token += lanes)
            for (size_t step = 0; step < whole_steps; step += lanes)
                transpose(reinterpret_cast<const float*>(from.words + token * from.stride + step), from.stride,
                          reinterpret_cast<float*>(&keys_[step * padded_tokens_ + token]), padded_tokens_);
        for (size_t token = 0; token < tokens_; token++)
            for (size_t step = token < whole_tokens ? whole_steps : 0; step < key_steps_; step++)
                keys_[step * padded_tokens_ + token] = from.words[token * from.stride + step];
    }

    template <int... counts>
    void dispatch(std::integer_sequence<int, counts...>, int rows, const Rows& queries, float* to, size_t to_stride) {
        using Tile = void (AttentionHead::*)(const Rows&, float*, size_t);
        static constexpr Tile tiles[] = {&AttentionHead::template attend_tile<counts + 1>...};
        (this->*tiles[rows - 1])(queries, to, to_stride);
    }

    template <int rows>
    void attend_tile(const Rows& queries, float* to, size_t to_stride) {
        size_t column = 0;
        for (; column + tile_columns <= padded_tokens_; column += tile_columns)
            compute_scores<rows, tile_vectors>(queries, column);
        for (; column < padded_tokens_; column += lanes) compute_scores<rows, 1>(queries, column);
        float inverse_sums[rows];
        Rows weights{reinterpret_cast<Word*>(scores_.data()), padded_tokens_, nullptr, nullptr};
        if (!Format::fp32_activations) weights.words = weights_.data();
        for (int row = 0; row < rows; row++) {
            inverse_sums[row] = 1.0f / exponentiate(&scores_[row * padded_tokens_]);
            Format::convert_row(&scores_[row * padded_tokens_], padded_tokens_, weights, row);
        }
        column = 0;
        for (; column + tile_columns <= padded_width_; column += tile_columns)
            weighted_sum<rows, tile_vectors>(weights, column, inverse_sums, to, to_stride);
        for (; column < padded_width_; column += lanes)
            weighted_sum<rows, 1>(weights, column, inverse_sums, to, to_stride);
    }

    template <int rows, int vectors>
    VITKIT_INLINE_MEMBER void compute_scores(const Rows& queries, size_t column) {
        Vec sums[rows][vectors] = {};
        accumulate<Format, rows, vectors>(sums, queries.words, queries.stride, &keys_[column], padded_tokens_,
                                          key_steps_, reinterpret_cast<const char*>(&values_[0]));
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
            for (int vector = 0; vector < vectors; vector++)
                store(&scores_[row * padded_tokens_ + column + vector * lanes], sums[row][vector]);
    }

    // Replace scores by exp2(score - max) and return their sum.
    float exponentiate(float* scores) const {
        float* last = scores + padded_tokens_ - lanes;
        store(last, load(last) + load(mask_.data()));
        Vec maximum = load(scores);
        for (float* i = scores + lanes; i <= last; i += lanes) maximum = vec_max(maximum, load(i));
        maximum = broadcast(reduce_max(maximum));
        Vec total{};
        for (float* i = scores; i <= last; i += lanes) {
            const Vec weight = exp2_approx(load(i) - maximum);
            store(i, weight);
            total += weight;
        }
        return reduce_add(total);
    }

    template <int rows, int vectors>
    VITKIT_INLINE_MEMBER void weighted_sum(const Rows& weights, size_t column, const float* inverse_sums, float* to,
                                           size_t to_stride) {
        Vec sums[rows][vectors] = {};
        accumulate<Format, rows, vectors>(sums, weights.words, weights.stride, &values_[column], padded_width_,
                                          steps_of(tokens_), reinterpret_cast<const char*>(&keys_[0]));
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
            for (int vector = 0; vector < vectors; vector++) {
                const size_t i = column + vector * lanes;
                const Vec value = sums[row][vector] * broadcast(inverse_sums[row]);
                if (i + lanes <= head_width_) {
                    store(to + row * to_stride + i, value);
                } else {  // do not overwrite the next head's columns
                    std::memcpy(to + row * to_stride + i, &value, (head_width_ - i) * sizeof(float));
                }
            }
    }

    size_t tokens_, head_width_, padded_tokens_, padded_width_, key_steps_;
    AlignedBuffer<uint32_t> keys_, values_;  // words
    AlignedBuffer<float> scores_, mask_, row_;
    AlignedBuffer<uint32_t> rows_, queries_, weights_;  // words; unused if the format reads float32 in place
};

}  // namespace vitkit
