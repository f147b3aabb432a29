#include "transfer/load_agreement.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "engine/start.h"
#include "state/describe.h"

namespace tessera::transfer {
namespace {

/// Each rank takes its part of a full tensor, so the full tensors must be the
/// same on all ranks.
std::string digests_of(const WantedState& wanted) {
  std::string text;
  for (const StateValue* value : wanted.by_member) {
    if (value != nullptr && value->is_tensor() && value->tensor().defined()) {
      text += fmt::format(
          " with the digest {:016x}", engine::digest_of(value->tensor()));
    }
  }
  return text;
}

/// Lists, such as betas, with their items.
std::string value_text(const StateValue& value) {
  if (!value.is_list()) {
    return state::describe(value);
  }
  std::string text;
  for (const StateValue& item : value.list()) {
    text += (text.empty() ? "" : ", ") + state::describe(item);
  }
  return "[" + text + "]";
}

} // namespace

std::vector<std::string> lines_to_agree(
    const std::vector<WantedLeaf>& leaves,
    const std::optional<StateList>& param_groups) {
  std::vector<std::string> result;
  for (const WantedLeaf& leaf : leaves) {
    const bool is_everybodys = leaf.members.front()->is_sharded();
    std::string line = leaf.members.front()->name + ":";
    for (const WantedState& wanted : leaf.states) {
      bool is_sharded = false;
      for (const StateValue* value : wanted.by_member) {
        is_sharded = is_sharded || (value != nullptr && value->is_sharded());
      }
      // State of a plain parameter may differ between ranks, unless all ranks
      // must put it together.
      if (is_everybodys || is_sharded) {
        line += " " + wanted.name + "=" +
            (wanted.dtype ? c10::toString(*wanted.dtype)
                          : state::describe(wanted.value).c_str()) +
            (is_sharded ? " sharded" : "");
      }
      if (is_everybodys) {
        line += digests_of(wanted);
      }
    }
    result.push_back(std::move(line));
  }
  std::erase_if(
      result, [](const std::string& line) { return line.ends_with(':'); });
  if (param_groups) {
    for (const StateValue& group : *param_groups) {
      std::string line = "param_groups:";
      for (const auto& [key, value] : group.dict()) {
        if (key != StateKey("params")) {
          line += " " + key.text() + "=" + value_text(value);
        }
      }
      result.push_back(std::move(line));
    }
  }
  return result;
}

} // namespace tessera::transfer
