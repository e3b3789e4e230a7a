// Queries, keys and values of one head go in; the values each query draws come out (MSA of equation 2).
//
// The scores of a tile of queries against all keys stay in the nearest cache: they are computed, turned into weights
// and used up, and the L × L matrix is never there.
#pragma once

#include "gemm.h"

namespace vitkit {

// One image's queries, keys and values: row by row, each the width of all heads, `stride` floats apart. Queries carry
// log2(e) / √K already, so that weights are powers of two.
struct Projections {
    const float* rows;
    size_t stride, width, tokens, head_width;

    const float* part(size_t which, size_t head, size_t token) const {
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
    for (int j = 0; j < 4; j++) {  // column j of each quarter, of four rows each: put the four groups of rows together
        const __m512 low = _mm512_shuffle_f32x4(a[j], a[j + 4], 0x88), high = _mm512_shuffle_f32x4(a[j], a[j + 4], 0xdd);
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

// A head's keys, transposed, and values, close together, with room for a tile of scores. The format is that of both
// products, float32 or bfloat16.
template <class Format>
class Head {
  public:
    Head(size_t tokens, size_t head_width)
        : tokens_(tokens), head_width_(head_width), padded_tokens_(rounded_up(tokens, lanes)),
          padded_width_(rounded_up(head_width, lanes)), key_steps_(steps_of(head_width)),
          keys_(key_steps_ * padded_tokens_), values_(steps_of(tokens) * padded_width_),
          scores_(tile_rows * padded_tokens_), mask_(lanes) {
        for (size_t lane = 0; lane < lanes; lane++)
            mask_[lane] = padded_tokens_ - lanes + lane < tokens_ ? 0.0f : -1e30f;  // no token is there
        if (Format::as_they_are) return;
        row_ = Block<float>(padded_width_);
        rows_ = Block<uint32_t>(padded_tokens_ * key_stride());
        queries_ = Block<uint32_t>(tile_rows * key_stride());
        weights_ = Block<uint32_t>(tile_rows * padded_tokens_);
    }

    void read(const Projections& of, size_t head) {
        read_keys(words_of(of, 1, head, 0, tokens_, rows_));
        if constexpr (Format::as_they_are) {
            for (size_t token = 0; token < tokens_; token++)
                std::memcpy(&values_[token * padded_width_], of.part(2, head, token), head_width_ * sizeof(float));
        } else {
            // The product runs over tokens here, so it is two tokens that share a word.
            for (size_t token = 0; token < tokens_; token += 2)
                for (size_t at = 0; at < head_width_; at += lanes) {
                    const Vec lower = some(of.part(2, head, token), at);
                    const Vec upper = token + 1 < tokens_ ? some(of.part(2, head, token + 1), at) : Vec{};
                    const Int pairs = Format::pairs(lower, upper);
                    std::memcpy(&values_[token / 2 * padded_width_ + at], &pairs, sizeof pairs);
                }
        }
    }

    // What `rows` queries from `token` on draw from all values.
    void attend(const Projections& of, size_t head, size_t token, int rows, float* to, size_t to_stride) {
        choose(std::make_integer_sequence<int, tile_rows>(), rows, words_of(of, 0, head, token, rows, queries_), to,
               to_stride);
    }

  private:
    static size_t steps_of(size_t count) { return (count + Format::values - 1) / Format::values; }
    size_t key_stride() const { return rounded_up(key_steps_, lanes); }

    // Up to a vector's worth of a head's part of a row, zero after its end.
    Vec some(const float* row, size_t at) const {
        if (at + lanes <= head_width_) return load(row + at);
        Vec values{};
        std::memcpy(&values, row + at, (head_width_ - at) * sizeof(float));
        return values;
    }

    // A head's part of some rows as words: where they are, or converted.
    Rows words_of(const Projections& of, size_t which, size_t head, size_t token, size_t rows,
                  const Block<uint32_t>& room) {
        if constexpr (Format::as_they_are) {
            float* from = const_cast<float*>(of.part(which, head, token));
            return {reinterpret_cast<Word*>(from), of.stride, nullptr, nullptr};
        } else {
            const Rows to{room.data(), key_stride(), nullptr, nullptr};
            for (size_t row = 0; row < rows; row++) {
                const float* from = of.part(which, head, token + row);
                if (head_width_ % 2) {  // what follows belongs to another head, and is not zero
                    std::memcpy(row_.data(), from, head_width_ * sizeof(float));
                    from = row_.data();
                }
                Format::convert(from, head_width_, to, row);
            }
            return to;
        }
    }

    void read_keys(const Rows& from) {
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
    void choose(std::integer_sequence<int, counts...>, int rows, const Rows& queries, float* to, size_t to_stride) {
        using Tile = void (Head::*)(const Rows&, float*, size_t);
        static constexpr Tile tiles[] = {&Head::template attend_tile<counts + 1>...};
        (this->*tiles[rows - 1])(queries, to, to_stride);
    }

    template <int rows>
    void attend_tile(const Rows& queries, float* to, size_t to_stride) {
        size_t column = 0;
        for (; column + tile_columns <= padded_tokens_; column += tile_columns)
            score<rows, tile_vectors>(queries, column);
        for (; column < padded_tokens_; column += lanes) score<rows, 1>(queries, column);
        float shares[rows];
        Rows weights{reinterpret_cast<Word*>(scores_.data()), padded_tokens_, nullptr, nullptr};
        if (!Format::as_they_are) weights.words = weights_.data();
        for (int row = 0; row < rows; row++) {
            shares[row] = 1.0f / weigh(&scores_[row * padded_tokens_]);
            Format::convert(&scores_[row * padded_tokens_], padded_tokens_, weights, row);
        }
        column = 0;
        for (; column + tile_columns <= padded_width_; column += tile_columns)
            draw<rows, tile_vectors>(weights, column, shares, to, to_stride);
        for (; column < padded_width_; column += lanes) draw<rows, 1>(weights, column, shares, to, to_stride);
    }

    template <int rows, int vectors>
    VITKIT_INLINE_MEMBER void score(const Rows& queries, size_t column) {
        Vec sums[rows][vectors] = {};
        accumulate<Format, rows, vectors>(sums, queries.words, queries.stride, &keys_[column], padded_tokens_,
                                          key_steps_, reinterpret_cast<const char*>(&values_[0]));
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
            for (int vector = 0; vector < vectors; vector++)
                store(&scores_[row * padded_tokens_ + column + vector * lanes], sums[row][vector]);
    }

    // Scores become powers of two, the largest of them 1; their sum is returned.
    float weigh(float* scores) const {
        float* last = scores + padded_tokens_ - lanes;
        store(last, load(last) + load(mask_.data()));
        Vec most = load(scores);
        for (float* at = scores + lanes; at <= last; at += lanes) most = larger(most, load(at));
        most = same(largest_of(most));
        Vec total{};
        for (float* at = scores; at <= last; at += lanes) {
            const Vec weight = power_of_two(load(at) - most);
            store(at, weight);
            total += weight;
        }
        return sum_of(total);
    }

    template <int rows, int vectors>
    VITKIT_INLINE_MEMBER void draw(const Rows& weights, size_t column, const float* shares, float* to,
                                   size_t to_stride) {
        Vec sums[rows][vectors] = {};
        accumulate<Format, rows, vectors>(sums, weights.words, weights.stride, &values_[column], padded_width_,
                                          steps_of(tokens_), reinterpret_cast<const char*>(&keys_[0]));
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
            for (int vector = 0; vector < vectors; vector++) {
                const size_t at = column + vector * lanes;
                const Vec value = sums[row][vector] * same(shares[row]);
                if (at + lanes <= head_width_) {
                    store(to + row * to_stride + at, value);
                } else {  // the next head's place is beside this one's
                    std::memcpy(to + row * to_stride + at, &value, (head_width_ - at) * sizeof(float));
                }
            }
    }

    size_t tokens_, head_width_, padded_tokens_, padded_width_, key_steps_;
    Block<uint32_t> keys_, values_;  // words
    Block<float> scores_, mask_, row_;
    Block<uint32_t> rows_, queries_, weights_;  // words, where the format is not that of the rows
};

}  // namespace vitkit
