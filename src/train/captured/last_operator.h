// The operator that began last, for errors of code that names none.
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <mutex>
#include <string>

namespace tessera::train {

/// Watches the operators of all threads of this process as long as it lives.
/// One at a time.
class LastOperator {
 public:
  LastOperator();
  ~LastOperator();
  LastOperator(const LastOperator&) = delete;
  LastOperator& operator=(const LastOperator&) = delete;

  /// "aten::nonzero"; empty if none has begun.
  std::string name() const;

 private:
  static std::unique_ptr<at::ObserverContext> note(
      const at::RecordFunction& function);

  at::CallbackHandle handle_;
};

} // namespace tessera::train
