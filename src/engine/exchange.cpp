#include "engine/exchange.h"

#include "libtorch/huge_pages.h"

namespace tessera::engine {
namespace {

using Pieces = std::vector<std::vector<at::Tensor>>;

/// Adds each rank's range of `whole` to what is sent to, or received from, that
/// rank.
void add_ranges(const Cut& cut, const at::Tensor& whole, Pieces& by_rank) {
  const at::Tensor flat = whole.view({-1});
  int64_t begin = 0;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    by_rank[rank].push_back(flat.narrow(0, begin, cut.numels[rank]));
    begin += cut.numels[rank];
  }
}

} // namespace

Cut Cut::of(const Layout& layout, size_t param) {
  Cut cut{layout.shape(param), {}};
  for (int rank = 0; rank < layout.num_ranks(); ++rank) {
    cut.numels.push_back(layout.run(param, rank).numel);
  }
  return cut;
}

std::vector<at::Tensor> gather(
    const std::vector<Part>& parts,
    const Group& group,
    std::optional<int> root,
    std::string_view label) {
  std::vector<at::Tensor> wholes(parts.size());
  Pieces inputs(static_cast<size_t>(group.size()));
  Pieces outputs(static_cast<size_t>(group.size()));
  for (const Part& part : parts) {
    for (int rank = 0; rank < group.size(); ++rank) {
      if (!root || rank == *root) {
        inputs[static_cast<size_t>(rank)].push_back(part.mine);
      }
    }
  }
  if (!root || group.rank() == *root) {
    std::vector<Shape> shapes;
    std::vector<at::TensorOptions> options;
    for (const Part& part : parts) {
      shapes.push_back(part.cut.shape);
      options.push_back(part.mine.options().requires_grad(false));
    }
    wholes = libtorch::empty_to_fill(shapes, options);
    for (size_t i = 0; i < parts.size(); ++i) {
      add_ranges(parts[i].cut, wholes[i], outputs);
    }
  }
  group.all_to_all(outputs, inputs, label);
  return wholes;
}

void scatter(
    const std::vector<at::Tensor>& wholes,
    const std::vector<Part>& parts,
    const Group& group,
    int root,
    std::string_view label) {
  Pieces inputs(static_cast<size_t>(group.size()));
  Pieces outputs(static_cast<size_t>(group.size()));
  for (size_t i = 0; i < parts.size(); ++i) {
    outputs[static_cast<size_t>(root)].push_back(parts[i].mine);
    if (group.rank() == root) {
      add_ranges(parts[i].cut, wholes[i], inputs);
    }
  }
  group.all_to_all(outputs, inputs, label);
}

} // namespace tessera::engine
