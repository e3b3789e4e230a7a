// A model's sizes and torch weights go in; the same weights, packed for the kernels, come out.
#pragma once

#include <memory>
#include <vector>

#include "rows.h"

extern "C" {

// Mirrored by `Sizes` in binding.py, in this order.
struct VitkitSizes {
    int32_t channels, image_height, image_width, patch_height, patch_width;
    int32_t width, depth, heads, mlp_dim;
    int32_t prefix, class_tokens;
    int32_t pooling;     // 0 class, 1 mean, 2 none: the tokens come out
    int32_t activation;  // 0 GELU by tanh, 1 GELU by erf, 2 SwiGLU: twice as many outputs, the gates first
    int32_t norm_first;  // whether the last norm comes before pooling
    int32_t pre_logits, classes;
    float norm_epsilon;
};

// Mirrored by `LayerWeights` in binding.py. What a model does not have is null.
struct VitkitLayer {
    const float *positions;
    const float *norm1_weight, *norm1_bias, *qkv_weight, *qkv_bias;
    const float *q_norm_weight, *q_norm_bias, *k_norm_weight, *k_norm_bias;
    const float *proj_weight, *proj_bias, *scale1;
    const float *norm2_weight, *norm2_bias, *fc1_weight, *fc1_bias, *fc2_weight, *fc2_bias, *scale2;
};

// Mirrored by `ModelWeights` in binding.py. `start` is what the tokens are before the patches are added: positions,
// learned tokens and the embedding's bias. `cosine` and `sine` are rotary positions, patches × width of a head.
struct VitkitWeights {
    const float *cosine, *sine;
    const float *start, *patch_weight, *norm_weight, *norm_bias;
    const float *pre_logits_weight, *pre_logits_bias, *head_weight, *head_bias;
};
}

namespace vitkit {

// Outputs of the MLP's first layer are made and used up this many at a time: a block's worth of all tokens of an image
// stays in a core's own cache, whatever the model's size.
constexpr size_t hidden_block = 1024;

template <class Format>
struct Layer {
    std::vector<float> positions;
    Norm norm1, norm2, q_norm, k_norm;
    bool norms_heads = false;
    Weights<Format> qkv, proj;
    std::vector<Weights<Format>> fc1, fc2;

    Layer(const VitkitSizes& sizes, const VitkitLayer& from, size_t tokens) {
        const size_t width = sizes.width, mlp_dim = sizes.mlp_dim, head_width = width / sizes.heads;
        if (from.positions) positions.assign(from.positions, from.positions + tokens * width);
        norm1 = Norm(from.norm1_weight, from.norm1_bias, width, sizes.norm_epsilon);
        norm2 = Norm(from.norm2_weight, from.norm2_bias, width, sizes.norm_epsilon);
        // Scores are scaled by 1/√K, and by log2(e) for powers of two: once, in what makes the queries.
        const float scale = log2_of_e / std::sqrt(static_cast<float>(head_width));
        norms_heads = from.q_norm_weight != nullptr;
        std::vector<float> factor(3 * width, 1.0f);
        if (norms_heads) {
            q_norm = Norm(from.q_norm_weight, from.q_norm_bias, head_width, sizes.norm_epsilon, scale);
            k_norm = Norm(from.k_norm_weight, from.k_norm_bias, head_width, sizes.norm_epsilon);
        } else {
            for (size_t column = 0; column < width; column++) factor[column] = scale;
        }
        qkv = pack<Format>(from.qkv_weight, width, from.qkv_bias, width, 3 * width, factor.data());
        proj = pack<Format>(from.proj_weight, width, from.proj_bias, width, width, from.scale1);
        const bool gated = sizes.activation == 2;
        const size_t at_once = gated ? hidden_block / 2 : hidden_block;
        const size_t blocks = (mlp_dim + at_once - 1) / at_once;
        const size_t block = rounded_up((mlp_dim + blocks - 1) / blocks, tile_columns);
        for (size_t first = 0; first < mlp_dim; first += block) {
            const size_t count = mlp_dim - first < block ? mlp_dim - first : block;
            // Where there are gates, a block's gates stand before what they let through.
            std::vector<float> weight, bias;
            for (size_t part = 0; part < (gated ? 2 : 1); part++) {
                const size_t begin = part * mlp_dim + first, end = begin + count;
                weight.insert(weight.end(), from.fc1_weight + begin * width, from.fc1_weight + end * width);
                bias.insert(bias.end(), from.fc1_bias + begin, from.fc1_bias + end);
            }
            fc1.push_back(pack<Format>(weight.data(), width, bias.data(), width, bias.size(), nullptr));
            fc2.push_back(pack<Format>(from.fc2_weight + first, mlp_dim, first ? nullptr : from.fc2_bias, count, width,
                                       from.scale2));
        }
    }

    size_t bytes() const {
        size_t total = qkv.bytes() + proj.bytes() + positions.size() * sizeof(float);
        for (const auto& block : fc1) total += block.bytes();
        for (const auto& block : fc2) total += block.bytes();
        return total;
    }
};

template <class Format>
struct Model {
    VitkitSizes sizes;
    size_t grid_rows, grid_columns, patches, tokens, patch_values;
    std::vector<float> start, cosine, sine;
    Weights<Format> patch;
    std::vector<Layer<Format>> layers;
    Norm norm;
    Weights<Float32> pre_logits, head;  // few numbers, and the last to be rounded: float32 always

    Model(const VitkitSizes& sizes_, const VitkitWeights& from, const VitkitLayer* each)
        : sizes(sizes_), grid_rows(sizes.image_height / sizes.patch_height),
          grid_columns(sizes.image_width / sizes.patch_width), patches(grid_rows * grid_columns),
          tokens(sizes.prefix + patches),
          patch_values(static_cast<size_t>(sizes.channels) * sizes.patch_height * sizes.patch_width) {
        const size_t width = sizes.width;
        start.assign(from.start, from.start + tokens * width);
        const size_t turned = from.cosine ? patches * (width / sizes.heads) : 0;
        cosine.assign(from.cosine, from.cosine + turned), sine.assign(from.sine, from.sine + turned);
        patch = pack<Format>(from.patch_weight, patch_values, nullptr, patch_values, width, nullptr);
        for (int32_t layer = 0; layer < sizes.depth; layer++) layers.emplace_back(sizes, each[layer], tokens);
        if (from.norm_weight) norm = Norm(from.norm_weight, from.norm_bias, width, sizes.norm_epsilon);
        const size_t pooled = pooled_width();
        if (sizes.pre_logits)
            pre_logits = pack<Float32>(from.pre_logits_weight, pooled, from.pre_logits_bias, pooled, sizes.pre_logits,
                                       nullptr);
        if (sizes.classes)
            head = pack<Float32>(from.head_weight, features(), from.head_bias, features(), sizes.classes, nullptr);
    }

    // The rows of the last layer that are read: all, or the class tokens alone.
    bool reads_class_tokens() const { return sizes.pooling == 0; }
    size_t pooled_width() const { return sizes.width * (reads_class_tokens() ? sizes.class_tokens : 1); }
    size_t features() const { return sizes.pre_logits ? sizes.pre_logits : pooled_width(); }

    size_t bytes() const {
        size_t total = start.size() * sizeof(float) + patch.bytes() + pre_logits.bytes() + head.bytes();
        for (const auto& layer : layers) total += layer.bytes();
        return total;
    }
};

}  // namespace vitkit
