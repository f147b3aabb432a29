// Counts how often the host reads a value of a tensor.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <memory>
#include <string_view>

namespace tessera::testing {

/// While it lives, counts the operator behind Tensor::item() in all threads of
/// this process. On a GPU each one waits for the device, and none can be
/// captured in a CUDA graph. Only one counter at a time.
class HostReads {
 public:
  HostReads()
      : handle_(at::addGlobalCallback(at::RecordFunctionCallback(&note).scopes(
            {at::RecordScope::FUNCTION}))) {
    count_ = 0;
  }
  ~HostReads() {
    at::removeCallback(handle_);
  }
  HostReads(const HostReads&) = delete;
  HostReads& operator=(const HostReads&) = delete;

  int count() const {
    return count_;
  }

 private:
  static std::unique_ptr<at::ObserverContext> note(
      const at::RecordFunction& function) {
    if (std::string_view(function.name()) == "aten::_local_scalar_dense") {
      ++count_;
    }
    return nullptr;
  }

  inline static std::atomic<int> count_{0};
  const at::CallbackHandle handle_;
};

} // namespace tessera::testing
