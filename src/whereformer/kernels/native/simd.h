// Vectors of 16 numbers, made of as many parts as the processor's registers need, by the compiler's own vectors. Only
// what those lack (a maximum, a dot product of bfloat16) is written in a processor's words, each with a portable twin.
#pragma once
#include <cmath>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace whereformer {
namespace LEVEL {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

struct bf16 { uint16_t bits; };

constexpr int64_t L = 16;  // numbers in a vector

template <class T> INLINE T larger(T a, T b) { return a > b ? a : b; }
template <class T> INLINE T smaller(T a, T b) { return a < b ? a : b; }
template <class T> INLINE T between(T x, T low, T high) { return x < low ? low : x > high ? high : x; }
INLINE int64_t up(int64_t x, int64_t m) { return (x + m - 1) / m * m; }

template <class E> struct Kind;
template <> struct Kind<float> {
  typedef float Part __attribute__((vector_size(BYTES)));
  typedef int32_t Int;
  typedef int32_t IntPart __attribute__((vector_size(BYTES)));
};
template <> struct Kind<double> {
  typedef double Part __attribute__((vector_size(BYTES)));
  typedef int64_t Int;
  typedef int64_t IntPart __attribute__((vector_size(BYTES)));
};
template <class E> using Part = typename Kind<E>::Part;
template <class E> using IntPart = typename Kind<E>::IntPart;

template <class P> INLINE P load_part(const void* at) {
  P x;
  __builtin_memcpy(&x, at, sizeof(P));
  return x;
}
template <class P> INLINE void store_part(void* at, P x) { __builtin_memcpy(at, &x, sizeof(P)); }

INLINE Part<float> larger_part(Part<float> a, Part<float> b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
INLINE Part<double> larger_part(Part<double> a, Part<double> b) { return a > b ? a : b; }

// e**x for x <= 0 and a little above; NaN for NaN, which is why x comes second where the larger is taken. Below
// 2**-126, negligible beside a row's largest weight of 1, it is zero, because denormals are slow on some processors.
// The relative error is about 1e-7 near 0, and without fused multiplications 1e-6 where the result is tiny.
INLINE Part<float> exp_part(Part<float> x) {
  constexpr float LOG2E = 1.44269504088896341f;
#if defined(__AVX512F__)
  const Part<float> y = x, n = _mm512_roundscale_ps(y * LOG2E, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // 2**-127 is zero below.
  const Part<float> y = larger_part(Part<float>{} - 88.0296919f, x);
  // Adding and subtracting 1.5 * 2**23 rounds to a whole number.
  const Part<float> n = (y * LOG2E + 12582912.f) - 12582912.f;
#endif
  const Part<float> f = y * LOG2E - n;
  Part<float> p = f * 1.32764668e-3f + 9.67554129e-3f;
  p = p * f + 5.55071329e-2f;
  p = p * f + 2.402211972e-1f;
  p = p * f + 6.931469671e-1f;
  p = p * f + 1.0000000717f;
#if defined(__AVX512F__)
  // NaN is not less.
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, Part<float>{} - 87.3365448f, _CMP_NLT_UQ), p, n);
#else
  return p * (Part<float>)((__builtin_convertvector(n, IntPart<float>) + 127) << 23);
#endif
}
INLINE Part<double> exp_part(Part<double> x) {
  for (unsigned i = 0; i < sizeof(x) / 8; i++) x[i] = __builtin_exp(x[i]);
  return x;
}

// The vector of 16 numbers.
template <class E> struct Vec {
  static constexpr int N = L * sizeof(E) / BYTES;
  Part<E> p[N];
};
#define EACH(E) UNROLL for (int i_ = 0; i_ < Vec<E>::N; i_++)
// Replaces each part of ``x``, and returns it.
#define RETURN_EACH(x, part) \
  EACH(E) x.p[i_] = part;    \
  return x

template <class E> INLINE Vec<E> load(const E* at) {
  Vec<E> x;
  EACH(E) x.p[i_] = load_part<Part<E>>(at + i_ * (BYTES / sizeof(E)));
  return x;
}
template <class E> INLINE void store(E* at, Vec<E> x) { EACH(E) store_part(at + i_ * (BYTES / sizeof(E)), x.p[i_]); }
template <class E> INLINE Vec<E> set(E v) {
  Vec<E> x;
  EACH(E) x.p[i_] = Part<E>{} + v;
  return x;
}
template <class E> INLINE Vec<E> operator+(Vec<E> x, Vec<E> y) { RETURN_EACH(x, x.p[i_] + y.p[i_]); }
template <class E> INLINE Vec<E> operator-(Vec<E> x, Vec<E> y) { RETURN_EACH(x, x.p[i_] - y.p[i_]); }
template <class E> INLINE Vec<E> operator*(Vec<E> x, Vec<E> y) { RETURN_EACH(x, x.p[i_] * y.p[i_]); }
template <class E> INLINE Vec<E> fma(Vec<E> x, Vec<E> y, Vec<E> z) { RETURN_EACH(x, x.p[i_] * y.p[i_] + z.p[i_]); }
template <class E> INLINE Vec<E> larger_of(Vec<E> x, Vec<E> y) { RETURN_EACH(x, larger_part(x.p[i_], y.p[i_])); }
template <class E> INLINE Vec<E> exp(Vec<E> x) { RETURN_EACH(x, exp_part(x.p[i_])); }

// x where ``low <= j + lane < high``, else y
template <class E> INLINE Vec<E> within(int64_t j, int64_t low, int64_t high, Vec<E> x, Vec<E> y) {
  constexpr int lanes = BYTES / sizeof(E);
  IntPart<E> lane;
  UNROLL for (int i = 0; i < lanes; i++) lane[i] = i;
  EACH(E) {
    // 32 bits suffice for places relative to this vector.
    const auto from = (typename Kind<E>::Int)between<int64_t>(low - j - i_ * lanes, -1, 99);
    const auto to = (typename Kind<E>::Int)between<int64_t>(high - j - i_ * lanes, -1, 99);
    x.p[i_] = ((lane >= from) & (lane < to)) ? x.p[i_] : y.p[i_];
  }
  return x;
}
// x where ``flags`` is not zero, else y
template <class E> INLINE Vec<E> where(Vec<E> flags, Vec<E> x, Vec<E> y) {
  EACH(E) x.p[i_] = flags.p[i_] != Part<E>{} ? x.p[i_] : y.p[i_];
  return x;
}

// |x|, and y with the sign of x, which is 0 where x is
template <class E> INLINE Vec<E> size_of(Vec<E> x) { RETURN_EACH(x, x.p[i_] < Part<E>{} ? -x.p[i_] : x.p[i_]); }
template <class E> INLINE Vec<E> signed_like(Vec<E> x, Vec<E> y) {
  const Part<E> zero{};
  EACH(E) y.p[i_] = x.p[i_] > zero ? y.p[i_] : x.p[i_] < zero ? -y.p[i_] : zero;
  return y;
}

INLINE float total(Part<float> x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#else
  // Halves first, so that few additions wait for others.
  UNROLL for (int half = BYTES / 8; half > 0; half /= 2) UNROLL for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
#endif
}
INLINE double total(Part<double> x) {
  UNROLL for (int half = BYTES / 16; half > 0; half /= 2) UNROLL for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}
// The totals of four at once
template <class P, class E> INLINE void totals_of(const P* x, E* found) {
  UNROLL for (int i = 0; i < 4; i++) found[i] = total(x[i]);
}
#if defined(__AVX512F__)
INLINE void totals_of(const Part<float>* x, float* found) {
  // Each fourth of ``all`` gets one sum of each of the four.
  const __m512 low = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
  const __m512 high = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
  const __m512 all = _mm512_shuffle_ps(low, high, 0x44) + _mm512_shuffle_ps(low, high, 0xee);
  const __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
  _mm_storeu_ps(found, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
}
#endif
template <class E> INLINE E total(Vec<E> x) {
  UNROLL for (int i = 1; i < Vec<E>::N; i++) x.p[0] += x.p[i];
  return total(x.p[0]);
}
template <class E> INLINE E largest(Vec<E> x) {
  Part<E> y = x.p[0];
  UNROLL for (int i = 1; i < Vec<E>::N; i++) y = larger_part(y, x.p[i]);
#if defined(__AVX512F__)
  if constexpr (sizeof(E) == 4) return _mm512_reduce_max_ps(y);
#endif
  E most = y[0];
  UNROLL for (unsigned i = 1; i < BYTES / sizeof(E); i++) most = larger<E>(most, y[i]);
  return most;
}

// The hyperbolic tangent of a row of numbers times ``scale``: by a polynomial near 0, where the quotient loses digits.
INLINE void tanh_row(float* x, int64_t n, float scale) {
  constexpr int lanes = BYTES / 4;
  for (int64_t j = 0; j < n; j += lanes) {
    const Part<float> y = load_part<Part<float>>(x + j) * scale, size = y < 0.f ? -y : y, z = y * y;
    Part<float> near = z * -5.70498872745e-3f + 2.06390887954e-2f;
    near = near * z - 5.37397155531e-2f;
    near = near * z + 1.33314422036e-1f;
    near = near * z - 3.33332819422e-1f;
    near = near * z * y + y;
    // exp_part takes numbers that are not positive.
    const Part<float> e = exp_part(size * -2.f), far = (1.f - e) / (1.f + e);
    store_part(x + j, size < 0.625f ? near : y < 0.f ? -far : far);
  }
}
INLINE void tanh_row(double* x, int64_t n, double scale) {
  for (int64_t j = 0; j < n; j++) x[j] = __builtin_tanh(x[j] * scale);
}

// --- conversions

INLINE float widen(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  __builtin_memcpy(&y, &bits, 4);
  return y;
}
INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
INLINE void narrow(float x, float& y) { y = x; }
INLINE void narrow(double x, double& y) { y = x; }
INLINE void narrow(float x, bf16& y) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  // To nearest, ties to even; a NaN stays one.
  y.bits = (bits & 0x7fffffff) > 0x7f800000 ? (uint16_t)(bits >> 16 | 64)
                                            : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE Part<float> widen_part(const bf16* at) {
  typedef uint16_t Bits __attribute__((vector_size(BYTES / 2)));
  return (Part<float>)(__builtin_convertvector(load_part<Bits>(at), IntPart<float>) << 16);
}

// Two vectors, rounded to bfloat16: (a0, b0, a1, b1, ...) in ``pairs``.
INLINE void put_pairs(Vec<float> a, Vec<float> b, uint32_t* pairs) {
#if defined(__AVX512BF16__)
  const __m512i x = (__m512i)_mm512_cvtne2ps_pbh(b.p[0], a.p[0]);  // a is the lower half
  alignas(64) static const uint16_t at[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16(_mm512_load_si512(at), x));
#else
  float x[L], y[L];
  store(x, a), store(y, b);
  for (int i = 0; i < L; i++) {
    bf16 low, high;
    narrow(x[i], low), narrow(y[i], high);
    pairs[i] = low.bits | (uint32_t)high.bits << 16;
  }
#endif
}
template <class E> INLINE void put(E* at, Vec<E> x) { store(at, x); }
INLINE void put(bf16* at, Vec<float> x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh(x.p[0]));
#else
  float y[L];
  store(y, x);
  for (int i = 0; i < L; i++) narrow(y[i], at[i]);
#endif
}

}  // namespace LEVEL
}  // namespace whereformer
