// The whole engine as four C functions: a model goes in once, then batches of images, and answers come out.
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

// The room that one call works in, and what it does there.
template <class Format>
class Room {
  public:
    explicit Room(const Model<Format>& model) : model_(model) {}

    void reserve(size_t batch, int threads) {
        const size_t tokens = model_.tokens, width = model_.sizes.width, together = batch % threads;
        const size_t kept = model_.reads_class_tokens() ? batch * model_.sizes.class_tokens : batch;
        if (spaces_.size() < size_t(threads)) spaces_.resize(threads);
        if (batch >= size_t(threads))
            for (int number = 0; number < threads; number++) spaces_[number].reserve(model_, tokens);
        const size_t rows = together * tokens;
        shared_.reserve(model_, rows > kept ? rows : kept);
        residual_.reserve(kept, width), mixed_.reserve(kept, width);
        pooled_.reserve(batch, model_.pooled_width()), hidden_.reserve(batch, model_.features());
        logits_.reserve(batch, model_.sizes.classes + 1);
        const size_t longest = model_.patch_values > width ? model_.patch_values : width;
        while (scratch_.size() < size_t(threads))
            scratch_.push_back(std::make_unique<Scratch<Format>>(Scratch<Format>{
                HeadOf<Format>(tokens, width / model_.sizes.heads), Block<float>(rounded_up(longest, tile_columns) + 1)}));
    }

    void run(const float* images, size_t batch, float* tokens, float* features, float* logits, int threads) {
        Barrier all, none;
        all.reset(threads);
        none.reset(1);
        std::atomic<size_t> next{0};
        // Whole images a thread while there is one for each; what is left, all together.
        const size_t together = batch % threads, alone_each = batch - together;
        const size_t pixels = size_t(model_.sizes.channels) * model_.sizes.image_height * model_.sizes.image_width;
        pool().run(threads, [&](int number) {
            [[maybe_unused]] const NoDenormals quick{};
            const Member single{0, 1, &none}, member{number, threads, &all};
            Forward<Format> own(model_, spaces_[number], *scratch_[number], single);
            for (size_t image = next++; image < alone_each; image = next++) {
                own.embed(images + image * pixels, 1);
                own.encode(1);
                keep(own, spaces_[number], image, 1, tokens);
            }
            if (together) {
                Forward<Format> shared(model_, shared_, *scratch_[number], member);
                shared.embed(images + alone_each * pixels, together);
                shared.encode(together);
                keep(shared, shared_, alone_each, together, tokens);
            }
            member.wait();
            if (model_.sizes.pooling != 2) answer(member, *scratch_[number], batch, features, logits);
        });
    }

  private:
    // What is read of images once they are encoded: class tokens, the mean of patches, or all tokens.
    void keep(const Forward<Format>& of, const Workspace<Format>& space, size_t first, size_t count, float* tokens) {
        const size_t width = model_.sizes.width, class_tokens = model_.sizes.class_tokens, prefix = model_.sizes.prefix;
        const bool norm_first = model_.sizes.norm_first;
        if (model_.sizes.pooling == 0) {
            of.each(count * class_tokens, [&](size_t row) {
                const size_t from = row / class_tokens * model_.tokens + row % class_tokens;
                const size_t to = first * class_tokens + row;
                std::memcpy(residual_.row(to), space.residual.row(from), width * sizeof(float));
                std::memcpy(mixed_.row(to), space.mixed.row(from), width * sizeof(float));
            });
        } else if (model_.sizes.pooling == 1) {
            of.each(count, [&](size_t image) {
                float* mean = pooled_.row(first + image);
                std::memset(mean, 0, width * sizeof(float));
                for (size_t token = prefix; token < model_.tokens; token++) {
                    float* row = space.residual.row(image * model_.tokens + token);
                    if (norm_first) normalise(model_.norm, row, row);
                    for (size_t at = 0; at < width; at++) mean[at] += row[at];
                }
                for (size_t at = 0; at < width; at++) mean[at] /= static_cast<float>(model_.patches);
                if (!norm_first) normalise(model_.norm, mean, mean);
            });
        } else {
            of.each(count * model_.tokens, [&](size_t row) {
                float* from = space.residual.row(row);
                if (norm_first) normalise(model_.norm, from, from);
                std::memcpy(tokens + (first * model_.tokens + row) * width, from, width * sizeof(float));
            });
        }
    }

    // The last layer's end for the class tokens of all images, the norm, and the heads.
    void answer(const Member& member, Scratch<Format>& scratch, size_t batch, float* features, float* logits) {
        const size_t width = model_.sizes.width, class_tokens = model_.sizes.class_tokens, wide = model_.features();
        Forward<Format> of(model_, shared_, scratch, member);
        if (model_.reads_class_tokens()) {
            of.finish(model_.layers.back(), residual_, mixed_, batch * class_tokens);
            of.each(batch * class_tokens, [&](size_t row) {
                float* to = pooled_.row(row / class_tokens) + row % class_tokens * width;
                normalise(model_.norm, residual_.row(row), to, false);
            });
            member.wait();
        }
        const Matrix* read = &pooled_;
        if (model_.sizes.pre_logits) {
            share_product(member, model_.pre_logits, pooled_.rows(), hidden_.target(Finish::store), batch);
            member.wait();
            of.each(batch, [&](size_t row) {
                for (size_t at = 0; at < wide; at++) hidden_.row(row)[at] = std::tanh(hidden_.row(row)[at]);
            });
            member.wait();
            read = &hidden_;
        }
        of.each(batch, [&](size_t row) { std::memcpy(features + row * wide, read->row(row), wide * sizeof(float)); });
        if (!logits) return;
        const size_t classes = model_.sizes.classes;
        share_product(member, model_.head, read->rows(), logits_.target(Finish::store), batch);
        member.wait();
        of.each(batch, [&](size_t row) { std::memcpy(logits + row * classes, logits_.row(row), classes * 4); });
    }

    const Model<Format>& model_;
    std::vector<Workspace<Format>> spaces_;
    Workspace<Format> shared_;
    std::vector<std::unique_ptr<Scratch<Format>>> scratch_;
    Matrix residual_, mixed_, pooled_, hidden_, logits_;
};

template <class Format>
class EngineOf final : public Engine {
  public:
    EngineOf(const VitkitSizes& sizes, const VitkitWeights& weights, const VitkitLayer* layers)
        : model_(sizes, weights, layers) {}

    size_t bytes() const override { return model_.bytes(); }

    void run(const float* images, size_t batch, float* tokens, float* features, float* logits, int threads) override {
        if (threads > 1) {
            const std::lock_guard<std::mutex> alone(pool().turn());
            reserve(together_, batch, threads);
            together_.run(images, batch, tokens, features, logits, threads);
        } else {  // who needs no thread but his own is in nobody's way
            std::unique_ptr<Room<Format>> room = free_room();
            reserve(*room, batch, 1);
            room->run(images, batch, tokens, features, logits, 1);
            const std::lock_guard<std::mutex> unforked(pool().growing());
            free_.push_back(std::move(room));
        }
    }

  private:
    void reserve(Room<Format>& room, size_t batch, int threads) {
        const std::lock_guard<std::mutex> unforked(pool().growing());
        room.reserve(batch, threads);
    }

    std::unique_ptr<Room<Format>> free_room() {
        const std::lock_guard<std::mutex> unforked(pool().growing());
        if (free_.empty()) return std::make_unique<Room<Format>>(model_);
        std::unique_ptr<Room<Format>> room = std::move(free_.back());
        free_.pop_back();
        return room;
    }

    const Model<Format> model_;
    Room<Format> together_{model_};
    std::vector<std::unique_ptr<Room<Format>>> free_;  // of calls on one thread: as many as there were at once
};

}  // namespace vitkit

// All else is hidden: two libraries in one process, for other machines or of other sources, must not share threads.
#define VITKIT_API extern "C" __attribute__((visibility("default")))

// 0 float32, 1 bfloat16, 2 int8. Null where memory is short.
VITKIT_API void* vitkit_create(const VitkitSizes* sizes, const VitkitWeights* weights, const VitkitLayer* layers,
                               int precision) {
    using namespace vitkit;
    try {
        if (precision == 0) return static_cast<Engine*>(new EngineOf<Float32>(*sizes, *weights, layers));
        if (precision == 1) return static_cast<Engine*>(new EngineOf<Half>(*sizes, *weights, layers));
        if (precision == 2) return static_cast<Engine*>(new EngineOf<Int8>(*sizes, *weights, layers));
    } catch (const std::exception&) {
    }
    return nullptr;
}

// 0 if all went well. `tokens` is for models without pooling here, the others for those with; `logits` may be null.
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

// What the kernels were compiled for, in people's words.
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
