#include "comm/group/broadcast_owned.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "comm/group/broadcast_packing.h"
#include "libtorch/recording.h"

namespace tessera::comm {
namespace {

constexpr const char* kLabel = "tensors of their owners";
constexpr size_t kInFlight = 4;

/// A tensor as a contiguous one.
struct Piece {
  explicit Piece(const at::Tensor& tensor)
      : target(tensor), dense(tensor.detach().contiguous()) {}

  /// Called once the tensor was received.
  void write_back() const {
    if (!target.is_contiguous()) {
      target.detach().copy_(dense);
    }
  }

  at::Tensor bytes() const {
    return dense.view({-1}).view(at::kByte);
  }

  at::Tensor target;
  at::Tensor dense;
};

using OwnedPieces = std::vector<std::vector<Piece>>; // by owner

/// Over shared memory: one exchange, without packing. The ranks compare sizes
/// on the host, which a step that is being captured cannot.
void give_to_all(const Group& group, const OwnedPieces& pieces) {
  std::vector<at::Tensor> own;
  for (const Piece& piece : pieces[group.rank()]) {
    own.push_back(piece.dense);
  }
  std::vector<std::vector<at::Tensor>> outputs(group.size());
  std::vector<std::vector<at::Tensor>> inputs(group.size(), own);
  inputs[group.rank()].clear();
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != group.rank()) {
      for (const Piece& piece : pieces[rank]) {
        outputs[rank].push_back(piece.dense);
      }
    }
  }
  group.all_to_all(outputs, inputs, kLabel);
}

/// Tensors that are packed into one tensor, on the way.
struct Pack {
  std::vector<Piece> pieces;
  at::Tensor wire;
  Work work;

  void finish(bool received) {
    work.wait();
    if (!received || pieces.size() == 1) {
      return;
    }
    int64_t begin = 0;
    for (const Piece& piece : pieces) {
      const at::Tensor place = piece.bytes();
      place.copy_(wire.narrow(0, begin, place.numel()));
      begin += place.numel();
    }
  }
};

/// Elsewhere: broadcasts, owner by owner.
class Broadcasts {
 public:
  explicit Broadcasts(const Group& group) : group_(group) {}

  void add(int owner, const std::vector<Piece>& pieces) {
    std::vector<int64_t> bytes;
    for (const Piece& piece : pieces) {
      bytes.push_back(static_cast<int64_t>(piece.dense.nbytes()));
    }
    for (const std::vector<size_t>& pack : pack_broadcasts(bytes)) {
      std::vector<Piece> together;
      for (const size_t piece : pack) {
        together.push_back(pieces[piece]);
      }
      send(owner, std::move(together));
    }
  }

  void finish() {
    while (!in_flight_.empty()) {
      finish_oldest();
    }
  }

 private:
  void send(int owner, std::vector<Piece> pieces) {
    if (in_flight_.size() == kInFlight) {
      finish_oldest();
    }
    Pack pack{std::move(pieces), {}, {}};
    if (pack.pieces.size() == 1) {
      pack.wire = pack.pieces.front().dense;
    } else {
      std::vector<at::Tensor> parts;
      for (const Piece& piece : pack.pieces) {
        parts.push_back(piece.bytes());
      }
      pack.wire = at::cat(parts);
    }
    pack.work = group_.broadcast_async(pack.wire, owner, kLabel);
    in_flight_.emplace_back(owner, std::move(pack));
  }

  void finish_oldest() {
    auto [owner, pack] = std::move(in_flight_.front());
    in_flight_.pop_front();
    pack.finish(owner != group_.rank());
  }

  const Group& group_;
  std::deque<std::pair<int, Pack>> in_flight_;
};

} // namespace

void broadcast_owned(
    const Group& group,
    const std::vector<std::vector<at::Tensor>>& owned) {
  if (group.size() == 1) {
    return;
  }
  const at::NoGradGuard no_grad;
  OwnedPieces pieces;
  bool on_host = true;
  for (const auto& tensors : owned) {
    auto& of_rank = pieces.emplace_back();
    for (const at::Tensor& tensor : tensors) {
      if (tensor.numel() != 0) {
        of_rank.emplace_back(tensor);
        on_host = on_host && tensor.device().is_cpu();
      }
    }
  }
  if (on_host && group.shares_memory() && !libtorch::is_recorded_here()) {
    give_to_all(group, pieces);
  } else {
    Broadcasts broadcasts(group);
    for (int owner = 0; owner < group.size(); ++owner) {
      // A pack has one device.
      std::vector<Piece> left = pieces[owner];
      while (!left.empty()) {
        const at::Device device = left.front().dense.device();
        const auto others = std::stable_partition(
            left.begin(), left.end(), [&](const Piece& piece) {
              return piece.dense.device() == device;
            });
        broadcasts.add(owner, {left.begin(), others});
        left.erase(left.begin(), others);
      }
    }
    broadcasts.finish();
  }
  for (int owner = 0; owner < group.size(); ++owner) {
    if (owner != group.rank()) {
      for (const Piece& piece : pieces[owner]) {
        piece.write_back();
      }
    }
  }
}

} // namespace tessera::comm
