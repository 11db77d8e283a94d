// What torch asks of a device type: current device and stream per thread, events, page-locked memory.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

#include "memory.h"

namespace simulated {

constexpr auto kind = c10::DeviceType::PrivateUse1;

inline std::atomic<bool> can_synchronize_device{false};  // torch_musa 2.7.1 can't through torch.accelerator

inline int& device_of_thread() {
  thread_local int device = 0;
  return device;
}

inline int current_device() { return device_of_thread(); }

inline void set_device(int device) {
  TORCH_CHECK(0 <= device && device < devices, "invalid device ordinal ", device, ": there are ", devices);
  device_of_thread() = device;
}

inline int64_t& stream_of_thread(int device) {
  thread_local std::array<int64_t, devices> ids{};
  return ids.at(device);
}

inline Stream& current_stream(int device) { return stream_at(device, stream_of_thread(device)); }

inline void synchronize_device(int device) {
  each_stream(device, [](Stream& stream) { stream.synchronize(stream.end()); });
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device_at(int index) { return {kind, static_cast<c10::DeviceIndex>(index)}; }
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
  static Stream& own(const c10::Stream& stream) { return stream_at(stream.device_index(), stream.id()); }
  static c10::Stream generic(const Stream& stream) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(stream.device), stream.id);
  }
  static Event& event_at(void* event) { return *static_cast<Event*>(event); }

  c10::DeviceType type() const override { return kind; }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_of_thread() = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return generic(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return generic(stream_at(index_of(device), 0)); }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return generic(next_pool_stream(index_of(device), priority < 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return generic(next_pool_stream(index_of(device), high_priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    stream_of_thread(stream.device_index()) = own(stream).id;
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return own(stream).passed(own(stream).end()); }
  void synchronizeStream(const c10::Stream& stream) const override { own(stream).synchronize(own(stream).end()); }
  void synchronizeDevice(const c10::DeviceIndex device) const {
    TORCH_CHECK(can_synchronize_device, "Backend doesn't support synchronizing all streams on device.");
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.device().index(), data.get(), own(stream));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    event_at(*event).record(own(stream));
  }
  void block(void* event, const c10::Stream& stream) const override { event_at(event).block(own(stream)); }
  bool queryEvent(void* event) const override { return event_at(event).query(); }
  void synchronizeEvent(void* event) const override { event_at(event).synchronize(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return milliseconds(*event_at(start).latest, *event_at(end).latest);
  }
};

inline PinnedMemory& pinned_memory() {
  static auto* allocator = new PinnedMemory;
  return *allocator;
}

// No `override` on what some of the supported torch versions lack. Random numbers come from the CPU's generators.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_page_locked(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex = -1) const { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const { return at::detail::createCPUGenerator(); }
};

}  // namespace simulated
