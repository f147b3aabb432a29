#include "checkpoint/save_job.h"

#include <tessera/error.h>

#include <ATen/ops/empty_like.h>

#include <sys/statvfs.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "checkpoint/device_work.h"
#include "checkpoint/held_memory.h"
#include "engine/start.h"

namespace tessera::checkpoint {

namespace {

/// About how many bytes can be compared in the time it takes to write one.
constexpr uint64_t kComparedPerWritten = 8;

void check_space(const fs::path& parent, uint64_t bytes) {
  struct statvfs space {};
  if (::statvfs(parent.c_str(), &space) < 0) {
    raise<CheckpointError>(
        {.call = "save", .path = parent.native()},
        fmt::format(
            "cannot access this folder: {}. Create it first.",
            system_reason(errno)));
  }
  const uint64_t free = static_cast<uint64_t>(space.f_bavail) * space.f_frsize;
  if (free < bytes) {
    raise<CheckpointError>(
        {.call = "save", .path = parent.native()},
        fmt::format(
            "the checkpoint needs {:.1f} MB, but only {:.1f} MB are free. Free some space, or save elsewhere.",
            static_cast<double>(bytes) * 1e-6,
            static_cast<double>(free) * 1e-6));
  }
}

/// A byte for each duty.
Bytes packed(const std::vector<Duty>& duties) {
  Bytes bytes;
  for (const Duty& duty : duties) {
    bytes.push_back(static_cast<uint8_t>(
        (duty.writes ? 1 : 0) + (duty.compares ? 2 : 0) +
        (duty.compares_on_host ? 4 : 0)));
  }
  return bytes;
}

Duty duty_from(uint8_t bits) {
  return {
      .writes = (bits & 1) != 0,
      .compares = (bits & 2) != 0,
      .compares_on_host = (bits & 4) != 0};
}

/// The values that the state's tensor has now, whatever is written to the
/// tensor later: see [Note: copies when they must be] in held_memory.h. Devices
/// write asynchronously, so their memory is copied at once.
at::Tensor frozen(const at::Tensor& tensor, uint64_t& copied) {
  if (std::optional<at::Tensor> held = hold(tensor)) {
    return *std::move(held);
  }
  copied += tensor.nbytes();
  const auto options =
      at::TensorOptions().device(at::kCPU).pinned_memory(tensor.is_cuda());
  return at::empty_like(tensor, options, at::MemoryFormat::Contiguous)
      .copy_(tensor);
}

} // namespace

SaveJob::SaveJob(
    const StateDict& state,
    const std::filesystem::path& folder,
    const SaveOptions& options,
    const Peers& peers)
    : folder_(folder),
      rank_(peers.rank()),
      num_ranks_(peers.size()),
      num_files_(
          options.files_per_rank() > 0 ? options.files_per_rank()
                                       : peers.cores_each(4)),
      progress_(options.progress()) {
  StateDict shared = state; // with the same tensors
  PackedClaims claims;
  const Outcome mine = Outcome::of([&] {
    SavedState saved = pieces_of(shared, num_ranks_);
    claims_ = std::move(saved.claims);
    pieces_ = std::move(saved.pieces);
    std::vector<at::Tensor> tensors;
    for (const SavedPiece& piece : pieces_) {
      if (piece.data.defined()) {
        tensors.push_back(piece.data);
      }
    }
    wait_for_devices(tensors);
    claims = pack(claims_);
    ByteWriter wire;
    wire.text(folder_.native());
    return wire.take();
  });
  const DistinctTexts all = peers.gather_distinct(
      {mine.to_bytes(),
       std::move(claims.heads),
       std::move(claims.boxes),
       std::move(claims.others)},
      "checkpoint: what ranks have");
  Outcome decision;
  if (peers.is_root()) {
    decision = Outcome::of([&] {
      decide(all, options.overwrite());
      ByteWriter out;
      out.text(writer_->partial().native());
      return out.take();
    });
  }
  decision = Outcome::from_bytes(
      peers.broadcast(decision.to_bytes(), "checkpoint: where it is written"));
  mine.raise(); // its own words first
  decision.raise();
  partial_ = ByteReader(decision.result).text();
  std::vector<Bytes> duties; // by rank
  for (size_t rank = 0; plan_ && rank < plan_->duties().size(); ++rank) {
    duties.push_back(packed(plan_->duties()[rank]));
  }
  size_t num_units = 0; // a byte for each
  for (const Claim& claim : claims_) {
    num_units += claim.num_units();
  }
  keep(peers.scatter(duties, num_units, "checkpoint: who writes what"));
}

void SaveJob::decide(const DistinctTexts& all, bool overwrite) {
  for (size_t rank = 0; rank < all.by_rank.size(); ++rank) {
    const std::vector<size_t>& texts = all.by_rank[rank];
    const Outcome outcome = Outcome::from_bytes(all.texts[texts[0]]);
    outcome.raise();
    const std::string folder = ByteReader(outcome.result).text();
    if (folder != folder_.native()) {
      raise<DisagreementError>(
          {.call = "save"},
          fmt::format(
              "rank 0 saves to \"{}\", rank {} to \"{}\". Pass the same folder on all ranks.",
              folder_.native(),
              rank,
              folder));
    }
    all_claims_.add(
        all.texts, {.heads = texts[1], .boxes = texts[2], .others = texts[3]});
  }
  plan_ = std::make_unique<SavePlan>(all_claims_.by_rank());
  const fs::path parent = fs::absolute(folder_ / ".")
                              .lexically_normal()
                              .parent_path()
                              .parent_path();
  check_space(parent, plan_->total_bytes());
  try {
    writer_ = std::make_unique<FolderWriter>(folder_, overwrite);
  } catch (const std::exception& error) {
    raise<CheckpointError>({.call = "save"}, error.what());
  }
}

void SaveJob::keep(const Bytes& duties) {
  std::vector<SavedPiece> kept;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    pieces_[i].duty = duty_from(duties.at(i));
    if (pieces_[i].duty.writes) {
      total_bytes_ += pieces_[i].bytes;
    }
    if (pieces_[i].duty != Duty{}) {
      kept.push_back(std::move(pieces_[i]));
    }
  }
  pieces_ = std::move(kept);
}

void SaveJob::compare(SavedPiece& piece) {
  piece.digest = engine::digest_of(
      piece.duty.compares_on_host ? piece.data.cpu() : piece.data);
  if (!piece.duty.writes) {
    piece.data.reset(); // others write it
  }
}

void SaveJob::compare_on_devices() {
  for (SavedPiece& piece : pieces_) {
    if (piece.duty.compares && !piece.digest && !piece.data.is_cpu()) {
      compare(piece);
    }
  }
}

uint64_t SaveJob::detach_from_state() {
  compare_on_devices(); // copies in host memory have other digests
  uint64_t copied = 0;
  for (SavedPiece& piece : pieces_) {
    if (!piece.data.defined()) {
      continue;
    }
    if (piece.duty.writes) {
      piece.data = frozen(piece.data, copied);
    } else if (std::optional<at::Tensor> held = hold(piece.data)) {
      piece.data = *std::move(held);
    } else {
      compare(piece); // costs less than a copy
    }
  }
  return copied;
}

void SaveJob::write() {
  outcome_ = Outcome::of([&] {
    write_files();
    return pack(result_);
  });
  pieces_.clear();
}

void SaveJob::write_files() {
  compare_on_devices();
  std::vector<size_t> order(pieces_.size());
  std::iota(order.begin(), order.end(), 0);
  // Memory that is only compared is released first.
  const auto written =
      std::stable_partition(order.begin(), order.end(), [&](size_t i) {
        return !pieces_[i].duty.writes;
      });
  // Each piece goes to the file with the fewest bytes so far.
  const size_t num_files = std::clamp<size_t>(
      static_cast<size_t>(order.end() - written),
      1,
      static_cast<size_t>(num_files_));
  std::vector<std::vector<size_t>> by_file(num_files);
  std::vector<uint64_t> load(num_files, 0);
  for (const size_t i : order) {
    const auto least = static_cast<size_t>(
        std::min_element(load.begin(), load.end()) - load.begin());
    by_file[least].push_back(i);
    load[least] += pieces_[i].duty.writes
        ? pieces_[i].bytes + 1
        : pieces_[i].bytes / kComparedPerWritten;
  }
  for (SavedPiece& piece : pieces_) {
    if (piece.duty.writes) {
      piece.result = result_.units.size();
      result_.units.emplace_back();
    }
  }
  result_.files.resize(num_files);
  std::vector<std::exception_ptr> errors(num_files);
  const auto run = [&](size_t file) {
    try {
      write_file(file, by_file[file]);
    } catch (...) {
      errors[file] = std::current_exception();
    }
  };
  std::vector<std::jthread> threads;
  for (size_t file = 1; file < num_files; ++file) {
    threads.emplace_back(run, file);
  }
  run(0);
  for (std::jthread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
  for (const SavedPiece& piece : pieces_) {
    if (piece.duty.compares) {
      result_.digests.push_back(*piece.digest);
    }
  }
}

void SaveJob::write_file(size_t file, const std::vector<size_t>& pieces) {
  if (!fs::is_directory(partial_)) {
    raise<CheckpointError>(
        {.call = "save", .rank = rank_, .path = partial_.native()},
        "rank 0 created this folder, but this rank does not see it. Save to a file system that all hosts share.");
  }
  ItemFile out(partial_ / data_file_name(rank_, file));
  for (const size_t i : pieces) {
    SavedPiece& piece = pieces_[i];
    if (piece.duty.compares && !piece.digest) {
      compare(piece);
    }
    if (piece.duty.writes) {
      const ItemPlace place =
          write_piece(out, piece, claims_[piece.claim].dtype);
      result_.units[piece.result] = {
          static_cast<uint32_t>(file), place.offset, place.length};
      report(piece.bytes);
    }
  }
  result_.files[file] = out.finish();
}

void SaveJob::report(uint64_t bytes) {
  if (progress_) {
    const MutexLock lock(progress_mutex_);
    done_bytes_ += bytes;
    progress_(done_bytes_, total_bytes_);
  }
}

void SaveJob::finish(const Peers& peers) {
  const std::vector<Bytes> results =
      peers.gather(outcome_.to_bytes(), "checkpoint: what was written");
  Outcome end;
  if (peers.is_root()) {
    end = Outcome::of([&] {
      commit(results);
      return Bytes();
    });
    writer_.reset();
  }
  end = Outcome::from_bytes(
      peers.broadcast(end.to_bytes(), "checkpoint: committed"));
  end.raise();
}

void SaveJob::commit(const std::vector<Bytes>& results) {
  std::vector<RankResult> written;
  std::string errors;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    const Outcome outcome = Outcome::from_bytes(results[rank]);
    if (outcome.kind == Outcome::Kind::Ok) {
      written.push_back(unpack_result(outcome.result));
    } else {
      errors += fmt::format("\n  rank {}: {}", rank, outcome.text);
    }
  }
  if (!errors.empty()) {
    raise<CheckpointError>(
        {.call = "save", .path = folder_.native()},
        "the checkpoint was not written:" + errors);
  }
  plan_->check_copies(written);
  try {
    const std::string metadata =
        format::write_dcp_metadata(plan_->metadata(written));
    Checksums sums;
    for (size_t rank = 0; rank < written.size(); ++rank) {
      for (size_t file = 0; file < written[rank].files.size(); ++file) {
        sums.files.emplace(
            data_file_name(static_cast<int>(rank), file),
            std::move(written[rank].files[file]));
      }
    }
    sums.files.emplace(".metadata", sums_of(format::as_bytes(metadata)));
    checkpoint::write_file(partial_ / kChecksumsName, write_checksums(sums));
    checkpoint::write_file(partial_ / ".metadata", metadata);
    writer_->commit();
  } catch (const std::exception& error) {
    raise<CheckpointError>({.call = "save"}, error.what());
  }
}

} // namespace tessera::checkpoint
