// The functions that Python calls: what was compiled, and a call divided among threads.
#include <atomic>
#include <iterator>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "call.h"

// build.py defines LEVELS, those that it compiled from the least to the most, and SOURCE, a hash of the sources.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace whereformer {

// Each set of instructions computes tasks of a call, as attention.cpp's ``run``, and returns 0, or 1 without memory.
#define DECLARE(level) int level_##level(const Call&, int64_t* next, int64_t tasks, void* parts);
LEVELS(DECLARE)
#define ADDRESS(level) level_##level,
static int (*const levels[])(const Call&, int64_t* next, int64_t tasks, void* parts) = {LEVELS(ADDRESS)};

}  // namespace whereformer

using namespace whereformer;

// A hash of the sources
EXPORT const char* whereformer_source() { return SOURCE; }

// The levels that were compiled, from the least to the most, with a space after each
#define NAME(level) #level " "
EXPORT const char* whereformer_levels() { return LEVELS(NAME); }

// Computes a call. Returns 0; 1 if there was no memory; 2 if the struct is not this library's.
EXPORT int whereformer_attention(const Call* call) {
  if (call->bytes != (int64_t)sizeof(Call) || call->level < 0 || call->level >= (int64_t)std::size(levels)) return 2;
  const int64_t key_parts = key_parts_of(*call),
                tasks = call->batch_parts * call->key_heads * call->row_parts * key_parts;
  const auto level = levels[call->level];
  std::unique_ptr<char[]> parts;
  if (key_parts > 1) {
    const int64_t numbers = key_parts * call->batch * call->heads * call->n_q * part_width(*call);
    parts.reset(new (std::nothrow) char[sizeof(double) * numbers]);
    if (!parts) return 1;
  }
  int64_t next = 0;
  std::atomic<int> failed{0};
  const auto work = [&] {
    if (int code = level(*call, &next, tasks, parts.get())) failed = code;
  };
  // Threads are started for each call: no pool can be left half alive by a fork, and starting one takes microseconds.
  constexpr double worth_it = 1 << 22;  // multiplications
  // Few queries wait for memory instead, as long as for some multiplications.
  const int64_t queries = has_few_queries(*call) ? 8 : call->n_q;
  const double size = (double)call->batch * call->heads * queries * call->n_k * (call->head_dim + call->value_dim);
  std::vector<std::thread> threads;
  try {
    if (size > worth_it)
      for (int64_t i = 1; i < call->threads && i < tasks; i++) threads.emplace_back(work);
  } catch (const std::exception&) {
    // There are no more threads or no more memory to be had: those that run do the work.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  if (!failed && key_parts > 1) failed = level(*call, nullptr, 0, parts.get());
  return failed;
}
