// Counts calls of operators, such as that by which the host reads a value.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <memory>
#include <string_view>

namespace tessera::testing {

/// While it lives, counts the calls of an operator in all threads of this
/// process. Only one counter at a time.
class OperatorCalls {
 public:
  explicit OperatorCalls(std::string_view name)
      : handle_(at::addGlobalCallback(at::RecordFunctionCallback(&note).scopes(
            {at::RecordScope::FUNCTION}))) {
    name_ = name;
    count_ = 0;
  }
  ~OperatorCalls() {
    at::removeCallback(handle_);
  }
  OperatorCalls(const OperatorCalls&) = delete;
  OperatorCalls& operator=(const OperatorCalls&) = delete;

  int count() const {
    return count_;
  }

 private:
  static std::unique_ptr<at::ObserverContext> note(
      const at::RecordFunction& function) {
    if (function.name() == name_) {
      ++count_;
    }
    return nullptr;
  }

  inline static std::string_view name_;
  inline static std::atomic<int> count_{0};
  const at::CallbackHandle handle_;
};

/// Counts the operator behind Tensor::item(). On a GPU each call waits for the
/// device, and none can be captured in a CUDA graph.
struct HostReads : OperatorCalls {
  HostReads() : OperatorCalls("aten::_local_scalar_dense") {}
};

} // namespace tessera::testing
