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

template <class A> INLINE A dot(const A* x, const A* y, int64_t width) {
  Vec<A> sum = set(A(0));
  for (int64_t e = 0; e < width; e += L) sum = fma(load(x + e), load(y + e), sum);
  return total(sum);
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

template <class F> struct Rows { const F* at; int64_t pitch; };

INLINE int64_t start_of(const Tensor& x, int64_t b, int64_t h, int64_t i) { return b * x.stride[0] + h * x.stride[1] + i * x.stride[2]; }

template <class From> INLINE void copy_number(From x, bf16& to) { narrow((float)widen(x), to); }
INLINE void copy_number(bf16 x, bf16& to) { to = x; }
template <class From> INLINE void copy_number(From x, float& to) { to = (float)widen(x); }
template <class From> INLINE void copy_number(From x, double& to) { to = widen(x); }

// out[i][e] = x[b, h, from + i, e], with zeros from ``width`` to ``pitch``
template <class T>
void read_rows(const Tensor& x, int64_t b, int64_t h, int64_t from, int64_t count, int64_t width, T* out, int64_t pitch) {
  by_dtype(x.dtype, x.data, [&](auto* data) {
    for (int64_t i = 0; i < count; i++) {
      const auto* row = data + start_of(x, b, h, from + i);
      T* to = out + i * pitch;
      if (x.stride[3] == 1) for (int64_t e = 0; e < width; e++) copy_number(row[e], to[e]);
      else for (int64_t e = 0; e < width; e++) copy_number(row[e * x.stride[3]], to[e]);
      for (int64_t e = width; e < pitch; e++) to[e] = T{};
    }
  });
}

// x[b, h, at, e] = scale * row[e]
template <class A> void write_row(const Tensor& x, int64_t b, int64_t h, int64_t at, int64_t width, const A* row, A scale) {
  by_dtype(x.dtype, x.data, [&](auto* data) {
    auto* to = data + start_of(x, b, h, at);
    if constexpr (sizeof(*to) <= sizeof(A)) {
      if (x.stride[3] == 1) for (int64_t e = 0; e < width; e++) narrow(row[e] * scale, to[e]);
      else for (int64_t e = 0; e < width; e++) narrow(row[e] * scale, to[e * x.stride[3]]);
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

// rows (n, width) -> the transposed matrix as a right factor: panels [n / 64][width in units][64], with zeros from n to a
// multiple of 16, behind which nobody reads
template <class F> void pack_transposed(const F* x, int64_t ld, int64_t n, int64_t width, Unit<F>* out) {
  const int64_t depth = width / Units<F>::step, pitch = ld / Units<F>::step;
  const Unit<F>* units = (const Unit<F>*)x;
  for (int64_t j = 0; j < n; j += 16)
    for (int64_t e = 0; e < depth; e += 16)
      transpose16(units + j * pitch + e, pitch, out + j / 64 * depth * 64 + e * 64 + j % 64, 64, smaller<int64_t>(n - j, 16));
}
// rows (m, width) -> a left factor (width, pitch), with zeros from m to an even number; bfloat16 needs scratch (16, width)
template <class F> void transpose_rows(const F* x, int64_t ld, int64_t m, int64_t width, F* out, int64_t pitch, uint32_t* scratch) {
  if constexpr (Units<F>::step == 1) {
    for (int64_t i = 0; i < m; i += 16)
      for (int64_t e = 0; e < width; e += 16) transpose16(x + i * ld + e, ld, out + e * pitch + i, pitch, smaller<int64_t>(16, m - i));
  } else {
    for (int64_t i = 0; i < m; i += 32) {
      const int64_t pairs = smaller<int64_t>(16, (m - i + 1) / 2);
      for (int64_t r = 0; r < pairs; r++) {
        const int64_t a = i + 2 * r;
        for (int64_t e = 0; e < width; e++)
          scratch[r * width + e] = x[a * ld + e].bits | (a + 1 < m ? (uint32_t)x[(a + 1) * ld + e].bits << 16 : 0);
      }
      for (int64_t e = 0; e < width; e += 16) transpose16(scratch + e, width, (uint32_t*)out + e * pitch / 2 + i / 2, pitch / 2, pairs);
    }
  }
}
// rows (n, width) of bfloat16 -> a right factor [n / 2][width]
inline void pack_pairs(const bf16* x, int64_t ld, int64_t n, int64_t width, uint32_t* out) {
  for (int64_t j = 0; j < n; j += 2)
    for (int64_t e = 0; e < width; e++)
      out[j / 2 * width + e] = x[j * ld + e].bits | (j + 1 < n ? (uint32_t)x[(j + 1) * ld + e].bits << 16 : 0);
}
// panels [n / 64][width][64] of sums -> rows of a tensor, times ``scale``; ``block`` is scratch (16, width)
template <class A>
void write_transposed(const A* panels, int64_t n, int64_t width, int64_t depth, const Tensor& x, int64_t b, int64_t h, A scale, A* block) {
  for (int64_t j = 0; j < n; j += 16) {
    for (int64_t e = 0; e < depth; e += 16) transpose16(panels + j / 64 * 64 * depth + e * 64 + j % 64, 64, block + e, depth, 16);
    for (int64_t r = 0; r < smaller<int64_t>(16, n - j); r++) write_row<A>(x, b, h, j + r, width, block + r * depth, scale);
  }
}

}  // namespace LEVEL
}  // namespace whereformer
