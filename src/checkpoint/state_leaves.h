// The leaves of a state dict by the names that checkpoints give them.
#pragma once

#include <tessera/state/state_dict.h>

#include <string>
#include <vector>

#include "checkpoint/format/dcp_metadata.h"

namespace tessera::checkpoint {

struct StateLeaf {
  std::string name;
  std::vector<format::DcpPath::Key> keys; // numbers are positions in lists
  StateValue* value; // in the dictionary

  bool is_tensor() const {
    return value->is_tensor() || value->is_sharded();
  }
};

/// Flattens a dictionary as Python's DCP does: dictionaries always, lists if
/// they hold tensors or dictionaries; keys that are numbers become their
/// digits. Other lists, and empty dictionaries, are leaves. Valid until `dict`
/// is changed. Throws c10::ValueError if two leaves get the same name.
std::vector<StateLeaf> state_leaves(StateDict& dict);

/// A dictionary with these leaves.
StateDict assemble(
    const std::vector<std::vector<format::DcpPath::Key>>& keys,
    std::vector<StateValue> values);

} // namespace tessera::checkpoint
