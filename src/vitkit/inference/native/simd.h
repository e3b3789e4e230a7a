// Portable SIMD vectors: 16 lanes on AVX-512, 8 on AVX2, 4 elsewhere (compiler vector extensions).
//
// All other files are written in terms of `Vec` and `Int`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE__)
#include <xmmintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define VITKIT_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__)
#define VITKIT_AVX2 1
#endif

#define VITKIT_INLINE static inline __attribute__((always_inline))
#define VITKIT_INLINE_MEMBER inline __attribute__((always_inline))

namespace vitkit {

#if VITKIT_AVX512
constexpr int lanes = 16;
#elif VITKIT_AVX2
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * lanes)));
typedef int32_t Int __attribute__((vector_size(4 * lanes)));

// Flush denormals to zero in this thread while in scope. Denormal pixels, which an untrusted client may send, would make
// products ten times slower.
class FlushDenormals {
#if defined(__SSE__)
  public:
    FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
    ~FlushDenormals() { _mm_setcsr(saved_); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

  private:
    unsigned saved_;
#elif defined(__aarch64__)
  public:
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" : : "r"(saved_ | (uint64_t{1} << 24)));  // FZ
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

  private:
    uint64_t saved_;
#endif
};

// Four bytes holding one float, two bfloat16 values, or two or four int8 codes.
typedef uint32_t Word __attribute__((may_alias));

VITKIT_INLINE Vec load(const float* from) {
    Vec vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

VITKIT_INLINE void store(float* to, Vec vector) { std::memcpy(to, &vector, sizeof vector); }

VITKIT_INLINE Int load_words(const Word* from) {
    Int vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

VITKIT_INLINE Vec broadcast(float value) {
#if VITKIT_AVX512
    return (Vec)_mm512_set1_ps(value);
#elif VITKIT_AVX2
    return (Vec)_mm256_set1_ps(value);
#else
    return Vec{value, value, value, value};
#endif
}

VITKIT_INLINE Int broadcast_word(Word value) {
#if VITKIT_AVX512
    return (Int)_mm512_set1_epi32((int)value);
#elif VITKIT_AVX2
    return (Int)_mm256_set1_epi32((int)value);
#else
    const int word = (int)value;
    return Int{word, word, word, word};
#endif
}

// a × b + c, fused where the CPU supports it.
VITKIT_INLINE Vec fmadd(Vec a, Vec b, Vec c) {
#if VITKIT_AVX512
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VITKIT_AVX2
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The intrinsic of this name for two vectors, or `plain` for CPUs without AVX2.
#if VITKIT_AVX512
#define VITKIT_PAIRWISE(name, a, b, plain) (Vec)_mm512_##name##_ps((__m512)(a), (__m512)(b))
#elif VITKIT_AVX2
#define VITKIT_PAIRWISE(name, a, b, plain) (Vec)_mm256_##name##_ps((__m256)(a), (__m256)(b))
#else
#define VITKIT_PAIRWISE(name, a, b, plain) (plain)
#endif

// Maximum and minimum; `b` if either argument is NaN.
VITKIT_INLINE Vec vec_max(Vec a, Vec b) { return VITKIT_PAIRWISE(max, a, b, a > b ? a : b); }
VITKIT_INLINE Vec vec_min(Vec a, Vec b) { return VITKIT_PAIRWISE(min, a, b, a < b ? a : b); }

VITKIT_INLINE Vec round_nearest(Vec a) {
#if VITKIT_AVX512
    return (Vec)_mm512_roundscale_ps((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif VITKIT_AVX2
    return (Vec)_mm256_round_ps((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Vec magic = broadcast(12582912.0f);  // 1.5 × 2²³: adding it rounds to an integer for |a| < 2²²
    return (a + magic) - magic;
#endif
}

VITKIT_INLINE Vec vec_abs(Vec a) { return (Vec)((Int)a & broadcast_word(0x7fffffffu)); }

VITKIT_INLINE Int to_int(Vec a) { return __builtin_convertvector(a, Int); }
VITKIT_INLINE Vec to_float(Int a) { return __builtin_convertvector(a, Vec); }

VITKIT_INLINE float reduce_add(Vec a) {
#if VITKIT_AVX512
    return _mm512_reduce_add_ps((__m512)a);
#else
    float total = 0;
    for (int lane = 0; lane < lanes; lane++) total += a[lane];
    return total;
#endif
}

VITKIT_INLINE float reduce_max(Vec a) {
#if VITKIT_AVX512
    return _mm512_reduce_max_ps((__m512)a);
#else
    float result = a[0];
    for (int lane = 1; lane < lanes; lane++) result = a[lane] > result ? a[lane] : result;
    return result;
#endif
}

VITKIT_INLINE float reduce_min(Vec a) { return -reduce_max(-a); }

// 1 / a to within two ulps, for finite nonzero a.
VITKIT_INLINE Vec reciprocal(Vec a) {
#if VITKIT_AVX512
    const Vec first = (Vec)_mm512_rcp14_ps((__m512)a);  // 14 bits, doubled by one Newton step
    return first * fmadd(-a, first, broadcast(2.0f));
#else
    return broadcast(1.0f) / a;
#endif
}

// 2^a for a ≤ 127. Values below -100 are clamped: negligible next to 1, and products stay normal. NaN stays NaN.
VITKIT_INLINE Vec exp2_approx(Vec a) {
    a = vec_max(broadcast(-100.0f), a);
    const Vec integer = round_nearest(a), fraction = a - integer;
    // Minimax polynomial on [-½, ½]; relative error 8e-8.
    Vec power = broadcast(0.001327647129073739f);
    power = fmadd(power, fraction, broadcast(0.009675540961325169f));
    power = fmadd(power, fraction, broadcast(0.05550713092088699f));
    power = fmadd(power, fraction, broadcast(0.24022120237350464f));
    power = fmadd(power, fraction, broadcast(0.6931469440460205f));
    power = fmadd(power, fraction, broadcast(1.0000001192092896f));
#if VITKIT_AVX512
    return (Vec)_mm512_scalef_ps((__m512)power, (__m512)integer);
#else
    return (Vec)((Int)power + (to_int(integer) << 23));
#endif
}

constexpr float log2e = 1.4426950408889634f;

// GELU (tanh form), computed as x / (1 + e^-2u), u = √(2/π) (x + 0.044715 x³).
VITKIT_INLINE Vec gelu_tanh(Vec x) {
    constexpr float factor = -2.0f * 0.7978845608028654f * log2e;
    const Vec cube = fmadd(x * x, broadcast(factor * 0.044715f), broadcast(factor));
    const Vec power = exp2_approx(vec_min(x * cube, broadcast(100.0f)));
    return x * reciprocal(power + broadcast(1.0f));
}

// GELU (erf form): max(x, 0) - |x| erfc(|x| / √2) / 2, with erf from Abramowitz and Stegun 7.1.26 (error 1.5e-7).
VITKIT_INLINE Vec gelu_erf(Vec x) {
    const Vec abs_x = vec_abs(x);
    const Vec t = reciprocal(fmadd(abs_x, broadcast(0.3275911f * 0.7071067811865476f), broadcast(1.0f)));
    Vec poly = broadcast(0.5f * 1.061405429f);
    poly = fmadd(poly, t, broadcast(0.5f * -1.453152027f));
    poly = fmadd(poly, t, broadcast(0.5f * 1.421413741f));
    poly = fmadd(poly, t, broadcast(0.5f * -0.284496736f));
    poly = fmadd(poly, t, broadcast(0.5f * 0.254829592f));
    const Vec gaussian = exp2_approx(x * x * broadcast(-0.5f * log2e));
    return vec_max(x, broadcast(0.0f)) - abs_x * (poly * t * gaussian);
}

// SiLU: x / (1 + e^-x).
VITKIT_INLINE Vec silu(Vec x) {
    return x * reciprocal(exp2_approx(vec_min(x * broadcast(-log2e), broadcast(100.0f))) + broadcast(1.0f));
}

}  // namespace vitkit
