// A c10d::Work that was finished before it was returned.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

namespace tessera::comm {

class DoneWork : public c10d::Work {
 public:
  explicit DoneWork(c10d::OpType type, std::vector<at::Tensor> outputs = {})
      : Work(-1, type), outputs_(std::move(outputs)) {
    finish();
  }

  bool wait(std::chrono::milliseconds) override {
    return true;
  }

  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), devices());
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  /// A future of tensors of a GPU must name the GPU: who waits for the future
  /// makes a stream of that GPU wait.
  std::vector<c10::Device> devices() const {
    std::vector<c10::Device> result;
    for (const at::Tensor& output : outputs_) {
      if (output.is_cuda()) {
        result.push_back(output.device());
      }
    }
    return result;
  }

  std::vector<at::Tensor> outputs_;
};

} // namespace tessera::comm
