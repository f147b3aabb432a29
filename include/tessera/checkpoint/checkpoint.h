#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/error.h>
#include <tessera/state/state_dict.h>

#include <torch/arg.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::checkpoint {

/// [Note: checkpoints]
///
/// A checkpoint is a folder in the format of torch.distributed.checkpoint, so
/// that Python's `dcp.load` reads it, plus one file with checksums. It appears
/// whole or not at all: written beside, synced, renamed. Names are the keys of
/// the state dict joined by dots, "optim.state.fc.weight.exp_avg", as in
/// Python.
///
/// Each rank writes what it has. What several ranks have (plain tensors,
/// copies of hybrid sharding) is written once, spread over them; the ranks'
/// dictionaries may have different keys. Values must be the same on all ranks
/// that have the key, those of tensors too: see StateValue::of_any_rank().
/// Parts of sharded tensors that are plain tensors in the dictionary, as
/// optimizer.state_dict() gives them, are refused.
///
/// Loading is driven by the target: each rank reads the bytes that overlap what
/// it has, whatever the number of ranks, the layout or the format it was saved
/// in.

/// What the file system refuses, and files that are damaged or not what they
/// should be. Thrown on every rank.
class TESSERA_API CheckpointError : public c10::Error {
  using Error::Error;
};

/// The system does not let this process at files now (permissions, too many
/// open files, a network file system that went away); they may be sound.
class TESSERA_API CheckpointAccessError : public CheckpointError {
  using CheckpointError::CheckpointError;
};

/// Something that knows its own state, as in Python: a training run.
class TESSERA_API Stateful {
 public:
  virtual ~Stateful() = default;

  /// What to save, and what to load into: tensors share memory with this
  /// object. May be collective.
  virtual StateDict state_dict() = 0;
  /// Takes what state_dict() gave after it was loaded into.
  virtual void load_state_dict(const StateDict& state) = 0;
  /// Such a name may be missing in a checkpoint, or be there for nothing.
  virtual bool is_optional(const std::string& /*name*/) const {
    return false;
  }
};

/// `done` of `total` bytes of this rank. Called from the thread that writes or
/// reads, not after the call or AsyncSave::wait() has returned.
using Progress = std::function<void(uint64_t done, uint64_t total)>;

/// Of save() and async_save().
struct TESSERA_API SaveOptions {
  /// Who saves; default: the world, or this process alone before init().
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
  /// Replace a checkpoint that is there, in one step; where the file system
  /// cannot (NFS, Lustre), in two, between which load() finds the old one and
  /// other programs none. Else that is an error.
  TORCH_ARG(bool, overwrite) = false;
  /// Files that a rank writes at the same time; 0: as many as it has cores of
  /// its own, at most 4.
  TORCH_ARG(int, files_per_rank) = 0;
  /// Called as bytes are written.
  TORCH_ARG(Progress, progress) = {};
};

/// Writes `state` to `folder`, whose parent must be there. Needs no memory to
/// speak of beside the state itself. Collective.
///
/// Tensors on devices are read after what the caller's current streams have to
/// do.
///
/// Throws on all ranks, with `folder` as it was before: CheckpointError for
/// what the file system refuses (there is a check for free space before
/// anything is written) and for a folder that another process is saving to;
/// c10::ValueError for what cannot be saved; DisagreementError for what ranks
/// disagree about (values of tensors are compared while they are written). If a
/// process dies, the folder is as it was before, too.
TESSERA_API void save(
    const StateDict& state,
    const std::filesystem::path& folder,
    const SaveOptions& options = {});
TESSERA_API void save(
    Stateful& state,
    const std::filesystem::path& folder,
    const SaveOptions& options = {});

/// A save under way.
class [[nodiscard]] TESSERA_API AsyncSave {
 public:
  /// A finished one.
  AsyncSave();
  AsyncSave(AsyncSave&&) noexcept;
  /// Waits for the one it had.
  AsyncSave& operator=(AsyncSave&&) noexcept;
  /// Waits; an error that nobody asked for becomes a warning.
  ~AsyncSave();

  /// Returns when the checkpoint is there, on every rank. Throws what save()
  /// throws, the first time it is called.
  void wait();
  /// True when wait() would not block.
  bool done() const;
  /// Bytes that this rank copied before async_save() returned.
  uint64_t staged_bytes() const;

  class Impl;
  /// For async_save(); not part of the public contract.
  explicit AsyncSave(std::shared_ptr<Impl> impl);

 private:
  std::shared_ptr<Impl> impl_;
};

/// save() that writes behind what follows: it returns when operators can no
/// longer change what is saved, which for tensors in host memory takes next to
/// no time, see [Note: copies when they must be]. Tensors on devices are copied
/// first. What was wrong with the call itself is thrown here, what happens
/// later by wait().
///
/// Until wait() has returned: pointers that were taken before (data_ptr())
/// write into what is being saved, so take them anew; and no two threads may
/// take a tensor's data_ptr() at once, since the first to do so may copy. With
/// LibTorch 2.11 and 2.12, which cannot hold memory, all tensors are copied
/// first.
///
/// Collective; the rest happens on a thread and a group of its own. Several may
/// be under way at once, to different folders.
TESSERA_API AsyncSave async_save(
    const StateDict& state,
    const std::filesystem::path& folder,
    const SaveOptions& options = {});
TESSERA_API AsyncSave async_save(
    Stateful& state,
    const std::filesystem::path& folder,
    const SaveOptions& options = {});

/// When blocks are compared with their checksums. Checkpoints that others wrote
/// have none.
enum class Verify {
  WhileReading, ///< costs little; damage is found when some is loaded already
  First, ///< reads twice; nothing is loaded if anything is damaged
  Never, ///< trusts the files
};

/// Of load() and Manager::load_latest().
struct TESSERA_API LoadOptions {
  /// Who loads; default: the world, or this process alone before init().
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
  /// Everything in the target must be in the checkpoint, and the other way
  /// round: but what the target leaves out as a whole, with no key at all,
  /// ("optim" of a checkpoint with "model" and "optim") need not be loaded.
  TORCH_ARG(bool, strict) = true;
  /// Convert between dtypes. Else a dtype that differs is an error.
  TORCH_ARG(bool, cast) = false;
  /// The name in the checkpoint for a name in the target.
  TORCH_ARG(std::function<std::string(const std::string&)>, rename) = {};
  /// Which names of the target to load; the others are left as they are.
  TORCH_ARG(std::function<bool(const std::string&)>, filter) = {};
  /// Names that `strict` does not ask for, on either side.
  TORCH_ARG(std::function<bool(const std::string&)>, optional) = {};
  /// When checksums are compared.
  TORCH_ARG(Verify, verify) = Verify::WhileReading;
  /// Threads that read; 0: as many as this rank has cores of its own, at most
  /// 4.
  TORCH_ARG(int, threads) = 0;
  /// Called as bytes are read.
  TORCH_ARG(Progress, progress) = {};
};

/// What load() did.
struct TESSERA_API LoadReport {
  /// Names of the target that were not there, and of the parts of the
  /// checkpoint that it has, those that were not asked for; both without
  /// `strict`.
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  /// By this rank.
  uint64_t bytes_read = 0;
};

/// Fills `target` from a checkpoint: a folder of save() or of Python's
/// torch.distributed.checkpoint, a safetensors file, a folder of them, or a
/// file of torch.save. Tensors and sharded tensors are written in place; other
/// values are replaced (an int becomes a double where the target has one).
/// Collective.
///
/// Everything is compared before anything is written: names, shapes, dtypes,
/// places of all bytes. Throws on all ranks, with all that is wrong in one
/// text: c10::ValueError for what does not fit, CheckpointError for files that
/// cannot be read or are damaged. Only damage that shows while tensors are read
/// (a disk that fails, a checksum that differs) leaves some of them loaded; the
/// message says so. See Verify::First.
TESSERA_API LoadReport load(
    StateDict& target,
    const std::filesystem::path& path,
    const LoadOptions& options = {});
TESSERA_API LoadReport load(
    Stateful& target,
    const std::filesystem::path& path,
    const LoadOptions& options = {});

/// All of a checkpoint, or what passes `filter`: whole tensors in host memory,
/// for this process. Not collective. Throws as load() does.
TESSERA_API StateDict read(
    const std::filesystem::path& path,
    const std::function<bool(const std::string&)>& filter = {});

} // namespace tessera::checkpoint
