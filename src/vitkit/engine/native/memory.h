// A number of bytes goes in, memory that starts on a cache line, and on large pages where it is large, comes out.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace vitkit {

// Zeroed memory for `count` values. It frees itself.
template <class Value>
class Block {
  public:
    Block() = default;
    explicit Block(size_t count) : count_(count) {
        if (count == 0) return;
        constexpr size_t large = size_t{2} << 20;
        const size_t bytes = count * sizeof(Value) + 64;  // a vector may be read a little past the end
        const size_t step = bytes >= large ? large : 64;
        const size_t whole = (bytes + step - 1) / step * step;
        void* found = nullptr;
        if (posix_memalign(&found, step, whole) != 0) throw std::bad_alloc();
#if defined(__linux__)
        // Weights are read from end to end in every pass: with large pages the table of pages stays in the core.
        if (step == large) madvise(found, whole, MADV_HUGEPAGE);
#endif
        std::memset(found, 0, whole);
        data_ = static_cast<Value*>(found);
    }
    Block(Block&& other) noexcept : data_(other.data_), count_(other.count_) { other.data_ = nullptr, other.count_ = 0; }
    Block& operator=(Block&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block() { std::free(data_); }

    Value* data() const { return data_; }
    Value& operator[](size_t index) const { return data_[index]; }
    size_t count() const { return count_; }
    size_t bytes() const { return count_ * sizeof(Value); }

    // Room for at least `count` values, zeroed if it is new.
    void reserve(size_t count) {
        if (count > count_) *this = Block(count);
    }

  private:
    Value* data_ = nullptr;
    size_t count_ = 0;
};

}  // namespace vitkit
