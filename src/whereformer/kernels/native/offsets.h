// Tables over offsets, and the positions between which there are offsets.
#pragma once
#include "packing.h"

namespace whereformer {
namespace LEVEL {

// Part of a head's queries, and some keys: ``width`` columns of scores of which ``real`` are keys. ``partial``: a pair
// may be forbidden.
struct Tile {
  int64_t i, rows, j, width, real;
  bool partial;
};

// Numbers too far apart to be positions give some other number.
INLINE int64_t offset_between(int64_t query, int64_t key) { return (int64_t)((uint64_t)key - (uint64_t)query); }

// Positions of queries and keys: computed, and then those of keys have stride 1, or listed.
struct Line {
  bool listed;
  int64_t query_start, query_stride, key_start;
  const int64_t *queries, *keys;
  const uint8_t* runs;  // of each 16 listed keys: whether each position is one more than the last

  INLINE int64_t query(int64_t i) const { return listed ? queries[i] : query_start + query_stride * i; }
  INLINE int64_t key(int64_t j) const { return listed ? keys[j] : key_start + j; }
  void bounds(const Tile& t, int64_t& least, int64_t& most) const {
    if (!listed) {
      least = key(t.j) - query(t.i + t.rows - 1), most = key(t.j + t.width - 1) - query(t.i);
      return;
    }
    int64_t low = queries[t.i], high = low, first = keys[t.j], last = first;
    for (int64_t i = t.i; i < t.i + t.rows; i++) low = smaller(low, queries[i]), high = larger(high, queries[i]);
    for (int64_t j = t.j; j < t.j + t.real; j++) first = smaller(first, keys[j]), last = larger(last, keys[j]);
    least = offset_between(high, first), most = offset_between(low, last);
  }
};
inline void find_runs(const int64_t* keys, int64_t n, uint8_t* runs) {
  for (int64_t j = 0; j < n; j += 16) {
    bool run = j + 16 <= n;
    for (int64_t e = 1; run && e < 16; e++) run = offset_between(keys[j], keys[j + e]) == e;
    runs[j / 16] = run;
  }
}

// A table's entries at ``length`` offsets from ``first`` on. In memory its ends are repeated 16 times on both sides, so
// that the entries of any 16 offsets in a row are one load.
struct Ends {
  int64_t first = 0, length = 0;
  INLINE int64_t pitch() const { return up(length + 32, 16); }
  // The column of an offset. Differences are unsigned, because those of distant numbers do not fit otherwise.
  INLINE int64_t column(int64_t offset) const {
    if (offset < first) return 0;
    const uint64_t at = (uint64_t)offset - (uint64_t)first;
    return at >= (uint64_t)length ? length - 1 : (int64_t)at;
  }
  // Where the entries of 16 offsets in a row begin
  INLINE int64_t place(int64_t offset) const {
    if (offset < first) {
      const uint64_t before = (uint64_t)first - (uint64_t)offset;
      return before >= 16 ? 0 : 16 - (int64_t)before;
    }
    const uint64_t at = (uint64_t)offset - (uint64_t)first;
    return at >= (uint64_t)length ? length + 16 : 16 + (int64_t)at;
  }
  // The same without limits, for offsets that grow by one from here on; far ones come near, but stay beyond the ends.
  INLINE int64_t origin(int64_t offset) const {
    constexpr int64_t far = (int64_t)1 << 40;
    return (int64_t)between<__int128>((__int128)offset - first + 16, -far, far + length);
  }
  template <class A> INLINE void pad(A* row) const {
    store(row, set(row[16])), store(row + 16 + length, set(row[15 + length]));
  }
  template <class A> INLINE void fold(A* row) const {
    row[16] += total(load(row)), row[15 + length] += total(load(row + 16 + length));
  }
  // Where a tile's offsets are: all at the first entry (-1), all at the last (1), or across (0)
  int side(int64_t least, int64_t most) const { return most <= first ? -1 : least >= first + length - 1 ? 1 : 0; }
};

// What a table adds to a row of scores, or nothing
template <class A> struct Added {
  const A* row;
  int64_t origin, length;
  INLINE Vec<A> at(int64_t j) const { return load(row + between<int64_t>(origin + j, 0, length + 16)); }
};

// Calls run(first column, place) for 16 listed keys in a row, and one(column, place) for each other key of a tile.
template <class Run_, class One_> INLINE void by_listed(const Tile& t, int64_t i, const Line& line, const Ends& ends,
                                                        Run_ run, One_ one) {
  const int64_t query = line.query(i);
  const int64_t* keys = line.keys + t.j;
  for (int64_t j = 0; j < t.real; j += 16) {
    if (line.runs[(t.j + j) / 16]) run(j, ends.place(keys[j] - query));
    else
      for (int64_t e = j; e < smaller(j + 16, t.real); e++) one(e, 16 + ends.column(offset_between(query, keys[e])));
  }
}
// s[j] += the entry at each listed offset
template <class A> void add_listed(A* s, const Tile& t, int64_t i, const Line& line, const Ends& ends, const A* row) {
  by_listed(
      t, i, line, ends, [&](int64_t j, int64_t at) { store(s + j, load(s + j) + load(row + at)); },
      [&](int64_t j, int64_t at) { s[j] += row[at]; });
}
// The transpose: adds a row's numbers to the entries at their offsets
template <class A> void collect_listed(const A* d, const Tile& t, int64_t i, const Line& line, const Ends& ends,
                                       A* row) {
  by_listed(
      t, i, line, ends, [&](int64_t j, int64_t at) { store(row + at, load(row + at) + load(d + j)); },
      [&](int64_t j, int64_t at) { row[at] += d[j]; });
}
// The same for offsets that grow by one from ``origin`` on
template <class A> INLINE void collect(const A* d, int64_t width, int64_t origin, const Ends& ends, A* row) {
  Vec<A> before = set(A(0)), after = before;
  int64_t j = 0;
  for (; j < width && origin + j <= 0; j += 16) before = before + load(d + j);
  for (; j < width && origin + j < ends.length + 16; j += 16)
    store(row + origin + j, load(row + origin + j) + load(d + j));
  for (; j < width; j += 16) after = after + load(d + j);
  store(row, load(row) + before);
  store(row + 16 + ends.length, load(row + 16 + ends.length) + after);
}
// The same for a whole tile, along its diagonals, in registers. Before and after every row of ``d`` lie 16 zeros.
template <class A>
void collect_diagonals(const A* d, int64_t ld, int64_t rows, int64_t width, int64_t origin, int64_t stride,
                       const Ends& ends, A* row) {
  for (int64_t s = origin - stride * (rows - 1); s < origin + width; s += 16) {
    const int64_t low = origin - s - 15, high = width - 1 + origin - s;
    int64_t i = low > 0 ? (low + stride - 1) / stride : 0;
    const int64_t end = smaller(rows, high / stride + 1), step = ld + stride;
    const A* x = d + (s - origin) + i * step;
    Vec<A> a = set(A(0)), b = a, e = a, f = a;
    for (; i + 4 <= end; i += 4, x += 4 * step)
      a = a + load(x), b = b + load(x + step), e = e + load(x + 2 * step), f = f + load(x + 3 * step);
    for (; i < end; i++, x += step) a = a + load(x);
    A* to = row + between<int64_t>(s, 0, ends.length + 16);
    store(to, load(to) + ((a + b) + (e + f)));
  }
}

// The offsets that a tile's rows read: of the first row from ``least`` up to, but without, ``end``, and of each later
// one by ``step`` more. Without limits if ``any``: every row may read all offsets of the tile.
struct Reach {
  bool any;
  int64_t least, end, step;
};

// A table of vectors over offsets: products with a tile's rows, and sums by offset, which are rounded to its dtype.
template <class F> struct Vectors {
  typedef Sum<F> A;
  static constexpr int64_t step = Units<F>::step;
  Ends whole, part;             // all offsets; those of the tile
  int64_t from = 0, depth = 0;  // the part's first column, a multiple of 16; the padded width of a vector
  int64_t pitch = 0;
  const F* table = nullptr;                        // the vectors one after another, ``depth`` numbers each
  F *copy = nullptr, *rounded = nullptr;           // ``rounded``: the sums of some rows
  Unit<F>*transposed = nullptr, *pairs = nullptr;  // right factors; ``pairs`` in bfloat16 alone
  A *products = nullptr, *sums = nullptr, *gradient = nullptr, *last = nullptr;

  bool on() const { return whole.length > 0; }
  const F* vector(int64_t column) const { return table + column * depth; }
  // ``packs``: whether enough rows meet the vectors to pack these
  void reserve(Scratch& memory, Ends ends, int64_t width, int64_t rows, int64_t columns, bool packs, bool multiplies,
               bool sums_up, bool learns) {
    whole = ends;
    depth = up(width, 16 * step);
    if (!on()) return;
    const int64_t all = up(whole.length, 64);
    pitch = up(smaller(all, columns + 32), 16) + 32;
    if (multiplies && packs) transposed = memory.take<Unit<F>>(all * depth / step);
    if (multiplies) products = memory.take<A>(rows * pitch);
    if (packs || width < depth) copy = memory.take<F>(all * depth);
    if (sums_up) sums = memory.take<A>(rows * pitch);
    if (sums_up && packs && step == 2)
      pairs = memory.take<Unit<F>>(all / 2 * depth), rounded = memory.take<F>(up(rows, 2) * pitch);
    if (learns) gradient = memory.take<A>(all * depth), last = memory.take<A>(depth);
  }
  void enter(const F* x, int64_t width) {
    table = copy ? copy : x;
    if (width < depth) zero(copy, whole.length * depth);
    for (int64_t t = 0; copy && width && t < whole.length; t++)
      __builtin_memcpy((void*)(copy + t * depth), x + t * width, sizeof(F) * width);
    if (transposed) pack_transposed<F>(copy, depth, whole.length, depth, transposed);
    if constexpr (step == 2)
      if (pairs) pack_pairs(copy, depth, whole.length, depth, pairs);
    if (gradient) zero(gradient, up(whole.length, 64) * depth), zero(last, depth);
  }
  void look_at(int64_t least, int64_t most) {
    from = whole.column(least) / 16 * 16;
    part = {whole.first + from, whole.column(most) + 1 - from};
  }
  // Whether columns up to this end with one that would need 16 of its own: the last of a table of 2 clip + 1 vectors
  bool stands_alone(int64_t end) const { return whole.length % 16 == 1 && from + end == whole.length; }
  // Calls f(first row, rows, first column, columns) for a few rows at a time and the part's columns that they read.
  template <class F_> INLINE void by_reach(int64_t rows, Reach reach, F_ f) const {
    constexpr int64_t few = step == 2 ? 32 : 24;
    if (reach.any) return f((int64_t)0, rows, (int64_t)0, part.length);
    for (int64_t i = 0; i < rows; i += few) {
      const int64_t count = smaller(few, rows - i), one = reach.least + i * reach.step,
                    other = one + (count - 1) * reach.step;
      const int64_t begin = part.column(smaller(one, other)) / 16 * 16,
                    end = part.column(larger(one, other) + (reach.end - reach.least - 1)) + 1;
      f(i, count, begin, end - begin);
    }
  }
  // products[i][o] = scale * <x_i, table[o]> for what the rows read
  void multiply(Rows<F> x, int64_t rows, A scale, Reach reach) {
    by_reach(rows, reach, [&](int64_t i, int64_t count, int64_t column, int64_t columns) {
      A* to = products + i * pitch + 16 + column;
      const Rows<F> left{x.at + i * x.pitch, x.pitch};
      if (!transposed) return dots<F>(count, columns, depth, left, {vector(from + column), depth}, to, pitch, false);
      const bool alone = stands_alone(column + columns);
      product_of_panels<F>(count, up(columns - alone, 16), depth, left.at, x.pitch, transposed, depth / step,
                           from + column, to, pitch, false);
      if (alone)
        for (int64_t r = 0; r < count; r++)
          to[r * pitch + columns - 1] = dot(x.at + (i + r) * x.pitch, vector(whole.length - 1), depth);
    });
    for (int64_t i = 0; i < rows; i++) {
      A* row = products + i * pitch;
      if (scale != 1)
        for (int64_t t = 0; t < part.length; t++) row[16 + t] *= scale;
      part.pad(row);
    }
  }
  void clear(int64_t rows) { zero(sums, rows * pitch); }
  // The repeated ends become part of the sums. What lies behind them counts as zeros in products of 16 columns.
  void fold(int64_t rows) {
    for (int64_t i = 0; i < rows; i++) {
      part.fold(sums + i * pitch);
      for (int64_t t = part.length; t < up(part.length, 16); t++) sums[i * pitch + 16 + t] = 0;
    }
  }
  // out (rows, depth) += sums . table
  void add_to(A* out, int64_t ld, int64_t rows, Reach reach) {
    by_reach(rows, reach, [&](int64_t i, int64_t count, int64_t column, int64_t columns) {
      const A* d = sums + i * pitch + 16 + column;
      if constexpr (step == 2)
        if (pairs) {
          for (int64_t r = 0; r < count; r++)
            for (int64_t e = 0; e < columns; e += L) put(rounded + r * pitch + e, load(d + r * pitch + e));
          return product<F>(count, depth, up(columns, 2), rounded, pitch, pairs + (from + column) / 2 * depth, depth,
                            out + i * ld, ld, true);
        }
      product<A>(count, depth, columns, d, pitch, vector(from + column), depth, out + i * ld, ld, true);
    });
  }
  // gradient^T += x^T . sums, where ``turned`` is x^T
  void learn(Rows<F> x, const F* turned, int64_t ld, int64_t rows, Reach reach) {
    by_reach(rows, reach, [&](int64_t i, int64_t count, int64_t column, int64_t columns) {
      const A* d = sums + i * pitch + 16 + column;
      const bool alone = stands_alone(column + columns);
      const Unit<F>* right = (const Unit<F>*)d;
      if constexpr (step == 2) {
        uint32_t* to = (uint32_t*)rounded;
        right = to;
        for (int64_t r = 0; r < count; r += 2, to += pitch)
          for (int64_t e = 0; e < columns; e += L) {
            const A* row = d + r * pitch + e;
            put_pairs(load(row), r + 1 < count ? load(row + pitch) : set(A(0)), to + e);
          }
      }
      product_to_panels<F>(depth, up(columns - alone, 16), up(count, step), turned + i, ld, right, pitch, gradient,
                           depth, from + column, true);
      for (int64_t r = 0; alone && r < count; r++) {
        const F* row = x.at + (i + r) * x.pitch;
        for (int64_t e = 0; e < depth; e++) last[e] += d[r * pitch + columns - 1] * (A)widen(row[e]);
      }
    });
  }
  // Writes the gradient of a head's vectors, or adds it; ``block`` is scratch (16, depth)
  void put_gradient(A* out, int64_t width, A scale, bool first, A* block) const {
    for (int64_t t = 0; t < whole.length; t += 16) {
      const bool alone = whole.length % 16 == 1 && t + 1 == whole.length;
      for (int64_t e = 0; !alone && e < depth; e += 16)
        transpose16(gradient + t / 64 * 64 * depth + e * 64 + t % 64, 64, block + e, depth, 16);
      for (int64_t r = 0; r < smaller<int64_t>(16, whole.length - t); r++) {
        const A* row = alone ? last : block + r * depth;
        A* to = out + (t + r) * width;
        for (int64_t e = 0; e < width; e++) to[e] = first ? scale * row[e] : to[e] + scale * row[e];
      }
    }
  }
};

// --- a table of vectors that keys meet, the mirror of one that queries meet: what a query reads of the keys' products
// lies on a diagonal

// Some keys at a time are multiplied with the vectors that the block's queries read: between multiples of ``FEW``.
constexpr int64_t FEW = 32;

template <class F> struct Mirror {
  typedef Sum<F> A;
  Vectors<F> vectors;
  A *square = nullptr, *turned = nullptr;  // (16, 16): entries by key, and by query

  bool on() const { return vectors.on(); }
  // ``span``: the most offsets between a key and the queries of a block
  void reserve(Scratch& memory, Ends ends, int64_t width, int64_t span, bool packs, bool backward, bool learns) {
    vectors.reserve(memory, ends, width, FEW, span + FEW, packs, packs, backward, learns);
    if (on()) square = memory.take<A>(256), turned = memory.take<A>(256);
  }

  // Calls f(tile of some keys, their side, the column of the first) for all keys of a tile, after looking at the table.
  template <class F_> INLINE void by_few(const Tile& t, const Line& line, F_ f) {
    for (int64_t j = t.j, next; j < t.j + t.real; j = next) {
      next = smaller(t.j + t.real, (j / FEW + 1) * FEW);
      const Tile few{t.i, t.rows, j, next - j, next - j, false};
      int64_t least, most;
      line.bounds(few, least, most);
      vectors.look_at(least, most);
      f(few, line.listed ? 0 : vectors.part.side(least, most), j - t.j);
    }
  }
  // Calls f(first column, columns, end of queries, queries, place) for 16 keys and 16 queries at a time, whose entries
  // go up by one from query to query before: ``place`` is that of the first key and the last query.
  template <class F_> INLINE void by_squares(const Tile& few, const Line& line, F_ f) const {
    for (int64_t end = few.rows; end > 0; end -= 16)
      for (int64_t e = 0; e < few.real; e += 16)
        f(e, smaller<int64_t>(16, few.real - e), end, smaller<int64_t>(16, end),
          vectors.part.origin(line.key(few.j + e) - line.query(few.i + end - 1)));
  }
  Reach reach(const Tile& few, const Line& line) const {
    if (line.listed) return {true, 0, 0, 0};
    return {false, line.key(few.j) - line.query(few.i + few.rows - 1), line.key(few.j) - line.query(few.i) + 1, 1};
  }
  // The entry of a key of ``few`` for a query
  INLINE int64_t entry(const Tile& few, const Line& line, int64_t i, int64_t e) const {
    return e * vectors.pitch + 16 + vectors.part.column(offset_between(line.query(few.i + i), line.key(few.j + e)));
  }
  int64_t place_of(int64_t origin) const { return between<int64_t>(origin, 0, vectors.part.length + 16); }

  // s_ij += scale <x_j, table[o]> for a tile of few queries; ``x`` begins with the tile's first key.
  void add_few(const Tile& t, const Line& line, Rows<F> x, A scale, A* scores, int64_t ld) const {
    for (int64_t j = 0; j < t.real; j++)
      for (int64_t i = 0; i < t.rows; i++) {
        const int64_t offset = offset_between(line.query(t.i + i), line.key(t.j + j));
        scores[i * ld + j] +=
            scale * dot(x.at + j * x.pitch, vectors.vector(vectors.whole.column(offset)), vectors.depth);
      }
  }
  // The same for many queries and all keys ``x``
  void add(const Tile& t, const Line& line, Rows<F> x, A scale, A* scores, int64_t ld) {
    by_few(t, line, [&](const Tile& few, int side, int64_t column) {
      vectors.multiply({x.at + few.j * x.pitch, x.pitch}, few.real, scale, reach(few, line));
      const A* p = vectors.products;
      const int64_t pitch = vectors.pitch, length = vectors.part.length;
      A* s = scores + column;
      if (side != 0) {  // One number for all queries
        for (int64_t e = 0; e < few.real; e++) square[e] = p[e * pitch + (side < 0 ? 16 : 15 + length)];
        for (int64_t e = few.real; e < up(few.real, 16); e++) square[e] = 0;
        for (int64_t i = 0; i < few.rows; i++)
          for (int64_t e = 0; e < few.real; e += 16) store(s + i * ld + e, load(s + i * ld + e) + load(square + e));
      } else if (line.listed || line.query_stride != 1) {
        for (int64_t i = 0; i < few.rows; i++)
          for (int64_t e = 0; e < few.real; e++) s[i * ld + e] += p[entry(few, line, i, e)];
      } else {
        by_squares(few, line, [&](int64_t e, int64_t keys, int64_t end, int64_t queries, int64_t origin) {
          if (origin >= 0 && origin + 15 <= length + 16) {
            transpose16(p + e * pitch + origin, pitch + 1, turned, 16, keys);
          } else {
            for (int64_t key = 0; key < keys; key++)
              store(square + 16 * key, load(p + (e + key) * pitch + place_of(origin + key)));
            transpose16(square, 16, turned, 16, keys);
          }
          for (int64_t r = 0; r < queries; r++) {
            A* to = s + (end - 1 - r) * ld + e;
            store(to, load(to) + load(turned + 16 * r));
          }
        });
      }
    });
  }

  // The transpose: adds a tile's gradient to the gradient of the keys' rows ``d_x`` (n, depth), if any, and of vectors.
  // ``turned_x`` is x^T, (depth, x_ld).
  void collect(const Tile& t, const Line& line, const A* gradients, int64_t ld, Rows<F> x, const F* turned_x,
               int64_t x_ld, A* d_x) {
    by_few(t, line, [&](const Tile& few, int side, int64_t column) {
      vectors.clear(few.real);
      A* sums = vectors.sums;
      const A* d = gradients + column;
      const int64_t pitch = vectors.pitch, length = vectors.part.length;
      if (side != 0) {
        for (int64_t e = 0; e < few.real; e += 16) {
          Vec<A> sum = set(A(0));
          for (int64_t i = 0; i < few.rows; i++) sum = sum + load(d + i * ld + e);
          store(square, sum);
          for (int64_t key = e; key < smaller(e + 16, few.real); key++)
            sums[key * pitch + (side < 0 ? 16 : 15 + length)] = square[key - e];
        }
      } else if (line.listed || line.query_stride != 1) {
        for (int64_t i = 0; i < few.rows; i++)
          for (int64_t e = 0; e < few.real; e++) sums[entry(few, line, i, e)] += d[i * ld + e];
      } else {
        by_squares(few, line, [&](int64_t e, int64_t keys, int64_t end, int64_t queries, int64_t origin) {
          transpose16(d + (end - 1) * ld + e, -ld, turned, 16, queries);
          for (int64_t key = 0; key < keys; key++) {
            A* to = sums + (e + key) * pitch + place_of(origin + key);
            store(to, load(to) + load(turned + 16 * key));
          }
        });
      }
      vectors.fold(few.real);
      if (d_x) vectors.add_to(d_x + few.j * vectors.depth, vectors.depth, few.real, reach(few, line));
      if (vectors.gradient)
        vectors.learn({x.at + few.j * x.pitch, x.pitch}, turned_x + few.j, x_ld, few.real, reach(few, line));
    });
  }
};

}  // namespace LEVEL
}  // namespace whereformer
