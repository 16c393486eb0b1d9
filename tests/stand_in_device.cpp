// A device whose memory is the host's and whose operators are the CPU's. It counts what is launched on it, and what would make
// the host wait for a device that works asynchronously.
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/library.h>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

std::mutex lock;
std::map<std::string, long> launches, waits;
bool raises = false;
// How many operators of this thread are at work: what they call on the way is neither a launch nor a wait.
thread_local int inside = 0;

struct Inside {
  Inside() { inside++; }
  ~Inside() { inside--; }
};

void launched(const std::string& name) {
  if (inside) return;
  std::lock_guard<std::mutex> guard(lock);
  launches[name]++;
}

void waited(const std::string& name) {
  if (inside) return;
  {
    std::lock_guard<std::mutex> guard(lock);
    waits[name]++;
  }
  TORCH_CHECK(!raises, "called a synchronizing operation: ", name);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return {memory, memory, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// Python's stand-ins for streams and events are in stand_in_device.py; this is what autograd's engine asks for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { *event = (void*)1; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { waited("synchronize"); }
  void synchronizeEvent(void*) const override { waited("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Without "override" where a version of torch may not have the method.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void*) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
};
Hooks hooks;
const bool is_registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

bool is_here(const at::Tensor& tensor) { return tensor.device().type() == kType; }

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  launched("empty");
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  launched("empty");
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  launched("copy");
  if (is_here(from) != is_here(to) && !non_blocking) waited(is_here(from) ? "copy to the host" : "copy from the host");
  Inside guard;
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  Inside guard;
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Scalar item(const at::Tensor& tensor) {
  waited("item");
  Inside guard;
  return on_cpu(tensor).item();
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(at::Tensor&, at::Stream) {}

// Operators whose result's size, or whose result itself, the host has to know.
const std::set<std::string> kWaiting = {"bincount", "equal", "linalg_lstsq", "masked_select", "nonzero", "nonzero_numpy",
                                        "repeat_interleave", "unique_consecutive", "unique_dim", "_unique2"};

bool has_mask(const torch::jit::Stack& stack) {
  for (const auto& given : stack) {
    if (!given.isList()) continue;
    for (const c10::IValue& each : given.toListRef())
      if (each.isTensor() && each.toTensor().defined() &&
          (each.toTensor().scalar_type() == at::kBool || each.toTensor().scalar_type() == at::kByte))
        return true;
  }
  return false;
}

void fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const std::string name = operation.schema().name().substr(6);
  launched(name);
  if (kWaiting.count(name)) waited(name);
  if (name.find("index") == 0 || name.find("_index") == 0)
    if (has_mask(*stack)) waited("an index that is a mask");
  Inside guard;
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("launches", [] { std::lock_guard<std::mutex> guard(lock); return launches; });
  m.def("waits", [] { std::lock_guard<std::mutex> guard(lock); return waits; });
  m.def("waited", [](const std::string& name) { waited(name); });
  m.def("forget", [] { std::lock_guard<std::mutex> guard(lock); launches.clear(); waits.clear(); });
  m.def("raise_on_waits", [](bool on) { raises = on; });
}
