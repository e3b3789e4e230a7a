// Images go in, features and logits come out: the steps of the model, shared out among threads.
//
// With at least as many images as threads, each thread takes whole images, and the weights it reads meet tokens that
// are in its own cache. What is left over is worked on by all threads together, who split each product by columns.
// Either way every number is added up in the same order.
#pragma once

#include "attention.h"
#include "model.h"
#include "threads.h"

namespace vitkit {

// Rows of floats, padded to whole tiles. The 16 more floats keep rows from falling on the same lines of the cache.
struct Matrix {
    Block<float> values;
    size_t stride = 0;

    void reserve(size_t rows, size_t width) {
        stride = rounded_up(width, tile_columns) + 16;
        values.reserve(rows * stride);
    }
    float* row(size_t row) const { return values.data() + row * stride; }
    Target target(Finish finish, size_t first = 0) const { return {row(first), stride, finish}; }
    Rows rows() const { return {reinterpret_cast<Word*>(values.data()), stride, nullptr, nullptr}; }
};

// The same as words.
struct Words {
    Block<uint32_t> words;
    Block<float> scale, least;
    size_t stride = 0;

    void reserve(size_t rows, size_t count) {
        stride = rounded_up(count, 16) + 16;
        words.reserve(rows * stride), scale.reserve(rows), least.reserve(rows);
    }
    Rows rows(size_t first = 0) const {
        return {words.data() + first * stride, stride, scale.data() + first, least.data() + first};
    }
};

// What the layers work in, for so many rows of tokens.
template <class Format>
struct Workspace {
    Matrix residual, projections, mixed, hidden;
    Words normed, converted;

    void reserve(const Model<Format>& model, size_t rows) {
        const size_t width = model.sizes.width;
        const size_t block = model.layers[0].fc2[0].in, outputs = model.layers[0].fc1[0].out;
        const size_t widest = model.patch_values > width ? model.patch_values : width;
        residual.reserve(rows, width), mixed.reserve(rows, width);
        projections.reserve(rows, 3 * width), hidden.reserve(rows, outputs);
        const auto words = [](size_t values) { return values / Format::values * Format::row_words + 4; };
        normed.reserve(rows, words(widest));
        converted.reserve(Format::as_they_are ? 0 : rows, words(width > block ? width : block));
    }
};

template <class Format>
using HeadOf = Head<typename AttentionFormat<Format>::type>;

// What one thread needs for itself.
template <class Format>
struct Scratch {
    HeadOf<Format> head;
    Block<float> row;
};

// This member's part of a product: of the rows, of the panels, or of both, so that the largest part is the least.
template <class Format>
void share_product(const Member& member, const Weights<Format>& weights, const Rows& from, const Target& target,
                   size_t rows, size_t first_panel = 0) {
    const size_t panels = weights.panels - first_panel, tiles = (rows + tile_rows - 1) / tile_rows;
    size_t by_rows = 1, least = SIZE_MAX;
    const size_t members = member.members;
    for (size_t parts = 1; parts <= members; parts++) {
        if (members % parts) continue;
        const size_t others = members / parts;
        const size_t largest = (tiles + parts - 1) / parts * ((panels + others - 1) / others);
        if (largest < least) least = largest, by_rows = parts;
    }
    const int by_panels = static_cast<int>(members / by_rows);
    size_t first_row, last_row, first, last;
    Member{member.number / by_panels, static_cast<int>(by_rows), nullptr}.part(rows, tile_rows, first_row, last_row);
    Member{member.number % by_panels, by_panels, nullptr}.part(panels, 1, first, last);
    multiply(weights, from, target, first_row, last_row, first_panel + first, first_panel + last);
}

template <class Format>
class Forward {
  public:
    Forward(const Model<Format>& model, Workspace<Format>& space, Scratch<Format>& scratch, const Member& member)
        : model_(model), space_(space), scratch_(scratch), member_(member) {}

    // Equation 1, for images side by side: patches times E, added to what the tokens start as.
    void embed(const float* images, size_t count) {
        const VitkitSizes& sizes = model_.sizes;
        const size_t patches = model_.patches, image = size_t(sizes.channels) * sizes.image_height * sizes.image_width;
        each(count * patches, [&](size_t row) { read_patch(images + row / patches * image, row % patches, row); });
        each(count * model_.tokens, [&](size_t row) {
            const float* start = &model_.start[row % model_.tokens * sizes.width];
            std::memcpy(space_.residual.row(row), start, sizes.width * sizeof(float));
        });
        member_.wait();
        for (size_t i = 0; i < count; i++)
            share_product(member_, model_.patch, space_.normed.rows(i * patches),
                          space_.residual.target(Finish::add, i * model_.tokens + sizes.prefix), patches);
        member_.wait();
    }

    // Equation 2 up to the values drawn, of the first `queries` tokens of each image.
    void attend(const Layer<Format>& layer, size_t count, size_t queries) {
        const size_t tokens = model_.tokens, width = model_.sizes.width;
        each(count * tokens, [&](size_t row) {
            float* residual = space_.residual.row(row);
            if (!layer.positions.empty()) {
                const float* positions = &layer.positions[row % tokens * width];
                for (size_t at = 0; at < width; at++) residual[at] += positions[at];
            }
            normalise_and_convert<Format>(layer.norm1, residual, space_.normed.rows(), row, scratch_.row.data());
        });
        member_.wait();
        const Target target = space_.projections.target(Finish::store);
        const bool few = queries < tokens && width % tile_columns == 0;
        share_product(member_, layer.qkv, space_.normed.rows(), target, count * tokens, few ? width / tile_columns : 0);
        if (few) {
            size_t first, last;
            member_.part(width / tile_columns, 1, first, last);
            for (size_t i = 0; i < count; i++)
                multiply(layer.qkv, space_.normed.rows(), target, i * tokens, i * tokens + queries, first, last);
        }
        member_.wait();
        if (layer.norms_heads) norm_heads(layer, count);
        if (!model_.cosine.empty()) turn_heads(count);
        draw(count, queries);
        member_.wait();
    }

    // The rest of equation 2, and equation 3, for `rows` tokens in `residual` and what they have drawn, in `mixed`.
    void finish(const Layer<Format>& layer, const Matrix& residual, const Matrix& mixed, size_t rows) {
        const size_t width = model_.sizes.width;
        const Rows drawn = words_of(mixed, rows, width);
        share_product(member_, layer.proj, drawn, residual.target(Finish::add), rows);
        member_.wait();
        each(rows, [&](size_t row) {
            normalise_and_convert<Format>(layer.norm2, residual.row(row), space_.normed.rows(), row,
                                          scratch_.row.data());
        });
        member_.wait();
        constexpr Finish activations[] = {Finish::gelu_tanh, Finish::gelu_erf, Finish::store};
        const Target hidden_target = space_.hidden.target(activations[model_.sizes.activation]);
        for (size_t block = 0; block < layer.fc1.size(); block++) {
            share_product(member_, layer.fc1[block], space_.normed.rows(), hidden_target, rows);
            member_.wait();
            if (model_.sizes.activation == 2) open_gates(rows, layer.fc2[block].in);
            const Rows hidden = words_of(space_.hidden, rows, layer.fc2[block].in);
            share_product(member_, layer.fc2[block], hidden, residual.target(Finish::add), rows);
            member_.wait();
        }
    }

    // Whole layers, but for what comes after attention in the last one if only the class tokens are read.
    void encode(size_t count) {
        for (size_t layer = 0; layer < model_.layers.size(); layer++) {
            const bool last = layer + 1 == model_.layers.size() && model_.reads_class_tokens();
            attend(model_.layers[layer], count, last ? model_.sizes.class_tokens : model_.tokens);
            if (!last) finish(model_.layers[layer], space_.residual, space_.mixed, count * model_.tokens);
        }
    }

    // Runs `work` on this member's part of the rows.
    template <class Work>
    void each(size_t rows, Work work) const {
        size_t first, last;
        member_.part(rows, 1, first, last);
        for (size_t row = first; row < last; row++) work(row);
    }

  private:
    void read_patch(const float* image, size_t patch, size_t row) {
        const VitkitSizes& sizes = model_.sizes;
        const size_t down = patch / model_.grid_columns * sizes.patch_height;
        const size_t across = patch % model_.grid_columns * sizes.patch_width;
        const Rows to = space_.normed.rows();
        float* values = Format::as_they_are ? reinterpret_cast<float*>(to.words + row * to.stride) : scratch_.row.data();
        for (int32_t channel = 0; channel < sizes.channels; channel++)
            for (int32_t line = 0; line < sizes.patch_height; line++) {
                const size_t at = (size_t(channel) * sizes.image_height + down + line) * sizes.image_width + across;
                std::memcpy(values, image + at, sizes.patch_width * sizeof(float));
                values += sizes.patch_width;
            }
        // What pads an odd row meets a weight of zero, which is not enough: of an earlier image it may be NaN.
        if (model_.patch_values % 2) *values = 0.0f;
        if (!Format::as_they_are) convert<Format>(scratch_.row.data(), model_.patch_values, to, row);
    }

    Rows words_of(const Matrix& matrix, size_t rows, size_t width) {
        if (Format::as_they_are) return matrix.rows();
        each(rows, [&](size_t row) { convert<Format>(matrix.row(row), width, space_.converted.rows(), row); });
        member_.wait();
        return space_.converted.rows();
    }

    void norm_heads(const Layer<Format>& layer, size_t count) {
        const size_t width = model_.sizes.width, head_width = width / model_.sizes.heads;
        each(count * model_.tokens, [&](size_t row) {
            float* queries = space_.projections.row(row);
            for (size_t at = 0; at < width; at += head_width) {
                normalise(layer.q_norm, queries + at, queries + at, false);
                normalise(layer.k_norm, queries + width + at, queries + width + at, false);
            }
        });
        member_.wait();
    }

    // Rotary positions: the halves of a patch's queries and keys, turned by its place.
    void turn_heads(size_t count) {
        const size_t tokens = model_.tokens, width = model_.sizes.width, head_width = width / model_.sizes.heads;
        const size_t prefix = model_.sizes.prefix, half = head_width / 2;
        each(count * tokens, [&](size_t row) {
            if (row % tokens < prefix) return;
            const float* cosine = &model_.cosine[(row % tokens - prefix) * head_width];
            const float* sine = &model_.sine[(row % tokens - prefix) * head_width];
            for (float* head = space_.projections.row(row); head < space_.projections.row(row) + 2 * width;
                 head += head_width)
                for (size_t at = 0; at < half; at++) {
                    const float first = head[at], second = head[half + at];
                    head[at] = first * cosine[at] - second * sine[at];
                    head[half + at] = second * cosine[half + at] + first * sine[half + at];
                }
        });
        member_.wait();
    }

    // SwiGLU: each of `count` gates, through SiLU, times what stands `count` places after it. The last vector may write
    // past the gates, to where all has been read.
    void open_gates(size_t rows, size_t count) {
        each(rows, [&](size_t row) {
            float* gates = space_.hidden.row(row);
            for (size_t at = 0; at < count; at += lanes)
                store(gates + at, silu(load(gates + at)) * load(gates + count + at));
        });
        member_.wait();
    }

    // Tiles of queries, of all heads of all images, in a row; each member takes a stretch of them.
    void draw(size_t count, size_t queries) {
        const size_t tokens = model_.tokens, width = model_.sizes.width, heads = model_.sizes.heads;
        const size_t tiles = (queries + tile_rows - 1) / tile_rows;
        size_t first, last, head_read = SIZE_MAX;
        member_.part(count * heads * tiles, 1, first, last);
        for (size_t place = first; place < last; place++) {
            const size_t image = place / (heads * tiles), head = place / tiles % heads, token = place % tiles * tile_rows;
            const Projections from{space_.projections.row(image * tokens), space_.projections.stride, width, tokens,
                                   width / heads};
            if (place / tiles != head_read) scratch_.head.read(from, head), head_read = place / tiles;
            const size_t rows = queries - token < size_t(tile_rows) ? queries - token : size_t(tile_rows);
            scratch_.head.attend(from, head, token, static_cast<int>(rows),
                                 space_.mixed.row(image * tokens + token) + head * from.head_width, space_.mixed.stride);
        }
    }

    const Model<Format>& model_;
    Workspace<Format>& space_;
    Scratch<Format>& scratch_;
    const Member& member_;
};

}  // namespace vitkit
