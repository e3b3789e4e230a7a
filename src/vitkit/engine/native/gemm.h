// Rows of activations and packed weights go in; their product, with what follows it, comes out.
//
// One register tile is `tile_rows` × `tile_columns` sums that stay in registers from the first k to the last. The order
// in which a sum is added up is that of k, whatever rows are beside it: an image's numbers do not depend on its batch.
#pragma once

#include <utility>

#include "formats.h"

namespace vitkit {

// What is done with a product and its bias, while it is in registers.
enum class Finish { store, gelu_tanh, gelu_erf, add };

struct Target {
    float* out;
    size_t stride;
    Finish finish;
};

// sums += rows × columns of weights, over `steps` words. One cache line for each 8 steps is fetched from `ahead`: the
// weights that come next are in the core's own cache by then.
template <class Format, int rows, int vectors>
VITKIT_INLINE void accumulate(typename Format::Sum (&sums)[rows][vectors], const Word* row, size_t row_stride,
                              const Word* weights, size_t weights_stride, size_t steps, const char* ahead) {
    constexpr int words = Format::row_words;
    const Word* every_third[(rows + 2) / 3];  // fewer addresses to hold than one for each row
#pragma GCC unroll 16
    for (int third = 0; third < (rows + 2) / 3; third++) every_third[third] = row + 3 * third * row_stride;
    for (size_t step = 0; step < steps; step++) {
        Int columns[vectors];
#pragma GCC unroll 16
        for (int vector = 0; vector < vectors; vector++) columns[vector] = load_words(weights + vector * lanes);
        weights += weights_stride;
        if (step % 8 == 0) __builtin_prefetch(ahead + step * 8, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            Int values[words];
#pragma GCC unroll 2
            for (int word = 0; word < words; word++)
                values[word] = same_word(every_third[r / 3][(r % 3) * row_stride + step * words + word]);
#pragma GCC unroll 16
            for (int vector = 0; vector < vectors; vector++)
                sums[r][vector] = Format::add_product(sums[r][vector], values, columns[vector]);
        }
    }
}

template <class Format, int rows>
void tile(const Weights<Format>& weights, size_t panel, const Rows& from, size_t row, const Target& target,
          const char* ahead) {
    typename Format::Sum sums[rows][tile_vectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int vector = 0; vector < tile_vectors; vector++) sums[r][vector] = typename Format::Sum{};
    accumulate<Format, rows, tile_vectors>(sums, from.words + row * from.stride, from.stride,
                                           weights.words.data() + panel * weights.steps * tile_columns, tile_columns,
                                           weights.steps, ahead);
#pragma GCC unroll 16
    for (int vector = 0; vector < tile_vectors; vector++) {
        const size_t column = panel * tile_columns + vector * lanes;
        const Vec bias = load(weights.bias.data() + column);
        float* out = target.out + row * target.stride + column;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            float* to = out + r * target.stride;
            const Vec value = Format::value(sums[r][vector], from, row + r, weights, column) + bias;
            store(to, target.finish == Finish::add ? load(to) + value : value);
        }
    }
}

template <class Format, int... counts>
void any_tile(std::integer_sequence<int, counts...>, int rows, const Weights<Format>& weights, size_t panel,
              const Rows& from, size_t row, const Target& target, const char* ahead) {
    using Tile = void (*)(const Weights<Format>&, size_t, const Rows&, size_t, const Target&, const char*);
    static constexpr Tile tiles[] = {tile<Format, counts + 1>...};
    tiles[rows - 1](weights, panel, from, row, target, ahead);
}

// A tile's outputs through a GELU, while they are in the nearest cache.
template <Vec (*gelu)(Vec)>
void through_gelu(const Target& target, size_t row, size_t rows, size_t column) {
    for (size_t r = row; r < row + rows; r++) {
        float* values = target.out + r * target.stride + column;
        for (int at = 0; at < tile_columns; at += lanes) store(values + at, gelu(load(values + at)));
    }
}

// Rows `first_row`…`last_row` of a layer's output, in the columns of panels `first_panel`…`last_panel`.
template <class Format>
void multiply(const Weights<Format>& weights, const Rows& from, const Target& target, size_t first_row, size_t last_row,
              size_t first_panel, size_t last_panel) {
    const size_t panel_words = weights.steps * tile_columns;
    for (size_t panel = first_panel; panel < last_panel; panel++) {
        const size_t next = panel + 1 < last_panel ? panel + 1 : panel;
        const char* ahead = reinterpret_cast<const char*>(weights.words.data() + next * panel_words);
        for (size_t row = first_row; row < last_row; row += tile_rows) {
            const size_t rows = last_row - row < tile_rows ? last_row - row : tile_rows;
            any_tile<Format>(std::make_integer_sequence<int, tile_rows>(), static_cast<int>(rows), weights, panel, from,
                             row, target, ahead);
            ahead += weights.steps * 8;
            if (target.finish == Finish::gelu_tanh) through_gelu<gelu_tanh>(target, row, rows, panel * tile_columns);
            if (target.finish == Finish::gelu_erf) through_gelu<gelu_erf>(target, row, rows, panel * tile_columns);
        }
    }
}

}  // namespace vitkit
