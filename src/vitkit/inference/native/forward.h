// Forward pass of a ViT, distributed over threads.
//
// While there are at least as many images as threads, each thread processes whole images, whose tokens stay in its own
// cache. The remaining images are processed by all threads together, which split each GEMM. Sums are accumulated in the
// same order either way, so results do not depend on the batch or the number of threads.
#pragma once

#include "attention.h"
#include "model.h"
#include "threads.h"

namespace vitkit {

// Row-major float matrix, padded to whole tiles. The extra 16 floats avoid cache-set conflicts between rows.
struct Matrix {
    AlignedBuffer<float> values;
    size_t stride = 0;

    void reserve(size_t rows, size_t width) {
        stride = round_up(width, tile_columns) + 16;
        values.reserve(rows * stride);
    }
    float* row(size_t row) const { return values.data() + row * stride; }
    OutputTile output(Epilogue epilogue, size_t first = 0) const {
        return {row(first), stride, epilogue};
    }
    Rows rows() const { return {reinterpret_cast<Word*>(values.data()), stride, nullptr, nullptr}; }
};

// Row-major matrix of words with the scale and offset of each row.
struct QuantizedRows {
    AlignedBuffer<uint32_t> words;
    AlignedBuffer<float> scale, smallest;
    size_t stride = 0;

    void reserve(size_t rows, size_t count) {
        stride = round_up(count, 16) + 16;
        words.reserve(rows * stride), scale.reserve(rows), smallest.reserve(rows);
    }
    Rows rows(size_t first = 0) const {
        return {words.data() + first * stride, stride, scale.data() + first, smallest.data() + first};
    }
};

// Activation buffers of the layers for a number of token rows.
template <class Format>
struct Workspace {
    Matrix residual, projections, attended, hidden;
    QuantizedRows normed, converted;

    void reserve(const Model<Format>& model, size_t rows) {
        const size_t width = model.sizes.width;
        const size_t block = model.layers[0].fc2[0].in, outputs = model.layers[0].fc1[0].out;
        const size_t widest = model.patch_values > width ? model.patch_values : width;
        residual.reserve(rows, width), attended.reserve(rows, width);
        projections.reserve(rows, 3 * width), hidden.reserve(rows, outputs);
        const auto words = [](size_t values) { return values / Format::values_per_word * Format::words_per_step + 4; };
        normed.reserve(rows, words(widest));
        converted.reserve(Format::fp32_activations ? 0 : rows, words(width > block ? width : block));
    }
};

template <class Format>
using AttentionHeadFor = AttentionHead<typename AttentionFormat<Format>::type>;

// Buffers of one thread.
template <class Format>
struct Scratch {
    AttentionHeadFor<Format> head;
    AlignedBuffer<float> row;
};

// Compute this thread's block of a GEMM. Rows, panels or both are split such that the largest block is smallest.
template <class Format>
void parallel_gemm(const ThreadSlice& slice, const Weights<Format>& weights, const Rows& from, const OutputTile& output,
                   size_t rows, size_t first_panel = 0) {
    const size_t panels = weights.panels - first_panel, tiles = (rows + tile_rows - 1) / tile_rows;
    size_t by_rows = 1, smallest = SIZE_MAX;
    const size_t threads = slice.threads;
    for (size_t row_parts = 1; row_parts <= threads; row_parts++) {
        if (threads % row_parts) continue;
        const size_t column_parts = threads / row_parts;
        const size_t largest = (tiles + row_parts - 1) / row_parts * ((panels + column_parts - 1) / column_parts);
        if (largest < smallest) smallest = largest, by_rows = row_parts;
    }
    const int by_panels = static_cast<int>(threads / by_rows);
    size_t first_row, last_row, first, last;
    ThreadSlice{slice.index / by_panels, static_cast<int>(by_rows), nullptr}.slice(rows, tile_rows, first_row,
                                                                                   last_row);
    ThreadSlice{slice.index % by_panels, by_panels, nullptr}.slice(panels, 1, first, last);
    gemm(weights, from, output, first_row, last_row, first_panel + first, first_panel + last);
}

template <class Format>
class Forward {
  public:
    Forward(const Model<Format>& model, Workspace<Format>& space, Scratch<Format>& scratch, const ThreadSlice& slice)
        : model_(model), space_(space), scratch_(scratch), slice_(slice) {}

    // Embed images (equation 1): add patches × E to the initial tokens.
    void embed(const float* images, size_t count) {
        const VitkitSizes& sizes = model_.sizes;
        const size_t patches = model_.patches, image = size_t(sizes.channels) * sizes.image_height * sizes.image_width;
        for_each_row(count * patches,
                     [&](size_t row) { read_patch(images + row / patches * image, row % patches, row); });
        for_each_row(count * model_.tokens, [&](size_t row) {
            const float* initial_tokens = &model_.initial_tokens[row % model_.tokens * sizes.width];
            std::memcpy(space_.residual.row(row), initial_tokens, sizes.width * sizeof(float));
        });
        slice_.wait();
        for (size_t i = 0; i < count; i++)
            parallel_gemm(slice_, model_.patch, space_.normed.rows(i * patches),
                          space_.residual.output(Epilogue::add, i * model_.tokens + sizes.prefix), patches);
        slice_.wait();
    }

    // Compute LayerNorm, qkv and attention (equation 2) for the first `queries` tokens of each image.
    void attend(const Layer<Format>& layer, size_t count, size_t queries) {
        const size_t tokens = model_.tokens, width = model_.sizes.width;
        for_each_row(count * tokens, [&](size_t row) {
            float* residual = space_.residual.row(row);
            if (!layer.positions.empty()) {
                const float* positions = &layer.positions[row % tokens * width];
                for (size_t i = 0; i < width; i++) residual[i] += positions[i];
            }
            norm_and_convert<Format>(layer.norm1, residual, space_.normed.rows(), row, scratch_.row.data());
        });
        slice_.wait();
        const OutputTile output = space_.projections.output(Epilogue::store);
        const bool class_tokens_only = queries < tokens && width % tile_columns == 0;
        parallel_gemm(slice_, layer.qkv, space_.normed.rows(), output, count * tokens,
                      class_tokens_only ? width / tile_columns : 0);
        if (class_tokens_only) {
            size_t first, last;
            slice_.slice(width / tile_columns, 1, first, last);
            for (size_t i = 0; i < count; i++)
                gemm(layer.qkv, space_.normed.rows(), output, i * tokens, i * tokens + queries, first, last);
        }
        slice_.wait();
        if (layer.has_qk_norm) apply_qk_norm(layer, count);
        if (!model_.cosine.empty()) apply_rotary(count);
        attention(count, queries);
        slice_.wait();
    }

    // Compute the output projection (equation 2) and the MLP (equation 3) for `rows` tokens.
    void project_and_mlp(const Layer<Format>& layer, const Matrix& residual, const Matrix& attended, size_t rows) {
        const size_t width = model_.sizes.width;
        const Rows attended_words = to_words(attended, rows, width);
        parallel_gemm(slice_, layer.proj, attended_words, residual.output(Epilogue::add), rows);
        slice_.wait();
        for_each_row(rows, [&](size_t row) {
            norm_and_convert<Format>(layer.norm2, residual.row(row), space_.normed.rows(), row, scratch_.row.data());
        });
        slice_.wait();
        constexpr Epilogue activations[] = {Epilogue::gelu_tanh, Epilogue::gelu_erf, Epilogue::store};
        const OutputTile hidden_target = space_.hidden.output(activations[model_.sizes.activation]);
        for (size_t block = 0; block < layer.fc1.size(); block++) {
            parallel_gemm(slice_, layer.fc1[block], space_.normed.rows(), hidden_target, rows);
            slice_.wait();
            if (model_.sizes.activation == 2) apply_swiglu(rows, layer.fc2[block].in);
            const Rows hidden = to_words(space_.hidden, rows, layer.fc2[block].in);
            parallel_gemm(slice_, layer.fc2[block], hidden, residual.output(Epilogue::add), rows);
            slice_.wait();
        }
    }

    // Run all layers. If only class tokens are pooled, the last layer stops after attention; `apply_head` completes it.
    void encode(size_t count) {
        for (size_t layer = 0; layer < model_.layers.size(); layer++) {
            const bool last = layer + 1 == model_.layers.size() && model_.reads_class_tokens();
            attend(model_.layers[layer], count, last ? model_.sizes.class_tokens : model_.tokens);
            if (!last) project_and_mlp(model_.layers[layer], space_.residual, space_.attended, count * model_.tokens);
        }
    }

    // Call `work` for each row of this thread's slice.
    template <class Work>
    void for_each_row(size_t rows, Work work) const {
        size_t first, last;
        slice_.slice(rows, 1, first, last);
        for (size_t row = first; row < last; row++) work(row);
    }

  private:
    void read_patch(const float* image, size_t patch, size_t row) {
        const VitkitSizes& sizes = model_.sizes;
        const size_t top = patch / model_.grid_columns * sizes.patch_height;
        const size_t left = patch % model_.grid_columns * sizes.patch_width;
        const Rows to = space_.normed.rows();
        float* values =
            Format::fp32_activations ? reinterpret_cast<float*>(to.words + row * to.stride) : scratch_.row.data();
        for (int32_t channel = 0; channel < sizes.channels; channel++)
            for (int32_t y = 0; y < sizes.patch_height; y++) {
                const size_t i = (size_t(channel) * sizes.image_height + top + y) * sizes.image_width + left;
                std::memcpy(values, image + i, sizes.patch_width * sizeof(float));
                values += sizes.patch_width;
            }
        // Clear the padding of an odd row: its weight is zero, but a NaN left by an earlier image would survive that.
        if (model_.patch_values % 2) *values = 0.0f;
        if (!Format::fp32_activations) convert_row<Format>(scratch_.row.data(), model_.patch_values, to, row);
    }

    Rows to_words(const Matrix& matrix, size_t rows, size_t width) {
        if (Format::fp32_activations) return matrix.rows();
        for_each_row(rows,
                     [&](size_t row) { convert_row<Format>(matrix.row(row), width, space_.converted.rows(), row); });
        slice_.wait();
        return space_.converted.rows();
    }

    void apply_qk_norm(const Layer<Format>& layer, size_t count) {
        const size_t width = model_.sizes.width, head_width = width / model_.sizes.heads;
        for_each_row(count * model_.tokens, [&](size_t row) {
            float* queries = space_.projections.row(row);
            for (size_t i = 0; i < width; i += head_width) {
                layer_norm(layer.q_norm, queries + i, queries + i, false);
                layer_norm(layer.k_norm, queries + width + i, queries + width + i, false);
            }
        });
        slice_.wait();
    }

    // Apply rotary position embeddings to the queries and keys of the patches.
    void apply_rotary(size_t count) {
        const size_t tokens = model_.tokens, width = model_.sizes.width, head_width = width / model_.sizes.heads;
        const size_t prefix = model_.sizes.prefix, half = head_width / 2;
        for_each_row(count * tokens, [&](size_t row) {
            if (row % tokens < prefix) return;
            const float* cosine = &model_.cosine[(row % tokens - prefix) * head_width];
            const float* sine = &model_.sine[(row % tokens - prefix) * head_width];
            for (float* head = space_.projections.row(row); head < space_.projections.row(row) + 2 * width;
                 head += head_width)
                for (size_t i = 0; i < half; i++) {
                    const float first = head[i], second = head[half + i];
                    head[i] = first * cosine[i] - second * sine[i];
                    head[half + i] = second * cosine[half + i] + first * sine[half + i];
                }
        });
        slice_.wait();
    }

    // SwiGLU: silu(gate) × value, where the values follow the `count` gates. The last vector may overwrite values that
    // were already read.
    void apply_swiglu(size_t rows, size_t count) {
        for_each_row(rows, [&](size_t row) {
            float* gates = space_.hidden.row(row);
            for (size_t i = 0; i < count; i += lanes) store(gates + i, silu(load(gates + i)) * load(gates + count + i));
        });
        slice_.wait();
    }

    // Attention over all (image, head, tile of queries) triples; each thread takes a contiguous slice of them.
    void attention(size_t count, size_t queries) {
        const size_t tokens = model_.tokens, width = model_.sizes.width, heads = model_.sizes.heads;
        const size_t tiles = (queries + tile_rows - 1) / tile_rows;
        size_t first, last, loaded_head = SIZE_MAX;
        slice_.slice(count * heads * tiles, 1, first, last);
        for (size_t tile = first; tile < last; tile++) {
            const size_t image = tile / (heads * tiles), head = tile / tiles % heads, token = tile % tiles * tile_rows;
            const Projections from{space_.projections.row(image * tokens), space_.projections.stride, width, tokens,
                                   width / heads};
            if (tile / tiles != loaded_head) scratch_.head.load_head(from, head), loaded_head = tile / tiles;
            const size_t rows = queries - token < size_t(tile_rows) ? queries - token : size_t(tile_rows);
            scratch_.head.attend(from, head, token, static_cast<int>(rows),
                                 space_.attended.row(image * tokens + token) + head * from.head_width,
                                 space_.attended.stride);
        }
    }

    const Model<Format>& model_;
    Workspace<Format>& space_;
    Scratch<Format>& scratch_;
    const ThreadSlice& slice_;
};

}  // namespace vitkit
