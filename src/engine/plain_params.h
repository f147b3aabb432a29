// Parameters that are not sharded, and who sees to their gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::engine {

/// Says, as long as it lives, that somebody averages the gradients of these
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

/// The user left the parameter out of sharding by name, and sees to it.
void set_ignored(const at::Tensor& param);
bool is_ignored(const at::Tensor& param);

} // namespace tessera::engine
