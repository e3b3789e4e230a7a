// C interface of the engine: create, run, measure, destroy.
#include <cstdio>
#include <string>

#include "forward.h"

namespace vitkit {

class Engine {
  public:
    virtual ~Engine() = default;
    virtual void run(const float* images, size_t batch, float* tokens, float* features, float* logits, int threads) = 0;
    virtual size_t bytes() const = 0;
};

// Buffers of one concurrent call, and the computation on them.
template <class Format>
class CallContext {
  public:
    explicit CallContext(const Model<Format>& model) : model_(model) {}

    void reserve(size_t batch, int threads) {
        const size_t tokens = model_.tokens, width = model_.sizes.width, shared_images = batch % threads;
        const size_t pooled_rows = model_.reads_class_tokens() ? batch * model_.sizes.class_tokens : batch;
        if (spaces_.size() < size_t(threads)) spaces_.resize(threads);
        if (batch >= size_t(threads))
            for (int index = 0; index < threads; index++) spaces_[index].reserve(model_, tokens);
        const size_t rows = shared_images * tokens;
        shared_.reserve(model_, rows > pooled_rows ? rows : pooled_rows);
        residual_.reserve(pooled_rows, width), attended_.reserve(pooled_rows, width);
        pooled_.reserve(batch, model_.pooled_width()), hidden_.reserve(batch, model_.features());
        logits_.reserve(batch, model_.sizes.num_classes + 1);
        const size_t longest = model_.patch_values > width ? model_.patch_values : width;
        while (scratch_.size() < size_t(threads))
            scratch_.push_back(std::make_unique<Scratch<Format>>(
                Scratch<Format>{AttentionHeadFor<Format>(tokens, width / model_.sizes.heads),
                                AlignedBuffer<float>(round_up(longest, tile_columns) + 1)}));
    }

    void run(const float* images, size_t batch, float* tokens, float* features, float* logits, int threads) {
        Barrier barrier, single_barrier;
        barrier.reset(threads);
        single_barrier.reset(1);
        std::atomic<size_t> next{0};
        // Whole images per thread while there are enough; all threads share the rest.
        const size_t shared_images = batch % threads, whole_images = batch - shared_images;
        const size_t pixels = size_t(model_.sizes.channels) * model_.sizes.image_height * model_.sizes.image_width;
        pool().run(threads, [&](int index) {
            [[maybe_unused]] const FlushDenormals flush{};
            const ThreadSlice single{0, 1, &single_barrier}, slice{index, threads, &barrier};
            Forward<Format> forward(model_, spaces_[index], *scratch_[index], single);
            for (size_t image = next++; image < whole_images; image = next++) {
                forward.embed(images + image * pixels, 1);
                forward.encode(1);
                store_output(forward, spaces_[index], image, 1, tokens);
            }
            if (shared_images) {
                Forward<Format> shared(model_, shared_, *scratch_[index], slice);
                shared.embed(images + whole_images * pixels, shared_images);
                shared.encode(shared_images);
                store_output(shared, shared_, whole_images, shared_images, tokens);
            }
            slice.wait();
            if (model_.sizes.pooling != 2) apply_head(slice, *scratch_[index], batch, features, logits);
        });
    }

  private:
    // Copy what pooling reads: class tokens, the mean of the patches, or all tokens.
    void store_output(const Forward<Format>& forward, const Workspace<Format>& space, size_t first, size_t count,
                      float* tokens) {
        const size_t width = model_.sizes.width, class_tokens = model_.sizes.class_tokens, prefix = model_.sizes.prefix;
        const bool norm_first = model_.sizes.norm_first;
        if (model_.sizes.pooling == 0) {
            forward.for_each_row(count * class_tokens, [&](size_t row) {
                const size_t from = row / class_tokens * model_.tokens + row % class_tokens;
                const size_t to = first * class_tokens + row;
                std::memcpy(residual_.row(to), space.residual.row(from), width * sizeof(float));
                std::memcpy(attended_.row(to), space.attended.row(from), width * sizeof(float));
            });
        } else if (model_.sizes.pooling == 1) {
            forward.for_each_row(count, [&](size_t image) {
                float* mean = pooled_.row(first + image);
                std::memset(mean, 0, width * sizeof(float));
                for (size_t token = prefix; token < model_.tokens; token++) {
                    float* row = space.residual.row(image * model_.tokens + token);
                    if (norm_first) layer_norm(model_.norm, row, row);
                    for (size_t i = 0; i < width; i++) mean[i] += row[i];
                }
                for (size_t i = 0; i < width; i++) mean[i] /= static_cast<float>(model_.patches);
                if (!norm_first) layer_norm(model_.norm, mean, mean);
            });
        } else {
            forward.for_each_row(count * model_.tokens, [&](size_t row) {
                float* from = space.residual.row(row);
                if (norm_first) layer_norm(model_.norm, from, from);
                std::memcpy(tokens + (first * model_.tokens + row) * width, from, width * sizeof(float));
            });
        }
    }

    // Complete the last layer for the class tokens, then apply the final norm, pre-logits and head.
    void apply_head(const ThreadSlice& slice, Scratch<Format>& scratch, size_t batch, float* features, float* logits) {
        const size_t width = model_.sizes.width, class_tokens = model_.sizes.class_tokens,
                     feature_width = model_.features();
        Forward<Format> forward(model_, shared_, scratch, slice);
        if (model_.reads_class_tokens()) {
            forward.project_and_mlp(model_.layers.back(), residual_, attended_, batch * class_tokens);
            forward.for_each_row(batch * class_tokens, [&](size_t row) {
                float* to = pooled_.row(row / class_tokens) + row % class_tokens * width;
                layer_norm(model_.norm, residual_.row(row), to, false);
            });
            slice.wait();
        }
        const Matrix* head_input = &pooled_;
        if (model_.sizes.pre_logits) {
            parallel_gemm(slice, model_.pre_logits, pooled_.rows(), hidden_.output(Epilogue::store), batch);
            slice.wait();
            forward.for_each_row(batch, [&](size_t row) {
                for (size_t i = 0; i < feature_width; i++) hidden_.row(row)[i] = std::tanh(hidden_.row(row)[i]);
            });
            slice.wait();
            head_input = &hidden_;
        }
        forward.for_each_row(batch, [&](size_t row) {
            std::memcpy(features + row * feature_width, head_input->row(row), feature_width * sizeof(float));
        });
        if (!logits) return;
        const size_t classes = model_.sizes.num_classes;
        parallel_gemm(slice, model_.head, head_input->rows(), logits_.output(Epilogue::store), batch);
        slice.wait();
        forward.for_each_row(batch, [&](size_t row) {
            std::memcpy(logits + row * classes, logits_.row(row), classes * sizeof(float));
        });
    }

    const Model<Format>& model_;
    std::vector<Workspace<Format>> spaces_;
    Workspace<Format> shared_;
    std::vector<std::unique_ptr<Scratch<Format>>> scratch_;
    Matrix residual_, attended_, pooled_, hidden_, logits_;
};

template <class Format>
class EngineFor final : public Engine {
  public:
    EngineFor(const VitkitSizes& sizes, const VitkitWeights& weights, const VitkitLayer* layers)
        : model_(sizes, weights, layers) {}

    size_t bytes() const override { return model_.bytes(); }

    void run(const float* images, size_t batch, float* tokens, float* features, float* logits, int threads) override {
        if (threads > 1) {
            const std::lock_guard<std::mutex> lock(pool().caller_mutex());
            reserve(parallel_context_, batch, threads);
            parallel_context_.run(images, batch, tokens, features, logits, threads);
        } else {  // single-threaded calls run concurrently, each in its own context
            std::unique_ptr<CallContext<Format>> context = take_context();
            reserve(*context, batch, 1);
            context->run(images, batch, tokens, features, logits, 1);
            const std::lock_guard<std::mutex> lock(pool().fork_mutex());
            idle_contexts_.push_back(std::move(context));
        }
    }

  private:
    void reserve(CallContext<Format>& context, size_t batch, int threads) {
        const std::lock_guard<std::mutex> lock(pool().fork_mutex());
        context.reserve(batch, threads);
    }

    std::unique_ptr<CallContext<Format>> take_context() {
        const std::lock_guard<std::mutex> lock(pool().fork_mutex());
        if (idle_contexts_.empty()) return std::make_unique<CallContext<Format>>(model_);
        std::unique_ptr<CallContext<Format>> context = std::move(idle_contexts_.back());
        idle_contexts_.pop_back();
        return context;
    }

    const Model<Format> model_;
    CallContext<Format> parallel_context_{model_};
    std::vector<std::unique_ptr<CallContext<Format>>> idle_contexts_;  // for single-threaded calls
};

}  // namespace vitkit

// Other symbols are hidden: two builds loaded into one process must not share a thread pool.
#define VITKIT_API extern "C" __attribute__((visibility("default")))

// Precision: 0 float32, 1 bfloat16, 2 int8. Returns null if memory is exhausted.
VITKIT_API void* vitkit_create(const VitkitSizes* sizes, const VitkitWeights* weights, const VitkitLayer* layers,
                               int precision) {
    using namespace vitkit;
    try {
        if (precision == 0) return static_cast<Engine*>(new EngineFor<Float32>(*sizes, *weights, layers));
        if (precision == 1) return static_cast<Engine*>(new EngineFor<Bf16Format>(*sizes, *weights, layers));
        if (precision == 2) return static_cast<Engine*>(new EngineFor<Int8>(*sizes, *weights, layers));
    } catch (const std::exception&) {}
    return nullptr;
}

// Returns 0 on success. `tokens` is written by models without pooling, `features` and `logits` by the others; `logits`
// may be null.
VITKIT_API int vitkit_run(void* engine, const float* images, size_t batch, float* tokens, float* features,
                          float* logits, int threads) {
    try {
        static_cast<vitkit::Engine*>(engine)->run(images, batch, tokens, features, logits, threads);
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}

VITKIT_API size_t vitkit_bytes(const void* engine) { return static_cast<const vitkit::Engine*>(engine)->bytes(); }

VITKIT_API void vitkit_destroy(void* engine) { delete static_cast<vitkit::Engine*>(engine); }

// Name of the instruction set that the kernels were compiled for.
VITKIT_API const char* vitkit_instructions() {
#if VITKIT_AVX512 && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
    return "AVX-512 VNNI BF16";
#elif VITKIT_AVX512 && defined(__AVX512VNNI__)
    return "AVX-512 VNNI";
#elif VITKIT_AVX512
    return "AVX-512";
#elif VITKIT_AVX2
    return "AVX2";
#else
    return "portable";
#endif
}
