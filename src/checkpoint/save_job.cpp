#include "checkpoint/save_job.h"

#include <tessera/error.h>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

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

#include "checkpoint/format/error.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/held_memory.h"
#include "checkpoint/state_leaves.h"
#include "checkpoint/values.h"
#include "engine/start.h"
#include "state/part_of.h"

namespace tessera::checkpoint {

namespace {

/// A tensor that several ranks have is cut into chunks of rows of this size, so
/// that the ranks share the work.
constexpr int64_t kWholePieceBytes = int64_t{32} << 20;
/// How many bytes are copied to host memory at a time.
constexpr int64_t kStageBytes = int64_t{16} << 20;
/// About how many bytes can be compared in the time it takes to write one.
constexpr uint64_t kComparedPerWritten = 8;

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

/// Asks the allocator. Tensor::is_pinned() asks the driver, which is forbidden
/// in a process that was forked after its parent used the driver.
bool is_pinned(const at::Tensor& tensor) {
  static const c10::Allocator* const pinned = at::hasCUDA()
      ? at::detail::getCUDAHooks().getPinnedMemoryAllocator()
      : nullptr;
  return pinned != nullptr && tensor.is_cpu() &&
      tensor.storage().allocator() == pinned;
}

/// Waits for the work that this thread has queued on devices. Tensors are read
/// on other threads, whose current streams are not this thread's; pinned memory
/// may still be written to by a device.
void wait_for_devices(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_cpu() && !is_pinned(tensor)) {
      continue;
    }
    const at::Device device = tensor.is_cpu()
        ? c10::impl::VirtualGuardImpl(at::kCUDA).getDevice()
        : tensor.device();
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
      c10::impl::VirtualGuardImpl(device.type())
          .getStream(device)
          .synchronize();
    }
  }
}

char letter_of(const Duty& duty) {
  return static_cast<char>(
      'a' + (duty.writes ? 1 : 0) + (duty.compares ? 2 : 0) +
      (duty.compares_on_host ? 4 : 0));
}

Duty duty_from(char letter) {
  const int bits = letter - 'a';
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
  const Outcome mine = Outcome::of([&] {
    add_units(shared);
    std::vector<at::Tensor> tensors;
    for (const Unit& unit : units_) {
      if (unit.data.defined()) {
        tensors.push_back(unit.data);
      }
    }
    wait_for_devices(tensors);
    ByteWriter wire;
    wire.text(folder_.native());
    const Bytes claims = pack(claims_);
    wire.text({reinterpret_cast<const char*>(claims.data()), claims.size()});
    return wire.take();
  });
  const std::vector<Bytes> all =
      peers.gather(mine.to_bytes(), "checkpoint: what ranks have");
  Outcome decision;
  if (peers.is_root()) {
    decision = Outcome::of([&] {
      ByteWriter out;
      decide(all, options.overwrite(), out);
      return out.take();
    });
  }
  decision = Outcome::from_bytes(
      peers.broadcast(decision.to_bytes(), "checkpoint: who writes what"));
  mine.raise(); // its own words first
  decision.raise();
  keep(ByteReader(decision.result));
}

void SaveJob::add_units(StateDict& state) {
  for (const StateLeaf& slot : state_leaves(state)) {
    Claim claim;
    claim.name = slot.name;
    claim.keys = slot.keys;
    if (slot.value->is_sharded()) {
      add_sharded(std::move(claim), slot.value->sharded());
    } else if (slot.value->is_tensor()) {
      add_tensor(std::move(claim), *slot.value);
    } else {
      Unit unit{
          .claim = claims_.size(), .data = {}, .value = to_format(*slot.value)};
      const std::string pickle = pickled(unit.value, slot.name);
      claim.value_sum = checksum(format::as_bytes(pickle));
      claim.value_bytes = unit.bytes = pickle.size();
      claims_.push_back(std::move(claim));
      units_.push_back(std::move(unit));
    }
  }
}

void SaveJob::add_tensor(Claim claim, const StateValue& value) {
  refuse_part(value, claim.name);
  const at::Tensor data = savable(value.tensor(), claim.name);
  claim.kind = ClaimKind::Whole;
  claim.is_of_any_rank = value.is_of_any_rank();
  claim.is_on_host = data.is_cpu();
  claim.dtype = *to_format(data.scalar_type());
  claim.sizes = data.sizes().vec();
  const auto add = [&](const at::Tensor& part, std::vector<int64_t> offsets) {
    units_.push_back(
        {.claim = claims_.size(), .data = part, .bytes = part.nbytes()});
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
  claims_.push_back(std::move(claim));
}

void SaveJob::add_sharded(Claim claim, const ShardedTensor& tensor) {
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
    units_.push_back(
        {.claim = claims_.size(), .data = data, .bytes = data.nbytes()});
    claim.boxes.push_back(piece.box);
  }
  claims_.push_back(std::move(claim));
}

void SaveJob::decide(
    const std::vector<Bytes>& claims,
    bool overwrite,
    ByteWriter& out) {
  for (size_t rank = 0; rank < claims.size(); ++rank) {
    const Outcome outcome = Outcome::from_bytes(claims[rank]);
    outcome.raise();
    ByteReader wire(outcome.result);
    const std::string folder = wire.text();
    if (folder != folder_.native()) {
      raise<DisagreementError>(
          {.call = "save"},
          fmt::format(
              "rank 0 saves to \"{}\", rank {} to \"{}\". Pass the same folder on all ranks.",
              folder_.native(),
              rank,
              folder));
    }
    const std::string packed = wire.text();
    all_claims_.push_back(unpack_claims(
        {reinterpret_cast<const uint8_t*>(packed.data()), packed.size()}));
  }
  plan_ = std::make_unique<SavePlan>(all_claims_);
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
  out.text(writer_->partial().native());
  for (const std::vector<Duty>& duties : plan_->duties()) {
    std::string letters;
    for (const Duty& duty : duties) {
      letters += letter_of(duty);
    }
    out.text(letters);
  }
}

void SaveJob::keep(ByteReader duties) {
  partial_ = duties.text();
  for (int rank = 0; rank < rank_; ++rank) {
    duties.text();
  }
  const std::string letters = duties.text();
  std::vector<Unit> kept;
  for (size_t i = 0; i < units_.size(); ++i) {
    units_[i].duty = duty_from(letters.at(i));
    if (units_[i].duty.writes) {
      total_bytes_ += units_[i].bytes;
    }
    if (units_[i].duty != Duty{}) {
      kept.push_back(std::move(units_[i]));
    }
  }
  units_ = std::move(kept);
}

void SaveJob::compare(Unit& unit) {
  unit.digest = engine::digest_of(
      unit.duty.compares_on_host ? unit.data.cpu() : unit.data);
  if (!unit.duty.writes) {
    unit.data.reset(); // others write it
  }
}

void SaveJob::compare_on_devices() {
  for (Unit& unit : units_) {
    if (unit.duty.compares && !unit.digest && !unit.data.is_cpu()) {
      compare(unit);
    }
  }
}

uint64_t SaveJob::detach_from_state() {
  compare_on_devices(); // copies in host memory have other digests
  uint64_t copied = 0;
  for (Unit& unit : units_) {
    if (!unit.data.defined()) {
      continue;
    }
    if (unit.duty.writes) {
      unit.data = frozen(unit.data, copied);
    } else if (std::optional<at::Tensor> held = hold(unit.data)) {
      unit.data = *std::move(held);
    } else {
      compare(unit); // costs less than a copy
    }
  }
  return copied;
}

void SaveJob::write() {
  outcome_ = Outcome::of([&] {
    write_files();
    return pack(result_);
  });
  units_.clear();
}

void SaveJob::write_files() {
  compare_on_devices();
  std::vector<size_t> order(units_.size());
  std::iota(order.begin(), order.end(), 0);
  // Memory that is only compared is released first.
  const auto written =
      std::stable_partition(order.begin(), order.end(), [&](size_t i) {
        return !units_[i].duty.writes;
      });
  // Each unit goes to the file with the fewest bytes so far.
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
    load[least] += units_[i].duty.writes
        ? units_[i].bytes + 1
        : units_[i].bytes / kComparedPerWritten;
  }
  for (Unit& unit : units_) {
    if (unit.duty.writes) {
      unit.result = result_.units.size();
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
  for (const Unit& unit : units_) {
    if (unit.duty.compares) {
      result_.digests.push_back(*unit.digest);
    }
  }
}

void SaveJob::write_file(size_t file, const std::vector<size_t>& units) {
  if (!fs::is_directory(partial_)) {
    raise<CheckpointError>(
        {.call = "save", .rank = rank_, .path = partial_.native()},
        "rank 0 created this folder, but this rank does not see it. Save to a file system that all hosts share.");
  }
  ItemFile out(partial_ / data_file_name(rank_, file));
  for (const size_t i : units) {
    Unit& unit = units_[i];
    if (unit.duty.compares && !unit.digest) {
      compare(unit);
    }
    if (unit.duty.writes) {
      const ItemPlace place = write_unit(out, unit);
      result_.units[unit.result] = {
          static_cast<uint32_t>(file), place.offset, place.length};
      report(unit.bytes);
    }
  }
  result_.files[file] = out.finish();
}

ItemPlace SaveJob::write_unit(ItemFile& file, Unit& unit) {
  if (!unit.data.defined()) {
    return file.add_value(unit.value);
  }
  const Claim& claim = claims_[unit.claim];
  file.begin_tensor(claim.dtype, unit.data.sizes().vec());
  if (is_plain_memory(unit.data)) {
    file.append(bytes_of(unit.data));
  } else {
    for_each_part(unit.data, [&](const at::Tensor& part) {
      file.append(bytes_of(part));
      file.flush(); // before `part` is destroyed
    });
  }
  const ItemPlace place = file.end_tensor();
  if (unit.bytes >= kBlockBytes) {
    file.flush();
    unit.data.reset(); // its memory may be needed
  }
  return place;
}

void SaveJob::report(uint64_t bytes) {
  if (progress_) {
    const std::lock_guard lock(progress_mutex_);
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
