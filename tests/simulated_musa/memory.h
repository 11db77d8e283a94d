// Device and page-locked memory of the simulated device: both are host memory from ranges of their own.
//
// Freed blocks are cached, as real allocators do, and overwritten when the streams that may use them get there:
// one that is used after its end on a stream the allocator was not told about reads poison, and never crashes.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "stream.h"

namespace simulated {

constexpr size_t device_bytes = size_t{4} << 30;
constexpr size_t page = 4096;
constexpr int host = -1;

struct Block {
  char* data;
  size_t bytes;
  int device;           // or `host`
  Stream* home;         // the stream it was allocated on; none for host memory
  std::set<Stream*> users;  // the other streams that were recorded on it
};

struct Memory {
  std::mutex lock;
  std::map<const char*, Block*> live;
  std::map<std::tuple<int, Stream*, size_t>, std::vector<Block*>> cached;
  std::map<const char*, size_t> registered;
  size_t reserved[devices] = {};
};

inline Memory& memory() {
  static auto* state = new Memory;
  return *state;
}

inline Stream& current_stream(int device);

inline size_t rounded(int device, size_t bytes) {
  return device == host ? std::bit_ceil(std::max(bytes, page)) : (bytes + page - 1) / page * page;
}

inline Block* new_block(int device, Stream* home, size_t bytes) {
  if (device != host) {
    auto& reserved = memory().reserved[device];
    TORCH_CHECK_WITH(
        OutOfMemoryError, reserved + bytes <= device_bytes, "MUSA out of memory. Tried to allocate ", bytes, " bytes");
    reserved += bytes;
  }
  auto* data = static_cast<char*>(std::aligned_alloc(page, bytes));
  TORCH_CHECK(data, "the simulated device got no ", bytes, " bytes of memory");
  std::memset(data, 0xA5, bytes);
  return new Block{data, bytes, device, home, {}};
}

inline Block* take_block(int device, Stream* home, size_t bytes) {
  std::lock_guard guard(memory().lock);
  auto& cached = memory().cached[{device, home, bytes}];
  Block* block = cached.empty() ? new_block(device, home, bytes) : cached.back();
  if (!cached.empty()) cached.pop_back();
  memory().live[block->data] = block;
  return block;
}

inline void cache_block(Block* block) {
  std::lock_guard guard(memory().lock);
  block->users.clear();
  memory().cached[{block->device, block->home, block->bytes}].push_back(block);
}

inline void poison(Block* block) { std::memset(block->data, 0xDB, block->bytes); }

// With other users the block rests until the last of its streams has passed; without, its own stream may have it
// again at once, since all that this stream does from now on runs behind the poison.
inline void release_block(Block* block) {
  auto streams = block->users;
  if (block->home) streams.insert(block->home);
  const bool shared_with_others = streams.size() > (block->home ? 1 : 0);
  auto left = std::make_shared<std::atomic<size_t>>(streams.size());
  const auto leave = [=] {
    if (--*left > 0) return;
    poison(block);
    if (shared_with_others) cache_block(block);
  };
  for (auto* stream : streams) stream->push(leave, false);
  if (streams.empty()) poison(block);
  if (!shared_with_others) cache_block(block);
}

inline void free_block(void* data) {
  Block* block;
  {
    std::lock_guard guard(memory().lock);
    auto found = memory().live.find(static_cast<char*>(data));
    block = found->second;
    memory().live.erase(found);
  }
  if (!shared().forked) release_block(block);
}

// The live block of `device` that holds `address`.
inline Block* find_block(int device, const void* address) {
  const auto* at = static_cast<const char*>(address);
  auto next = memory().live.upper_bound(at);
  if (next == memory().live.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return block->device == device && at < block->data + block->bytes ? block : nullptr;
}

// Tell the allocator that `stream` uses the block at `address`; false if it is not one of its blocks.
inline bool record_use(int device, const void* address, Stream& stream) {
  std::lock_guard guard(memory().lock);
  Block* block = find_block(device, address);
  if (block && block->home != &stream) block->users.insert(&stream);
  return block != nullptr;
}

inline bool is_registered(const char* address) {
  auto next = memory().registered.upper_bound(address);
  return next != memory().registered.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

inline bool is_page_locked(const void* address) {
  std::lock_guard guard(memory().lock);
  return find_block(host, address) || is_registered(static_cast<const char*>(address));
}

enum class Error { success = 0, invalid_value = 1, already_registered = 712, not_registered = 713 };

inline Error register_host(uintptr_t address, size_t bytes) {
  const auto* start = reinterpret_cast<const char*>(address);
  if (!address || !bytes) return Error::invalid_value;
  std::lock_guard guard(memory().lock);
  if (is_registered(start) || is_registered(start + bytes - 1)) return Error::already_registered;
  memory().registered[start] = bytes;
  return Error::success;
}

inline Error unregister_host(uintptr_t address) {
  std::lock_guard guard(memory().lock);
  const bool found = memory().registered.erase(reinterpret_cast<const char*>(address)) > 0;
  return found ? Error::success : Error::not_registered;
}

inline int current_device();

template <class Base>
struct DeviceMemory : Base {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    const c10::Device where(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (!bytes) return {nullptr, where};
    auto* block = take_block(device, &current_stream(device), rounded(device, bytes));
    return {block->data, block->data, &free_block, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { this->default_copy_data(to, from, bytes); }
};

struct PinnedMemory : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, c10::Device(c10::kCPU)};
    auto* block = take_block(host, nullptr, rounded(host, bytes));
    return {block->data, block->data, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

#if SIMULATED_TORCH >= 209
struct AccountedMemory : DeviceMemory<c10::DeviceAllocator> {
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(stream.device_index(), data.get(), stream_at(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};
#endif

}  // namespace simulated
