// Autocast, switched for a while.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace tessera::exported {

/// While it lives, autocast of one type of devices is on or off. Without a
/// dtype, that of the surroundings stays.
class AutocastGuard {
 public:
  AutocastGuard(
      at::DeviceType type,
      bool enabled,
      std::optional<at::ScalarType> dtype,
      bool caches)
      : type_(type),
        enabled_(at::autocast::is_autocast_enabled(type)),
        dtype_(at::autocast::get_autocast_dtype(type)),
        caches_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_enabled(type, enabled);
    at::autocast::set_autocast_dtype(type, dtype.value_or(dtype_));
    at::autocast::set_autocast_cache_enabled(caches);
    at::autocast::increment_nesting();
  }
  ~AutocastGuard() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(type_, enabled_);
    at::autocast::set_autocast_dtype(type_, dtype_);
    at::autocast::set_autocast_cache_enabled(caches_);
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  at::DeviceType type_;
  bool enabled_;
  at::ScalarType dtype_;
  bool caches_;
};

} // namespace tessera::exported
