// The card's memory: what torch allocates begins as NaN, becomes NaN when it is freed, and is not used again soon.
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

namespace {

constexpr size_t STEP = 512;            // torch's allocator of a GPU begins at multiples of it
constexpr size_t MAX_FREED = 64 << 20;  // bytes of freed memory that nothing else gets yet

struct Block {
  char* address;
  size_t size;
};

std::mutex mutex;
std::map<uintptr_t, size_t> live;  // the bytes of what is allocated, by address
std::deque<Block> freed;
size_t freed_bytes = 0;
bool keeps = false;

// What lies behind an allocation belongs to nothing, so that a kernel that reads beyond its end is seen.
size_t room_for(size_t size) { return (size + 2 * STEP - 1) / STEP * STEP; }

void release(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  if (keeps) return;
  const auto block = live.find(reinterpret_cast<uintptr_t>(address));
  const size_t size = room_for(block->second);
  live.erase(block);
  std::memset(address, 0xff, size);
  freed.push_back({static_cast<char*>(address), size});
  for (freed_bytes += size; freed_bytes > MAX_FREED; freed.pop_front()) {
    freed_bytes -= freed.front().size;
    std::free(freed.front().address);
  }
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(c10::DeviceType::CPU);
    if (size == 0) return {nullptr, nullptr, &release, device};
    void* address = std::aligned_alloc(STEP, room_for(size));
    std::memset(address, 0xff, room_for(size));
    std::lock_guard<std::mutex> lock(mutex);
    live[reinterpret_cast<uintptr_t>(address)] = size;
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

Allocator allocator;

}  // namespace

extern "C" {

// Give torch this memory from now on.
void card_use_memory() { c10::SetCPUAllocator(&allocator, 255); }

// While it keeps memory, what is freed stays as it is and remains allocated.
void card_keep_memory(int yes) { keeps = yes; }

// Return the index of the first address where no `size` bytes are allocated, of those with a mask; -1 if there is none.
long card_first_wrong(const uint64_t* addresses, const unsigned char* mask, long count, long size) {
  std::lock_guard<std::mutex> lock(mutex);
  uintptr_t first = 1, end = 0;
  for (long index = 0; index < count; ++index) {
    if (!mask[index] || (addresses[index] >= first && addresses[index] + size <= end)) continue;
    auto block = live.upper_bound(addresses[index]);
    if (block == live.begin()) return index;
    --block;
    first = block->first, end = first + block->second;
    if (addresses[index] + size > end) return index;
  }
  return -1;
}
}
