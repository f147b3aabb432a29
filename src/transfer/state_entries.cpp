#include "transfer/state_entries.h"

#include <tessera/engine/transient_buffers.h>

#include "engine/names.h"

namespace tessera::transfer {
namespace {

void add_entries(
    const torch::nn::Module& module,
    const std::string& prefix,
    std::vector<StateEntry>& entries) {
  const auto* transient = dynamic_cast<const HasTransientBuffers*>(&module);
  const auto add = [&](const auto& items, bool are_buffers) {
    for (const auto& item : items) {
      const bool is_left_out = are_buffers && transient != nullptr &&
          !transient->is_persistent(item.key());
      if (item.value().defined() && !is_left_out) {
        entries.push_back(
            {engine::clean_name(prefix + item.key()),
             item.value(),
             are_buffers});
      }
    }
  };
  add(module.named_parameters(/*recurse=*/false), false);
  add(module.named_buffers(/*recurse=*/false), true);
  for (const auto& child : module.named_children()) {
    add_entries(*child.value(), prefix + child.key() + ".", entries);
  }
}

} // namespace

std::vector<StateEntry> state_entries(const torch::nn::Module& module) {
  std::vector<StateEntry> entries;
  add_entries(module, "", entries);
  return entries;
}

} // namespace tessera::transfer
