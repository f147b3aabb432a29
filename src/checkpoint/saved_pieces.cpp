#include "checkpoint/saved_pieces.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "checkpoint/format/format_error.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/scalar_type.h"
#include "checkpoint/state_leaves.h"
#include "checkpoint/values.h"
#include "state/part_of.h"

namespace tessera::checkpoint {
namespace {

/// A tensor that several ranks have is cut into chunks of rows of this size, so
/// that the ranks share the work.
constexpr int64_t kWholePieceBytes = int64_t{32} << 20;
/// How many bytes are copied to host memory at a time.
constexpr int64_t kStageBytes = int64_t{16} << 20;

format::ByteSpan bytes_of(const at::Tensor& tensor) {
  return {
      static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor.nbytes()};
}

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous();
}

/// Why a tensor cannot be saved; empty if it can.
std::string objection_to(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "the tensor is not defined.";
  }
  if (tensor.layout() != at::kStrided) {
    return "sparse tensors cannot be saved. Save tensor.to_dense().";
  }
  if (tensor.is_meta()) {
    return "the tensor has no values (device meta). Initialize it first.";
  }
  if (!to_format(tensor.scalar_type())) {
    return fmt::format(
        "tensors of {} cannot be saved. Convert it first.",
        c10::toString(tensor.scalar_type()));
  }
  return "";
}

/// Refuses a part of a sharded tensor: the parts of several ranks look like
/// copies of one tensor. Throws c10::ValueError.
void refuse_part(const StateValue& value, const std::string& name) {
  if (const auto part = state::find_part_of(value, name)) {
    raise<c10::ValueError>(
        {.call = "save", .parameter = name},
        fmt::format(
            "this is {}, not a whole tensor. Save what tessera::get_state_dict(model, optimizers) or a TrainingState gives: it knows the places of all parts.",
            state::to_string(*part)));
  }
}

at::Tensor savable(const at::Tensor& tensor, const std::string& name) {
  const std::string objection = objection_to(tensor);
  if (!objection.empty()) {
    raise<c10::ValueError>({.call = "save", .parameter = name}, objection);
  }
  return tensor.detach().resolve_conj().resolve_neg();
}

/// Throws c10::ValueError with the name if a pickle cannot hold the value.
std::string pickled(const format::Value& value, const std::string& name) {
  try {
    return format::write_pickle(value);
  } catch (const format::FormatError& error) {
    raise<c10::ValueError>(
        {.call = "save", .parameter = name},
        fmt::format("this value cannot be saved: {}.", error.what()));
  }
}

class PieceList {
 public:
  explicit PieceList(int num_ranks) : num_ranks_(num_ranks) {}

  void add_all(StateDict& state);
  SavedState take() {
    return std::move(state_);
  }

 private:
  void add_tensor(Claim claim, const StateValue& value);
  void add_sharded(Claim claim, const ShardedTensor& tensor);

  const int num_ranks_;
  SavedState state_;
};

void PieceList::add_all(StateDict& state) {
  for (const StateLeaf& slot : state_leaves(state)) {
    Claim claim;
    claim.name = slot.name;
    claim.keys = slot.keys;
    if (slot.value->is_sharded()) {
      add_sharded(std::move(claim), slot.value->sharded());
    } else if (slot.value->is_tensor()) {
      add_tensor(std::move(claim), *slot.value);
    } else {
      SavedPiece piece{
          .claim = state_.claims.size(),
          .data = {},
          .value = to_format(*slot.value)};
      const std::string pickle = pickled(piece.value, slot.name);
      claim.value_sum = checksum(format::as_bytes(pickle));
      claim.value_bytes = piece.bytes = pickle.size();
      state_.claims.push_back(std::move(claim));
      state_.pieces.push_back(std::move(piece));
    }
  }
}

void PieceList::add_tensor(Claim claim, const StateValue& value) {
  refuse_part(value, claim.name);
  const at::Tensor data = savable(value.tensor(), claim.name);
  claim.kind = ClaimKind::Whole;
  claim.is_of_any_rank = value.is_of_any_rank();
  claim.is_on_host = data.is_cpu();
  claim.dtype = *to_format(data.scalar_type());
  claim.sizes = data.sizes().vec();
  const auto add = [&](const at::Tensor& part, std::vector<int64_t> offsets) {
    state_.pieces.push_back(
        {.claim = state_.claims.size(), .data = part, .bytes = part.nbytes()});
    claim.boxes.push_back({std::move(offsets), part.sizes().vec()});
  };
  std::vector<int64_t> offsets(claim.sizes.size(), 0);
  const auto bytes = static_cast<int64_t>(data.nbytes());
  if (num_ranks_ == 1 || bytes <= kWholePieceBytes || data.dim() == 0) {
    add(data, offsets);
  } else {
    const int64_t rows =
        std::max<int64_t>(1, kWholePieceBytes / (bytes / data.size(0)));
    for (int64_t i = 0; i < data.size(0); i += rows) {
      offsets[0] = i;
      add(data.narrow(0, i, std::min(rows, data.size(0) - i)), offsets);
    }
  }
  state_.claims.push_back(std::move(claim));
}

void PieceList::add_sharded(Claim claim, const ShardedTensor& tensor) {
  claim.kind = ClaimKind::Sharded;
  const auto dtype = to_format(tensor.dtype());
  if (!dtype) {
    raise<c10::ValueError>(
        {.call = "save", .parameter = claim.name},
        fmt::format(
            "tensors of {} cannot be saved. Convert it first.",
            c10::toString(tensor.dtype())));
  }
  claim.dtype = *dtype;
  claim.sizes = tensor.sizes();
  for (const ShardedTensor::Piece& piece : tensor.pieces()) {
    if (piece.box.numel() == 0) {
      continue;
    }
    const at::Tensor data = savable(piece.tensor, claim.name);
    claim.is_on_host = data.is_cpu();
    state_.pieces.push_back(
        {.claim = state_.claims.size(), .data = data, .bytes = data.nbytes()});
    claim.boxes.push_back(piece.box);
  }
  state_.claims.push_back(std::move(claim));
}

/// Calls `use` with all of `tensor` as contiguous host memory, in order, in
/// parts of about kStageBytes.
void for_each_part(
    const at::Tensor& tensor,
    const std::function<void(const at::Tensor&)>& use) {
  if (static_cast<int64_t>(tensor.nbytes()) <= kStageBytes ||
      tensor.dim() == 0) {
    use(tensor.cpu().contiguous());
    return;
  }
  const at::Tensor rows = tensor.is_contiguous() ? tensor.view({-1}) : tensor;
  const int64_t row_bytes = static_cast<int64_t>(rows.nbytes()) / rows.size(0);
  if (row_bytes > kStageBytes) {
    for (int64_t i = 0; i < rows.size(0); ++i) {
      for_each_part(rows.select(0, i), use);
    }
    return;
  }
  const int64_t step = kStageBytes / row_bytes;
  for (int64_t i = 0; i < rows.size(0); i += step) {
    use(rows.narrow(0, i, std::min(step, rows.size(0) - i)).cpu().contiguous());
  }
}

} // namespace

SavedState pieces_of(StateDict& state, int num_ranks) {
  PieceList list(num_ranks);
  list.add_all(state);
  return list.take();
}

ItemPlace write_piece(ItemFile& file, SavedPiece& piece, format::DType dtype) {
  if (!piece.data.defined()) {
    return file.add_value(piece.value);
  }
  file.begin_tensor(dtype, piece.data.sizes().vec());
  if (is_plain_memory(piece.data)) {
    file.append(bytes_of(piece.data));
  } else {
    for_each_part(piece.data, [&](const at::Tensor& part) {
      file.append(bytes_of(part));
      file.flush(); // before `part` is destroyed
    });
  }
  const ItemPlace place = file.end_tensor();
  if (piece.bytes >= kBlockBytes) {
    file.flush();
    piece.data.reset(); // its memory may be needed
  }
  return place;
}

} // namespace tessera::checkpoint
