#include <tessera/error.h>
#include <tessera/optim/optimizer.h>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/view_as_real.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "libtorch/recording.h"

namespace tessera::optim {
namespace {

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
}

/// Kernels walk through memory, so all tensors of a parameter must have the
/// same layout.
bool lies_like(const at::Tensor& tensor, const at::Tensor& param) {
  return tensor.sizes() == param.sizes() && tensor.strides() == param.strides();
}

at::Tensor laid_out_like(const at::Tensor& tensor, const at::Tensor& param) {
  if (lies_like(tensor, param)) {
    return tensor;
  }
  at::Tensor copy = at::empty_like(param);
  copy.copy_(tensor);
  return copy;
}

at::Tensor make(
    const StateField& field,
    const at::Tensor& param,
    double initial) {
  if (field.kind == StateField::Kind::LikeParam) {
    at::Tensor value = at::empty_like(param);
    as_real(value).fill_(
        initial); // complex: both parts, as in Python's Adagrad
    return value;
  }
  auto options = param.options().dtype(at::kFloat).requires_grad(false);
  if (field.kind == StateField::Kind::HostScalar) {
    options = options.device(at::kCPU);
  }
  return at::full({}, initial, options);
}

/// A step that is recorded makes nothing: the value would begin anew with each
/// replay.
void refuse_to_record(const StateField& field, const at::Tensor& param) {
  if (libtorch::recording_on(param.device()) != nullptr) {
    raise(
        {.call = "step"},
        fmt::format(
            "state \"{}\" of a parameter is not there yet: this is the parameter's first gradient. Run an eager step first, or call initialize_state().",
            field.name));
  }
}

bool has(const StateDict& state, const StateField& field) {
  const StateValue* value = state.find(field.name);
  return value != nullptr && !value->is_none();
}

} // namespace

bool reads_lr_on_device(const Options& options, const Batch& batch) {
  const at::Tensor& lr = options.lr_on_device();
  if (!lr.defined() || lr.device() != batch.params.front().device()) {
    return false;
  }
  const bool is_current = options.value_on_device() == options.get_lr();
  if (!is_current && libtorch::recording_on(lr.device()) != nullptr) {
    raise(
        {.call = "step"},
        "the step changes learning rates, which a replay cannot do. Change them before the captured step.");
  }
  return is_current;
}

void Batch::add(Owner owner, const at::Tensor& gradient) {
  params.push_back(as_real(owner.dense));
  gradients.push_back(as_real(laid_out_like(gradient, owner.dense)));
  owners_.push_back(std::move(owner));
}

void Batch::write_back() const {
  for (const Owner& owner : owners_) {
    if (!owner.dense.is_same(owner.param)) {
      owner.param.copy_(owner.dense);
    }
  }
}

std::vector<at::Tensor> Batch::state(const StateField& field, double initial) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(owners_.size());
  for (const Owner& owner : owners_) {
    if (!has(*owner.state, field)) {
      refuse_to_record(field, owner.dense);
      owner.state->set(field.name, make(field, owner.dense, initial));
    }
    StateValue& value = (*owner.state)[field.name];
    if (field.kind != StateField::Kind::LikeParam) {
      tensors.push_back(value.tensor());
      continue;
    }
    if (value.tensor().sizes() != owner.dense.sizes()) {
      raise(
          {.call = "step"},
          fmt::format(
              "state \"{}\" has shape {}, its parameter {}. Shapes of parameters cannot change once they have state; make a new optimizer.",
              field.name,
              value.tensor().sizes().vec(),
              owner.dense.sizes().vec()));
    }
    if (!lies_like(value.tensor(), owner.dense)) {
      value = laid_out_like(value.tensor(), owner.dense);
    }
    tensors.push_back(as_real(value.tensor()));
  }
  return tensors;
}

std::pair<Batch, Batch> Batch::split_by(const StateField& field) const {
  std::pair<Batch, Batch> parts;
  for (size_t i = 0; i < owners_.size(); ++i) {
    Batch& part = has(*owners_[i].state, field) ? parts.first : parts.second;
    part.params.push_back(params[i]);
    part.gradients.push_back(gradients[i]);
    part.owners_.push_back(owners_[i]);
  }
  return parts;
}

} // namespace tessera::optim
