#pragma once

#include <tessera/api.h>
#include <tessera/state/state_dict.h>

#include <string>

namespace tessera {

/// An object that knows its own state, as in Python, such as a training run or
/// a learning-rate schedule. Checkpoints save and load it.
class TESSERA_API Stateful {
 public:
  virtual ~Stateful() = default;

  /// The state to save or to load into: tensors share memory with this object.
  /// May be collective.
  virtual StateDict state_dict() = 0;
  /// Takes the dictionary that state_dict() returned, once a checkpoint has
  /// been loaded into that dictionary.
  virtual void load_state_dict(const StateDict& state) = 0;
  /// Throws what load_state_dict() would throw for this dictionary. A load
  /// calls this before it fills the tensors, which may still have this object's
  /// values, so that a state that is refused changes nothing. Not collective:
  /// an error on one rank ends the load on every rank.
  virtual void check_state_dict(const StateDict& /*state*/) const {}
  /// Whether a name may be missing in the checkpoint, or unused by the target.
  virtual bool is_optional(const std::string& /*name*/) const {
    return false;
  }
};

} // namespace tessera
