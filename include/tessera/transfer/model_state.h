#pragma once

#include <tessera/api.h>
#include <tessera/module_ref.h>
#include <tessera/state/state_dict.h>

#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera {

/// Parameters and buffers of any module under their own names, in the order of
/// Python's state_dict: tied parameters under every name. Sharded parameters
/// come as the module's state_dict_type says: full, local or sharded, in the
/// dtype of the shards. Gathered units are resharded first. FullStateDict of
/// a sharded module has copies; other values share memory with the module,
/// clone() makes a snapshot. Collective if units are sharded and the type is
/// FullStateDict.
///
/// Throws c10::Error inside summon_full_params: what is shown there is not in
/// the shards yet.
TESSERA_API StateDict state_dict(ModuleRef module);

/// Keys that did not fit, if that is not an error.
struct TESSERA_API IncompatibleKeys {
  std::vector<std::string> missing; // of the model, not in the dictionary
  std::vector<std::string> unexpected; // the other way round
};

/// Writes `dict` into the module's parameters and buffers. A value may be a
/// full tensor, the same on all ranks, or a ShardedTensor of any layout over
/// the same ranks; values are cast to the module's dtypes. Nothing is written
/// unless everything fits on every rank. Collective if the module is sharded.
///
/// Throws c10::ValueError on all ranks for shapes and kinds that do not fit
/// and, if `strict`, for keys that are missing or unexpected: all of them in
/// one text, with the nearest name for each. Without `strict` these are
/// returned.
TESSERA_API IncompatibleKeys
load_state_dict(ModuleRef module, const StateDict& dict, bool strict = true);

} // namespace tessera
