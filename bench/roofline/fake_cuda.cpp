// A CUDA device that a CPU build of torch can give to fake tensors: its guard and its hooks do nothing.
// bench/roofline/fake_cuda.py compiles this file and loads it before torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

struct FakeGuard final : impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  Device gpu() const { return Device(static_type, 0); }
  Stream first(Device device) const { return Stream(Stream::DEFAULT, device); }

  DeviceType type() const override { return static_type; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return gpu(); }
  Device exchangeDevice(Device) const override { return gpu(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return first(gpu()); }
  Stream getDefaultStream(Device) const override { return first(gpu()); }
  Stream getNewStream(Device, int) const override { return first(gpu()); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};

namespace {
const impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new FakeGuard());
const bool hooks = [] {
  at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs given) -> std::unique_ptr<at::CUDAHooksInterface> {
    return std::make_unique<FakeHooks>(given);
  });
  return true;
}();
}  // namespace
