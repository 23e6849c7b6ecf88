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
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
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

thread_local DeviceIndex current = 0;
DeviceIndex devices = 2;
void (*on_wait)(const char*) = nullptr;

void wait(const std::string& what) {
  if (on_wait) on_wait(what.c_str());
}

// Memory.

struct DeviceMemory final : c10::Allocator {
  DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 512, bytes + 1) == 0);
    // Nothing is zero by chance.
    std::memset(memory, 0xA5, bytes);
    return {memory, memory, &std::free, Device(at::kCUDA, current)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
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
  // Resizable, as an operation may resize what it writes to.
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       DataPtr(memory, Device(at::kCPU)), c10::GetCPUAllocator(), true);
  auto host = over(std::move(storage), DispatchKey::CPU, tensor);
  host.unsafeGetTensorImpl()->_set_conj(tensor.is_conj());
  host.unsafeGetTensorImpl()->_set_neg(tensor.is_neg());
  return {tensor, host, memory};
}

// Memory that a CPU kernel has allocated becomes the device's.
c10::Storage taken(const Tensor& host, Device device) {
  auto kept = new Tensor(host);
  DataPtr memory(host.storage().mutable_data(), kept,
                 [](void* it) { delete static_cast<Tensor*>(it); }, device);
  return c10::Storage(c10::Storage::use_byte_size_t(), host.storage().nbytes(), std::move(memory),
                      &device_memory, true);
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
      tensor->set_storage_keep_dtype(taken(each.host, each.device.device()));
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

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
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

extern "C" {
void hollow_start() {
  c10::SetAllocator(at::kCUDA, &device_memory);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(at::kCUDA)].store(&guard);
}
int hollow_exchange_device(int device) {
  return device < 0 ? current : std::exchange(current, static_cast<DeviceIndex>(device));
}
void hollow_on_wait(void (*call)(const char*)) { on_wait = call; }
}
