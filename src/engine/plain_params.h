// Parameters that are not sharded, and who averages their gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::engine {

/// Declares, as long as it lives, that somebody averages the gradients of these
/// parameters over the ranks.
class AveragedParams {
 public:
  explicit AveragedParams(std::vector<at::Tensor> params);
  ~AveragedParams();
  AveragedParams(const AveragedParams&) = delete;
  AveragedParams& operator=(const AveragedParams&) = delete;

 private:
  const std::vector<at::Tensor> params_;
};

bool is_averaged(const at::Tensor& param);

/// The user excluded the parameter from sharding by name, and is responsible
/// for its gradients.
void set_ignored(const at::Tensor& param);
bool is_ignored(const at::Tensor& param);

} // namespace tessera::engine
