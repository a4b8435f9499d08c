// A device guard for CUDA that has streams and events, but no GPU. torch's C++ code (the autograd
// engine, futures, torch.Stream and torch.Event) goes through it. It logs what orders streams.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr c10::DeviceIndex kDevices = 2;
// Streams of one device have other numbers than those of the next: device 1 begins with a million.
constexpr int64_t kPerDevice = 1000000;

enum Kind { kRecord, kWait, kHostWaitsForEvent, kHostWaitsForStream, kOperation, kFree, kKeep, kMade };

struct Entry {
  int kind;
  int64_t what;    // an event, an operation, or an address
  int64_t stream;  // -1: all streams; of kMade the number of bytes
};

std::mutex mutex;
std::vector<Entry> entries;
std::unordered_map<int64_t, double> times;  // of events, in ms
int64_t next_event = 1, next_stream = 1;

void log(int kind, int64_t what, int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex);
  entries.push_back({kind, what, stream});
}

int64_t record_event(int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex);
  // A number of its own for each record: a wait is for the latest one.
  int64_t event = next_event++;
  std::chrono::duration<double, std::milli> now = std::chrono::steady_clock::now().time_since_epoch();
  times[event] = now.count();
  entries.push_back({kRecord, event, stream});
  return event;
}

// Copies to the host that it has not waited for, with what they bring.
std::vector<std::pair<at::Tensor, at::Tensor>> under_way;

void arrive() {
  std::vector<std::pair<at::Tensor, at::Tensor>> now;  // freed after the lock is
  std::lock_guard<std::mutex> lock(mutex);
  now.swap(under_way);
  for (auto& [to, from] : now) std::memcpy(to.data_ptr(), from.data_ptr(), from.nbytes());
}

thread_local c10::DeviceIndex device = 0;
thread_local int64_t current[kDevices] = {0, kPerDevice};

c10::Stream as_stream(int64_t id, c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, index), id);
}

c10::DeviceIndex index_of(c10::Device given) { return given.has_index() ? given.index() : device; }

int64_t new_stream(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> lock(mutex);
  return index * kPerDevice + next_stream++;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = device;
    device = index_of(to);
    return {c10::DeviceType::CUDA, before};
  }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, device}; }
  void setDevice(c10::Device to) const override { device = index_of(to); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { device = index_of(to); }
  c10::Stream getStream(c10::Device of) const override {
    return as_stream(current[index_of(of)], index_of(of));
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return as_stream(index_of(of) * kPerDevice, index_of(of));
  }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return as_stream(new_stream(index_of(of)), index_of(of));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return as_stream(new_stream(index_of(of)), index_of(of));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto index = index_of(to.device());
    auto before = current[index];
    current[index] = to.id();
    return as_stream(before, index);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag
  ) const override {
    *event = reinterpret_cast<void*>(record_event(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) log(kWait, reinterpret_cast<int64_t>(event), stream.id());
  }
  bool queryEvent(void*) const override {
    arrive();
    return true;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  bool isStreamCapturing(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream& stream) const override {
    arrive();
    log(kHostWaitsForStream, 0, stream.id());
  }
  void synchronizeEvent(void* event) const override {
    arrive();
    log(kHostWaitsForEvent, reinterpret_cast<int64_t>(event), 0);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    arrive();
    log(kHostWaitsForStream, 0, -1);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    log(kKeep, reinterpret_cast<int64_t>(data.get()), stream.id());
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    std::lock_guard<std::mutex> lock(mutex);
    // cudaEventElapsedTime gives a float.
    return static_cast<float>(
        times.at(reinterpret_cast<int64_t>(end)) - times.at(reinterpret_cast<int64_t>(begin)));
  }
};

// Tells torch that a GPU is there, and in use. torch's own hooks would call the driver.
struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  c10::DeviceIndex current_device() const override { return device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(device, index);
  }
};

// Memory of simulated tensors is poisoned when it is freed, and not given out again before `clear`.
std::unordered_map<void*, size_t> owned;
std::vector<c10::DataPtr> freed;

std::unordered_map<void*, c10::DataPtr> memory;  // of all tensors

void release(void* data) {
  c10::DataPtr old;  // given back after the lock
  std::lock_guard<std::mutex> lock(mutex);
  auto found = memory.find(data);
  if (found == memory.end()) return;  // older than this allocator: a cache of oneDNN's
  old = std::move(found->second);
  memory.erase(found);
  auto its = owned.find(data);
  if (its == owned.end()) return;
  entries.push_back({kFree, reinterpret_cast<int64_t>(data), 0});
  std::memset(data, 0xFF, its->second);  // NaN in every floating-point type
  owned.erase(its);
  freed.push_back(std::move(old));
}

struct Allocator final : c10::Allocator {
  c10::Allocator* beneath = c10::GetCPUAllocator();
  c10::DataPtr allocate(size_t bytes) override {
    auto made = beneath->allocate(bytes);
    void* data = made.get();
    if (data == nullptr) return made;
    std::lock_guard<std::mutex> lock(mutex);
    memory[data] = std::move(made);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
};

void install() {
  static Guard guard;
  static Hooks hooks;
  static Allocator allocator;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  // There is no way to replace the object that torch has made by now: it gets our functions instead.
  std::memcpy(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()), &hooks, sizeof(void*));
  c10::SetCPUAllocator(&allocator, 1);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("DEVICES") = kDevices;
  m.def("install", &install);
  m.def("current", [](c10::DeviceIndex index) { return current[index]; });
  m.def("set_current", [](int64_t id, c10::DeviceIndex index) { return std::exchange(current[index], id); });
  m.def("record", &record_event);
  m.def("wait", [](int64_t event, int64_t stream) { log(kWait, event, stream); });
  m.def("operation", [](int64_t number, int64_t stream) { log(kOperation, number, stream); });
  m.def("host_waits", [](int64_t stream) {
    arrive();
    log(kHostWaitsForStream, 0, stream);
  });
  m.def("arrives_later", [](const at::Tensor& to, const at::Tensor& bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    under_way.emplace_back(to, bytes);
  });
  m.def("keep", [](int64_t address, int64_t stream) { log(kKeep, address, stream); });
  m.def("own", [](const at::Tensor& tensor, int64_t address, size_t bytes) {
    auto* data = reinterpret_cast<void*>(address);
    tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap({data, tensor.device()});
    std::lock_guard<std::mutex> lock(mutex);
    if (owned.emplace(data, bytes).second) {
      entries.push_back({kMade, address, static_cast<int64_t>(bytes)});
    }
  });
  m.def("entries", [] {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<std::tuple<int, int64_t, int64_t>> found;
    for (const auto& entry : entries) found.emplace_back(entry.kind, entry.what, entry.stream);
    return found;
  });
  m.def("clear", [] {
    std::vector<c10::DataPtr> old;  // freed after the lock is: `release` takes it
    std::lock_guard<std::mutex> lock(mutex);
    entries.clear();
    old.swap(freed);
  });
}
