// Model configuration and weights, packed for the kernels.
#pragma once

#include <memory>
#include <vector>

#include "layer_norm.h"

extern "C" {

// Mirrored by `Sizes` in library.py, in this order.
struct VitkitSizes {
    int32_t channels, image_height, image_width, patch_height, patch_width;
    int32_t width, depth, heads, mlp_dim;
    int32_t prefix, class_tokens;
    int32_t pooling;     // 0 class token, 1 mean, 2 none (tokens are returned)
    int32_t activation;  // 0 GELU (tanh), 1 GELU (erf), 2 SwiGLU (fc1 has gates, then values)
    int32_t norm_first;  // whether the final norm precedes pooling
    int32_t pre_logits, num_classes;
    float norm_epsilon;
};

// Mirrored by `LayerWeights` in library.py. Absent parameters are null.
struct VitkitLayer {
    const float* positions;
    const float *norm1_weight, *norm1_bias, *qkv_weight, *qkv_bias;
    const float *q_norm_weight, *q_norm_bias, *k_norm_weight, *k_norm_bias;
    const float *proj_weight, *proj_bias, *scale1;
    const float *norm2_weight, *norm2_bias, *fc1_weight, *fc1_bias, *fc2_weight, *fc2_bias, *scale2;
};

// Mirrored by `ModelWeights` in library.py. `initial_tokens` are the tokens before patches are added:
// positions, learned tokens and the patch embedding's bias. `cosine` and `sine` (patches × head width) are rotary embeddings.
struct VitkitWeights {
    const float *cosine, *sine;
    const float *initial_tokens, *patch_weight, *norm_weight, *norm_bias;
    const float *pre_logits_weight, *pre_logits_bias, *head_weight, *head_bias;
};
}

namespace vitkit {

// The MLP's hidden layer is computed in blocks of this many columns, so that one block for all tokens of an image stays
// in the L2 cache.
constexpr size_t mlp_block = 1024;

template <class Format>
struct Layer {
    std::vector<float> positions;
    LayerNorm norm1, norm2, q_norm, k_norm;
    bool has_qk_norm = false;
    Weights<Format> qkv, proj;
    std::vector<Weights<Format>> fc1, fc2;

    Layer(const VitkitSizes& sizes, const VitkitLayer& from, size_t tokens) {
        const size_t width = sizes.width, mlp_dim = sizes.mlp_dim, head_width = width / sizes.heads;
        if (from.positions) positions.assign(from.positions, from.positions + tokens * width);
        norm1 = LayerNorm(from.norm1_weight, from.norm1_bias, width, sizes.norm_epsilon);
        norm2 = LayerNorm(from.norm2_weight, from.norm2_bias, width, sizes.norm_epsilon);
        // Fold 1/√d_k and the log2(e) of exp2 into the query projection (or the query norm).
        const float scale = log2e / std::sqrt(static_cast<float>(head_width));
        has_qk_norm = from.q_norm_weight != nullptr;
        std::vector<float> factor(3 * width, 1.0f);
        if (has_qk_norm) {
            q_norm = LayerNorm(from.q_norm_weight, from.q_norm_bias, head_width, sizes.norm_epsilon, scale);
            k_norm = LayerNorm(from.k_norm_weight, from.k_norm_bias, head_width, sizes.norm_epsilon);
        } else {
            for (size_t column = 0; column < width; column++) factor[column] = scale;
        }
        qkv = pack<Format>(from.qkv_weight, width, from.qkv_bias, width, 3 * width, factor.data());
        proj = pack<Format>(from.proj_weight, width, from.proj_bias, width, width, from.scale1);
        const bool gated = sizes.activation == 2;
        const size_t block_limit = gated ? mlp_block / 2 : mlp_block;
        const size_t blocks = (mlp_dim + block_limit - 1) / block_limit;
        const size_t block = round_up((mlp_dim + blocks - 1) / blocks, tile_columns);
        for (size_t first = 0; first < mlp_dim; first += block) {
            const size_t count = mlp_dim - first < block ? mlp_dim - first : block;
            // SwiGLU: a block's gates precede its values.
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
    std::vector<float> initial_tokens, cosine, sine;
    Weights<Format> patch;
    std::vector<Layer<Format>> layers;
    LayerNorm norm;
    Weights<Float32> pre_logits, head;  // always float32: small, and directly before the output

    Model(const VitkitSizes& sizes_, const VitkitWeights& from, const VitkitLayer* layer_weights)
        : sizes(sizes_),
          grid_rows(sizes.image_height / sizes.patch_height),
          grid_columns(sizes.image_width / sizes.patch_width),
          patches(grid_rows * grid_columns),
          tokens(sizes.prefix + patches),
          patch_values(static_cast<size_t>(sizes.channels) * sizes.patch_height * sizes.patch_width) {
        const size_t width = sizes.width;
        initial_tokens.assign(from.initial_tokens, from.initial_tokens + tokens * width);
        const size_t rotary_values = from.cosine ? patches * (width / sizes.heads) : 0;
        cosine.assign(from.cosine, from.cosine + rotary_values), sine.assign(from.sine, from.sine + rotary_values);
        patch = pack<Format>(from.patch_weight, patch_values, nullptr, patch_values, width, nullptr);
        for (int32_t layer = 0; layer < sizes.depth; layer++) layers.emplace_back(sizes, layer_weights[layer], tokens);
        if (from.norm_weight) norm = LayerNorm(from.norm_weight, from.norm_bias, width, sizes.norm_epsilon);
        const size_t pooled = pooled_width();
        if (sizes.pre_logits)
            pre_logits =
                pack<Float32>(from.pre_logits_weight, pooled, from.pre_logits_bias, pooled, sizes.pre_logits, nullptr);
        if (sizes.num_classes)
            head = pack<Float32>(from.head_weight, features(), from.head_bias, features(), sizes.num_classes, nullptr);
    }

    // Whether pooling reads only the class tokens.
    bool reads_class_tokens() const { return sizes.pooling == 0; }
    size_t pooled_width() const { return sizes.width * (reads_class_tokens() ? sizes.class_tokens : 1); }
    size_t features() const { return sizes.pre_logits ? sizes.pre_logits : pooled_width(); }

    size_t bytes() const {
        size_t total = initial_tokens.size() * sizeof(float) + patch.bytes() + pre_logits.bytes() + head.bytes();
        for (const auto& layer : layers) total += layer.bytes();
        return total;
    }
};

}  // namespace vitkit
