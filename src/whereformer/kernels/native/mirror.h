// A table of vectors that keys meet, the mirror of one that queries meet: what a query reads of the keys' products lies on a
// diagonal.
#pragma once
#include "offsets.h"

namespace whereformer {
namespace LEVEL {

// Some keys at a time are multiplied with the vectors that the block's queries read: from one multiple of ``FEW`` to the next.
constexpr int64_t FEW = 32;

template <class A> struct Mirror {
  Vectors<A> vectors;
  A *square = nullptr, *turned = nullptr;  // (16, 16): entries by key, and by query

  bool on() const { return vectors.on(); }
  // ``span``: the most offsets between a key and the queries of a block
  void reserve(Scratch& memory, Ends ends, int64_t width, int64_t span, bool backward, bool learns) {
    vectors.reserve(memory, ends, width, FEW, span + FEW, true, backward, learns);
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
  // Calls f(first column, columns, end of queries, queries, place) for 16 keys and 16 queries at a time, whose entries go up
  // by one from query to query before: ``place`` is that of the first key and the last query.
  template <class F_> INLINE void by_squares(const Tile& few, const Line& line, F_ f) const {
    for (int64_t end = few.rows; end > 0; end -= 16)
      for (int64_t e = 0; e < few.real; e += 16)
        f(e, smaller<int64_t>(16, few.real - e), end, smaller<int64_t>(16, end), vectors.part.origin(line.key(few.j + e) - line.query(few.i + end - 1)));
  }
  Reach reach(const Tile& few, const Line& line) const {
    if (line.listed) return {true, 0, 0, 0};
    return {false, line.key(few.j) - line.query(few.i + few.rows - 1), line.key(few.j) - line.query(few.i) + 1, 1};
  }
  // The entry of a key of ``few`` for a query
  INLINE int64_t entry(const Tile& few, const Line& line, int64_t i, int64_t e) const {
    return e * vectors.pitch + 16 + vectors.part.column(line.key(few.j + e) - line.query(few.i + i));
  }
  int64_t place_of(int64_t origin) const { return between<int64_t>(origin, 0, vectors.part.length + 16); }

  // s_ij += scale <x_j, table[o]> for a tile
  void add(const Tile& t, const Line& line, Rows<A> x, A scale, A* scores, int64_t ld) {
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
            for (int64_t key = 0; key < keys; key++) store(square + 16 * key, load(p + (e + key) * pitch + place_of(origin + key)));
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

  // The transpose: adds a tile's gradient to those of the keys' rows ``d_x`` (n, depth), if any, and of the vectors
  void collect(const Tile& t, const Line& line, const A* gradients, int64_t ld, const A* panels, A* d_x) {
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
          for (int64_t key = e; key < smaller(e + 16, few.real); key++) sums[key * pitch + (side < 0 ? 16 : 15 + length)] = square[key - e];
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
      if (vectors.gradient) vectors.learn(panels + few.j / 64 * 64 * vectors.depth + few.j % 64, 64, few.real, reach(few, line));
    });
  }
};

}  // namespace LEVEL
}  // namespace whereformer
