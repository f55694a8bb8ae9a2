// Copies: scratch memory, rows in and out of tensors of any layout and dtype, and transposition.
#pragma once
#include "call.h"
#include "products.h"

namespace whereformer {
namespace LEVEL {

// Memory that is handed out in pieces. Without memory it only counts, so that the same code tells how much is needed.
struct Scratch {
  char* memory = nullptr;
  int64_t taken = 0;
  template <class T> T* take(int64_t count) {
    T* piece = (T*)(memory ? memory + taken : nullptr);
    taken += up(count * (int64_t)sizeof(T), 64);
    return piece;
  }
};

template <class T> INLINE void zero(T* x, int64_t count) { __builtin_memset((void*)x, 0, sizeof(T) * count); }

// <x, y_0>, ..., where row after row of y lies ``pitch`` numbers on; ``width`` is a multiple of 16, in bfloat16 of 32.
template <int ROWS, class F> INLINE void dots_of(const F* x, const F* y, int64_t pitch, int64_t width, Sum<F>* found) {
  typedef typename Units<F>::Right Right;
  Part<Sum<F>> sums[ROWS] = {};
  for (int64_t e = 0; e < width; e += sizeof(Right) / sizeof(F)) {
    const Right left = load_part<Right>(x + e);
    UNROLL for (int r = 0; r < ROWS; r++) sums[r] = times(sums[r], left, load_part<Right>(y + r * pitch + e));
  }
  if constexpr (ROWS == 4) totals_of(sums, found);
  else UNROLL for (int r = 0; r < ROWS; r++) found[r] = total(sums[r]);
}
template <class F> INLINE Sum<F> dot(const F* x, const F* y, int64_t width) {
  Sum<F> found;
  dots_of<1>(x, y, 0, width, &found);
  return found;
}

// Calls f with a pointer to numbers of the dtype.
template <class Call_> INLINE void by_dtype(int64_t dtype, char* data, Call_ f) {
  switch (dtype) {
    case FLOAT32: return f((float*)data);
    case BFLOAT16: return f((bf16*)data);
    default: return f((double*)data);
  }
}
template <class F> constexpr int64_t DTYPE = FLOAT32;
template <> constexpr int64_t DTYPE<double> = FLOAT64;
template <> constexpr int64_t DTYPE<bf16> = BFLOAT16;

template <class F> struct Rows {
  const F* at;
  int64_t pitch;
};

INLINE int64_t start_of(const Tensor& x, int64_t b, int64_t h, int64_t i) {
  return b * x.stride[0] + h * x.stride[1] + i * x.stride[2];
}

template <class From> INLINE void copy_number(From x, bf16& to) { narrow((float)widen(x), to); }
INLINE void copy_number(bf16 x, bf16& to) { to = x; }
template <class From> INLINE void copy_number(From x, float& to) { to = (float)widen(x); }
template <class From> INLINE void copy_number(From x, double& to) { to = widen(x); }

// Rows of a tensor lie far apart, and no processor foresees which come next.
constexpr int64_t AHEAD = 16;
template <bool WRITE, class T> INLINE void prefetch_row(const T* row, int64_t width) {
  for (int64_t e = 0; e < width; e += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + e, WRITE);
}

// s[i][j] (+)= <x_i, y_j>, where all rows lie as they are
template <class F> void dots(int64_t m, int64_t n, int64_t width, Rows<F> x, Rows<F> y, Sum<F>* s, int64_t ld,
                             bool add) {
  constexpr int64_t some = 4;
  Sum<F> found[some];
  for (int64_t j = 0; j < n; j += some) {
    const int64_t count = smaller(some, n - j);
    const F* row = y.at + j * y.pitch;
    for (int64_t r = j + AHEAD; r < smaller(j + AHEAD + some, n); r++) prefetch_row<false>(y.at + r * y.pitch, width);
    for (int64_t i = 0; i < m; i++, s += ld) {
      if (count == some) dots_of<some>(x.at + i * x.pitch, row, y.pitch, width, found);
      else
        for (int64_t r = 0; r < count; r++) found[r] = dot(x.at + i * x.pitch, row + r * y.pitch, width);
      for (int64_t r = 0; r < count; r++) s[j + r] = add ? s[j + r] + found[r] : found[r];
    }
    s -= m * ld;
  }
}

// out[i][e] = x[b, h, from + i, e], with zeros from ``width`` to ``pitch``
template <class T>
void read_rows(const Tensor& x, int64_t b, int64_t h, int64_t from, int64_t count, int64_t width, T* out,
               int64_t pitch) {
  by_dtype(x.dtype, x.data, [&](auto* data) {
    for (int64_t i = 0; i < count; i++) {
      const auto* row = data + start_of(x, b, h, from + i);
      T* to = out + i * pitch;
      if (x.stride[3] == 1 && i + AHEAD < count) prefetch_row<false>(row + AHEAD * x.stride[2], width);
      if (x.stride[3] == 1)
        for (int64_t e = 0; e < width; e++) copy_number(row[e], to[e]);
      else
        for (int64_t e = 0; e < width; e++) copy_number(row[e * x.stride[3]], to[e]);
      for (int64_t e = width; e < pitch; e++) to[e] = T{};
    }
  });
}

// x[b, h, from + i, e] = scale * rows[i][e], or scales[i] * rows[i][e]. Few other stores lie between these, so that
// many of them are under way at once. Some processors take denormal bfloat16 for zeros.
template <class A>
void write_rows(const Tensor& x, int64_t b, int64_t h, int64_t from, int64_t count, int64_t width, const A* rows,
                int64_t pitch, A scale, const A* scales = nullptr) {
  by_dtype(x.dtype, x.data, [&](auto* to) {
    // Rows of float64 are written as nothing else, and others never as float64.
    if constexpr ((sizeof(*to) == 8) == (sizeof(A) == 8)) {
      const int64_t whole = x.stride[3] == 1 ? width / L * L : 0;
      to += start_of(x, b, h, from);
      for (int64_t i = 0; i < smaller(count, AHEAD); i++) prefetch_row<true>(to + i * x.stride[2], whole);
      for (int64_t i = 0; i < count; i++, to += x.stride[2], rows += pitch) {
        if (i + AHEAD < count) prefetch_row<true>(to + AHEAD * x.stride[2], whole);
        const A factor = scales ? scales[i] : scale;
        for (int64_t e = 0; e < whole; e += L) put(to + e, load(rows + e) * set(factor));
        for (int64_t e = whole; e < width; e++) narrow(rows[e] * factor, to[e * x.stride[3]]);
      }
    }
  });
}

// dst[c][r] = src[r][c] for 16 rows, of which those from ``rows`` on count as zeros, and 16 columns
template <class U> INLINE void transpose16(const U* src, int64_t ls, U* dst, int64_t ld, int64_t rows) {
  if constexpr (sizeof(U) == 4) {
    typedef float V8 __attribute__((vector_size(32)));
    UNROLL for (int a = 0; a < 16; a += 8) UNROLL for (int b = 0; b < 16; b += 8) {
      V8 r[8], t[8];
      UNROLL for (int i = 0; i < 8; i++) r[i] = a + i < rows ? load_part<V8>(src + (a + i) * ls + b) : V8{};
      UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
      }
      UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        r[i + 2 * j] = __builtin_shufflevector(t[i + j], t[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        r[i + 2 * j + 1] = __builtin_shufflevector(t[i + j], t[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
      }
      UNROLL for (int i = 0; i < 4; i++) {
        store_part(dst + (b + i) * ld + a, __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store_part(dst + (b + i + 4) * ld + a, __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
      }
    }
  } else {
    for (int c = 0; c < 16; c++)
      for (int r = 0; r < 16; r++) dst[c * ld + r] = r < rows ? src[r * ls + c] : U{};
  }
}

// rows (n, width) -> the transposed matrix as a right factor: panels [n / 64][width in units][64], with zeros from n to
// a multiple of 16, behind which nobody reads
template <class F> void pack_transposed(const F* x, int64_t ld, int64_t n, int64_t width, Unit<F>* out) {
  const int64_t depth = width / Units<F>::step, pitch = ld / Units<F>::step;
  const Unit<F>* units = (const Unit<F>*)x;
  for (int64_t j = 0; j < n; j += 16)
    for (int64_t e = 0; e < depth; e += 16)
      transpose16(units + j * pitch + e, pitch, out + j / 64 * depth * 64 + e * 64 + j % 64, 64,
                  smaller<int64_t>(n - j, 16));
}
// rows (n, width) of bfloat16 -> a right factor [n / 2][width]
inline void pack_pairs(const bf16* x, int64_t ld, int64_t n, int64_t width, uint32_t* out) {
  for (; n > 1; n -= 2, x += 2 * ld, out += width)
    for (int64_t e = 0; e < width; e++) out[e] = x[e].bits | (uint32_t)x[ld + e].bits << 16;
  for (int64_t e = 0; n && e < width; e++) out[e] = x[e].bits;
}
// rows (m, width) -> a left factor (width, pitch), zeros from m to an even number; bfloat16 needs scratch (16, width)
template <class F> void transpose_rows(const F* x, int64_t ld, int64_t m, int64_t width, F* out, int64_t pitch,
                                       uint32_t* scratch) {
  if constexpr (Units<F>::step == 1) {
    for (int64_t i = 0; i < m; i += 16)
      for (int64_t e = 0; e < width; e += 16)
        transpose16(x + i * ld + e, ld, out + e * pitch + i, pitch, smaller<int64_t>(16, m - i));
  } else {
    for (int64_t i = 0; i < m; i += 32) {
      const int64_t rows = smaller<int64_t>(32, m - i), pairs = (rows + 1) / 2;
      pack_pairs(x + i * ld, ld, rows, width, scratch);
      for (int64_t e = 0; e < width; e += 16)
        transpose16(scratch + e, width, (uint32_t*)out + e * pitch / 2 + i / 2, pitch / 2, pairs);
    }
  }
}
// panels [n / 64][width][64] of sums -> rows of a tensor, times ``scale``; ``block`` is scratch (64, width)
template <class A>
void write_transposed(const A* panels, int64_t n, int64_t width, int64_t depth, const Tensor& x, int64_t b, int64_t h,
                      A scale, A* block) {
  for (int64_t j = 0; j < n; j += 64, panels += 64 * depth) {
    const int64_t rows = smaller<int64_t>(64, n - j);
    for (int64_t r = 0; r < rows; r += 16)
      for (int64_t e = 0; e < depth; e += 16) transpose16(panels + e * 64 + r, 64, block + r * depth + e, depth, 16);
    write_rows<A>(x, b, h, j, rows, width, block, depth, scale);
  }
}

}  // namespace LEVEL
}  // namespace whereformer
