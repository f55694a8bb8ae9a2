// What Python tells the kernel about a call. Every field has eight bytes; __init__.py writes them in this order.
#pragma once
#include <cstdint>

namespace whereformer {

enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT64 };

// Four axes: batch, head, row and number. A stride of 0 is an axis whose items share their numbers.
struct Tensor {
  char* data;
  int64_t dtype;
  int64_t stride[4];  // in numbers
};

// A table over offsets, (heads, T), or (heads or 1, T, dim); ``stride`` is from head to head.
struct Table {
  const void* data;
  int64_t length, first, stride;
};

// "Sums" below are float32, or float64 in calls of float64: the dtype of scores. The bias and factors have it too.
struct Call {
  int64_t bytes;  // the size of this struct, which tells whether both sides mean the same
  int64_t level;  // an index into the levels of instructions
  int64_t threads;
  int64_t backward;  // 0: forward, 1: backward
  int64_t poison;    // whether to fill scratch memory with NaN, for tests

  int64_t batch, heads, key_heads, n_q, n_k, head_dim, value_dim, rank;  // head_dim 0: no query; rank: of the factors
  int64_t key_rank, query_rank;    // of the factors of the tables of vectors; 0: they meet queries, and keys
  int64_t levels;                  // the number of levels of each query and key
  int64_t dtype;                   // of query, key, value and output
  int64_t table_dtype;             // of the tables of vectors: that of sums, or BFLOAT16 in calls of it without factors
  int64_t batch_parts, row_parts;  // the parts whose gradients are summed one by one; they do not depend on threads

  // Positions: whole[i] = start + stride * i for queries, start + j for keys; or lists, (batch or 1, n).
  int64_t listed;  // 0: computed; 1: lists
  int64_t query_start, query_stride, key_start;
  const int64_t *query_positions, *key_positions;
  int64_t query_positions_stride, key_positions_stride;  // from item to item

  int64_t has_least, has_most, least, most;  // the offsets that causality and the window allow
  const uint8_t* key_mask;                   // (batch, n_k) with these strides
  int64_t key_mask_strides[2];
  const int64_t *query_documents, *key_documents;  // (batch, n)

  double scale, softcap, dropout_p;  // softcap 0: none
  int64_t seed;                      // of dropout

  // The inputs, in the order of call.py; without one, data is null. The table of keys meets queries or factors of them,
  // that of queries keys or factors.
  Tensor query, key, value;
  Table bias, key_table, query_table, value_table;
  Tensor key_table_factors;           // (1 or batch, heads, n_q, key_rank) sums
  Tensor query_table_factors;         // (1 or batch, heads, n_k, query_rank) sums
  Tensor query_factors, key_factors;  // (1 or batch, heads, n, rank) sums
  Tensor query_levels, key_levels;    // (1 or batch, heads, n, levels) sums
  Tensor dense;                       // (1 or batch, heads, n_q, n_k) in any dtype

  Tensor output;      // read by the backward
  void* log_sums;     // (2, batch, heads, n_q) sums; the second part begins at a multiple of 4
  void* rounded_off;  // null, or what rounding took from the output, (batch, heads, n_q, value_dim) in its dtype

  // The backward: null pointers where a gradient is not needed. Those of tables are (batch_parts, row_parts, heads,
  // ...), those of keys, values and what else has a row per key (row_parts, batch, ...) in float32 or wider, of query
  // and what else has a row per query as they are. ``d_dense`` is like ``dense`` and begins as zeros.
  Tensor d_output;
  const void* d_log_sums;  // (batch, heads, n_q) sums, or null
  Tensor d_query, d_key, d_value;
  void *d_bias, *d_key_table, *d_query_table, *d_value_table;
  void *d_key_table_factors, *d_query_table_factors;  // (batch, heads, n_q, ..), (row_parts, batch, heads, n_k, ..)
  void *d_query_factors, *d_key_factors;              // likewise
  void *d_query_levels, *d_key_levels;                // likewise
  Tensor d_dense;
};

// Whether reading keys and values where they lie takes less time than packing them, as in decoding. The more queries
// share them, the more a packed key saves; most where they are in a core's cache, and in bfloat16.
inline bool has_few_queries(const Call& c) {
  const int64_t bytes = c.dtype == FLOAT64 ? 8 : c.dtype == FLOAT32 ? 4 : 2;
  const bool cached = c.batch * c.key_heads * c.n_k * (c.head_dim + c.value_dim) * bytes < 1 << 21;
  return !c.backward && c.n_q * (c.heads / c.key_heads) <= (!cached ? 8 : bytes == 2 ? 2 : 4);
}
// The parts of the keys that few queries attend to one by one: enough for most processors' cores, and so short that
// they stay in a core's cache for all heads that share them. They do not depend on threads, so neither do the sums.
inline int64_t key_parts_of(const Call& c) {
  constexpr int64_t keys = 1024, tasks = 8;  // the fewest keys of a part; _NUM_TASKS of __init__.py
  if (!has_few_queries(c) || c.n_k < 2 * keys) return 1;
  const int64_t most = c.n_k / keys, wanted = (tasks - 1) / (c.batch * c.key_heads) + 1;
  return c.heads > c.key_heads || wanted > most ? most : wanted;
}
// The numbers that a part of the keys leaves of a query: its largest score, its sum and its output
inline int64_t part_width(const Call& c) { return c.value_dim + 2; }

}  // namespace whereformer
