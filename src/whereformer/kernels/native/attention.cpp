// Softmax attention with position terms, forward and backward, in tiles of scores that never leave a core's cache. It
// is compiled once for each set of instructions (LEVEL). The formulas are those of reference.py.
//
//   score_ij = softcap(scale <q_i, k_j>) + bias[o] + <f_i, key_table[o]> + <g_j, query_table[o]> + <qf_i, kf_j>
//              - sum |ql_i - kl_j| + dense_ij;
//              f and g are factors, or scale q and scale k
//   out_i    = sum_j w_ij (v_j + value_table[o]),  w = dropout(softmax(score)),  o = offset of key j from query i
//
// For every block of queries and every tile of keys: multiply, add the terms, forbid, take the softmax (with a running
// maximum), multiply with values. The backward computes a tile's weights again, and from them its scores' gradient,
// which then goes to all inputs. Gradients of keys and values are summed as (width, n), so that no tile is transposed.
//
// Nothing here may come from the standard library but what is compiled away: an object file of one level must not bring
// functions that the linker could take for those of another.
#include "limits.h"

namespace whereformer {
namespace LEVEL {

// ``F``: the dtype of query, key and value; ``T``: of the tables of vectors
template <class F, class T> struct Attention {
  typedef Sum<F> A;
  static constexpr int64_t step = Units<F>::step;
  static constexpr bool halves = step == 2, differs = sizeof(T) != sizeof(F);

  const Call& c;
  const bool backward, few;  // ``few``: queries, whose keys and values are read where they lie
  const int64_t key_parts;
  A* const parts;  // what each part of the keys leaves of each query
  const int64_t group, dk, dv, rk, bq, bk, ld, keys_up, blocks;
  const int64_t key_width, query_width;  // of the vectors of tables
  const int64_t apart;                   // the numbers from the first to the second part of log_sums
  Line line;
  Limits<A> limits;
  uint8_t* runs = nullptr;
  Ends bias_ends;
  Vectors<T> key_vectors, value_vectors;
  Mirror<T> query_vectors;
  const A minus_infinity = -(A)__builtin_inf();

  // Right factors: keys and values transposed, as they are, and factors
  Unit<F>*keys_turned = nullptr, *values_turned = nullptr, *keys_packed = nullptr, *values_packed = nullptr;
  F *keys_copy = nullptr, *values_copy = nullptr, *query_copy = nullptr, *gradient_copy = nullptr;
  F* output_copy = nullptr;
  A *factors_turned = nullptr, *factors_copy = nullptr, *query_factors = nullptr, *factors_turned_rows = nullptr,
    *d_factors = nullptr, *d_query_factors = nullptr;
  // What the tables of vectors meet, where it is not the rows of queries and keys themselves, and its gradient
  T *key_table_rows = nullptr, *key_table_turned = nullptr, *query_table_rows = nullptr, *query_table_turned = nullptr;
  A *d_key_table_rows = nullptr, *d_query_table_rows = nullptr;
  A *query_levels = nullptr, *key_levels = nullptr, *d_query_levels = nullptr, *d_key_levels = nullptr;
  A *bias = nullptr, *bias_sums = nullptr;
  // Tiles: scores or weights, their gradient, the soft cap's tangents; for bfloat16 as pairs of rows and as rows
  A *scores = nullptr, *gradients = nullptr, *tangents = nullptr, *tile_levels = nullptr;
  uint32_t *weight_pairs = nullptr, *gradient_pairs = nullptr;
  F* narrow_rows = nullptr;
  // Numbers of a block's rows
  A *output = nullptr, *tops = nullptr, *totals = nullptr, *deltas = nullptr, *kept = nullptr, *block64 = nullptr;
  T *table_gradient_rows = nullptr, *table_gradient_turned = nullptr;
  A *d_query = nullptr, *d_keys = nullptr, *d_values = nullptr;
  F *query_turned = nullptr, *gradient_turned = nullptr;
  uint32_t* pair_scratch = nullptr;
  // Where the rows of the head and block are
  Rows<F> query{}, value{}, key{}, d_output{};
  Rows<T> key_table_left{}, query_table_left{}, table_gradient{};
  int64_t b = 0, h = 0, key_part = 0;
  bool in_place_query, in_place_key, in_place_value, in_place_gradient;

  static bool in_place(const Tensor& x, int64_t width, int64_t padded) {
    return x.dtype == DTYPE<F> && x.stride[3] == 1 && width == padded && (!halves || x.stride[2] % 2 == 0);
  }

  // Blocks of 128 queries and tiles of 512 keys fit a core's second cache. In a window, fewer queries reach fewer keys.
  static int64_t block_rows(const Call& c) {
    const bool windowed = c.has_least && c.has_most && (double)c.most - (double)c.least < 1024;
    return smaller<int64_t>(windowed ? 64 : 128, up(c.n_q, 2));
  }

  Attention(const Call& call, void* parts_, Scratch& memory)
      : c(call), backward(call.backward != 0), few(has_few_queries(call)), key_parts(key_parts_of(call)),
        parts((A*)parts_), group(call.heads / call.key_heads), dk(up(call.head_dim, 16 * step)),
        dv(up(call.value_dim, 16 * step)), rk(up(call.rank, 16)), bq(block_rows(call)),
        bk(smaller<int64_t>(512, up(call.n_k, 64))), ld(bk + 16), keys_up(up(call.n_k, 64)),
        blocks((call.n_q + bq - 1) / bq), key_width(call.key_rank ? call.key_rank : call.head_dim),
        query_width(call.query_rank ? call.query_rank : call.head_dim),
        apart(up(call.batch * call.heads * call.n_q, 4)),
        line{call.listed != 0, call.query_start, call.query_stride, call.key_start, nullptr, nullptr, nullptr},
        limits(call, line, memory, bk) {
    in_place_query = in_place(c.query, c.head_dim, dk), in_place_key = in_place(c.key, c.head_dim, dk);
    in_place_value = in_place(c.value, c.value_dim, dv), in_place_gradient = in_place(c.d_output, c.value_dim, dv);
    bias_ends = {c.bias.first, c.bias.length};
    if (c.listed) runs = memory.take<uint8_t>(up(c.n_k, 16) / 16);
    scores = memory.take<A>(bq * ld);
    const int64_t keys_held = few ? bk : keys_up;
    block64 = memory.take<A>(64 * larger(larger(larger(dk, dv), larger(rk, L)), up(larger(key_width, query_width), L)));
    if (c.head_dim) {
      if (!few) keys_turned = memory.take<Unit<F>>(keys_up * dk / step);
      if (!in_place_query) query_copy = memory.take<F>(bq * dk);
      if (!in_place_key) keys_copy = memory.take<F>(keys_held * dk);
    }
    if (c.rank) {
      if (!few) factors_turned = memory.take<A>(keys_up * rk);
      factors_copy = memory.take<A>(keys_held * rk), query_factors = memory.take<A>(bq * rk);
    }
    if (!in_place_value) values_copy = memory.take<F>(keys_held * dv);
    if (c.bias.data) bias = memory.take<A>(bias_ends.pitch());
    // The most offsets in a tile
    constexpr int64_t any = (int64_t)1 << 40;
    const int64_t most = c.listed ? any : (int64_t)smaller<__int128>((__int128)c.query_stride * (bq - 1) + bk, any);
    key_vectors.reserve(memory, {c.key_table.first, c.key_table.length}, key_width, bq, most, !few, true, backward,
                        backward && c.d_key_table);
    query_vectors.reserve(memory, {c.query_table.first, c.query_table.length}, query_width,
                          c.listed ? any : (int64_t)smaller<__int128>((__int128)c.query_stride * (bq - 1), any), !few,
                          backward, backward && c.d_query_table);
    const int64_t key_depth = key_vectors.depth, query_depth = query_vectors.vectors.depth;
    if (key_vectors.on() && (c.key_rank || differs)) key_table_rows = memory.take<T>(bq * larger(key_depth, dk));
    if (query_vectors.on() && (c.query_rank || differs)) query_table_rows = memory.take<T>(keys_held * query_depth);
    if (c.levels) query_levels = memory.take<A>(bq * c.levels), key_levels = memory.take<A>(c.levels * keys_up);
    value_vectors.reserve(memory, {c.value_table.first, c.value_table.length}, c.value_dim, bq, most, !few, backward,
                          true, backward && c.d_value_table);
    if (c.dropout_p > 0) kept = memory.take<A>(bk);
    if (!backward) {
      output = memory.take<A>(bq * dv), tops = memory.take<A>(bq), totals = memory.take<A>(bq);
      if (halves && !few) values_packed = memory.take<Unit<F>>(keys_up / 2 * dv), narrow_rows = memory.take<F>(bq * bk);
      return;
    }
    values_turned = memory.take<Unit<F>>(keys_up * dv / step);
    gradients = memory.take<A>(bq * ld + 32);
    if (gradients) {
      gradients += 16;
      for (int64_t i = 0; i <= bq; i++) zero(gradients - 16 + i * ld, 16);  // for diagonals
    }
    if (c.softcap) tangents = memory.take<A>(bq * ld);
    if (!in_place_gradient) gradient_copy = memory.take<F>(bq * dv);
    output_copy = memory.take<F>(bq * dv);
    if constexpr (halves) {
      weight_pairs = memory.take<uint32_t>(bq / 2 * bk), gradient_pairs = memory.take<uint32_t>(bq / 2 * bk),
      narrow_rows = memory.take<F>(bq * bk);
      keys_packed = memory.take<Unit<F>>(keys_up / 2 * dk), pair_scratch = memory.take<uint32_t>(16 * larger(dk, dv));
    }
    if (differs && value_vectors.on())
      table_gradient_rows = memory.take<T>(bq * dv), table_gradient_turned = memory.take<T>(dv * up(bq, 32));
    deltas = memory.take<A>(bq);
    query_turned = memory.take<F>(dk * up(bq, 32)), gradient_turned = memory.take<F>(dv * up(bq, 32));
    d_query = memory.take<A>(bq * dk);
    d_keys = memory.take<A>(keys_up * dk), d_values = memory.take<A>(keys_up * dv);
    if (c.d_query_factors || c.d_key_factors)
      d_factors = memory.take<A>(keys_up * rk), d_query_factors = memory.take<A>(bq * rk),
      factors_turned_rows = memory.take<A>(rk * up(bq, 16));
    if (c.key_rank && c.d_key_table_factors) d_key_table_rows = memory.take<A>(bq * key_depth);
    if ((c.key_rank || differs) && c.d_key_table) key_table_turned = memory.take<T>(key_depth * up(bq, 32));
    if (query_vectors.on() && (c.query_rank ? c.d_query_table_factors != nullptr : c.d_key.data != nullptr))
      d_query_table_rows = memory.take<A>(keys_up * query_depth);
    if (c.d_query_table) query_table_turned = memory.take<T>(query_depth * keys_up);
    if (c.d_query_levels || c.d_key_levels)
      d_query_levels = memory.take<A>(bq * c.levels), d_key_levels = memory.take<A>(c.levels * keys_up),
      tile_levels = memory.take<A>(c.levels * bk);
    if (c.d_bias) bias_sums = memory.take<A>(bias_ends.pitch());
  }

  // --- what a batch item, its head of keys, a head and a block of queries have in common

  void enter_item(int64_t item, int64_t first_key, int64_t last_key) {
    b = item;
    if (c.listed) {
      line.queries = c.query_positions + b * c.query_positions_stride;
      line.keys = c.key_positions + b * c.key_positions_stride;
      find_runs(line.keys, c.n_k, runs), line.runs = runs;
    }
    limits.enter(b, first_key, last_key);
  }

  void enter_key_head(int64_t key_head) {
    if (few) return;
    if (c.head_dim) {
      key = rows_of(c.key, key_head, 0, c.n_k, c.head_dim, dk, in_place_key, keys_copy);
      pack_transposed<F>(key.at, key.pitch, c.n_k, dk, keys_turned);
    }
    value = rows_of(c.value, key_head, 0, c.n_k, c.value_dim, dv, in_place_value, values_copy);
    if (query_vectors.on() && !c.query_rank) enter_keys_of_table(c.key, key_head);
    if (!backward) {
      if constexpr (halves) pack_pairs(value.at, value.pitch, c.n_k, dv, values_packed);
      return;
    }
    pack_transposed<F>(value.at, value.pitch, c.n_k, dv, values_turned);
    if constexpr (halves)
      if (c.head_dim) pack_pairs(key.at, key.pitch, c.n_k, dk, keys_packed);
  }

  // Finds the keys and values of a tile of few queries, and what else has a row for each key, or copies them.
  void enter_keys(const Tile& t) {
    const int64_t key_head = h / group, depth = query_vectors.vectors.depth;
    if (c.head_dim) key = rows_of(c.key, key_head, t.j, t.real, c.head_dim, dk, in_place_key, keys_copy);
    value = rows_of(c.value, key_head, t.j, t.real, c.value_dim, dv, in_place_value, values_copy);
    if (c.rank) read_rows(c.key_factors, b, h, t.j, t.real, c.rank, factors_copy, rk);
    if constexpr (!differs) query_table_left = key;
    if (!query_table_rows) return;
    if (c.query_rank) read_rows(c.query_table_factors, b, h, t.j, t.real, query_width, query_table_rows, depth);
    else read_rows(c.key, b, key_head, t.j, t.real, query_width, query_table_rows, depth);
    query_table_left = {query_table_rows, depth};
  }

  // Prepares what the table of queries' vectors meets: keys, or factors of them.
  void enter_keys_of_table(const Tensor& x, int64_t head) {
    const int64_t depth = query_vectors.vectors.depth;
    if (d_query_table_rows) zero(d_query_table_rows, keys_up * depth);
    if constexpr (!differs) query_table_left = key;
    if (query_table_rows) {
      read_rows(x, b, head, 0, c.n_k, query_width, query_table_rows, depth);
      query_table_left = {query_table_rows, depth};
    }
    if (query_table_turned)
      transpose_rows<T>(query_table_left.at, query_table_left.pitch, c.n_k, depth, query_table_turned, keys_up,
                        pair_scratch);
  }

  Rows<F> rows_of(const Tensor& x, int64_t head, int64_t from, int64_t count, int64_t width, int64_t padded,
                  bool as_it_is, F* copy) {
    if (as_it_is) return {(const F*)x.data + start_of(x, b, head, from), x.stride[2]};
    read_rows(x, b, head, from, count, width, copy, padded);
    return {copy, padded};
  }

  void enter_head(int64_t head) {
    h = head;
    if (c.bias.data) {
      int64_t from = 0;
      if (few) {  // They may read little of a long table.
        const int64_t keys = limits.last_key - limits.first_key;
        int64_t least, most;
        line.bounds({0, c.n_q, limits.first_key, keys, keys, false}, least, most);
        const Ends all{c.bias.first, c.bias.length};
        from = all.column(least), bias_ends = {all.first + from, all.column(most) + 1 - from};
      }
      __builtin_memcpy(bias + 16, (const A*)c.bias.data + h * c.bias.stride + from, sizeof(A) * bias_ends.length);
      bias_ends.pad(bias);
      if (bias_sums) zero(bias_sums, bias_ends.pitch());
    }
    if (key_vectors.on()) key_vectors.enter((const T*)c.key_table.data + h * c.key_table.stride, key_width);
    if (query_vectors.on()) {
      query_vectors.vectors.enter((const T*)c.query_table.data + h * c.query_table.stride, query_width);
      if (c.query_rank && !few) enter_keys_of_table(c.query_table_factors, h);
    }
    if (c.levels) {
      zero(key_levels, c.levels * keys_up);
      by_dtype(c.key_levels.dtype, c.key_levels.data, [&](const auto* data) {
        for (int64_t j = 0; j < c.n_k; j++)
          for (int64_t l = 0; l < c.levels; l++)
            copy_number(data[start_of(c.key_levels, b, h, j) + l * c.key_levels.stride[3]],
                        key_levels[l * keys_up + j]);
      });
      if (d_key_levels) zero(d_key_levels, c.levels * keys_up);
    }
    if (value_vectors.on()) value_vectors.enter((const T*)c.value_table.data + h * c.value_table.stride, c.value_dim);
    if (c.rank && !few) {
      read_rows(c.key_factors, b, h, 0, c.n_k, c.rank, factors_copy, rk);
      pack_transposed<A>(factors_copy, rk, c.n_k, rk, factors_turned);
      if (d_factors) zero(d_factors, keys_up * rk);
    }
  }

  void enter_block(Tile& t, int64_t block) {
    t.i = block * bq, t.rows = smaller(bq, c.n_q - t.i);
    limits.enter_block(t.i, t.rows);
    if (c.head_dim) query = rows_of(c.query, h, t.i, t.rows, c.head_dim, dk, in_place_query, query_copy);
    if (c.rank) read_rows(c.query_factors, b, h, t.i, t.rows, c.rank, query_factors, rk);
    if (key_vectors.on()) {
      const int64_t depth = key_vectors.depth;
      if (c.key_rank)
        read_rows(c.key_table_factors, b, h, t.i, t.rows, c.key_rank, key_table_rows, depth),
            key_table_left = {key_table_rows, depth};
      else key_table_left = in_table_dtype(c.query, query, t, c.head_dim, dk, key_table_rows);
    }
    if (c.levels) read_rows(c.query_levels, b, h, t.i, t.rows, c.levels, query_levels, c.levels);
  }

  // A block's rows in the dtype of tables
  Rows<T> in_table_dtype(const Tensor& x, Rows<F> rows, const Tile& t, int64_t width, int64_t padded, T* copy) {
    if constexpr (!differs) return rows;
    else {
      read_rows(x, b, h, t.i, t.rows, width, copy, padded);
      return {copy, padded};
    }
  }

  // --- scores

  // How the terms over offsets stand to a tile: across it, or one number in all of it
  struct Sides { int bias, keys, values; };
  Sides enter_tile(const Tile& t) {
    Sides sides{2, 2, 2};
    if (!(c.bias.data || key_vectors.on() || value_vectors.on())) return sides;
    int64_t least, most;
    line.bounds(t, least, most);
    if (c.bias.data) sides.bias = line.listed ? 0 : bias_ends.side(least, most);
    if (key_vectors.on()) {
      key_vectors.look_at(least, most);
      sides.keys = line.listed ? 0 : key_vectors.part.side(least, most);
      key_vectors.multiply(key_table_left, t.rows, c.key_rank ? A(1) : (A)c.scale, reach(t));
    }
    if (value_vectors.on())
      value_vectors.look_at(least, most), sides.values = line.listed ? 0 : value_vectors.part.side(least, most);
    return sides;
  }

  // The offsets of a tile's queries
  Reach reach(const Tile& t) const {
    if (line.listed) return {true, 0, 0, 0};
    const int64_t least = line.key(t.j) - line.query(t.i);
    return {false, least, least + t.width, -line.query_stride};
  }

  // Whether something is added that only a pass of its own over a row can
  bool adds_by_row() const { return c.dense.data || c.levels || (line.listed && (c.bias.data || key_vectors.on())); }

  // Calls f(first row, rows, first column, end of columns) for parts of a tile with all allowed pairs: where causality
  // or a window cuts through it, a few rows reach fewer keys than all. Columns begin and end at multiples of 16.
  template <class Part_> INLINE void by_parts(const Tile& t, Part_ f) const {
    constexpr int64_t few = halves ? 32 : 24;
    // The soft cap's tangents are needed in whole rows.
    if (!t.partial || !limits.limited || c.listed || c.softcap) return f(0, t.rows, 0, t.width);
    for (int64_t i = 0; i < t.rows; i += few) {
      const int64_t rows = smaller(few, t.rows - i);
      const int64_t begin = between<int64_t>(limits.begin_of(t.i + i) - t.j, 0, t.real) / L * L;
      const int64_t end = between<int64_t>(limits.end_of(t.i + i + rows - 1) - t.j, 0, t.real);
      f(i, rows, begin, larger(begin, up(end, L)));
    }
  }
  // c (rows, width) (+)= a . right, where ``a`` has the rows of a tile and ``right`` has a row for each of its keys
  INLINE void multiply_keys(const Tile& t, int64_t width, const F* a, int64_t lda, const Unit<F>* right, int64_t pitch,
                            A* to, bool add) const {
    by_parts(t, [&](int64_t i, int64_t rows, int64_t begin, int64_t end) {
      const int64_t sum = up(smaller(end, t.real) - begin, step);
      if (sum > 0)
        product<F>(rows, width, sum, a + i * lda + begin, lda, right + begin / step * pitch, pitch, to + i * width,
                   width, add);
      else if (!add) zero(to + i * width, rows * width);
    });
  }
  // to (rows, keys) = x . panels
  INLINE void multiply_rows(const Tile& t, Rows<F> x, int64_t width, const Unit<F>* panels, A* to) const {
    by_parts(t, [&](int64_t i, int64_t rows, int64_t begin, int64_t end) {
      product_of_panels<F>(rows, end - begin, width, x.at + i * x.pitch, x.pitch, panels, width / step, t.j + begin,
                           to + i * ld + begin, ld, false);
    });
  }

  // Fills the tile with products, and returns the factor that they still lack
  A multiply(const Tile& t) {
    if (c.head_dim && few) dots<F>(t.rows, t.real, dk, query, key, scores, ld, false);
    else if (c.head_dim) multiply_rows(t, query, dk, keys_turned, scores);
    else
      for (int64_t i = 0; i < t.rows; i++) zero(scores + i * ld, t.width);
    A factor = c.head_dim ? (A)c.scale : A(1);
    if (c.softcap) {
      // Infinity times a score of 0 would be NaN.
      const A steep = sizeof(A) == 8 ? (A)(c.scale / c.softcap) : (A)between<double>(c.scale / c.softcap, -3e38, 3e38);
      for (int64_t i = 0; i < t.rows; i++) {
        A* s = scores + i * ld;
        tanh_row(s, t.width, steep);
        if (tangents) __builtin_memcpy(tangents + i * ld, s, sizeof(A) * t.width);
      }
      factor = (A)c.softcap;
    }
    if (c.rank) {
      if (factor != 1)
        for (int64_t i = 0; i < t.rows; i++) times_row(scores + i * ld, t.width, factor);
      factor = 1;
      if (few) dots<A>(t.rows, t.real, rk, {query_factors, rk}, {factors_copy, rk}, scores, ld, true);
      else product_of_panels<A>(t.rows, t.width, rk, query_factors, rk, factors_turned, rk, t.j, scores, ld, true);
    }
    if (query_vectors.on()) {
      // Products with keys lack the same factor as those of queries and keys, unless these have it already.
      const bool both = !c.query_rank && !c.rank && !c.softcap;
      if (!both && factor != 1)
        for (int64_t i = 0; i < t.rows; i++) times_row(scores + i * ld, t.width, factor);
      if (!both) factor = 1;
      const A scale = both || c.query_rank ? A(1) : (A)c.scale;
      few ? query_vectors.add_few(t, line, query_table_left, scale, scores, ld)
          : query_vectors.add(t, line, query_table_left, scale, scores, ld);
    }
    return factor;
  }
  INLINE void times_row(A* s, int64_t width, A factor) {
    for (int64_t j = 0; j < width; j += L) store(s + j, load(s + j) * set(factor));
  }

  void add_by_row(const Tile& t, int64_t i, A* s, A factor) {
    if (factor != 1) times_row(s, t.width, factor);
    if (line.listed && c.bias.data) add_listed(s, t, t.i + i, line, bias_ends, bias);
    if (line.listed && key_vectors.on())
      add_listed(s, t, t.i + i, line, key_vectors.part, key_vectors.products + i * key_vectors.pitch);
    for (int64_t l = 0; l < c.levels; l++) {
      const Vec<A> level = set(query_levels[i * c.levels + l]);
      const A* x = key_levels + l * keys_up + t.j;
      for (int64_t j = 0; j < t.width; j += L) store(s + j, load(s + j) - size_of(level - load(x + j)));
    }
    if (c.dense.data)
      by_dtype(c.dense.dtype, c.dense.data, [&](const auto* data) {
        const auto* x = data + start_of(c.dense, b, h, t.i + i) + t.j * c.dense.stride[3];
        if (c.dense.stride[3] == 1)
          for (int64_t j = 0; j < t.real; j++) s[j] += (A)widen(x[j]);
        else
          for (int64_t j = 0; j < t.real; j++) s[j] += (A)widen(x[j * c.dense.stride[3]]);
      });
  }

  // The vectors of a row that have a key which its query may attend to: from ``begin`` up to ``end``
  struct Span { int64_t begin, end; };

  // Calls each(column, 16 scores, result) along a span, and returns the result, which begins as ``result``.
  template <int N, int M, class Each_>
  static Vec<A> finish_row(const A* s, Span span, A factor, A base, const Added<A>* added, int64_t low, int64_t high,
                           const A* allowed, Vec<A> result, Each_ each) {
    const Vec<A> scale = set(factor), plus = set(base), never = set(-(A)__builtin_inf());
    for (int64_t j = span.begin; j < span.end; j += L) {
      Vec<A> x = plus;
      if constexpr (N > 0) x = x + added[0].at(j);
      if constexpr (N > 1) x = x + added[1].at(j);
      x = fma(load(s + j), scale, x);
      if constexpr (M > 0)
        if (j < low || j + L > high) x = within(j, low, high, x, never);
      if constexpr (M > 1) x = where(load(allowed + j), x, never);
      each(j, x, result);
    }
    return result;
  }

  // Adds to a row of products what the terms add, and forbids; calls each(column, 16 scores, result) for the row's
  // ``span``, and returns the result. Around the span all is forbidden.
  template <class Each_>
  Vec<A> finish(const Tile& t, const Sides& sides, int64_t i, A factor, Span& span, Vec<A> result, Each_ each) {
    A* s = scores + i * ld;
    if (adds_by_row()) add_by_row(t, i, s, factor), factor = 1;
    Added<A> added[2];
    int n = 0;
    A base = 0;
    auto add = [&](int side, const A* row, const Ends& ends) {
      if (side == 0) added[n++] = {row, ends.origin(line.key(t.j) - line.query(t.i + i)), ends.length};
      else base += row[side < 0 ? 16 : 15 + ends.length];
    };
    if (!line.listed) {
      if (c.bias.data) add(sides.bias, bias, bias_ends);
      if (key_vectors.on()) add(sides.keys, key_vectors.products + i * key_vectors.pitch, key_vectors.part);
    }
    int64_t low = 0, high = t.width;
    const A* allowed = t.partial ? limits.of_row(t, t.i + i, low, high) : nullptr;
    const int m = !t.partial ? 0 : allowed ? 2 : 1;
    span = {low / L * L, larger(low / L * L, up(high, L))};
    return by_number(n, [&](auto N) {
      return by_number(m, [&](auto M) {
        return finish_row<N.value, M.value>(s, span, factor, base, added, low, high, allowed, result, each);
      });
    });
  }
  // Calls f with 0, 1 or 2 as a type
  template <int N> struct Number { static constexpr int value = N; };
  template <class F_> static INLINE Vec<A> by_number(int n, F_ f) {
    return n == 0 ? f(Number<0>{}) : n == 1 ? f(Number<1>{}) : f(Number<2>{});
  }

  // Fills ``kept`` for a row of a tile: 0 where dropout takes the weight, 1 / (1 - p) elsewhere; as in dropout.py.
  void draw_kept(const Tile& t, int64_t i) {
    uint64_t x = (uint64_t)c.seed + ((uint64_t)((b * c.heads + h) * c.n_q + t.i + i) + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    const uint32_t seed = (uint32_t)(x ^ x >> 31), least = (uint32_t)(c.dropout_p * 4294967296.0);
    const A factor = (A)(1 / (1 - c.dropout_p));
    for (int64_t j = 0; j < t.width; j++) {
      uint32_t y = seed + (uint32_t)(t.j + j) * 0x9E3779B9u;
      y = (y ^ y >> 16) * 0x85EBCA6Bu;
      y = (y ^ y >> 13) * 0xC2B2AE35u;
      kept[j] = (y ^ y >> 16) >= least ? factor : A(0);
    }
  }

  // --- forward

  void attend_block(Tile& t) {
    for (int64_t i = 0; i < t.rows; i++) tops[i] = minus_infinity, totals[i] = 0;
    bool any = false;
    for (int64_t j = limits.from; limits.next(t, j, bk); any = true) attend_to(t, any);
    if (!any) zero(output, t.rows * dv);
    key_parts > 1 ? leave_part(t) : put_outputs(t);
  }

  // Adds a tile to the block's output; ``any`` says that others came before.
  void attend_to(const Tile& t, bool any) {
    if (few) enter_keys(t);
    const Sides sides = enter_tile(t);
    const A factor = multiply(t);
    if (value_vectors.on()) value_vectors.clear(t.rows);
    // The scores of some rows at a time, so that no weight waits for the largest score.
    constexpr int64_t some = 4;
    Span spans[some];
    A largest_of[some];
    const bool wide = !narrow_rows || kept || value_vectors.on();
    for (int64_t i = 0; i < t.rows; i++) {
      for (int64_t r = i; i % some == 0 && r < smaller(i + some, t.rows); r++) {
        const auto keep = [s = scores + r * ld](int64_t j, Vec<A> x, Vec<A>& most) {
          store(s + j, x), most = larger_of(most, x);
        };
        largest_of[r % some] = largest(finish(t, sides, r, factor, spans[r % some], set(tops[r]), keep));
      }
      const Span span = spans[i % some];
      const A top = largest_of[i % some], most = top == minus_infinity ? A(0) : top;
      A* s = scores + i * ld;
      F* narrow = narrow_rows ? narrow_rows + i * bk : nullptr;
      const A added =
          wide ? put_weights<true>(s, narrow, t.width, span, most) : put_weights<false>(s, narrow, t.width, span, most);
      if (any) raise_top(i, top);
      tops[i] = top, totals[i] += added;
      if (kept) {
        draw_kept(t, i);
        for (int64_t j = 0; j < t.width; j += L) {
          const Vec<A> w = load(s + j) * load(kept + j);
          store(s + j, w);
          if (narrow) put(narrow + j, w);
        }
      }
      if (value_vectors.on()) collect_row(t, i, s, value_vectors);
    }
    if (few) product<A>(t.rows, dv, t.real, scores, ld, value.at, value.pitch, output, dv, any);
    else if constexpr (halves) multiply_keys(t, dv, narrow_rows, bk, values_packed + t.j / 2 * dv, dv, output, any);
    else multiply_keys(t, dv, scores, ld, value.at + t.j * value.pitch, value.pitch, output, any);
    if (value_vectors.on()) value_vectors.fold(t.rows), value_vectors.add_to(output, dv, t.rows, reach(t));
  }

  // Makes a row's sums relative to a largest score of ``top``.
  void raise_top(int64_t i, A top) {
    if (top == tops[i]) return;
    const A smaller_by = exp(set(tops[i] - top)).p[0][0];
    tops[i] = top, totals[i] *= smaller_by;
    times_row(output + i * dv, dv, smaller_by);
  }

  // Turns a row of scores into weights, which ``narrow`` gets in bfloat16, if there is one, and returns their sum.
  // Without ``WIDE`` only ``narrow`` gets them.
  template <bool WIDE> static A put_weights(A* s, F* narrow, int64_t width, Span span, A top) {
    Vec<A> sum = set(A(0));
    const Vec<A> most = set(top);
    if constexpr (WIDE) clear_around(s, width, span);
    if (narrow) clear_around(narrow, width, span);
    for (int64_t j = span.begin; j < span.end; j += L) {
      const Vec<A> w = exp(load(s + j) - most);
      if constexpr (WIDE) store(s + j, w);
      if (narrow) put(narrow + j, w);
      sum = sum + w;
    }
    return total(sum);
  }

  template <class U> static INLINE void clear_around(U* row, int64_t width, Span span) {
    if (span.end - span.begin < width) zero(row, span.begin), zero(row + span.end, width - span.end);
  }

  void collect_row(const Tile& t, int64_t i, const A* d, Vectors<T>& vectors) {
    A* row = vectors.sums + i * vectors.pitch;
    if (line.listed) collect_listed(d, t, t.i + i, line, vectors.part, row);
    else collect(d, t.width, vectors.part.origin(line.key(t.j) - line.query(t.i + i)), vectors.part, row);
  }

  // What a part of the keys leaves of query ``i``: its largest score, its sum and its output
  A* part_of(int64_t part, int64_t i) const {
    return parts + (((part * c.batch + b) * c.heads + h) * c.n_q + i) * part_width(c);
  }
  void leave_part(const Tile& t) {
    for (int64_t i = 0; i < t.rows; i++) {
      A* to = part_of(key_part, i);
      to[0] = tops[i], to[1] = totals[i];
      __builtin_memcpy(to + 2, output + i * dv, sizeof(A) * c.value_dim);
    }
  }
  // Puts together the outputs that the parts of the keys have left.
  void join_parts() {
    for (b = 0; b < c.batch; b++)
      for (h = 0; h < c.heads; h++) {
        zero(output, c.n_q * dv);
        for (int64_t i = 0; i < c.n_q; i++) {
          tops[i] = minus_infinity, totals[i] = 0;
          for (int64_t part = 0; part < key_parts; part++) {
            const A* from = part_of(part, i);
            raise_top(i, larger(from[0], tops[i]));
            const A share = tops[i] == minus_infinity ? A(1) : exp(set(from[0] - tops[i])).p[0][0];
            totals[i] += share * from[1];
            for (int64_t e = 0; e < c.value_dim; e++) output[i * dv + e] += share * from[2 + e];
          }
        }
        put_outputs({0, c.n_q, 0, 0, 0, false});
      }
  }

  void put_outputs(const Tile& t) {
    A* sums = (A*)c.log_sums + (b * c.heads + h) * c.n_q + t.i;
    for (int64_t i = 0; i < t.rows; i++) {
      const A top = tops[i], sum = totals[i];
      const bool empty = top == minus_infinity && !(sum != sum);
      sums[i] = top, sums[apart + i] = empty ? A(0) : (A)logarithm(sum);
      totals[i] = empty ? A(0) : A(1) / sum;
    }
    write_rows<A>(c.output, b, h, t.i, t.rows, c.value_dim, output, dv, A(1), totals);
    if (!c.rounded_off) return;
    for (int64_t i = 0; i < t.rows; i++) {
      A* row = output + i * dv;
      times_row(row, dv, totals[i]);
      read_rows(c.output, b, h, t.i + i, 1, c.value_dim, block64, dv);
      for (int64_t e = 0; e < dv; e += L) store(row + e, load(row + e) - load(block64 + e));
      write_rows<A>(rounded_off(), b, h, t.i + i, 1, c.value_dim, row, dv, A(1));
    }
  }
  Tensor rounded_off() const {
    return {(char*)c.rounded_off, c.dtype, {c.heads * c.n_q * c.value_dim, c.n_q * c.value_dim, c.value_dim, 1}};
  }
  static float logarithm(float x) { return __builtin_logf(x); }
  static double logarithm(double x) { return __builtin_log(x); }

  // --- backward

  // ``first``: nothing has been added to the gradients of keys and values yet.
  void differentiate_block(Tile& t, bool first) {
    enter_gradient(t);
    int64_t seen = 0;
    for (int64_t j = limits.from; limits.next(t, j, bk); seen = t.j + t.width) {
      if (first) clear_sums(seen, t.j);
      differentiate(t, !first);
    }
    if (first) clear_sums(seen, keys_up);
    leave_block(t);
  }
  void clear_sums(int64_t from, int64_t to) {
    product_to_panels<F>(dv, to - from, 0, nullptr, 0, nullptr, 0, d_values, dv, from, false);
    product_to_panels<F>(dk, to - from, 0, nullptr, 0, nullptr, 0, d_keys, dk, from, false);
  }

  void leave_key_head(int64_t key_head, int64_t item) {
    if (d_query_table_rows && !c.query_rank) {
      const int64_t depth = query_vectors.vectors.depth;
      for (int64_t j = 0; j < c.n_k; j++)
        for (int64_t e = 0; e < depth; e++)
          d_keys[(j / 64 * dk + e) * 64 + j % 64] += d_query_table_rows[j * depth + e];
    }
    if (c.d_key.data) write_transposed<A>(d_keys, c.n_k, c.head_dim, dk, c.d_key, item, key_head, (A)c.scale, block64);
    if (c.d_value.data) write_transposed<A>(d_values, c.n_k, c.value_dim, dv, c.d_value, item, key_head, A(1), block64);
  }

  // Prepares the block's gradients of the output, and the number that each row's gradient of scores is relative to.
  void enter_gradient(const Tile& t) {
    d_output = rows_of(c.d_output, h, t.i, t.rows, c.value_dim, dv, in_place_gradient, gradient_copy);
    if (value_vectors.on())
      table_gradient = in_table_dtype(c.d_output, d_output, t, c.value_dim, dv, table_gradient_rows);
    const A* given = (const A*)c.d_log_sums;
    // The gradient of a row's log of sums is its weights.
    for (int64_t i = 0; i < t.rows; i++) deltas[i] = given ? -given[(b * c.heads + h) * c.n_q + t.i + i] : A(0);
    const auto add_dots = [&](const Tensor& x) {
      const Rows<F> rows = rows_of(x, h, t.i, t.rows, c.value_dim, dv, in_place(x, c.value_dim, dv), output_copy);
      for (int64_t i = 0; i < t.rows; i++) {
        if (i + AHEAD < t.rows) prefetch_row<false>(rows.at + (i + AHEAD) * rows.pitch, dv);
        deltas[i] += dot(d_output.at + i * d_output.pitch, rows.at + i * rows.pitch, dv);
      }
    };
    add_dots(c.output);
    if (c.rounded_off) add_dots(rounded_off());
    const int64_t pitch = up(bq, 32);
    if (c.head_dim) transpose_rows<F>(query.at, query.pitch, t.rows, dk, query_turned, pitch, pair_scratch);
    transpose_rows<F>(d_output.at, d_output.pitch, t.rows, dv, gradient_turned, pitch, pair_scratch);
    if (d_factors)
      transpose_rows<A>(query_factors, rk, t.rows, rk, factors_turned_rows, up(bq, 16), nullptr),
          zero(d_query_factors, bq * rk);
    const auto turn = [&](Rows<T> rows, int64_t depth, T* to) {
      if (to) transpose_rows<T>(rows.at, rows.pitch, t.rows, depth, to, pitch, pair_scratch);
    };
    turn(key_table_left, key_vectors.depth, key_table_turned), turn(table_gradient, dv, table_gradient_turned);
    if (d_key_table_rows) zero(d_key_table_rows, t.rows * key_vectors.depth);
    if (d_query_levels) zero(d_query_levels, t.rows * c.levels);
    zero(d_query, t.rows * dk);
  }

  // Turns row ``i`` of products with values into the gradient of its scores, and its scores into weights.
  void weigh_row(const Tile& t, const Sides& sides, int64_t i, A factor) {
    const int64_t row = (b * c.heads + h) * c.n_q + t.i + i;
    const A *tops = (const A*)c.log_sums + row, *sums = tops + apart;
    A *s = scores + i * ld, *d = gradients + i * ld, delta = deltas[i];
    Added<A> values{};
    bool across = false;
    if (value_vectors.on()) {
      const A* row = value_vectors.products + i * value_vectors.pitch;
      const Ends& ends = value_vectors.part;
      if (line.listed) add_listed(d, t, t.i + i, line, ends, row);
      else values = {row, ends.origin(line.key(t.j) - line.query(t.i + i)), ends.length}, across = true;
      if (across && sides.values != 0 && !kept) delta -= row[sides.values < 0 ? 16 : 15 + ends.length], across = false;
    }
    if (kept) {
      draw_kept(t, i);
      for (int64_t j = 0; j < t.width; j += L)
        store(d + j, (across ? load(d + j) + values.at(j) : load(d + j)) * load(kept + j));
      across = false;
    }
    Span span;
    const Vec<A> most = set(*tops == minus_infinity ? A(0) : *tops), less = set(*sums), minus = set(delta);
    const auto weigh = [=](int64_t j, Vec<A> x, Vec<A> gradient) {
      const Vec<A> w = exp((x - most) - less);
      store(s + j, w), store(d + j, w * (gradient - minus));
    };
    const auto plain = [=](int64_t j, Vec<A> x, Vec<A>&) { weigh(j, x, load(d + j)); };
    const auto with_values = [=](int64_t j, Vec<A> x, Vec<A>&) { weigh(j, x, load(d + j) + values.at(j)); };
    across ? finish(t, sides, i, factor, span, minus, with_values) : finish(t, sides, i, factor, span, minus, plain);
    clear_around(s, t.width, span), clear_around(d, t.width, span);
    if (kept)
      for (int64_t j = 0; j < t.width; j += L) store(s + j, load(s + j) * load(kept + j));
  }

  // ``add``: to the gradients of the tile's keys and values
  void differentiate(const Tile& t, bool add) {
    const Sides sides = enter_tile(t);
    if (value_vectors.on()) value_vectors.multiply(table_gradient, t.rows, 1, reach(t)), value_vectors.clear(t.rows);
    if (key_vectors.on()) key_vectors.clear(t.rows);
    const A factor = multiply(t);
    multiply_rows(t, d_output, dv, values_turned, gradients);
    if (t.width < bk)
      for (int64_t i = 0; i < t.rows; i++) store(gradients + i * ld + t.width, set(A(0)));  // for diagonals
    for (int64_t i = 0; i < t.rows; i++) {
      weigh_row(t, sides, i, factor);
      const A *s = scores + i * ld, *d = gradients + i * ld;
      if (key_vectors.on()) collect_row(t, i, d, key_vectors);
      if (value_vectors.on()) collect_row(t, i, s, value_vectors);
      if (bias_sums && line.listed) collect_listed(d, t, t.i + i, line, bias_ends, bias_sums);
      if (d_query_levels) collect_levels(t, i, d);
      if (c.d_dense.data) {
        A* to = (A*)c.d_dense.data + start_of(c.d_dense, b, h, t.i + i) + t.j;
        for (int64_t j = 0; j < t.real; j++) to[j] += d[j];
      }
      // While they are in the first cache; the soft cap changes them later.
      if constexpr (halves)
        if (!tangents && (i % 2 || i + 1 == t.rows)) narrow_two(t, i / 2 * 2);
    }
    if (bias_sums && !line.listed) collect_bias(t, sides.bias);
    if (d_query_levels)
      for (int64_t l = 0; l < c.levels; l++)
        for (int64_t j = 0; j < t.real; j++) d_key_levels[l * keys_up + t.j + j] += tile_levels[l * bk + j];
    add_products(t, add);
  }

  // The levels' part of a row's gradient: -d sign(query's - key's) for the query, and the opposite for the key
  void collect_levels(const Tile& t, int64_t i, const A* d) {
    for (int64_t l = 0; l < c.levels; l++) {
      const Vec<A> level = set(query_levels[i * c.levels + l]);
      const A* x = key_levels + l * keys_up + t.j;
      A* to = tile_levels + l * bk;
      Vec<A> sum = set(A(0));
      for (int64_t j = 0; j < t.width; j += L) {
        const Vec<A> signed_ = signed_like(level - load(x + j), load(d + j));
        sum = sum + signed_;
        store(to + j, i == 0 ? signed_ : load(to + j) + signed_);
      }
      d_query_levels[i * c.levels + l] -= total(sum);
    }
  }

  void collect_bias(const Tile& t, int side) {
    if (side == 0 && line.query_stride > 16) {  // There are more diagonals than vectors in all rows.
      for (int64_t i = 0; i < t.rows; i++)
        collect(gradients + i * ld, t.width, bias_ends.origin(line.key(t.j) - line.query(t.i + i)), bias_ends,
                bias_sums);
      return;
    }
    if (side == 0)
      return collect_diagonals(gradients, ld, t.rows, t.width, bias_ends.origin(line.key(t.j) - line.query(t.i)),
                               line.query_stride, bias_ends, bias_sums);
    Vec<A> all = set(A(0));
    for (int64_t i = 0; i < t.rows; i++)
      for (int64_t j = 0; j < t.width; j += L) all = all + load(gradients + i * ld + j);
    A* to = bias_sums + (side < 0 ? 0 : 16 + bias_ends.length);
    store(to, load(to) + all);
  }

  // Adds what a tile's weights and gradients contribute to those of queries, keys, values, tables and factors.
  void add_products(const Tile& t, bool add) {
    const int64_t pitch = up(bq, 32), rows = up(t.rows, step);
    if (d_factors) {
      product<A>(t.rows, rk, t.real, gradients, ld, factors_copy + t.j * rk, rk, d_query_factors, rk, true);
      product_to_panels<A>(rk, t.width, t.rows, factors_turned_rows, up(bq, 16), gradients, ld, d_factors, rk, t.j,
                           true);
    }
    if (value_vectors.on() && c.d_value_table) {
      value_vectors.fold(t.rows);
      value_vectors.learn(table_gradient, columns(table_gradient_turned, gradient_turned), pitch, t.rows, reach(t));
    }
    if (key_vectors.on()) {
      key_vectors.fold(t.rows);
      if (!c.key_rank) key_vectors.add_to(d_query, dk, t.rows, reach(t));
      else if (d_key_table_rows) key_vectors.add_to(d_key_table_rows, key_vectors.depth, t.rows, reach(t));
      if (c.d_key_table)
        key_vectors.learn(key_table_left, columns(key_table_turned, query_turned), pitch, t.rows, reach(t));
    }
    if (query_vectors.on())
      query_vectors.collect(t, line, gradients, ld, query_table_left, query_table_turned, keys_up, d_query_table_rows);
    if (tangents)  // The cap holds for products of queries and keys alone.
      for (int64_t i = 0; i < t.rows; i++)
        for (int64_t j = 0; j < t.width; j += L) {
          const Vec<A> x = load(tangents + i * ld + j), d = load(gradients + i * ld + j);
          store(gradients + i * ld + j, d - d * x * x);
        }
    const Unit<F>* weights = (Unit<F>*)scores;
    const Unit<F>* changes = (Unit<F>*)gradients;
    const F* left = (F*)gradients;
    int64_t units = ld, left_pitch = ld;
    const Unit<F>* right = (const Unit<F>*)key.at + t.j * key.pitch;
    int64_t right_pitch = key.pitch;
    if constexpr (halves) {
      if (tangents)
        for (int64_t i = 0; i < t.rows; i += 2) narrow_two(t, i);
      weights = weight_pairs, changes = gradient_pairs, left = narrow_rows;
      units = left_pitch = bk, right = keys_packed + t.j / 2 * dk, right_pitch = dk;
    }
    if (c.d_value.data)
      product_to_panels<F>(dv, t.width, rows, gradient_turned, pitch, weights, units, d_values, dv, t.j, add);
    if (c.d_key.data)
      product_to_panels<F>(dk, t.width, rows, query_turned, pitch, changes, units, d_keys, dk, t.j, add);
    if (c.d_query.data) multiply_keys(t, dk, left, left_pitch, right, right_pitch, d_query, true);
  }

  // A block's rows as columns in the dtype of tables: a copy, or those in the inputs' dtype
  static const T* columns(const T* copy, const F* same) {
    if constexpr (differs) return copy;
    else return copy ? copy : same;
  }

  // Rounds the weights and gradients of two rows from an even ``i`` on, of which the second may not be.
  void narrow_two(const Tile& t, int64_t i) {
    const bool odd = i + 1 == t.rows;
    for (int64_t j = 0; j < t.width; j += L) {
      const Vec<A> none = set(A(0));
      const A *s = scores + i * ld + j, *d = gradients + i * ld + j;
      put_pairs(load(s), odd ? none : load(s + ld), weight_pairs + i / 2 * bk + j);
      put_pairs(load(d), odd ? none : load(d + ld), gradient_pairs + i / 2 * bk + j);
      put(narrow_rows + i * bk + j, load(d));
      if (!odd) put(narrow_rows + (i + 1) * bk + j, load(d + ld));
    }
  }

  void leave_block(const Tile& t) {
    if (c.d_query.data) write_rows<A>(c.d_query, b, h, t.i, t.rows, c.head_dim, d_query, dk, (A)c.scale);
    for (int64_t i = 0; i < t.rows; i++) {
      const int64_t row = (b * c.heads + h) * c.n_q + t.i + i;
      auto put = [&](void* out, const A* from, int64_t width, int64_t pitch) {
        __builtin_memcpy((A*)out + row * width, from + i * pitch, sizeof(A) * width);
      };
      if (c.d_query_factors) put(c.d_query_factors, d_query_factors, c.rank, rk);
      if (d_key_table_rows) put(c.d_key_table_factors, d_key_table_rows, c.key_rank, key_vectors.depth);
      if (c.d_query_levels) put(c.d_query_levels, d_query_levels, c.levels, c.levels);
    }
  }

  // Writes the gradients of the head's tables, or adds them to those of the batch items before.
  void leave_head(int64_t part, int64_t row_part, bool first) {
    const int64_t place = (part * c.row_parts + row_part) * c.heads + h;
    auto put_table = [&](void* out, A* sums, const Ends& ends) {
      ends.fold(sums);
      A* to = (A*)out + place * ends.length;
      for (int64_t t = 0; t < ends.length; t++) to[t] = first ? sums[16 + t] : to[t] + sums[16 + t];
    };
    if (bias_sums) put_table(c.d_bias, bias_sums, bias_ends);
    if (c.d_key_table)
      key_vectors.put_gradient((A*)c.d_key_table + place * key_vectors.whole.length * key_width, key_width,
                               c.key_rank ? A(1) : (A)c.scale, first, block64);
    if (c.d_query_table) {
      const Vectors<T>& vectors = query_vectors.vectors;
      vectors.put_gradient((A*)c.d_query_table + place * vectors.whole.length * query_width, query_width,
                           c.query_rank ? A(1) : (A)c.scale, first, block64);
    }
    const int64_t rows = ((row_part * c.batch + b) * c.heads + h) * c.n_k;
    if (d_query_table_rows && c.query_rank)
      for (int64_t j = 0; j < c.n_k; j++)
        __builtin_memcpy((A*)c.d_query_table_factors + (rows + j) * c.query_rank,
                         d_query_table_rows + j * query_vectors.vectors.depth, sizeof(A) * c.query_rank);
    if (c.d_key_levels)
      for (int64_t j = 0; j < c.n_k; j++)
        for (int64_t l = 0; l < c.levels; l++)
          ((A*)c.d_key_levels)[(rows + j) * c.levels + l] = d_key_levels[l * keys_up + j];
    if (c.d_value_table)
      value_vectors.put_gradient((A*)c.d_value_table + place * value_vectors.whole.length * c.value_dim, c.value_dim,
                                 A(1), first, block64);
    if (c.d_key_factors) {
      A* to = (A*)c.d_key_factors + rows * c.rank;
      const Tensor out{(char*)to, DTYPE<A>, {0, 0, c.rank, 1}};
      write_transposed<A>(d_factors, c.n_k, c.rank, rk, out, 0, 0, A(1), block64);
    }
  }

  void run(int64_t task) {
    key_part = task % key_parts, task /= key_parts;
    const int64_t row_part = task % c.row_parts, key_head = task / c.row_parts % c.key_heads,
                  part = task / c.row_parts / c.key_heads;
    const int64_t first_block = blocks * row_part / c.row_parts, last_block = blocks * (row_part + 1) / c.row_parts;
    const int64_t from = c.batch * part / c.batch_parts, to = c.batch * (part + 1) / c.batch_parts,
                  panels = keys_up / 64;
    const int64_t first_key = panels * key_part / key_parts * 64;
    const int64_t last_key = smaller(c.n_k, panels * (key_part + 1) / key_parts * 64);
    for (int64_t item = from; item < to; item++) {
      enter_item(item, first_key, last_key);
      enter_key_head(key_head);
      for (int64_t head = key_head * group; head < (key_head + 1) * group; head++) {
        enter_head(head);
        for (int64_t block = first_block; block < last_block; block++) {
          Tile t{};
          enter_block(t, block);
          backward ? differentiate_block(t, head == key_head * group && block == first_block) : attend_block(t);
        }
        if (backward) leave_head(part, row_part, item == from);
      }
      if (backward) leave_key_head(key_head, row_part * c.batch + b);
    }
  }
};

// Runs tasks from ``next`` on, which other threads take from as well; without ``next``, joins what they have left.
template <class F, class T> int run(const Call& c, int64_t* next, int64_t tasks, void* parts) {
  Scratch memory;
  { Attention<F, T> counts(c, parts, memory); }
  char* allocated = (char*)__builtin_malloc(memory.taken + 64);
  if (!allocated) return 1;
  if (c.poison) __builtin_memset(allocated, 255, memory.taken + 64);
  memory = {(char*)up((int64_t)allocated, 64), 0};
  Attention<F, T> attention(c, parts, memory);
#if WITH_TILES
  if constexpr (Attention<F, T>::halves) begin_tiles();
#endif
  if (next)
    for (int64_t task; (task = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < tasks;) attention.run(task);
  else attention.join_parts();
#if WITH_TILES
  if constexpr (Attention<F, T>::halves) end_tiles();
#endif
  __builtin_free(allocated);
  return 0;
}

}  // namespace LEVEL

int JOIN(level_, LEVEL)(const Call& c, int64_t* next, int64_t tasks, void* parts) {
#if WITH_HALVES
  typedef LEVEL::bf16 half;
  return c.table_dtype == BFLOAT16 ? LEVEL::run<half, half>(c, next, tasks, parts)
                                   : LEVEL::run<half, float>(c, next, tasks, parts);
#else
  return c.dtype == FLOAT64 ? LEVEL::run<double, double>(c, next, tasks, parts)
                            : LEVEL::run<float, float>(c, next, tasks, parts);
#endif
}

}  // namespace whereformer
