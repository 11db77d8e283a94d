// A simulated accelerator as torch's PrivateUse1: two devices of host memory, with streams, events and copies that are
// as asynchronous as a real driver's. The Python side is in torch_musa_sim.py.
#include <pthread.h>
#include <pybind11/pybind11.h>

#include "operators.h"

namespace simulated {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

namespace {

void start(bool device_allocator, bool synchronizes_device) {
  c10::Allocator* allocator = new DeviceMemory<c10::Allocator>;
#if SIMULATED_TORCH >= 209
  if (device_allocator) allocator = new AccountedMemory;
#endif
  c10::SetAllocator(kind, allocator);
  can_synchronize_device = synchronizes_device;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pthread_atfork(nullptr, nullptr, [] { shared().forked = true; });
}

// At the end of the process: workers stop after what they are running.
void stop() {
  const WithoutInterpreter released;
  std::lock_guard guard(shared().lock);
  shared().stopping = true;
  for (int device = 0; device < devices; ++device) each_stream(device, [](Stream& stream) { stream.wake(); });
}

void set_delay(double shortest, double longest, uint32_t seed) {
  std::lock_guard guard(shared().lock);
  shared().shortest_delay = shortest;
  shared().longest_delay = longest;
  shared().random.seed(seed);
}

std::pair<size_t, size_t> memory_info(int device) {
  std::lock_guard guard(memory().lock);
  size_t used = 0;
  for (const auto& [data, block] : memory().live) used += block->device == device ? block->bytes : 0;
  return {device_bytes - used, device_bytes};
}

double elapsed_ms(uintptr_t start, uintptr_t end) {
  const auto latest = [](uintptr_t event) { return event ? reinterpret_cast<Event*>(event)->latest : nullptr; };
  TORCH_CHECK(latest(start) && latest(end), "MUSA error: invalid resource handle: both events must be recorded");
  const bool done = latest(start)->passed() && latest(end)->passed();
  TORCH_CHECK(done, "MUSA error: device not ready: both events must be completed");
  return milliseconds(*latest(start), *latest(end));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  py::enum_<Error>(module, "musaError").value("success", Error::success);
  module.def("start", &start);
  module.def("stop", &stop);
  module.def("set_delay", &set_delay);
  module.def("set_late", [](int device, int64_t id, bool late) { stream_at(device, id).set_late(late); });
  module.def("set_can_synchronize_device", [](bool can) { can_synchronize_device = can; });
  module.def("device_count", [] { return devices; });
  module.def("stream_count", [] { return 1 + 2 * pool_size; });
  module.def("current_device", &current_device);
  module.def("set_device", &set_device);
  module.def("current_stream", [](int device) { return stream_of_thread(device); });
  module.def("set_stream", [](int device, int64_t id) { stream_of_thread(device) = stream_at(device, id).id; });
  module.def("elapsed_ms", &elapsed_ms);
  module.def("synchronize", &synchronize_device);
  module.def("memory_info", &memory_info);
  module.def("is_forked", [] { return shared().forked.load(); });
  module.def("register_host", &register_host);
  module.def("unregister_host", &unregister_host);
  module.def("stream_handle", [](int device, int64_t id) {
    return id ? reinterpret_cast<uintptr_t>(&stream_at(device, id)) : uintptr_t{0};
  });
}

}  // namespace simulated
