// The functions that Python calls: which instructions there are, and a call divided among threads.
#include <atomic>
#include <cstring>
#include <iterator>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "call.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// From the least to the most; build.py defines the levels that it compiled, and a hash of the sources.
#ifndef LEVELS
#define LEVELS(f) f(base)
#define SOURCE "unknown"
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace whereformer {

// Each set of instructions computes part ``task`` of a call and returns 0, or 1 if there is no memory.
#define DECLARE(level) int level_##level(const Call&, int64_t task);
LEVELS(DECLARE)
#define ADDRESS(level) level_##level,
static int (*const levels[])(const Call&, int64_t task) = {LEVELS(ADDRESS)};

#if defined(__x86_64__)
// Tiles have to be asked for, once in a process.
static bool permits_tiles() {
#if defined(__linux__)
  constexpr long request = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

// Whether the processor has a level's instructions, and the system keeps their registers.
static bool has(const std::string& level) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  const bool fma = c >> 12 & 1, saves = c >> 27 & 1;
  if (!saves) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  unsigned b7, c7, d7, a71 = 0;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return false;
  const unsigned leaves = a;
  if (leaves >= 1) __get_cpuid_count(7, 1, &a71, &b, &c, &d);
  auto bit = [](unsigned x, int i) { return (x >> i & 1) != 0; };
  const bool avx2 = fma && (low & 0x6) == 0x6 && bit(b7, 5);
  const bool avx512 = avx2 && (low & 0xe6) == 0xe6 && bit(b7, 16) && bit(b7, 17) && bit(b7, 30) && bit(b7, 31);
  const bool halves = avx512 && bit(a71, 5);
  if (level == "avx2") return avx2;
  if (level == "avx512") return avx512;
  if (level == "avx512bf16") return halves;
  if (level == "amx") return halves && (low & 0x60000) == 0x60000 && bit(d7, 22) && bit(d7, 24) && permits_tiles();
  return false;
}
#else
static bool has(const std::string&) { return false; }
#endif

}  // namespace whereformer

using namespace whereformer;

// A hash of the sources
EXPORT const char* whereformer_source() { return SOURCE; }

// The levels that were compiled, from the least to the most, with a space after each
#define NAME(level) #level " "
EXPORT const char* whereformer_levels() { return LEVELS(NAME); }

// Whether this processor can run a level
EXPORT int whereformer_supports(const char* level) {
#ifdef EMULATED
  level = std::strcmp(level, "base") == 0 ? level : "avx2";  // A build for tests, whose levels use no higher instructions
#endif
  return std::strcmp(level, "base") == 0 || has(level);
}

// Computes a call. Returns 0; 1 if there was no memory; 2 if the struct is not this library's.
EXPORT int whereformer_attention(const Call* call) {
  if (call->bytes != (int64_t)sizeof(Call) || call->level < 0 || call->level >= (int64_t)std::size(levels)) return 2;
  const int64_t tasks = call->batch_parts * call->key_heads * call->row_parts;
  std::atomic<int64_t> next{0};
  std::atomic<int> failed{0};
  auto work = [&] {
    for (int64_t task; (task = next++) < tasks && !failed;)
      if (int code = levels[call->level](*call, task)) failed = code;
  };
  // Threads are started for each call: no pool can be left half alive by a fork, and starting one takes microseconds.
  constexpr double worth_it = 1 << 22;  // multiplications
  const double size = (double)call->batch * call->heads * call->n_q * call->n_k * (call->head_dim + call->value_dim);
  std::vector<std::thread> threads;
  try {
    if (size > worth_it)
      for (int64_t i = 1; i < call->threads && i < tasks; i++) threads.emplace_back(work);
  } catch (const std::exception&) {
    // There are no more threads or no more memory to be had: those that run do the work.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return failed;
}
