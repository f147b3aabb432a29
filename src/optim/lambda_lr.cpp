#include <tessera/error.h>
#include <tessera/optim/lambda_lr.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace tessera::optim {
namespace {

/// One function per param group.
std::vector<LRLambda> checked_lambdas(
    std::vector<LRLambda> lambdas,
    const torch::optim::Optimizer& optimizer,
    const char* call) {
  const size_t num_groups = optimizer.param_groups().size();
  if (lambdas.size() != num_groups) {
    raise<c10::ValueError>(
        {.call = call},
        fmt::format(
            "there are {} functions for {} param groups. Pass one for each, or one for all.",
            lambdas.size(),
            num_groups));
  }
  for (const LRLambda& lambda : lambdas) {
    if (!lambda) {
      raise<c10::ValueError>(
          {.call = call}, "a function is empty. Pass one that can be called.");
    }
  }
  return lambdas;
}

std::vector<LRLambda> for_all_groups(
    const LRLambda& lambda,
    const torch::optim::Optimizer& optimizer) {
  return std::vector<LRLambda>(optimizer.param_groups().size(), lambda);
}

/// Throws unless each param group has a function.
void need_functions(size_t num_functions, size_t num_groups, const char* call) {
  if (num_functions != num_groups) {
    raise<c10::ValueError>(
        {.call = call},
        fmt::format(
            "the optimizer has {} param groups, this schedule has functions for {}. Make a new schedule after add_param_group().",
            num_groups,
            num_functions));
  }
}

void write_lambdas(size_t count, StateDict& state) {
  state.set("lr_lambdas", StateList(count));
}

/// Functions are the program's; state that an object in Python had is not for
/// them.
void read_lambdas(size_t count, const StateDict& state, const char* call) {
  const StateList& saved = state.at("lr_lambdas").list();
  const bool are_functions = saved.size() == count &&
      std::all_of(saved.begin(), saved.end(), [](const StateValue& value) {
                               return value.is_none();
                             });
  if (!are_functions) {
    raise<c10::ValueError>(
        {.call = call},
        fmt::format(
            "\"lr_lambdas\" must be a list of {} times None. Functions are not saved, and state of Python's callable objects is not supported: use functions there.",
            count));
  }
}

} // namespace

LambdaLR::LambdaLR(
    torch::optim::Optimizer& optimizer,
    const LRLambda& lr_lambda,
    int64_t last_epoch)
    : LambdaLR(optimizer, for_all_groups(lr_lambda, optimizer), last_epoch) {}

LambdaLR::LambdaLR(
    torch::optim::Optimizer& optimizer,
    std::vector<LRLambda> lr_lambdas,
    int64_t last_epoch)
    : EpochSchedule(optimizer, "LambdaLR", last_epoch),
      lr_lambdas_(
          checked_lambdas(std::move(lr_lambdas), optimizer, "LambdaLR")) {
  start();
}

std::vector<double> LambdaLR::get_lr() const {
  need_base_lrs();
  std::vector<double> lrs;
  for (size_t group = 0; group < base_lrs().size(); ++group) {
    lrs.push_back(base_lrs()[group] * lr_lambdas_[group](last_epoch()));
  }
  return lrs;
}

void LambdaLR::write_more(StateDict& state) const {
  write_lambdas(lr_lambdas_.size(), state);
}

void LambdaLR::read_more(const StateDict& state) {
  read_lambdas(lr_lambdas_.size(), state, "LambdaLR");
}

MultiplicativeLR::MultiplicativeLR(
    torch::optim::Optimizer& optimizer,
    const LRLambda& lr_lambda,
    int64_t last_epoch)
    : MultiplicativeLR(
          optimizer,
          for_all_groups(lr_lambda, optimizer),
          last_epoch) {}

MultiplicativeLR::MultiplicativeLR(
    torch::optim::Optimizer& optimizer,
    std::vector<LRLambda> lr_lambdas,
    int64_t last_epoch)
    : EpochSchedule(optimizer, "MultiplicativeLR", last_epoch),
      lr_lambdas_(checked_lambdas(
          std::move(lr_lambdas),
          optimizer,
          "MultiplicativeLR")) {
  start();
}

std::vector<double> MultiplicativeLR::get_lr() const {
  std::vector<double> lrs = current_lrs();
  if (is_initial()) {
    return lrs;
  }
  need_functions(lr_lambdas_.size(), lrs.size(), "MultiplicativeLR");
  for (size_t group = 0; group < lrs.size(); ++group) {
    lrs[group] *= lr_lambdas_[group](last_epoch());
  }
  return lrs;
}

void MultiplicativeLR::write_more(StateDict& state) const {
  write_lambdas(lr_lambdas_.size(), state);
}

void MultiplicativeLR::read_more(const StateDict& state) {
  read_lambdas(lr_lambdas_.size(), state, "MultiplicativeLR");
}

} // namespace tessera::optim
