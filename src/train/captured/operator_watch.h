// Which operators a step calls, for errors of code that names none.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <memory>
#include <string>
#include <vector>

namespace tessera::train {

/// Watches the operators of all threads of this process as long as it lives.
/// One at a time.
class OperatorWatch {
 public:
  /// Also notes who reads or writes the memory of `tensors`.
  explicit OperatorWatch(const std::vector<at::Tensor>& tensors = {});
  ~OperatorWatch();
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;

  /// The operator that began last, "aten::nonzero"; empty if none has begun.
  std::string last() const;
  /// The first operator that got one of the tensors, or an alias of one; empty
  /// if none did.
  std::string first_user() const;

 private:
  static std::unique_ptr<at::ObserverContext> note(
      const at::RecordFunction& function);

  at::CallbackHandle handle_;
};

} // namespace tessera::train
