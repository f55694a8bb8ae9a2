// C (+)= A B. A lies row by row. B's numbers are "units": float32 and float64 as they are, bfloat16 as pairs of two
// rows, so that [k / 2][n] holds B[k][n] and B[k + 1][n]. The number of columns is a multiple of 16.
#pragma once
#include "simd.h"

// What an object file of a level has besides float32: -DLEVEL=name picks a line of these.
#define HALVES_avx512bf16 1
#define HALVES_amx 1
#define HALVES_neonbf16 1
#define TILES_amx 1
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define WITH_HALVES JOIN(HALVES_, LEVEL)
#define WITH_TILES JOIN(TILES_, LEVEL)

namespace whereformer {
namespace LEVEL {

typedef uint32_t PairsPart __attribute__((vector_size(BYTES)));
template <class F> struct Units {
  typedef F Unit;
  typedef F Sum;
  typedef Part<F> Right;
  static constexpr int64_t step = 1;
};
template <> struct Units<bf16> {
  typedef uint32_t Unit;
  typedef float Sum;
  typedef PairsPart Right;
  static constexpr int64_t step = 2;
};
template <class F> using Unit = typename Units<F>::Unit;
template <class F> using Sum = typename Units<F>::Sum;  // the dtype of scores

INLINE Part<float> times(Part<float> c, Part<float> a, Part<float> b) { return b * a + c; }
INLINE Part<float> times(Part<float> c, float a, Part<float> b) { return b * a + c; }
INLINE Part<double> times(Part<double> c, Part<double> a, Part<double> b) { return b * a + c; }
INLINE Part<double> times(Part<double> c, double a, Part<double> b) { return b * a + c; }
INLINE Part<float> times(Part<float> c, PairsPart a, PairsPart b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (Part<float>)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  return (Part<float>)(b & 0xffff0000) * (Part<float>)(a & 0xffff0000) +
         ((Part<float>)(b << 16) * (Part<float>)(a << 16) + c);
#endif
}
INLINE Part<float> times(Part<float> c, uint32_t a, PairsPart b) { return times(c, PairsPart{} + a, b); }

// The right factor of float32 may also have rows of bfloat16.
INLINE Part<float> right_part(const float* at) { return load_part<Part<float>>(at); }
INLINE Part<double> right_part(const double* at) { return load_part<Part<double>>(at); }
INLINE PairsPart right_part(const uint32_t* at) { return load_part<PairsPart>(at); }
INLINE Part<float> right_part(const bf16* at) { return widen_part(at); }

// R rows and W parts of C stay in registers.
template <class F, int R, int W, class B>
INLINE void block(const Unit<F>* a, int64_t lda, const B* b, int64_t ldb, Sum<F>* c, int64_t ldc, int64_t k, bool add) {
  typedef Part<Sum<F>> P;
  typedef typename Units<F>::Right Right;
  constexpr int lanes = BYTES / sizeof(Sum<F>);
  P sums[R][W];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int w = 0; w < W; w++) sums[r][w] = P{};
  for (int64_t i = 0; i < k; i++) {
    Right right[W];
    UNROLL for (int w = 0; w < W; w++) right[w] = right_part(b + i * ldb + w * lanes);
    UNROLL for (int r = 0; r < R; r++) {
      const Unit<F> left = a[r * lda + i];
      UNROLL for (int w = 0; w < W; w++) sums[r][w] = times(sums[r][w], left, right[w]);
    }
  }
  // Sums of sums round less than one long sum.
  if (add)
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int w = 0; w < W; w++) sums[r][w] +=
        load_part<P>(c + r * ldc + w * lanes);
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int w = 0; w < W; w++) store_part(c + r * ldc + w * lanes, sums[r][w]);
}

// The rows of C in registers at a time: with AVX-512 and NEON, 6 x 4 of 32 registers hold sums, with AVX2 6 x 2 of 16.
template <class F> constexpr int HEIGHT = sizeof(Sum<F>) == 4 ? 6 : BYTES == 16 ? 2 : 3;
// The columns of C in registers at a time.
template <class F> constexpr int64_t WIDTH = BYTES == 64 && sizeof(Sum<F>) == 4 ? 64 : L;

template <class F, int R, int W, class B>
INLINE void up_to(int64_t m, const Unit<F>* a, int64_t lda, const B* b, int64_t ldb, Sum<F>* c, int64_t ldc, int64_t k,
                  bool add) {
  if (m >= R) return block<F, R, W>(a, lda, b, ldb, c, ldc, k, add);
  if constexpr (R > 1) up_to<F, R - 1, W>(m, a, lda, b, ldb, c, ldc, k, add);
}
// Some rows and ``columns`` (a multiple of 16, at most WIDTH)
template <class F, class B>
INLINE void strip(int64_t m, int64_t columns, const Unit<F>* a, int64_t lda, const B* b, int64_t ldb, Sum<F>* c,
                  int64_t ldc, int64_t k, bool add) {
  constexpr int R = HEIGHT<F>, one = Vec<Sum<F>>::N;
  if constexpr (WIDTH<F> == L) return up_to<F, R, one>(m, a, lda, b, ldb, c, ldc, k, add);
  else if (columns >= 64) return up_to<F, R, 4 * one>(m, a, lda, b, ldb, c, ldc, k, add);
  else if (columns == 48) return up_to<F, R, 3 * one>(m, a, lda, b, ldb, c, ldc, k, add);
  else if (columns == 32) return up_to<F, R, 2 * one>(m, a, lda, b, ldb, c, ldc, k, add);
  else return up_to<F, R, one>(m, a, lda, b, ldb, c, ldc, k, add);
}

// The length of sums after which C goes back to memory: short sums round less, and with AVX2 the rows of B that are
// read stay in the first cache.
constexpr int64_t SPAN = BYTES == 64 ? 256 : 64;

// ``lda`` and ``k`` are in numbers of F, ``ldb`` in units, ``ldc`` in sums. Left factors of bfloat16 are even in both.
template <class F, class B>
void in_registers(int64_t m, int64_t n, int64_t k, const F* left, int64_t lda, const B* b, int64_t ldb, Sum<F>* c,
                  int64_t ldc, bool add) {
  constexpr int64_t step = Units<F>::step, R = HEIGHT<F>, W = WIDTH<F>;
  const Unit<F>* a = (const Unit<F>*)left;
  lda /= step;
  // Without anything to sum, C becomes zeros all the same.
  for (int64_t from = 0; from < k / step || !add; from += SPAN, add = true) {
    const int64_t length = smaller(SPAN, k / step - from);
    for (int64_t j = 0; j < n; j += 64)
      for (int64_t i = 0; i < m; i += R)
        for (int64_t e = j; e < smaller(j + 64, n); e += W)
          strip<F>(m - i, n - e, a + i * lda + from, lda, b + from * ldb + e, ldb, c + i * ldc + e, ldc, length, add);
  }
}

#if WITH_TILES
// The eight tile registers of AMX, each 16 rows of 64 bytes; if the compiler lacks AMX, the same in memory, for tests.
#if defined(__AMX_BF16__)
// GCC does not know what tiles are loaded from: what was written there has to be there.
#define TILE_BARRIER(at) __asm__ volatile("" : : "r"(at) : "memory")
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, at, stride) _tile_loadd(t, at, stride)
#define TILE_STORE(t, at, stride) _tile_stored(t, at, stride)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
struct TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
INLINE void begin_tiles() {
  TileShapes shapes;
  for (int t = 0; t < 8; t++) shapes.bytes[t] = 64, shapes.rows[t] = 16;
  TILE_BARRIER(&shapes);
  _tile_loadconfig(&shapes);
}
INLINE void end_tiles() { _tile_release(); }
#else
#define TILE_BARRIER(at)
static thread_local uint32_t tiles_[8][16][16];
INLINE void begin_tiles() {}
INLINE void end_tiles() {}
INLINE void tile_copy(bool in, int t, void* at, int64_t stride) {
  for (int r = 0; r < 16; r++)
    in ? __builtin_memcpy(tiles_[t][r], (char*)at + r * stride, 64)
       : __builtin_memcpy((char*)at + r * stride, tiles_[t][r], 64);
}
INLINE void tile_dot(int c, int a, int b) {
  for (int r = 0; r < 16; r++)
    for (int n = 0; n < 16; n++) {
      float sum;
      __builtin_memcpy(&sum, &tiles_[c][r][n], 4);
      for (int k = 0; k < 16; k++)
        for (int half = 0; half < 2; half++)
          sum += widen(bf16{(uint16_t)(tiles_[a][r][k] >> 16 * half)}) *
                 widen(bf16{(uint16_t)(tiles_[b][k][n] >> 16 * half)});
      __builtin_memcpy(&tiles_[c][r][n], &sum, 4);
    }
}
#define TILE_ZERO(t) __builtin_memset(tiles_[t], 0, 1024)
#define TILE_LOAD(t, at, stride) tile_copy(true, t, (void*)(at), stride)
#define TILE_STORE(t, at, stride) tile_copy(false, t, (void*)(at), stride)
#define TILE_DOT(c, a, b) tile_dot(c, a, b)
#endif

// Tiles 0 to 3 hold sums, 4 and 5 rows of A, 6 and 7 columns of B.
INLINE void tile_block(int64_t k, const bf16* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c, int64_t ldc,
                       bool add) {
  TILE_BARRIER(a);
  if (add) {
    TILE_LOAD(0, c, ldc * 4);
    TILE_LOAD(1, c + 16, ldc * 4);
    TILE_LOAD(2, c + 16 * ldc, ldc * 4);
    TILE_LOAD(3, c + 16 * ldc + 16, ldc * 4);
  } else {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  for (int64_t i = 0; i < k; i += 32) {
    TILE_LOAD(4, a + i, lda * 2);
    TILE_LOAD(5, a + 16 * lda + i, lda * 2);
    TILE_LOAD(6, b + i / 2 * ldb, ldb * 4);
    TILE_LOAD(7, b + i / 2 * ldb + 16, ldb * 4);
    TILE_DOT(0, 4, 6);
    TILE_DOT(1, 4, 7);
    TILE_DOT(2, 5, 6);
    TILE_DOT(3, 5, 7);
  }
  TILE_STORE(0, c, ldc * 4);
  TILE_STORE(1, c + 16, ldc * 4);
  TILE_STORE(2, c + 16 * ldc, ldc * 4);
  TILE_STORE(3, c + 16 * ldc + 16, ldc * 4);
}
// What the tiles leave over (rows, columns and sums that are no multiples of theirs) is done in registers.
inline void in_tiles(int64_t m, int64_t n, int64_t k, const bf16* a, int64_t lda, const uint32_t* b, int64_t ldb,
                     float* c, int64_t ldc, bool add) {
  const int64_t M = m / 32 * 32, N = n / 32 * 32, K = k / 32 * 32;
  if (M == 0 || N == 0 || K == 0) return in_registers<bf16>(m, n, k, a, lda, b, ldb, c, ldc, add);
  for (int64_t j = 0; j < N; j += 32)
    for (int64_t i = 0; i < M; i += 32) tile_block(K, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, add);
  if (K < k) in_registers<bf16>(M, N, k - K, a + K, lda, b + K / 2 * ldb, ldb, c, ldc, true);
  if (N < n) in_registers<bf16>(M, n - N, k, a, lda, b + N, ldb, c + N, ldc, add);
  if (M < m) in_registers<bf16>(m - M, n, k, a + M * lda, lda, b, ldb, c + M * ldc, ldc, add);
}
#endif

template <class F, class B>
INLINE void product(int64_t m, int64_t n, int64_t k, const F* a, int64_t lda, const B* b, int64_t ldb, Sum<F>* c,
                    int64_t ldc, bool add) {
#if WITH_TILES
  if constexpr (Units<F>::step == 2) return in_tiles(m, n, k, a, lda, b, ldb, c, ldc, add);
#endif
  in_registers<F>(m, n, k, a, lda, b, ldb, c, ldc, add);
}

// The same with C, or B, in panels of 64 columns (a panel is ``depth`` rows of 64), from column ``from`` on.
template <class F>
INLINE void product_to_panels(int64_t m, int64_t n, int64_t k, const F* a, int64_t lda, const Unit<F>* b, int64_t ldb,
                              Sum<F>* panels, int64_t depth, int64_t from, bool add) {
  for (int64_t j = 0, next; j < n; j = next) {
    const int64_t column = from + j;
    next = smaller(n, j + 64 - column % 64);
    product<F>(m, next - j, k, a, lda, b + j, ldb, panels + column / 64 * 64 * depth + column % 64, 64, add);
  }
}
template <class F>
INLINE void product_of_panels(int64_t m, int64_t n, int64_t k, const F* a, int64_t lda, const Unit<F>* panels,
                              int64_t depth, int64_t from, Sum<F>* c, int64_t ldc, bool add) {
  for (int64_t j = 0, next; j < n; j = next) {
    const int64_t column = from + j;
    next = smaller(n, j + 64 - column % 64);
    product<F>(m, next - j, k, a, lda, panels + column / 64 * 64 * depth + column % 64, 64, c + j, ldc, add);
  }
}

}  // namespace LEVEL
}  // namespace whereformer
