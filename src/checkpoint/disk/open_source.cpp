// Finding out what kind of checkpoint a path is.
#include <algorithm>
#include <string>
#include <vector>

#include "checkpoint/disk/files.h"
#include "checkpoint/disk/input.h"
#include "checkpoint/disk/openers.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/format/bytes.h"
#include "checkpoint/format/format_error.h"
#include "exported/format/archive_reader.h"

namespace tessera::checkpoint {
namespace {

constexpr const char* kWhatIsRead =
    "A checkpoint is a folder with .metadata (DCP), a folder with "
    "model.safetensors.index.json or one .safetensors file, or a file of "
    "safetensors, torch.save or torch.export.save.";

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error) {
    throw FileError(quoted(folder) + ": " + error.message());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> ending_with(
    const std::vector<std::string>& names,
    const std::string& ending) {
  std::vector<std::string> found;
  std::copy_if(
      names.begin(), names.end(), std::back_inserter(found), [&](auto& name) {
        return name.ends_with(ending);
      });
  return found;
}

// The steps that a checkpoint::Manager saved in `folder`, each with `prefix`.
std::vector<std::string> saved_steps(
    const fs::path& folder,
    const std::string& prefix) {
  std::vector<std::string> steps;
  std::error_code error; // what cannot be listed is not proposed
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with("step_") && is_there(it->path() / kDcpMetadataName)) {
      steps.push_back(prefix + name);
    }
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

// A folder of steps, or the folder of a trainer's run, where an export may lie
// beside them.
std::vector<std::string> steps_of_run(const fs::path& folder) {
  auto steps = saved_steps(folder, "");
  return steps.empty() ? saved_steps(folder / "checkpoints", "checkpoints/")
                       : steps;
}

std::unique_ptr<Source> open_folder(OpenedPath at) {
  if (is_there(at.root / kDcpMetadataName)) {
    return open_dcp(at);
  }
  const auto names = names_in(at.root);
  const auto safetensors = ending_with(names, ".safetensors");
  if (const auto steps = steps_of_run(at.root); !steps.empty()) {
    throw FileError(
        quoted(at.path) + ": the folder is not a checkpoint, but holds " +
        (safetensors.empty() ? "" : listed(safetensors) + " and ") +
        "the checkpoints " + listed(steps) + ". Give the path of one of them.");
  }
  if (is_there(at.root / kSafetensorsIndexName)) {
    at.name = kSafetensorsIndexName;
    return open_safetensors_index(at);
  }
  if (safetensors.size() == 1) {
    at.name = safetensors[0];
    return open_safetensors_file(at);
  }
  if (safetensors.size() > 1) {
    throw FileError(
        quoted(at.path) + ": several safetensors files (" +
        listed(safetensors) + ") and no " + kSafetensorsIndexName +
        " that says what belongs together. Give the path of one of them.");
  }
  if (names.empty()) {
    throw FileError(quoted(at.path) + ": the folder is empty. " + kWhatIsRead);
  }
  if (!ending_with(names, ".distcp").empty()) {
    throw FileError(
        quoted(at.path) +
        ": data files of DCP without the .metadata that describes them. The save did not complete; use an earlier checkpoint.");
  }
  throw FileError(
      quoted(at.path) + ": not a checkpoint; the folder holds " +
      listed(names) + ". " + kWhatIsRead);
}

std::string first_bytes(const fs::path& path) {
  const Input input = open_input(path);
  std::string bytes(std::min<uint64_t>(input.bytes, 16), '\0');
  read_at(
      input.file,
      path,
      0,
      reinterpret_cast<uint8_t*>(bytes.data()),
      bytes.size());
  return bytes;
}

// A damaged archive is none: whoever reads it as a torch file says what is
// wrong.
bool is_exported(const fs::path& path) {
  const Input input = open_input(path);
  try {
    return exported::is_archive(part_of(input.file, path, 0, input.bytes));
  } catch (const format::FormatError&) {
    return false;
  }
}

std::unique_ptr<Source> open_file_at(OpenedPath at, const fs::path& resolved) {
  if (at.path.filename() == kDcpMetadataName) {
    at.root = resolved.parent_path();
    return open_dcp(at);
  }
  if (at.path.string().ends_with(".index.json")) {
    // The files that the index names lie beside the path that was given.
    at.root = resolve(
        at.path.has_parent_path() ? at.path.parent_path() : fs::path("."));
    at.name = at.path.filename().string();
    return open_safetensors_index(at);
  }
  at.root = resolved.parent_path();
  at.name = resolved.filename().string();
  const std::string begin = first_bytes(resolved);
  if (begin.starts_with("PK") &&
      (at.path.extension() == ".pt2" || is_exported(resolved))) {
    return open_exported(at);
  }
  if (begin.starts_with("PK")) {
    return open_torch_file(at);
  }
  // The header, after its length in 8 bytes, whose first one may be any.
  if (begin.size() > 8 && begin[8] == '{') {
    return open_safetensors_file(at);
  }
  // 0x80 begins files of torch.save before 1.6: their reader refuses them with
  // a better message.
  if (begin.starts_with('\x80')) {
    return open_torch_file(at);
  }
  if (at.path.extension() == ".safetensors") {
    return open_safetensors_file(at);
  }
  throw FileError(
      quoted(at.path) + ": neither a safetensors file nor one of torch.save. " +
      kWhatIsRead);
}

} // namespace

std::unique_ptr<Source> Source::open(const fs::path& path, Sums sums) {
  const fs::path resolved = resolve_checkpoint(path);
  OpenedPath at{.path = path, .root = resolved, .name = "", .sums = sums};
  return fs::is_directory(resolved) ? open_folder(std::move(at))
                                    : open_file_at(std::move(at), resolved);
}

} // namespace tessera::checkpoint
