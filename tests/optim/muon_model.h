// Matrices of many shapes in units, with gradients that are set by hand, so
// that sharded and whole ones are the same.
#pragma once

#include <tessera/engine/parameters.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/muon_with_adamw.h>

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::optim {

/// Tall, wide, square, of one row, of fewer rows than ranks.
inline const std::vector<std::vector<int64_t>>& matrix_shapes() {
  static const std::vector<std::vector<int64_t>> shapes{
      {12, 5}, {5, 12}, {7, 7}, {3, 64}, {1, 9}, {33, 17}, {2, 2}, {40, 24}};
  return shapes;
}

/// Two matrices, and a vector if it is asked for.
struct PairImpl : torch::nn::Module {
  PairImpl(
      const std::vector<int64_t>& first,
      const std::vector<int64_t>& second,
      bool has_vector) {
    register_parameter("first", torch::randn(first));
    register_parameter("second", torch::randn(second));
    if (has_vector) {
      register_parameter("vector", torch::randn({5}));
    }
  }
};
TORCH_MODULE(Pair);

/// The same values on every rank and in every copy.
struct MatricesImpl : torch::nn::Module {
  explicit MatricesImpl(bool has_vectors = false) {
    torch::manual_seed(3);
    const auto& shapes = matrix_shapes();
    for (size_t i = 0; i < shapes.size(); i += 2) {
      pairs.push_back(register_module(
          "pair" + std::to_string(i / 2),
          Pair(shapes[i], shapes[i + 1], has_vectors)));
    }
  }
  std::vector<Pair> pairs;
};
TORCH_MODULE(Matrices);

/// The first three pairs are units, the last one is the root's.
inline void shard(Matrices& model, const FullyShardOptions& options) {
  for (size_t i = 0; i + 1 < model->pairs.size(); ++i) {
    fully_shard(model->pairs[i], options);
  }
  fully_shard(model, options);
}

/// The whole gradient of a parameter in a step.
inline at::Tensor gradient_for(
    const std::string& name,
    at::IntArrayRef sizes,
    int step) {
  torch::manual_seed(static_cast<uint64_t>(
      1000 * (step + 1) + static_cast<int>(name.size()) + name[4] * 7 +
      name[name.size() - 1]));
  return torch::randn(sizes);
}

/// The whole shapes, by name.
inline std::vector<std::pair<std::string, std::vector<int64_t>>> whole_shapes(
    bool has_vectors = false) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> shapes;
  Matrices plain(has_vectors);
  for (const auto& item : plain->named_parameters()) {
    shapes.emplace_back(item.key(), item.value().sizes().vec());
  }
  return shapes;
}

/// Sets the gradients of a whole model.
inline void set_gradients(Matrices& model, int step) {
  for (auto& item : model->named_parameters()) {
    item.value().mutable_grad() =
        gradient_for(item.key(), item.value().sizes(), step);
  }
}

/// Sets this rank's parts of the same gradients: in every layout the ranks of
/// a group have ranges of the flattened parameter, in their order. Collective.
inline void set_sharded_gradients(
    Matrices& model,
    const Group& shard_group,
    int step,
    bool has_vectors = false) {
  const auto shapes = whole_shapes(has_vectors);
  const auto params = named_parameters(model);
  TORCH_CHECK(shapes.size() == params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    at::Tensor leaf = params[i].second;
    const auto mine = torch::full({1}, leaf.numel(), torch::kLong);
    const auto all = torch::empty({shard_group.size()}, torch::kLong);
    shard_group.all_gather_into(all, mine, "numels");
    const int64_t begin =
        all.narrow(0, 0, shard_group.rank()).sum().item<int64_t>();
    leaf.mutable_grad() = gradient_for(params[i].first, shapes[i].second, step)
                              .flatten()
                              .narrow(0, begin, leaf.numel())
                              .view(leaf.sizes())
                              .clone();
  }
}

} // namespace tessera::optim
