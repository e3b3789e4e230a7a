// Numbers in rows of `lanes` go in, the same arithmetic on all of them at once comes out.
//
// Everything above this file is written once, in terms of `Vec` and `Int`. Here they are 16 lanes on AVX-512, 8 on
// AVX2, and 4 elsewhere, where the compiler's own vector types are right on every machine.
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
// While one of these lives, its thread counts denormal numbers as zero: with pixels that are all denormal, products
// would take ten times as long, and a stranger may send them.
class NoDenormals {
#if defined(__SSE__)
  public:
    NoDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
    ~NoDenormals() { _mm_setcsr(before_); }
    NoDenormals(const NoDenormals&) = delete;
    NoDenormals& operator=(const NoDenormals&) = delete;

  private:
    unsigned before_;
#endif
};

// Four bytes that hold one float, two bfloat16, or two or four int8.
typedef uint32_t Word __attribute__((may_alias));

VITKIT_INLINE Vec load(const float* from) {
    Vec all;
    std::memcpy(&all, from, sizeof all);
    return all;
}

VITKIT_INLINE void store(float* to, Vec all) { std::memcpy(to, &all, sizeof all); }

VITKIT_INLINE Int load_words(const Word* from) {
    Int all;
    std::memcpy(&all, from, sizeof all);
    return all;
}

VITKIT_INLINE Vec same(float value) {
#if VITKIT_AVX512
    return (Vec)_mm512_set1_ps(value);
#elif VITKIT_AVX2
    return (Vec)_mm256_set1_ps(value);
#else
    return Vec{value, value, value, value};
#endif
}

VITKIT_INLINE Int same_word(Word value) {
#if VITKIT_AVX512
    return (Int)_mm512_set1_epi32((int)value);
#elif VITKIT_AVX2
    return (Int)_mm256_set1_epi32((int)value);
#else
    const int word = (int)value;
    return Int{word, word, word, word};
#endif
}

// a × b + c, rounded once wherever the machine can.
VITKIT_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if VITKIT_AVX512
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VITKIT_AVX2
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Of these two, `b` comes out where one of them is not a number.
VITKIT_INLINE Vec larger(Vec a, Vec b) {
#if VITKIT_AVX512
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif VITKIT_AVX2
    return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

VITKIT_INLINE Vec smaller(Vec a, Vec b) {
#if VITKIT_AVX512
    return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif VITKIT_AVX2
    return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

VITKIT_INLINE Vec nearest(Vec a) {
#if VITKIT_AVX512
    return (Vec)_mm512_roundscale_ps((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif VITKIT_AVX2
    return (Vec)_mm256_round_ps((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Vec magic = same(12582912.0f);  // 1.5 × 2²³: adding it rounds to a whole number; for |a| < 2²²
    return (a + magic) - magic;
#endif
}

VITKIT_INLINE Vec magnitude(Vec a) { return (Vec)((Int)a & same_word(0x7fffffffu)); }

VITKIT_INLINE Int to_int(Vec a) { return __builtin_convertvector(a, Int); }
VITKIT_INLINE Vec to_float(Int a) { return __builtin_convertvector(a, Vec); }

VITKIT_INLINE float sum_of(Vec a) {
#if VITKIT_AVX512
    return _mm512_reduce_add_ps((__m512)a);
#else
    float total = 0;
    for (int lane = 0; lane < lanes; lane++) total += a[lane];
    return total;
#endif
}

VITKIT_INLINE float largest_of(Vec a) {
#if VITKIT_AVX512
    return _mm512_reduce_max_ps((__m512)a);
#else
    float found = a[0];
    for (int lane = 1; lane < lanes; lane++) found = a[lane] > found ? a[lane] : found;
    return found;
#endif
}

VITKIT_INLINE float smallest_of(Vec a) { return -largest_of(-a); }

// 1 / a to the last bit or two, for a that is neither 0 nor infinite.
VITKIT_INLINE Vec reciprocal(Vec a) {
#if VITKIT_AVX512
    const Vec first = (Vec)_mm512_rcp14_ps((__m512)a);  // 14 bits; one step of Newton's doubles them
    return first * multiply_add(-a, first, same(2.0f));
#else
    return same(1.0f) / a;
#endif
}

// 2 to the power of a, for a ≤ 127. What is below -100 counts as -100: nothing beside 1, and its products are not
// denormal, which would be slow. What is not a number stays none.
VITKIT_INLINE Vec power_of_two(Vec a) {
    a = larger(same(-100.0f), a);
    const Vec whole = nearest(a), rest = a - whole;
    // The least largest relative error on [-½, ½] at this degree: 8e-8.
    Vec power = same(0.001327647129073739f);
    power = multiply_add(power, rest, same(0.009675540961325169f));
    power = multiply_add(power, rest, same(0.05550713092088699f));
    power = multiply_add(power, rest, same(0.24022120237350464f));
    power = multiply_add(power, rest, same(0.6931469440460205f));
    power = multiply_add(power, rest, same(1.0000001192092896f));
#if VITKIT_AVX512
    return (Vec)_mm512_scalef_ps((__m512)power, (__m512)whole);
#else
    return (Vec)((Int)power + (to_int(whole) << 23));
#endif
}

constexpr float log2_of_e = 1.4426950408889634f;

// x Φ(x) with Φ by tanh, written as x / (1 + e^-2u), u = √(2/π) (x + 0.044715 x³).
VITKIT_INLINE Vec gelu_tanh(Vec x) {
    constexpr float factor = -2.0f * 0.7978845608028654f * log2_of_e;
    const Vec cube = multiply_add(x * x, same(factor * 0.044715f), same(factor));
    const Vec power = power_of_two(smaller(x * cube, same(100.0f)));
    return x * reciprocal(power + same(1.0f));
}

// x Φ(x) with Φ by erf (Abramowitz and Stegun 7.1.26: erf to 1.5e-7): max(x, 0) - |x| erfc(|x| / √2) / 2.
VITKIT_INLINE Vec gelu_erf(Vec x) {
    const Vec size = magnitude(x);
    const Vec place = reciprocal(multiply_add(size, same(0.3275911f * 0.7071067811865476f), same(1.0f)));
    Vec tail = same(0.5f * 1.061405429f);
    tail = multiply_add(tail, place, same(0.5f * -1.453152027f));
    tail = multiply_add(tail, place, same(0.5f * 1.421413741f));
    tail = multiply_add(tail, place, same(0.5f * -0.284496736f));
    tail = multiply_add(tail, place, same(0.5f * 0.254829592f));
    const Vec bell = power_of_two(x * x * same(-0.5f * log2_of_e));
    return larger(x, same(0.0f)) - size * (tail * place * bell);
}

// x / (1 + e^-x).
VITKIT_INLINE Vec silu(Vec x) {
    return x * reciprocal(power_of_two(smaller(x * same(-log2_of_e), same(100.0f))) + same(1.0f));
}

}  // namespace vitkit
