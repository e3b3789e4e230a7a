// Aligned, zeroed buffers; large ones use huge pages.
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

// Owning buffer of `count` zeroed values, aligned to a cache line.
template <class Value>
class AlignedBuffer {
  public:
    AlignedBuffer() = default;
    explicit AlignedBuffer(size_t count) : count_(count) {
        if (count == 0) return;
        constexpr size_t huge_page = size_t{2} << 20;
        const size_t bytes = count * sizeof(Value) + 64;  // vector loads may read past the end
        const size_t alignment = bytes >= huge_page ? huge_page : 64;
        const size_t size = (bytes + alignment - 1) / alignment * alignment;
        void* pointer = nullptr;
        if (posix_memalign(&pointer, alignment, size) != 0) throw std::bad_alloc();
#if defined(__linux__)
        // Weights are streamed in every forward pass; huge pages keep them within the TLB.
        if (alignment == huge_page) madvise(pointer, size, MADV_HUGEPAGE);
#endif
        std::memset(pointer, 0, size);
        data_ = static_cast<Value*>(pointer);
    }
    AlignedBuffer(AlignedBuffer&& other) noexcept : data_(other.data_), count_(other.count_) {
        other.data_ = nullptr, other.count_ = 0;
    }
    AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    AlignedBuffer(const AlignedBuffer&) = delete;
    AlignedBuffer& operator=(const AlignedBuffer&) = delete;
    ~AlignedBuffer() { std::free(data_); }

    Value* data() const { return data_; }
    Value& operator[](size_t index) const { return data_[index]; }
    size_t count() const { return count_; }
    size_t bytes() const { return count_ * sizeof(Value); }

    // Ensure room for `count` values; newly allocated memory is zeroed.
    void reserve(size_t count) {
        if (count > count_) *this = AlignedBuffer(count);
    }

  private:
    Value* data_ = nullptr;
    size_t count_ = 0;
};

}  // namespace vitkit
