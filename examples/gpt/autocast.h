#pragma once

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

namespace gpt {

/// Turns LibTorch's autocast on while the object lives.
class Autocast {
 public:
  Autocast(torch::DeviceType device, torch::ScalarType dtype)
      : device_(device),
        was_enabled_(at::autocast::is_autocast_enabled(device)),
        dtype_before_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::set_autocast_enabled(device, true);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(device_, was_enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_before_);
    at::autocast::clear_cache();
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const torch::DeviceType device_;
  const bool was_enabled_;
  const torch::ScalarType dtype_before_;
};

} // namespace gpt
