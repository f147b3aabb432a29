#include <tessera/fsdp/wrap_policy.h>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <utility>

namespace tessera {
namespace {

template <class... Modules>
bool is_any_of(const torch::nn::Module& module) {
  return ((dynamic_cast<const Modules*>(&module) != nullptr) || ...);
}

} // namespace

WrapPolicy always_wrap_policy() {
  return {.wraps = [](const torch::nn::Module&, int64_t) { return true; }};
}

WrapPolicy size_based_auto_wrap_policy(int64_t min_numel) {
  return {
      .wraps =
          [min_numel](const torch::nn::Module& module, int64_t numel) {
            return numel >= min_numel &&
                !is_any_of<
                       torch::nn::ModuleListImpl,
                       torch::nn::ModuleDictImpl>(module);
          },
      .descends =
          [min_numel](const torch::nn::Module& module, int64_t numel) {
            return numel >= min_numel &&
                !is_any_of<torch::nn::MultiheadAttentionImpl>(module);
          }};
}

WrapPolicy lambda_auto_wrap_policy(
    std::function<bool(const torch::nn::Module&)> wraps) {
  return {
      .wraps = [wraps = std::move(wraps)](
                   const torch::nn::Module& module, int64_t) {
        return wraps(module);
      }};
}

} // namespace tessera
