#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>
#include <tessera/error.h>
#include <tessera/state/state_dict.h>
#include <tessera/state/stateful.h>

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
/// complete or not at all: files are written to a temporary folder, synced, and
/// renamed. Names are the keys of the state dict joined by dots,
/// "optim.state.fc.weight.exp_avg", as in Python.
///
/// Each rank writes what it has. What several ranks have (plain tensors, copies
/// of hybrid sharding) is written once, and the work is spread over these
/// ranks; the ranks' dictionaries may have different keys. Values, including
/// those of tensors, must be the same on all ranks that have the key: see
/// StateValue::of_any_rank(). Parts of sharded tensors that are plain tensors
/// in the dictionary, as optimizer.state_dict() gives them, are refused.
///
/// Loading is driven by the target: each rank reads the bytes that overlap its
/// part of the target, whatever the number of ranks, the layout or the format
/// of the checkpoint.

/// An error of the file system, or a file that is damaged or of the wrong kind.
/// Thrown on every rank.
class TESSERA_API CheckpointError : public c10::Error {
  using Error::Error;
};

/// The system denies access to files now (permissions, too many open files, a
/// network file system that went away); the files may be sound.
class TESSERA_API CheckpointAccessError : public CheckpointError {
  using CheckpointError::CheckpointError;
};

/// Also here, since Python's torch.distributed.checkpoint has `Stateful`.
using tessera::Stateful;

/// `done` of `total` bytes of this rank. Called from the thread that writes or
/// reads, not after the call or AsyncSave::wait() has returned.
using Progress = std::function<void(uint64_t done, uint64_t total)>;

/// Options of save() and async_save().
struct TESSERA_API SaveOptions {
  /// The ranks that save; default: the world, or this process alone before
  /// init().
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
  /// Replace an existing checkpoint in one step. If the file system does not
  /// support that (NFS, Lustre), in two steps, between which load() finds the
  /// old checkpoint and other programs find none. If off, an existing
  /// checkpoint is an error.
  TORCH_ARG(bool, overwrite) = false;
  /// How many files a rank writes at the same time; 0 for one per core of its
  /// own, at most 4.
  TORCH_ARG(int, files_per_rank) = 0;
  /// Called as bytes are written.
  TORCH_ARG(Progress, progress) = {};
};

/// Writes `state` to `folder`, whose parent must exist. Needs hardly any memory
/// besides the state itself. Collective.
///
/// Tensors on devices are read after the work queued on the caller's current
/// streams.
///
/// Throws on all ranks, with `folder` as it was before: CheckpointError for
/// errors of the file system (free space is checked before anything is written)
/// and for a folder that another process is saving to; c10::ValueError for
/// values that cannot be saved; DisagreementError if ranks disagree (values of
/// tensors are compared while they are written). An error in cleaning up, when
/// the new checkpoint is in place already, says so. If a process dies, the
/// folder is as it was before, too.
TESSERA_API void save(
    const StateDict& state,
    const std::filesystem::path& folder,
    const SaveOptions& options = {});
TESSERA_API void save(
    Stateful& state,
    const std::filesystem::path& folder,
    const SaveOptions& options = {});

/// A save in the background.
class [[nodiscard]] TESSERA_API AsyncSave {
 public:
  /// A finished save.
  AsyncSave();
  AsyncSave(AsyncSave&&) noexcept;
  /// Waits for the save that this object had.
  AsyncSave& operator=(AsyncSave&&) noexcept;
  /// Waits; if wait() was not called, an error becomes a warning.
  ~AsyncSave();

  /// Returns when the checkpoint is complete on every rank. Throws what save()
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

/// Saves in the background: returns once later updates cannot affect the save,
/// which for tensors in host memory takes hardly any time, see [Note: copies
/// when they must be]. Tensors on devices are copied first. Errors of the call
/// itself are thrown here, later ones by wait().
///
/// Until wait() has returned: pointers that were taken before (data_ptr())
/// write into the memory that is being saved, so take them anew; and no two
/// threads may take a tensor's data_ptr() at once, since the first one to do so
/// may copy. With LibTorch 2.11 and 2.12, which cannot hold memory, all tensors
/// are copied first.
///
/// Collective; the rest happens on a thread and a group of its own. Several
/// saves may run at once, to different folders.
TESSERA_API AsyncSave async_save(
    const StateDict& state,
    const std::filesystem::path& folder,
    const SaveOptions& options = {});
TESSERA_API AsyncSave async_save(
    Stateful& state,
    const std::filesystem::path& folder,
    const SaveOptions& options = {});

/// When blocks are compared with their checksums. Checkpoints that other
/// programs wrote have none.
enum class Verify {
  WhileReading, ///< costs little; damage is found when some is loaded already
  First, ///< reads twice; nothing is loaded if anything is damaged
  Never, ///< trusts the files
};

/// Options of load() and Manager::load_latest().
struct TESSERA_API LoadOptions {
  /// The ranks that load; default: the world, or this process alone before
  /// init().
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
  /// Everything in the target must be in the checkpoint, and the other way
  /// round. But a part that a StateDict leaves out as a whole, with no key at
  /// all ("optim" of a checkpoint with "model" and "optim"), need not be
  /// loaded. A Stateful, such as a TrainingState, may leave out only what
  /// `optional` passes: whatever else it left out would begin anew.
  TORCH_ARG(bool, strict) = true;
  /// Convert between dtypes. If off, a dtype that differs is an error.
  TORCH_ARG(bool, cast) = false;
  /// The name in the checkpoint for a name in the target.
  TORCH_ARG(std::function<std::string(const std::string&)>, rename) = {};
  /// Which names of the target to load; the others are left as they are.
  TORCH_ARG(std::function<bool(const std::string&)>, filter) = {};
  /// Names that `strict` does not require, on either side.
  TORCH_ARG(std::function<bool(const std::string&)>, optional) = {};
  /// When checksums are compared.
  TORCH_ARG(Verify, verify) = Verify::WhileReading;
  /// How many threads read; 0 for one per core of this rank, at most 4.
  TORCH_ARG(int, threads) = 0;
  /// Called as bytes are read.
  TORCH_ARG(Progress, progress) = {};
};

/// What load() did.
struct TESSERA_API LoadReport {
  /// Names of the target that the checkpoint lacks, and names in the parts of
  /// the checkpoint that the target has but does not use; with `strict` only
  /// those that `optional` passed.
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  /// Bytes read by this rank.
  uint64_t bytes_read = 0;
};

/// Fills `target` from a checkpoint: a folder of save() or of Python's
/// torch.distributed.checkpoint, a safetensors file, a folder of them, a file
/// of torch.save, or one of torch.export.save (.pt2), whose parameters and
/// persistent buffers are read. Tensors and sharded tensors are written in
/// place; other values are replaced (an int becomes a double where the target
/// has one). Collective.
///
/// Everything is compared before anything is written: names, shapes, dtypes,
/// places of all bytes. Throws on all ranks, with everything that is wrong in
/// one text: c10::ValueError if something does not fit, CheckpointError for
/// files that cannot be read or are damaged. Only damage that is found while
/// tensors are read (a failing disk, a checksum that differs) leaves some
/// tensors loaded; the message says so. See Verify::First.
TESSERA_API LoadReport load(
    StateDict& target,
    const std::filesystem::path& path,
    const LoadOptions& options = {});
TESSERA_API LoadReport load(
    Stateful& target,
    const std::filesystem::path& path,
    const LoadOptions& options = {});

/// Reads all of a checkpoint, or the names that pass `filter`: whole tensors in
/// host memory, for this process. Not collective. Throws as load() does.
TESSERA_API StateDict read(
    const std::filesystem::path& path,
    const std::function<bool(const std::string&)>& filter = {});

} // namespace tessera::checkpoint
