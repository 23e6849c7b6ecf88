// A CUDA device without a GPU: its memory is the host's, and CPU kernels compute its operations.
//
// torch's CPU build has the dispatch key and the device type, but nothing behind them. Here an
// allocator, a device guard and hooks stand in, and one boxed kernel that takes every operation: it
// shows the CPU's kernel the same memory as CPU tensors, and gives what comes back to the device
// again. What a real device would wait for calls back; tensors of two devices in one operation are
// an error, as there.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <set>
#include <string>
#include <vector>

#include "hollow_graphs.h"
#include "hollow_memory.h"

namespace {

// What torch asks of a device.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return at::kCUDA; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(at::kCUDA, current); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  void synchronizeStream(const Stream&) const override { wait("a stream"); }
  void synchronizeDevice(const DeviceIndex) const override { wait("the device"); }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
} guard;

// Its name is that under which torch looks for it.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current : std::exchange(current, device);
  }
  Device getDeviceFromPtr(void*) const override { return Device(at::kCUDA, current); }
};

// Tensors of the host and of the device over the same memory.

struct Shown {
  Tensor device, host;
  void* memory;
};

Tensor over(c10::Storage storage, DispatchKey key, const Tensor& like) {
  auto tensor = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

Shown show(const Tensor& tensor) {
  auto memory = tensor.storage().mutable_data();
  // A collective goes on when its operation has returned.
  auto kept = new c10::Storage(tensor.storage());
  DataPtr same(memory, kept, [](void* it) { delete static_cast<c10::Storage*>(it); },
               Device(at::kCPU));
  // Resizable, as an operation may resize what it writes to.
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       std::move(same), c10::GetCPUAllocator(), true);
  auto host = over(std::move(storage), DispatchKey::CPU, tensor);
  host.unsafeGetTensorImpl()->_set_conj(tensor.is_conj());
  host.unsafeGetTensorImpl()->_set_neg(tensor.is_neg());
  return {tensor, host, memory};
}

// Memory that a CPU kernel has allocated becomes the device's.
c10::Storage taken(const Tensor& host, Device device) {
  auto held = new Held(nullptr, host, host.storage().nbytes(), device.index());
  DataPtr memory(host.storage().mutable_data(), held, &let_go, device);
  return c10::Storage(c10::Storage::use_byte_size_t(), host.storage().nbytes(), std::move(memory),
                      &device_memory, true);
}

// Whoever has the storage has what is put into it.
void put(const c10::Storage& into, c10::Storage what) {
  auto bytes = what.nbytes();
  into.set_data_ptr_noswap(std::move(what.mutable_data_ptr()));
  into.set_nbytes(bytes);
}

Tensor given_back(const Tensor& host, const std::vector<Shown>& shown, Device device) {
  if (!host.defined() || !host.device().is_cpu()) return host;
  auto memory = host.storage().mutable_data();
  for (auto& each : shown)
    if (each.host.is_same(host)) return each.device;
  for (auto& each : shown)
    if (memory && each.memory == memory)
      return over(each.device.storage(), DispatchKey::CUDA, host);
  return over(taken(host, device), DispatchKey::CUDA, host);
}

// Operations.

const std::set<std::string> results_on_the_host = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::nonzero.out",
    "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor"};

void any_operation(const c10::OperatorHandle& operation, DispatchKeySet, torch::jit::Stack* stack) {
  if (is_captured()) return capture(operation, stack);
  auto& schema = operation.schema();
  auto name = schema.operator_name().name;
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  if (results_on_the_host.count(name)) wait(name);
  // Indices may lie on the host, and masks are turned into indices.
  bool indexes = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
  std::vector<Shown> shown;
  Device device(at::kCUDA, current);
  auto show_host = [&](const Tensor& tensor) {
    if (!tensor.defined() || (tensor.device().is_cpu() && (indexes || tensor.dim() == 0)))
      return tensor;
    bool same = tensor.is_cuda() && (shown.empty() || tensor.device() == device);
    TORCH_CHECK(same || (tensor.is_cuda() && tensor.dim() == 0),
                "Expected all tensors to be on the same device, but found ", tensor.device(),
                " beside ", device, " in ", name);
    device = tensor.device();
    return shown.emplace_back(show(tensor)).host;
  };
  auto count = schema.arguments().size();
  for (auto& each : torch::jit::last(*stack, count)) {
    auto& value = const_cast<IValue&>(each);
    if (value.isTensor()) {
      value = show_host(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(show_host(tensor));
      value = c10::List<Tensor>(tensors);
    } else if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
      // A collective's tensors of each rank.
      c10::List<c10::List<Tensor>> lists;
      for (const IValue& list : value.toListRef()) {
        lists.push_back(c10::List<Tensor>());
        for (const Tensor& tensor : list.toTensorVector())
          lists.get(lists.size() - 1).push_back(show_host(tensor));
      }
      value = lists;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        if (tensor && tensor->defined()) {
          if (tensor->scalar_type() == at::kBool) wait(name + " with a mask");
          tensor = show_host(*tensor);
        }
        tensors.push_back(tensor);
      }
      value = tensors;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (value.toDevice().has_index()) device = value.toDevice();
      value = Device(at::kCPU);
    }
  }
  operation.callBoxed(*stack);
  for (auto& each : shown) {
    auto tensor = each.device.unsafeGetTensorImpl();
    if (each.host.storage().mutable_data() != each.memory)
      put(each.device.storage(), taken(each.host, each.device.device()));
    tensor->set_sizes_and_strides(
        each.host.sizes(), each.host.strides(), each.host.storage_offset());
  }
  for (auto& each : torch::jit::last(*stack, schema.returns().size())) {
    auto& value = const_cast<IValue&>(each);
    if (value.isTensor()) {
      value = given_back(value.toTensor(), shown, device);
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& host : value.toTensorVector())
        tensors.push_back(given_back(host, shown, device));
      value = c10::List<Tensor>(tensors);
    }
  }
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (is_captured()) {
    static auto copy = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    torch::jit::Stack stack{to, from, non_blocking};
    capture(copy, &stack);
    return to;
  }
  bool up = from.device().is_cpu(), down = to.device().is_cpu();
  if ((up || down) && to.numel() > 0) {
    auto& host = up ? from : to;
    auto way = std::string(up ? "a copy from" : "a copy to") + " the host";
    if (!non_blocking) wait(way);
    else if (!is_pinned(host.storage().data())) wait(way + "'s pageable memory");
  }
  at::AutoDispatchBelowADInplaceOrView below;
  auto target = down ? to : show(to).host;
  target.copy_(up ? from : show(from).host);
  return to;
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device,
                     std::optional<bool>) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           DispatchKeySet(DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef size,
                    IntArrayRef stride) {
  auto it = tensor.unsafeGetTensorImpl();
  it->set_storage_keep_dtype(std::move(storage));
  if (stride.empty()) it->set_sizes_contiguous(size);
  else it->set_sizes_and_strides(size, stride);
  it->set_storage_offset(offset);
  return tensor;
}

Tensor& set_whole_storage(Tensor& tensor, at::Storage storage) {
  auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage(tensor, std::move(storage), 0, {count}, {});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& of) {
  return set_storage(tensor, of.storage(), of.storage_offset(), of.sizes(), of.strides());
}

void record_stream(Tensor&, Stream) {}

void resize_storage(const Tensor& of, int64_t bytes) {
  auto before = of.storage();
  c10::OptionalDeviceGuard on(of.device());
  auto kept = std::min(static_cast<size_t>(bytes), before.nbytes());
  c10::Storage after(c10::Storage::use_byte_size_t(), bytes, &device_memory, true);
  if (kept) std::memcpy(after.mutable_data(), before.data(), kept);
  put(before, std::move(after));
}

// DDP times its passes by one.
struct Untimed final : c10d::Timer {
  explicit Untimed(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, Untimed);
}

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}

TORCH_LIBRARY(hollow, library) {
  library.def("resize_storage(Tensor of, int bytes) -> ()", &resize_storage);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("record_stream", &record_stream);
}

// Of each collective torch has a kernel for CUDA, which asks NCCL.
const char* const collectives[] = {
    "_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_",
    "allgather_into_tensor_coalesced_", "allreduce_", "allreduce_coalesced_", "alltoall_",
    "alltoall_base_", "barrier", "broadcast_", "gather_", "recv_", "recv_any_source_", "reduce_",
    "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "scatter_", "send"};

void let_gloo_communicate() {
  // That they replace others is meant, and no news.
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } handler;
  c10::WarningUtils::WarningHandlerGuard guard(&handler);
  static torch::Library library(torch::Library::IMPL, "c10d", DispatchKey::CUDA, __FILE__, __LINE__);
  for (auto name : collectives)
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&any_operation>());
}

extern "C" {
void hollow_start() {
  let_gloo_communicate();
  c10::SetAllocator(at::kCUDA, &device_memory);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(at::kCUDA)].store(&guard);
}
int hollow_exchange_device(int device) {
  return device < 0 ? current : std::exchange(current, static_cast<DeviceIndex>(device));
}
void hollow_on_wait(void (*call)(const char*)) { on_wait = call; }
void hollow_forbid_waits(bool forbids) { waits_are_errors = forbids; }
bool hollow_exempt(bool is) { return std::exchange(exempt, is); }
void hollow_synchronize() {
  if (on_wait) on_wait("the device");
}
int64_t hollow_allocated(int device) { return figures[device].now; }
int64_t hollow_peak(int device) { return figures[device].most; }
void hollow_reset_peak(int device) { figures[device].most = figures[device].now.load(); }
}
