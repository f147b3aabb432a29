// Learning rates where the kernels of a recorded step read them.
#pragma once

#include <tessera/optim/options.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::train {

/// A scalar on the device for each param group of Tessera's optimizers.
class DeviceRates {
 public:
  /// The optimizers must outlive this object.
  DeviceRates(OptimizerRefs optimizers, at::Device device)
      : optimizers_(std::move(optimizers)), device_(device) {}

  /// Writes the groups' present rates to the device, those that have changed.
  void write();

  /// As long as it lives, steps read the rates on the device.
  class Scope {
   public:
    explicit Scope(DeviceRates& rates);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    DeviceRates& rates_;
  };

 private:
  struct Rate {
    at::Tensor on_device;
    double value = 0; // that is on its way to the device
  };

  template <class See>
  void for_each_group(const See& see);

  const OptimizerRefs optimizers_;
  const at::Device device_;
  std::vector<Rate> rates_; // by group, of all optimizers
};

/// The learning rates of all groups.
std::vector<double> rates_of(const OptimizerRefs& optimizers);

} // namespace tessera::train
