// Which keys a query may attend to: which tiles to visit, and what to forbid in a row of one.
#pragma once
#include "offsets.h"

namespace whereformer {
namespace LEVEL {

// ``A`` is the dtype of scores.
template <class A> struct Limits {
  const Call& c;
  const Line& line;
  bool limited, by_pair;  // by offsets at all; in a way that a row's interval cannot tell
  const int64_t *query_documents = nullptr, *key_documents = nullptr;
  int64_t panels;
  A *keys = nullptr, *row = nullptr;  // 1 for keys that the mask allows; the same for a row of a tile
  uint8_t *some = nullptr, *every = nullptr;
  int64_t *first_document = nullptr, *last_document = nullptr, *low = nullptr, *high = nullptr;
  // of the block of queries
  int64_t from = 0, to = 0, first_key = 0, last_key = 0, block_low = 0, block_high = 0, block_first_document = 0,
          block_last_document = 0;

  Limits(const Call& call, const Line& positions, Scratch& memory, int64_t tile_width) : c(call), line(positions) {
    limited = c.has_least || c.has_most;
    by_pair = c.query_documents || (limited && c.listed);
    panels = (c.n_k + 63) / 64;
    if (c.key_mask)
      keys = memory.take<A>(up(c.n_k, 64)), some = memory.take<uint8_t>(panels), every = memory.take<uint8_t>(panels);
    if (by_pair) row = memory.take<A>(tile_width);
    if (c.query_documents) first_document = memory.take<int64_t>(panels), last_document = memory.take<int64_t>(panels);
    if (limited && c.listed) low = memory.take<int64_t>(panels), high = memory.take<int64_t>(panels);
  }

  template <class T> static void range(const T* x, int64_t from, int64_t to, T& low, T& high) {
    low = high = x[from];
    for (int64_t j = from + 1; j < to; j++) low = smaller(low, x[j]), high = larger(high, x[j]);
  }

  // The keys from ``first``, a multiple of 64, up to ``last`` of an item
  void enter(int64_t b, int64_t first, int64_t last) {
    first_key = first, last_key = last;
    if (c.query_documents) query_documents = c.query_documents + b * c.n_q, key_documents = c.key_documents + b * c.n_k;
    for (int64_t j = first; j < last; j += 64) {
      const int64_t p = j / 64, end = smaller(j + 64, c.n_k);
      if (keys) {
        bool any = false, all = true;
        for (int64_t e = j; e < end; e++) {
          const bool on = c.key_mask[b * c.key_mask_strides[0] + e * c.key_mask_strides[1]];
          keys[e] = on, any |= on, all &= on;
        }
        some[p] = any, every[p] = all;
      }
      if (key_documents) range(key_documents, j, end, first_document[p], last_document[p]);
      if (low) range(line.keys, j, end, low[p], high[p]);
    }
  }

  // The smallest and the last key that ``least`` and ``most`` allow a query, for computed positions
  INLINE int64_t begin_of(int64_t i) const {
    return c.has_least ? (int64_t)between<__int128>((__int128)c.least + line.query(i) - line.key_start, 0, c.n_k) : 0;
  }
  INLINE int64_t end_of(int64_t i) const {
    return c.has_most ? (int64_t)between<__int128>((__int128)c.most + line.query(i) - line.key_start + 1, 0, c.n_k)
                      : c.n_k;
  }

  void enter_block(int64_t i, int64_t rows) {
    from = first_key, to = last_key;
    if (!c.listed) from = larger(from, begin_of(i) / 16 * 16), to = smaller(to, end_of(i + rows - 1));
    if (query_documents) range(query_documents, i, i + rows, block_first_document, block_last_document);
    if (low) range(line.queries, i, i + rows, block_low, block_high);
  }

  // Whether any pair of the block and some keys of a panel may attend, and whether all may; or nearly so: where it
  // would take each pair to know, any are said to and not all.
  void look(const Tile& block, int64_t j, int64_t end, bool& any, bool& all) const {
    const int64_t p = j / 64;
    any = all = true;
    if (keys) any &= some[p] != 0, all &= every[p] != 0;
    if (key_documents) {
      any &= last_document[p] >= block_first_document && first_document[p] <= block_last_document;
      all &= first_document[p] == last_document[p] && block_first_document == block_last_document &&
             first_document[p] == block_first_document;
    }
    if (!limited) return;
    const int64_t least = c.listed ? low[p] - block_high : line.key(j) - line.query(block.i + block.rows - 1);
    const int64_t most = c.listed ? high[p] - block_low : line.key(end - 1) - line.query(block.i);
    any &= reaches(most) && stays(least), all &= reaches(least) && stays(most);
  }
  // Whether an offset is not too small; and not too large
  INLINE bool reaches(int64_t offset) const { return !c.has_least || offset >= c.least; }
  INLINE bool stays(int64_t offset) const { return !c.has_most || offset <= c.most; }

  // The block's next tile from key ``j`` on, at most ``width`` wide; false if there is none. ``j`` moves behind it.
  bool next(Tile& t, int64_t& j, int64_t width) const {
    bool any = false, all = false;
    for (;; j = (j / 64 + 1) * 64) {
      if (j >= to) return false;
      look(t, j, smaller((j / 64 + 1) * 64, to), any, all);
      if (any) break;
    }
    t.j = j, t.partial = false;
    while (j < to) {
      const int64_t end = smaller((j / 64 + 1) * 64, to);
      if (up(end - t.j, 16) > width) break;
      look(t, j, end, any, all);
      if (!any) break;
      t.partial |= !all;
      j = end;
    }
    t.real = j - t.j, t.width = up(t.real, 16);
    t.partial |= t.real != t.width;
    return true;
  }

  // What a query may attend to in a tile: keys from ``low`` up to ``high``, and of these where the result is not 0; all
  // if it is null
  const A* of_row(const Tile& t, int64_t i, int64_t& low, int64_t& high) const {
    low = 0, high = t.real;
    if (!c.listed && limited) {
      high = between<int64_t>(end_of(i) - t.j, 0, t.real);
      low = between<int64_t>(begin_of(i) - t.j, 0, t.real);
    }
    if (!by_pair) return keys ? keys + t.j : nullptr;
    for (int64_t j = 0; j < t.width; j++) row[j] = j < high ? keys ? keys[t.j + j] : A(1) : A(0);
    if (query_documents)
      for (int64_t j = 0; j < high; j++) row[j] = key_documents[t.j + j] == query_documents[i] ? row[j] : A(0);
    if (!limited || !c.listed) return row;
    for (int64_t j = 0; j < high; j++) {
      const int64_t offset = line.keys[t.j + j] - line.queries[i];
      row[j] = reaches(offset) && stays(offset) ? row[j] : A(0);
    }
    return row;
  }
};

}  // namespace LEVEL
}  // namespace whereformer
