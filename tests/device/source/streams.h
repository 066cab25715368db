// Streams by number, and their order. Nothing runs behind the host's back here: a kernel is done when its call returns.
// What a real device would be free to do is therefore computed: each stream has a vector clock, an event carries the
// clock of the stream it was recorded on, and two uses of the same memory race if neither has seen the other.
#pragma once
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

constexpr auto CUDA = c10::DeviceType::CUDA;
inline c10::Device the_device() { return c10::Device(CUDA, 0); }

// Set by the Python module: hears of everything that makes the host wait for the device.
inline void (*on_wait)(const std::string&) = nullptr;

using Clock = std::map<c10::StreamId, int64_t>;  // how much of each stream's work has been seen
inline void merge(Clock& into, const Clock& from) {
  for (auto& [stream, tick] : from) into[stream] = std::max(into[stream], tick);
}

// One use of some memory by a kernel.
struct Use { c10::StreamId stream; int64_t tick; std::string kernel; };

class Order {
  std::mutex lock;
  std::map<c10::StreamId, Clock> seen;
  Clock host;  // what the host has waited for, and so all that it queues from now on
  Clock done;  // what the device is said to have done, so that waiting for it takes no time
  std::map<const void*, Use> written;
  std::map<const void*, std::vector<Use>> read;  // since it was written
  std::vector<std::string> races;

  void compare(const Clock& clock, const Use& before, const Use& now, const char* did, const char* does) {
    auto found = clock.find(before.stream);
    if (before.stream == now.stream || (found != clock.end() && found->second >= before.tick)) return;
    races.push_back(now.kernel + " on stream " + std::to_string(now.stream) + " " + does + " what " + before.kernel +
                    " on stream " + std::to_string(before.stream) + " " + did);
  }

 public:
  void kernel(c10::StreamId stream, const std::string& name, const std::vector<const void*>& reads, const std::vector<const void*>& writes) {
    std::lock_guard guard(lock);
    auto& clock = seen[stream];
    merge(clock, host);
    const Use now{stream, ++clock[stream], name};
    for (auto memory : reads) {
      if (auto it = written.find(memory); it != written.end()) compare(clock, it->second, now, "wrote", "reads");
      read[memory].push_back(now);
    }
    for (auto memory : writes) {
      if (auto it = written.find(memory); it != written.end()) compare(clock, it->second, now, "wrote", "writes");
      for (auto& before : read[memory]) compare(clock, before, now, "read", "writes");
      read.erase(memory);
      written[memory] = now;
    }
  }
  Clock look(c10::StreamId stream) { std::lock_guard guard(lock); merge(seen[stream], host); return seen[stream]; }
  void wait(c10::StreamId stream, const Clock& clock) { std::lock_guard guard(lock); merge(seen[stream], clock); }
  void host_waits(const Clock& clock) { std::lock_guard guard(lock); merge(host, clock); }
  void host_waits_for_all() { std::lock_guard guard(lock); for (auto& [_, clock] : seen) merge(host, clock); }
  void catch_up() { std::lock_guard guard(lock); for (auto& [_, clock] : seen) merge(done, clock); }
  bool is_done(const Clock& clock) {
    std::lock_guard guard(lock);
    return std::all_of(clock.begin(), clock.end(), [&](auto& one) { auto found = done.find(one.first); return found != done.end() && found->second >= one.second; });
  }
  void forget(const void* memory) { std::lock_guard guard(lock); written.erase(memory); read.erase(memory); }
  std::vector<std::string> take_races() { std::lock_guard guard(lock); return std::exchange(races, {}); }
};
inline Order& order() { static auto* one = new Order; return *one; }  // never destroyed: memory is freed until the very end

inline thread_local c10::StreamId current_stream = 0;
inline bool hangs = false;  // whether the device, as far as events tell, gets no further

// The host waits for the stream it queues work on.
inline void wait_for_current(const std::string& why) {
  order().host_waits(order().look(current_stream));
  if (on_wait) on_wait(why);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, the_device(), id); }
  static c10::Stream fresh() { static std::atomic<int64_t> number{0}; return stream(++number); }
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool = false) const override { return fresh(); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return fresh(); }
  c10::Stream exchangeStream(c10::Stream s) const override { return stream(std::exchange(current_stream, s.id())); }
  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Clock;
    *static_cast<Clock*>(*event) = order().look(s.id());
  }
  void block(void* event, const c10::Stream& s) const override { if (event) order().wait(s.id(), *static_cast<Clock*>(event)); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  bool queryEvent(void*) const override { return !hangs; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    order().host_waits(*static_cast<Clock*>(event));
    if (on_wait && !order().is_done(*static_cast<Clock*>(event))) on_wait("Event.synchronize");
  }
  void synchronizeStream(const c10::Stream& s) const override {
    order().host_waits(order().look(s.id()));
    if (on_wait) on_wait("Stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    order().host_waits_for_all();
    if (on_wait) on_wait("synchronize");
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
