// The memory of a device that is not there, and where the host would wait for it.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

using at::Device;
using at::DeviceIndex;
using at::IntArrayRef;
using at::Tensor;
using c10::DataPtr;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Stream;

constexpr DeviceIndex devices = 2;
using Graph = std::vector<std::function<void()>>;
// That is being captured.
Graph* graph = nullptr;
thread_local DeviceIndex current = 0;
void (*on_wait)(const char*) = nullptr;
bool waits_are_errors = false;
// What an interpreter of kernels does is none of the device's work.
thread_local bool exempt = false;

void wait(const std::string& what) {
  if (exempt) return;
  if (on_wait) on_wait(what.c_str());
  TORCH_CHECK(!graph, what, " is not permitted while a stream is capturing");
  TORCH_CHECK(!waits_are_errors, "called a synchronizing CUDA operation: ", what);
}

// Memory.

struct Figures {
  std::atomic<int64_t> now{0}, most{0};
  void add(int64_t bytes) {
    auto sum = now += bytes;
    for (auto before = most.load(); before < sum && !most.compare_exchange_weak(before, sum);) {}
  }
} figures[devices];

// What lies on a device: its memory, or the host's tensor of which it was taken.
struct Held {
  void* memory;
  Tensor host;
  int64_t bytes;
  DeviceIndex device;
  Held(void* memory, Tensor host, size_t size, DeviceIndex device)
      : memory(memory), host(std::move(host)), bytes((size + 511) / 512 * 512), device(device) {
    figures[device].add(bytes);
  }
  ~Held() {
    std::free(memory);
    figures[device].now -= bytes;
  }
};

void let_go(void* held) { delete static_cast<Held*>(held); }

struct DeviceMemory final : c10::Allocator {
  DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 512, bytes + 1) == 0);
    // Nothing is zero by chance.
    std::memset(memory, 0xA5, bytes);
    auto held = new Held(memory, {}, bytes, current);
    return {memory, held, &let_go, Device(at::kCUDA, current)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} device_memory;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

void unpin(void* memory) {
  {
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.erase(static_cast<const char*>(memory));
  }
  std::free(memory);
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> held(pinned_lock);
  auto place = static_cast<const char*>(address);
  auto after = pinned.upper_bound(place);
  if (after == pinned.begin()) return false;
  auto [start, bytes] = *--after;
  return place < start + bytes;
}

struct PinnedMemory final : c10::Allocator {
  DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 512, bytes + 1) == 0);
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned[static_cast<const char*>(memory)] = bytes + 1;
    return {memory, memory, &unpin, Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} pinned_memory;

}  // namespace
