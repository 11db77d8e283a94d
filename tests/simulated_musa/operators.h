// The operators of the simulated device. Copies and, wherever a result's shape is known before it is computed, all
// other operators are queued on the current stream and run there on the CPU, in place in device memory.
//
// Queued work holds no reference to device memory, as a kernel doesn't: lifetimes are the caller's and the allocator's.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "guard.h"

namespace simulated {

// A CPU tensor over the same bytes that owns nothing.
inline at::Tensor bytes_of(const at::Tensor& tensor) {
  auto* data = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).pinned_memory(false));
}

inline at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>,
                        std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kind)));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, c10::GetAllocator(kind), keys, c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kind)));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kind), keys, c10::dtype_or_default(dtype));
}

// The host side of a queued copy. torch's page-locked memory waits for its streams. Registered memory must stay so until
// the copy has run. Other memory is kept, only to make its early end an error that can be read and not a crash.
class HostSide {
 public:
  HostSide(const at::Tensor& tensor, Stream& stream) : data_(tensor.const_data_ptr()) {
    registered_ = is_page_locked(data_);
    if (record_use(host, data_, stream)) registered_ = false;
    else if (!registered_) kept_ = std::make_shared<c10::Storage>(tensor.storage());
  }
  void check() const {
    TORCH_CHECK(!registered_ || is_page_locked(data_), "host memory was unregistered before a queued copy of it ran");
    const bool owner = kept_ && kept_->data_ptr().get_context() == kept_->data_ptr().get();
    TORCH_CHECK(!owner || kept_->use_count() > 1, "host memory was freed before a queued copy of it ran");
  }

 private:
  const void* data_;
  bool registered_;
  std::shared_ptr<c10::Storage> kept_;
};

inline void queue_copy(const at::Tensor& from, const at::Tensor& to, Stream& stream, std::optional<HostSide> side) {
  stream.push([source = bytes_of(from), target = bytes_of(to), side = std::move(side)] {
    if (side) side->check();
    const at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(source);
  });
}

inline void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  auto& sender = current_stream(from.device().index());
  auto& receiver = current_stream(to.device().index());
  if (&sender != &receiver) wait_stream(sender, receiver);
  queue_copy(from, to, sender, std::nullopt);
  if (&sender != &receiver) wait_stream(receiver, sender);
}

// Host memory that is not page-locked is copied just as late as the rest: no staging, as in torch_musa.
inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (from.is_privateuseone() && to.is_privateuseone()) {
    copy_between_devices(from, to);
    return to;
  }
  const auto& on_host = from.is_privateuseone() ? to : from;
  auto& stream = current_stream((from.is_privateuseone() ? from : to).device().index());
  queue_copy(from, to, stream, HostSide(on_host, stream));
  if (!non_blocking) stream.synchronize(stream.end());
  return to;
}

inline const at::Tensor& resize_now(const at::Tensor& self, at::IntArrayRef size,
                                    std::optional<at::MemoryFormat> format = std::nullopt) {
  const c10::DeviceGuard guard(self.device());
  auto& stream = current_stream(self.device().index());
  if (self.numel() > 0) stream.synchronize(stream.end());
  return at::native::resize_(self, size, format);
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize_now(to, from.sizes());
  return copy_from(from, to, false);
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.device().index(), self.storage().data_ptr().get(), Guard::own(stream));
}

using Values = torch::jit::Stack;

template <class Change>
c10::IValue with_tensors(const c10::IValue& value, const Change& change) {
  const auto changed = [&](const at::Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) return changed(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(changed(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor ? std::optional(changed(*tensor)) : std::nullopt);
    return tensors;
  }
  return value;
}

template <class Change>
Values with_tensors(const Values& values, const Change& change) {
  Values changed;
  for (const auto& value : values) changed.push_back(with_tensors(value, change));
  return changed;
}

template <class Visit>
void each_tensor(const Values& values, const Visit& visit) {
  with_tensors(values, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

inline at::Tensor shape_of(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// What a queued operator reads: device bytes where they are, a number given as a CPU tensor as it is now.
inline at::Tensor argument_of(const at::Tensor& tensor) {
  if (tensor.is_privateuseone()) return bytes_of(tensor);
  auto number = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

inline bool takes_host_indices(const c10::OperatorHandle& op) {
  static const std::set<std::string> names{"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
  return names.count(op.schema().name()) > 0;
}

// The one device of the arguments; mixing devices is refused as real ones do.
inline std::optional<at::Device> device_of(const c10::OperatorHandle& op, const Values& values) {
  std::optional<at::Device> device;
  bool on_host = false;
  each_tensor(values, [&](const at::Tensor& tensor) {
    if (!tensor.is_privateuseone()) {
      on_host = on_host || tensor.dim() > 0;
      return;
    }
    TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found ",
                *device, " and ", tensor.device(), " in ", op.schema().name());
    device = tensor.device();
  });
  TORCH_CHECK(!device || !on_host || takes_host_indices(op), "Expected all tensors to be on the same device, but found ",
              *device, " and cpu in ", op.schema().name());
  return on_host ? std::nullopt : device;
}

inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Random numbers and whatever doesn't return plain tensors are computed at once.
inline bool can_be_queued(const c10::FunctionSchema& schema, const Values& values) {
  const auto returns_tensor = [](const c10::Argument& result) {
    return result.type()->kind() == c10::TypeKind::TensorType && (!result.alias_info() || is_written(result));
  };
  const auto plain = [](const c10::IValue& value) { return !value.isGenerator() && !value.isDevice(); };
  const auto takes_generator = [](const c10::Argument& argument) { return argument.name() == "generator"; };
  return std::all_of(schema.returns().begin(), schema.returns().end(), returns_tensor) &&
         std::all_of(values.begin(), values.end(), plain) &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), takes_generator);
}

// The shapes of the results, or nothing where they depend on the values.
inline std::optional<Values> shapes_of_results(const c10::OperatorHandle& op, Values& shapes) {
  Values results = shapes;
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&results);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return results;
}

// An `out=` tensor takes the shape of its result.
inline void resize_written(const c10::FunctionSchema& schema, const Values& values, const Values& shapes) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!is_written(schema.arguments()[i]) || !values[i].isTensor()) continue;
    if (values[i].toTensor().sizes() != shapes[i].toTensor().sizes())
      resize_now(values[i].toTensor(), shapes[i].toTensor().sizes());
  }
}

inline at::Tensor written_argument(const c10::FunctionSchema& schema, const c10::Argument& result, const Values& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (is_written(argument) && argument.alias_info()->beforeSets() == result.alias_info()->beforeSets())
      return values[i].toTensor();
  }
  TORCH_CHECK(false, "no argument of ", schema.name(), " is its result");
}

inline Values allocate_results(const c10::FunctionSchema& schema, const Values& values, const Values& shapes,
                               at::Device device) {
  Values results;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& result = schema.returns()[i];
    const auto& shape = shapes[i].toTensor();
    results.push_back(
        result.alias_info() ? written_argument(schema, result, values)
        : shape.defined()   ? at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device))
                            : at::Tensor());
  }
  return results;
}

inline void queue_operator(const c10::OperatorHandle& op, const Values& values, const Values& results, Stream& stream) {
  std::vector<std::pair<size_t, at::Tensor>> fresh;
  for (size_t i = 0; i < results.size(); ++i)
    if (!op.schema().returns()[i].alias_info() && results[i].toTensor().defined())
      fresh.emplace_back(i, bytes_of(results[i].toTensor()));
  stream.push([op, arguments = with_tensors(values, argument_of), fresh = std::move(fresh)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    Values computed = arguments;
    op.callBoxed(&computed);
    for (const auto& [i, target] : fresh) target.copy_(computed[i].toTensor());
  });
}

// Every operator without one of its own. What can't be queued runs at once, on copies in CPU memory: making them waits
// for the current stream.
inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const Values values = torch::jit::pop(*stack, schema.arguments().size());
  const auto device = device_of(op, values);
  Values shapes = with_tensors(values, shape_of);
  const auto results = device && can_be_queued(schema, values) ? shapes_of_results(op, shapes) : std::nullopt;
  if (!results) {
    stack->insert(stack->end(), values.begin(), values.end());
    at::native::cpu_fallback(op, stack);
    return;
  }
  const c10::DeviceGuard guard(*device);
  resize_written(schema, values, shapes);
  auto allocated = allocate_results(schema, values, *results, *device);
  queue_operator(op, values, allocated, current_stream(device->index()));
  stack->insert(stack->end(), allocated.begin(), allocated.end());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("resize_", resize_now);
  library.impl("record_stream", record_stream);
  library.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(at::native::view));
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
}

}  // namespace simulated
