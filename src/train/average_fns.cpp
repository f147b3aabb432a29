#include <tessera/error.h>
#include <tessera/train/averaged_model.h>

#include <ATen/ops/_foreach_lerp.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

namespace tessera {
namespace {

bool can_lerp(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

} // namespace

MultiAvgFn get_ema_multi_avg_fn(double decay) {
  if (!(decay >= 0 && decay <= 1)) {
    raise<c10::ValueError>(
        {.call = "get_ema_multi_avg_fn"},
        fmt::format("decay is {}, must be from 0 to 1.", decay));
  }
  return [decay](
             const std::vector<at::Tensor>& averaged,
             const std::vector<at::Tensor>& current,
             int64_t /*num_averaged*/) {
    if (can_lerp(averaged.front())) {
      at::_foreach_lerp_(averaged, current, at::Scalar(1 - decay));
      return;
    }
    for (size_t i = 0; i < averaged.size(); ++i) {
      averaged[i].copy_(averaged[i] * decay + current[i] * (1 - decay));
    }
  };
}

MultiAvgFn get_swa_multi_avg_fn() {
  return [](const std::vector<at::Tensor>& averaged,
            const std::vector<at::Tensor>& current,
            int64_t num_averaged) {
    const double weight = 1 / static_cast<double>(num_averaged + 1);
    if (can_lerp(averaged.front())) {
      at::_foreach_lerp_(averaged, current, at::Scalar(weight));
      return;
    }
    for (size_t i = 0; i < averaged.size(); ++i) {
      averaged[i].copy_(averaged[i] + (current[i] - averaged[i]) * weight);
    }
  };
}

} // namespace tessera
