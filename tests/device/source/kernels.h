// Kernels: every operation on tensors of the device is the CPU's, on the same memory under its host name.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>
#include "memory.h"

using at::Tensor;

// ---- one memory, two names ----------------------------------------------------------------------------------------------
inline Tensor over(const Tensor& like, const c10::Storage& storage, c10::DispatchKey key) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return out;
}
inline void drop(void* kept) {
  auto* storage = static_cast<c10::Storage*>(kept);
  if (storage->device().is_cpu()) order().forget(storage->data());  // the CPU's allocator frees it, and does not tell
  delete storage;
}
inline c10::DataPtr borrow(const c10::Storage& storage, c10::Device device) {
  auto* kept = new c10::Storage(storage);
  return {kept->mutable_data(), kept, &drop, device};
}
inline c10::Storage renamed(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator) {
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), borrow(storage, device), allocator, true);
}
inline Tensor on_host(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  TORCH_CHECK(t.storage().nbytes() == 0 || t.storage().data() || t.numel() == 0, "freed device memory is read");
  return over(t, renamed(t.storage(), c10::Device(c10::DeviceType::CPU), c10::GetAllocator(c10::DeviceType::CPU)), c10::DispatchKey::CPU);
}
inline Tensor on_device(const Tensor& t) { return over(t, renamed(t.storage(), the_device(), &device_memory), c10::DispatchKey::CUDA); }

inline void use(const std::string& kernel, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes) {
  auto memory = [](const std::vector<Tensor>& tensors) {
    std::vector<const void*> found;
    for (auto& t : tensors) if (t.defined() && t.is_cuda() && t.numel()) found.push_back(t.storage().data());
    return found;
  };
  order().kernel(current_stream, kernel, memory(reads), memory(writes));
}

// ---- any operation --------------------------------------------------------------------------------------------------------
// Those whose result's size or value the host must know, so that CUDA's kernel waits.
inline const std::set<std::string> waiting = {"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::is_set_to"};

class Call {  // one operation on its way to the CPU's kernel and back
  const c10::FunctionSchema& schema;
  torch::jit::Stack* stack;
  std::vector<std::pair<Tensor, Tensor>> names;  // the host's name and the device's
  std::vector<Tensor> reads, writes;

  Tensor down(const Tensor& t, bool written) {
    if (!t.defined() || !t.is_cuda()) return t;
    (written ? writes : reads).push_back(t);
    names.emplace_back(on_host(t), t);
    return names.back().first;
  }
  Tensor up(const Tensor& t) const {
    if (!t.defined() || t.is_cuda()) return t;
    for (auto& [host, device] : names) {
      if (host.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return device;
      if (t.has_storage() && t.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl()) return over(t, device.storage(), c10::DispatchKey::CUDA);
    }
    return on_device(t);
  }
  bool is_view() const {
    return writes.empty() && !schema.returns().empty() && std::all_of(schema.returns().begin(), schema.returns().end(), [](auto& r) { return r.alias_info() != nullptr; });
  }

 public:
  Call(const c10::FunctionSchema& schema, torch::jit::Stack* stack) : schema(schema), stack(stack) {}
  void take_arguments() {
    const auto& arguments = schema.arguments();
    for (size_t i = 0, begin = stack->size() - arguments.size(); i < arguments.size(); ++i) {
      auto& value = (*stack)[begin + i];
      const bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
      if (value.isTensor()) value = down(value.toTensor(), written);
      else if (value.isTensorList()) { c10::List<Tensor> all; for (const Tensor& t : value.toTensorVector()) all.push_back(down(t, written)); value = all; }
      else if (value.isOptionalTensorList()) { c10::List<std::optional<Tensor>> all; for (const auto& t : value.toOptionalTensorVector()) all.push_back(t ? std::optional<Tensor>(down(*t, written)) : t); value = all; }
      else if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(c10::DeviceType::CPU);
    }
  }
  void give_results() {
    for (auto& [host, device] : names) follow_resize(host, device);
    std::vector<Tensor> made;
    for (size_t i = 0, begin = stack->size() - schema.returns().size(); i < schema.returns().size(); ++i) {
      auto& value = (*stack)[begin + i];
      if (value.isTensor()) { value = up(value.toTensor()); made.push_back(value.toTensor()); }
      else if (value.isTensorList()) { c10::List<Tensor> all; for (const Tensor& t : value.toTensorVector()) { all.push_back(up(t)); made.push_back(all.get(all.size() - 1)); } value = all; }
    }
    if (is_view()) return;
    use(schema.name(), reads, writes);
    if (writes.empty()) use(schema.name(), {}, made);
  }
  static void follow_resize(const Tensor& host, const Tensor& device) {  // an out= that was too small
    if (host.storage().data() != device.storage().data()) {
      auto* storage = device.storage().unsafeGetStorageImpl();
      storage->set_data_ptr(borrow(host.storage(), the_device()));
      storage->set_nbytes(host.storage().nbytes());
    }
    if (host.sizes() != device.sizes() || host.strides() != device.strides()) device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  }
};

inline void any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (waiting.count(op.schema().name())) wait_for_current(op.schema().name());
  Call call(op.schema(), stack);
  call.take_arguments();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.give_results();
}

// ---- operations of the device's own ------------------------------------------------------------------------------------
namespace own {
inline Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}
// Between host and device: a copy that the host need not wait for is non_blocking, and the host's side of it pinned.
inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  use("aten::copy_", {source}, {self});
  if (source.numel() && (self.is_cpu() || source.is_cpu())) {
    const std::string way = self.is_cpu() ? "to the host" : "from the host";
    const bool pinned = PinnedMemory::holds((self.is_cpu() ? self : source).storage().data());
    if (!non_blocking) wait_for_current("copy " + way);
    else if (!pinned) wait_for_current("copy " + way + ", whose memory is not pinned");
  }
  on_host(self).copy_(on_host(source));
  return self;
}
inline c10::Scalar item(const Tensor& self) {
  use("aten::item", {self}, {});
  wait_for_current("item");
  return on_host(self).item();
}
inline Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) { return at::native::as_strided_tensorimpl(self, size, stride, offset); }
inline Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
inline Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) { return at::native::_reshape_alias(self, size, stride); }
inline void record_stream(Tensor&, c10::Stream) {}
inline void resize_storage(c10::StorageImpl* storage, size_t n) {
  if (n == storage->nbytes()) return;
  auto fresh = device_memory.allocate(n);
  if (n && storage->nbytes() && storage->data()) std::memcpy(fresh.get(), storage->data(), std::min(n, storage->nbytes()));
  storage->set_data_ptr(std::move(fresh));
  storage->set_nbytes(n);
}
inline const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t need = (self.numel() + self.storage_offset()) * self.itemsize();
  if (need > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  return self;
}
inline Tensor& set_(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const bool contiguous = stride.empty() && !size.empty();
  impl->set_sizes_and_strides(size, contiguous ? c10::IntArrayRef(c10::contiguous_strides(size)) : stride, offset);
  return self;
}
}  // namespace own

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &own::empty);
  m.impl("empty_strided", &own::empty_strided);
  m.impl("copy_", &own::copy_);
  m.impl("_local_scalar_dense", &own::item);
  m.impl("as_strided", &own::as_strided);
  m.impl("view", &own::view);
  m.impl("_reshape_alias", &own::reshape_alias);
  m.impl("record_stream", &own::record_stream);
  m.impl("resize_", &own::resize_);
  m.impl("set_.source_Storage_storage_offset", &own::set_);
}
