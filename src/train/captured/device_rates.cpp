#include "train/captured/device_rates.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <utility>

namespace tessera::train {

/// Calls `see(options, rate)` for the groups whose kernels can read a rate.
template <class See>
void DeviceRates::for_each_group(const See& see) {
  size_t next = 0;
  for (const auto& optimizer : optimizers_) {
    for (auto& group : optimizer.get().param_groups()) {
      if (auto* own = dynamic_cast<optim::Options*>(&group.options())) {
        if (next == rates_.size()) {
          rates_.emplace_back();
        }
        see(*own, rates_[next]);
        ++next;
      }
    }
  }
}

void DeviceRates::write() {
  const at::NoGradGuard no_grad;
  for_each_group([&](optim::Options& options, Rate& rate) {
    const double value = options.get_lr();
    if (!rate.on_device.defined()) {
      // Kernels of devices read float32, those of the CPU any dtype.
      const auto dtype = device_.is_cpu() ? at::kDouble : at::kFloat;
      rate.on_device =
          at::full({}, value, at::TensorOptions(device_).dtype(dtype));
    } else if (rate.value != value) {
      rate.on_device.fill_(value);
    }
    rate.value = value;
  });
}

DeviceRates::Scope::Scope(DeviceRates& rates) : rates_(rates) {
  rates_.write();
  rates_.for_each_group([](optim::Options& options, const Rate& rate) {
    options.lr_on_device(rate.on_device, rate.value);
  });
}

DeviceRates::Scope::~Scope() {
  rates_.for_each_group([](optim::Options& options, const Rate&) {
    options.lr_on_device(at::Tensor(), 0);
  });
}

std::vector<double> rates_of(const OptimizerRefs& optimizers) {
  std::vector<double> rates;
  for (const auto& optimizer : optimizers) {
    for (auto& group : optimizer.get().param_groups()) {
      rates.push_back(group.options().get_lr());
    }
  }
  return rates;
}

} // namespace tessera::train
