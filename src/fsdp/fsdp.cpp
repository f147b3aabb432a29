#include <tessera/deferred/deferred_init.h>
#include <tessera/fsdp/fsdp.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <functional>
#include <utility>

#include "engine/module_units.h"
#include "engine/plain_params.h"
#include "engine/unit.h"
#include "fsdp/fsdp_request.h"
#include "fsdp/fsdp_unit.h"
#include "fsdp/open_forwards.h"
#include "fsdp/shard_module.h"
#include "libtorch/alias.h"

namespace tessera {
namespace {

/// Whether the tensor has no values and none were recorded for it.
bool is_plain_meta(const at::Tensor& tensor) {
  return tensor.is_meta() && !is_deferred(tensor);
}

void move_to(torch::nn::Module& module, at::Device device) {
  for (const at::Tensor& tensor : module.parameters()) {
    if (!is_plain_meta(tensor) && engine::unit_of(tensor) == nullptr) {
      at::Tensor(tensor).set_data(tensor.detach().to(device));
    }
  }
  for (const at::Tensor& buffer : module.buffers()) {
    if (!is_plain_meta(buffer)) {
      at::Tensor(buffer).set_data(buffer.to(device));
    }
  }
}

void cast_buffers(torch::nn::Module& module, at::ScalarType dtype) {
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.is_floating_point()) {
      at::Tensor(buffer).set_data(buffer.to(dtype));
    }
  }
}

/// Allocates parameters that are on the meta device and lets `fill` initialize
/// them.
void initialize_meta(
    torch::nn::Module& module,
    const std::function<void(torch::nn::Module&)>& fill,
    at::Device device) {
  at::NoGradGuard no_grad;
  const auto visit = [&](torch::nn::Module& one) {
    bool any = false;
    const auto give_memory = [&](const at::Tensor& tensor) {
      if (is_plain_meta(tensor)) {
        libtorch::show(
            tensor, at::empty_like(tensor, tensor.options().device(device)));
        any = true;
      }
    };
    for (const at::Tensor& tensor : one.parameters(/*recurse=*/false)) {
      give_memory(tensor);
    }
    for (const at::Tensor& tensor : one.buffers(/*recurse=*/false)) {
      give_memory(tensor);
    }
    if (any) {
      fill(one);
    }
  };
  visit(module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    visit(*item.value());
  }
}

} // namespace

namespace detail {

FSDPHandle::FSDPHandle(
    std::shared_ptr<torch::nn::Module> module,
    const FSDPOptions& options)
    : module_(std::move(module)),
      options_(options),
      strategy_(fsdp::strategy_of(options)) {
  const fsdp::ShardRequest request = fsdp::request_of(options_, strategy_);
  if (options_.param_init_fn()) {
    initialize_meta(
        *module_,
        options_.param_init_fn(),
        options_.device_id().value_or(at::Device(at::kCPU)));
  }
  if (options_.device_id()) {
    move_to(*module_, *options_.device_id());
  }
  fsdp::shard_module(*module_, request);
  for (const auto& ignored : options_.ignored_modules()) {
    for (const at::Tensor& tensor : ignored->parameters()) {
      engine::set_ignored(tensor);
    }
  }
  if (const auto dtype = options_.mixed_precision().buffer_dtype()) {
    cast_buffers(*module_, *dtype);
  }
}

FSDPHandle::ForwardScope::ForwardScope(const FSDPHandle& handle) {
  if (auto unit = engine::unit_at(*handle.module_)) {
    fsdp::enter_forward(*unit);
    unit_.emplace(
        std::make_shared<const FSDPUnit::Inner>(
            FSDPUnit::Inner{std::move(unit)}),
        *handle.module_);
  }
}

FSDPHandle::ForwardScope::~ForwardScope() {
  if (unit_) {
    fsdp::leave_forward(*unit_->inner()->unit);
  }
}

at::Tensor FSDPHandle::cast_tensor(const at::Tensor& input) const {
  const MixedPrecision& precision = options_.mixed_precision();
  return precision.param_dtype() && precision.cast_root_forward_inputs() &&
          input.defined() && input.is_floating_point()
      ? input.to(*precision.param_dtype())
      : input;
}

} // namespace detail
} // namespace tessera
