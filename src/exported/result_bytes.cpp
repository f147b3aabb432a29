#include "exported/result_bytes.h"

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "exported/fold_constants.h"
#include "exported/operator_name.h"
#include "exported/overloaded.h"

namespace tessera::exported {
namespace {

/// The bytes that the tensor spans, or those of its elements if these are more:
/// elements of an expanded tensor share memory. Nothing if the graph does not
/// tell.
std::optional<uint64_t> bytes_of(const TensorMeta& meta) {
  if (meta.sizes.size() != meta.strides.size()) {
    return std::nullopt;
  }
  uint64_t extent = 1;
  uint64_t numel = 1;
  for (size_t dim = 0; dim < meta.sizes.size(); ++dim) {
    const auto* size = std::get_if<int64_t>(&meta.sizes[dim].value);
    const auto* stride = std::get_if<int64_t>(&meta.strides[dim].value);
    if (size == nullptr || stride == nullptr || *size < 0 || *stride < 0) {
      return std::nullopt;
    }
    if (*size == 0) {
      return 0;
    }
    uint64_t more = 0;
    if (__builtin_mul_overflow(
            static_cast<uint64_t>(*size - 1),
            static_cast<uint64_t>(*stride),
            &more) ||
        __builtin_add_overflow(extent, more, &extent) ||
        __builtin_mul_overflow(numel, static_cast<uint64_t>(*size), &numel)) {
      return std::nullopt;
    }
  }
  uint64_t bytes = 0;
  const bool is_too_large = __builtin_mul_overflow(
      std::max(extent, numel),
      c10::elementSize(to_scalar_type(meta.dtype)),
      &bytes);
  return is_too_large ? std::nullopt : std::optional(bytes);
}

} // namespace

const Graph* graph_in(const Node& node) {
  for (const NamedArgument& input : node.inputs) {
    const auto* nested = std::get_if<NestedGraph>(&input.argument.value);
    if (nested != nullptr) {
      return nested->graph.get();
    }
  }
  return nullptr;
}

std::optional<uint64_t> result_bytes(const Node& node, const Graph& graph) {
  uint64_t total = 0;
  bool are_small = true;
  const auto add = Overloaded{
      [&](const TensorName& tensor) {
        const auto meta = graph.tensors.find(tensor.name);
        const auto bytes =
            meta == graph.tensors.end() ? std::nullopt : bytes_of(meta->second);
        are_small = are_small && bytes && *bytes <= kMaxFoldedValue;
        total += bytes.value_or(0);
      },
      [&](const std::optional<TensorName>& tensor) {
        are_small = are_small && !tensor; // its size is not looked for
      },
      [](const auto&) {}};
  for (const Argument& output : node.outputs) {
    std::visit(
        Overloaded{
            [&]<class Element>(const std::vector<Element>& elements) {
              for (const Element& element : elements) {
                add(element);
              }
            },
            add},
        output.value);
  }
  if (!are_small) {
    return std::nullopt;
  }
  if (const Graph* inside = graph_in(node)) {
    for (const Node& inner : inside->nodes) {
      const auto bytes = result_bytes(inner, *inside);
      if (!bytes) {
        return std::nullopt;
      }
      total += *bytes;
    }
  }
  return total;
}

HeldMemory::HeldMemory(std::span<const at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    const c10::Storage& storage = tensor.storage();
    storages_.emplace(storage.unsafeGetStorageImpl(), storage);
  }
}

uint64_t HeldMemory::bytes_left() const {
  return kMaxFolded - bytes_;
}

bool HeldMemory::fits(std::span<const c10::IValue> values) const {
  uint64_t more = 0;
  for (const c10::IValue& value : values) {
    if (!value.isTensor()) {
      continue;
    }
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || !tensor.has_storage()) {
      return false;
    }
    const c10::Storage& storage = tensor.storage();
    const bool is_held = storages_.contains(storage.unsafeGetStorageImpl());
    const uint64_t bytes = is_held ? 0 : storage.nbytes();
    if (std::max<uint64_t>(bytes, tensor.nbytes()) > kMaxFoldedValue) {
      return false;
    }
    more += bytes; // two results of one memory count twice
  }
  return more <= bytes_left();
}

void HeldMemory::hold(std::span<const c10::IValue> values) {
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      const c10::Storage& storage = value.toTensor().storage();
      const bool is_new =
          storages_.emplace(storage.unsafeGetStorageImpl(), storage).second;
      bytes_ += is_new ? storage.nbytes() : 0;
    }
  }
}

} // namespace tessera::exported
