// GEMM of activations with packed weights and a fused epilogue.
//
// The accumulators of one register tile stay in registers over the whole k loop. Each sum is accumulated in the order of
// k whatever the neighboring rows, so the results of an image do not depend on its batch.
#pragma once

#include <utility>

#include "formats.h"

namespace vitkit {

// Operation applied to the product plus bias.
enum class Epilogue { store, gelu_tanh, gelu_erf, add };

struct OutputTile {
    float* out;
    size_t stride;
    Epilogue epilogue;
};

// Accumulate rows × weight columns over `steps` words. Every 8 steps one cache line is prefetched from `prefetch`, so
// that the next panel's weights are in the L2 cache in time.
template <class Format, int rows, int vectors>
VITKIT_INLINE void accumulate(typename Format::Sum (&sums)[rows][vectors], const Word* row, size_t row_stride,
                              const Word* weights, size_t weights_stride, size_t steps, const char* prefetch) {
    constexpr int words = Format::words_per_step;
    const Word* row_bases[(rows + 2) / 3];  // one base address per three rows saves registers
#pragma GCC unroll 16
    for (int group = 0; group < (rows + 2) / 3; group++) row_bases[group] = row + 3 * group * row_stride;
    for (size_t step = 0; step < steps; step++) {
        Int columns[vectors];
#pragma GCC unroll 16
        for (int vector = 0; vector < vectors; vector++) columns[vector] = load_words(weights + vector * lanes);
        weights += weights_stride;
        if (step % 8 == 0) __builtin_prefetch(prefetch + step * 8, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            Int values[words];
#pragma GCC unroll 2
            for (int word = 0; word < words; word++)
                values[word] = broadcast_word(row_bases[r / 3][(r % 3) * row_stride + step * words + word]);
#pragma GCC unroll 16
            for (int vector = 0; vector < vectors; vector++)
                sums[r][vector] = Format::add_product(sums[r][vector], values, columns[vector]);
        }
    }
}

template <class Format, int rows>
void compute_tile(const Weights<Format>& weights, size_t panel, const Rows& from, size_t row, const OutputTile& output,
                  const char* prefetch) {
    typename Format::Sum sums[rows][tile_vectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int vector = 0; vector < tile_vectors; vector++) sums[r][vector] = typename Format::Sum{};
    accumulate<Format, rows, tile_vectors>(sums, from.words + row * from.stride, from.stride,
                                           weights.words.data() + panel * weights.steps * tile_columns, tile_columns,
                                           weights.steps, prefetch);
#pragma GCC unroll 16
    for (int vector = 0; vector < tile_vectors; vector++) {
        const size_t column = panel * tile_columns + vector * lanes;
        const Vec bias = load(weights.bias.data() + column);
        float* out = output.out + row * output.stride + column;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            float* to = out + r * output.stride;
            const Vec value = Format::value(sums[r][vector], from, row + r, weights, column) + bias;
            store(to, output.epilogue == Epilogue::add ? load(to) + value : value);
        }
    }
}

template <class Format, int... counts>
void dispatch_tile(std::integer_sequence<int, counts...>, int rows, const Weights<Format>& weights, size_t panel,
                   const Rows& from, size_t row, const OutputTile& output, const char* prefetch) {
    using Tile = void (*)(const Weights<Format>&, size_t, const Rows&, size_t, const OutputTile&, const char*);
    static constexpr Tile tiles[] = {compute_tile<Format, counts + 1>...};
    tiles[rows - 1](weights, panel, from, row, output, prefetch);
}

// Apply GELU to a tile's outputs while they are in the L1 cache.
template <Vec (*gelu)(Vec)>
void apply_gelu(const OutputTile& output, size_t row, size_t rows, size_t column) {
    for (size_t r = row; r < row + rows; r++) {
        float* values = output.out + r * output.stride + column;
        for (int i = 0; i < tile_columns; i += lanes) store(values + i, gelu(load(values + i)));
    }
}

// Compute rows [first_row, last_row) of the output for panels [first_panel, last_panel).
template <class Format>
void gemm(const Weights<Format>& weights, const Rows& from, const OutputTile& output, size_t first_row, size_t last_row,
          size_t first_panel, size_t last_panel) {
    const size_t panel_words = weights.steps * tile_columns;
    for (size_t panel = first_panel; panel < last_panel; panel++) {
        const size_t next = panel + 1 < last_panel ? panel + 1 : panel;
        const char* prefetch = reinterpret_cast<const char*>(weights.words.data() + next * panel_words);
        for (size_t row = first_row; row < last_row; row += tile_rows) {
            const size_t rows = last_row - row < tile_rows ? last_row - row : tile_rows;
            dispatch_tile<Format>(std::make_integer_sequence<int, tile_rows>(), static_cast<int>(rows), weights, panel,
                                  from, row, output, prefetch);
            prefetch += weights.steps * 8;
            if (output.epilogue == Epilogue::gelu_tanh) apply_gelu<gelu_tanh>(output, row, rows, panel * tile_columns);
            if (output.epilogue == Epilogue::gelu_erf) apply_gelu<gelu_erf>(output, row, rows, panel * tile_columns);
        }
    }
}

}  // namespace vitkit
