#include <tessera/error.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/optim/optimizer.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <set>
#include <utility>

#include "optim/dictionary.h"

namespace tessera::optim {

struct NamedOptimizer::Names {
  ParamNames by_param;
  NamedTensors tensors; // keeps the addresses from being reused
};

/// Gives groups and state to the wrapped optimizer while it works. LibTorch's
/// accessors are not virtual, so groups and state must be here at all other
/// times: a scheduler changes the groups that it finds here.
class NamedOptimizer::Lend {
 public:
  explicit Lend(NamedOptimizer& owner) : owner_(owner) {
    owner_.exchange_with_inner();
  }
  ~Lend() {
    owner_.exchange_with_inner();
  }
  Lend(const Lend&) = delete;
  Lend& operator=(const Lend&) = delete;

  /// Takes groups and state back for a while.
  at::Tensor call(const LossClosure& closure) {
    Lend back(owner_);
    return closure();
  }

 private:
  NamedOptimizer& owner_;
};

NamedOptimizer::NamedOptimizer(
    NamedTensors named,
    std::unique_ptr<torch::optim::Optimizer> optimizer)
    : torch::optim::Optimizer(
          std::vector<torch::optim::OptimizerParamGroup>(),
          optimizer->defaults().clone()),
      names_(std::make_unique<Names>()),
      inner_(std::move(optimizer)) {
  std::set<std::string> seen;
  for (const auto& [name, tensor] : named) {
    if (!seen.insert(name).second) {
      raise<c10::ValueError>(
          {.call = "NamedOptimizer"},
          fmt::format("the name \"{}\" is given twice.", name));
    }
    // For tied parameters, the first name counts.
    names_->by_param.emplace(tensor.unsafeGetTensorImpl(), name);
  }
  names_->tensors = std::move(named);
  exchange_with_inner();
  access_to(*inner_, param_groups_, "NamedOptimizer");
  check_names(param_groups_, "NamedOptimizer");
}

NamedOptimizer::~NamedOptimizer() = default;

at::Tensor NamedOptimizer::step(LossClosure closure) {
  Lend lend(*this);
  if (!closure) {
    return inner_->step();
  }
  // Closures call zero_grad() here.
  return inner_->step([&] { return lend.call(closure); });
}

void NamedOptimizer::add_param_group(
    const torch::optim::OptimizerParamGroup& group) {
  check_names({group}, "NamedOptimizer::add_param_group");
  Lend lend(*this);
  if (auto* own = dynamic_cast<optim::Optimizer*>(inner_.get())) {
    own->add_param_group(group);
  } else {
    inner_->add_param_group(group);
  }
}

StateDict NamedOptimizer::state_dict() const {
  check_names(param_groups_, "NamedOptimizer::state_dict");
  const auto access = access_to(*inner_, param_groups_, "state_dict");
  return write_dictionary(*this, *access, &names_->by_param);
}

void NamedOptimizer::load_state_dict(const StateDict& dict) {
  check_names(param_groups_, "NamedOptimizer::load_state_dict");
  const auto access = access_to(*inner_, param_groups_, "load_state_dict");
  read_dictionary(*this, *access, dict, &names_->by_param);
}

void NamedOptimizer::initialize_state() {
  Lend lend(*this);
  optim::initialize_state(*inner_);
}

bool NamedOptimizer::skip_where(const at::Tensor& found_inf) {
  auto* inner = dynamic_cast<DeviceSkip*>(inner_.get());
  return inner != nullptr && inner->skip_where(found_inf);
}

std::optional<std::string> NamedOptimizer::capture_objection() const {
  return optim::capture_objection(*inner_);
}

void NamedOptimizer::exchange_with_inner() {
  // Elements do not move: references to groups and state stay valid.
  std::swap(param_groups_, inner_->param_groups());
  std::swap(state_, inner_->state());
}

void NamedOptimizer::check_names(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::string_view call) const {
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& params = groups[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      if (!names_->by_param.contains(params[i].unsafeGetTensorImpl())) {
        raise<c10::ValueError>(
            {.call = call},
            fmt::format(
                "parameter {} of param group {} has no name. Pass the names of all parameters, those of groups that come later too.",
                i,
                group));
      }
    }
  }
}

} // namespace tessera::optim
