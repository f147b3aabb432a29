// The pieces of a state that this rank could write.
#pragma once

#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "checkpoint/disk/item_file.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle_value.h"
#include "checkpoint/save_plan.h"

namespace tessera::checkpoint {

struct SavedPiece {
  size_t claim;
  at::Tensor data; // of tensors
  format::Value value; // of others
  uint64_t bytes = 0;
  Duty duty = {};
  size_t result = 0; // its place in RankResult::units, if it is written
  std::optional<uint64_t> digest; // of a piece that is compared, once computed
};

struct SavedState {
  std::vector<Claim> claims;
  std::vector<SavedPiece> pieces; // in the order of the claims and their boxes
};

/// A tensor that several ranks have is cut into rows, so that the ranks share
/// the work. Throws c10::ValueError for values that cannot be saved.
SavedState pieces_of(StateDict& state, int num_ranks);

/// May release the memory of a large piece.
ItemPlace write_piece(ItemFile& file, SavedPiece& piece, format::DType dtype);

} // namespace tessera::checkpoint
