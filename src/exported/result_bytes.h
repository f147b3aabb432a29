// How large the results of a node are, before and after they are computed.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>

#include "exported/format/program.h"

namespace tessera::exported {

/// The graph that a node runs; null if there is none.
const Graph* graph_in(const Node& node);

/// The bytes of all results of a node of `graph`, and of the nodes of the graph
/// that it runs. Nothing if one of them has more than kMaxFoldedValue bytes, or
/// if the graph does not tell.
std::optional<uint64_t> result_bytes(const Node& node, const Graph& graph);

/// Memory that folded values hold, as it is: the sizes in the graph are those
/// of the file, which may be wrong.
class HeldMemory {
 public:
  /// Memory of the model's own, which does not count.
  explicit HeldMemory(std::span<const at::Tensor> tensors);

  /// Whether none of the values has more than kMaxFoldedValue bytes, and all
  /// that are held then not more than kMaxFolded.
  bool fits(std::span<const c10::IValue> values) const;
  void hold(std::span<const c10::IValue> values);
  uint64_t bytes_left() const;

 private:
  using Storages = std::unordered_map<const c10::StorageImpl*, c10::Storage>;

  Storages storages_;
  uint64_t bytes_ = 0;
};

} // namespace tessera::exported
