// The device's memory, which is the host's under another name, and pinned memory, which is the host's and known to be.
// torch looks for these hooks once, so that this library is loaded before torch is imported.
#pragma once
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <cstdlib>
#include <cstring>
#include "streams.h"

inline void free_device(void* p) { order().forget(p); std::free(p); }

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override { void* p = n ? std::malloc(n) : nullptr; return {p, p, &free_device, the_device()}; }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

class PinnedMemory final : public c10::Allocator {
  static std::map<const char*, size_t>& blocks() { static auto* all = new std::map<const char*, size_t>; return *all; }
  static std::mutex& lock() { static auto* one = new std::mutex; return *one; }
  static void release(void* p) { { std::lock_guard guard(lock()); blocks().erase(static_cast<char*>(p)); } std::free(p); }

 public:
  static bool holds(const void* p) {
    std::lock_guard guard(lock());
    auto after = blocks().upper_bound(static_cast<const char*>(p));
    if (after == blocks().begin()) return false;
    auto [begin, size] = *std::prev(after);
    return static_cast<const char*>(p) < begin + size;
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = std::malloc(n ? n : 1);
    std::lock_guard guard(lock());
    blocks()[static_cast<char*>(p)] = n ? n : 1;
    return {p, p, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

inline DeviceMemory device_memory;
inline PinnedMemory pinned_memory;

// What torch asks of CUDA where it was built without: one device, there from the start.
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* p) const override { return PinnedMemory::holds(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  void deviceSynchronize(c10::DeviceIndex) const override { Guard().synchronizeDevice(0); }
};
inline const bool hooks_are_there =
    (at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs a) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<Hooks>(a); }), true);
inline const bool memory_is_there = (c10::SetAllocator(CUDA, &device_memory, 1), true);
