#include "checkpoint/tools/write_safetensors.h"

#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/folder_writer.h"
#include "checkpoint/disk/input.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/safetensors_index.h"
#include "checkpoint/tools/checkpoint_text.h"
#include "checkpoint/tools/entry_reader.h"
#include "checkpoint/tools/new_file.h"

namespace tessera::checkpoint {
namespace {

using Entries = std::vector<const TensorEntry*>;

void refuse_values(const Content& content) {
  if (content.values.empty()) {
    return;
  }
  std::string names;
  constexpr size_t kMost = 20;
  for (size_t i = 0; i < content.values.size() && i < kMost; ++i) {
    names += "\n  " + content.values[i].name;
  }
  if (content.values.size() > kMost) {
    names +=
        "\n  and " + std::to_string(content.values.size() - kMost) + " more";
  }
  throw FileError(
      "safetensors holds tensors only, and these are not tensors:" + names +
      "\nLeave them out with --drop-values, or choose tensors with --select.");
}

// Writes one file through `append`, in the order that the format requires.
template <class Append>
void write_tensors(
    const Content& content,
    EntryReader& reader,
    const Entries& entries,
    const Append& append) {
  format::SafetensorsHeader header;
  if (content.source->format() == Format::Safetensors) {
    header.metadata = content.source->notes();
  }
  header.metadata.emplace(
      "format", "pt"); // some readers refuse files without it
  std::map<std::string, const TensorEntry*> by_name;
  for (const auto* entry : entries) {
    header.tensors.push_back(
        {.name = entry->name,
         .dtype = entry->dtype,
         .sizes = entry->tensor->sizes});
    by_name.emplace(entry->name, entry);
  }
  const std::string begin =
      parsing("safetensors", [&] { return lay_out_safetensors(&header); });
  append(format::as_bytes(begin));
  for (const auto& tensor : header.tensors) {
    const auto& entry = *by_name.at(tensor.name);
    reader.each_piece(entry, whole_of(entry.tensor->sizes), append);
  }
}

std::vector<Entries> divide(const Content& content, uint64_t most) {
  std::vector<Entries> shards(1);
  uint64_t bytes = 0;
  for (const auto& entry : content.tensors) {
    if (bytes > 0 && bytes + entry.bytes() > most) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(&entry);
    bytes += entry.bytes();
  }
  return shards;
}

std::string shard_name(size_t number, size_t count) {
  if (count == 1) {
    return "model.safetensors";
  }
  char name[64];
  std::snprintf(
      name,
      sizeof(name),
      "model-%05zu-of-%05zu.safetensors",
      number + 1,
      count);
  return name;
}

void write_folder(
    const Content& content,
    const fs::path& folder,
    const TargetOptions& options,
    ProgressMeter& progress) {
  FolderWriter writer(folder, options.overwrite);
  const auto shards = divide(content, options.max_shard_bytes);
  EntryReader reader(content, progress);
  Checksums sums;
  format::SafetensorsIndex index;
  index.total_bytes = content.bytes();
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    StreamFile file(writer.partial() / name);
    write_tensors(content, reader, shards[i], [&](format::ByteSpan bytes) {
      file.append(bytes);
    });
    sums.files[name] = file.finish();
    for (const auto* entry : shards[i]) {
      index.files.emplace(entry->name, name);
    }
  }
  if (shards.size() > 1) {
    const std::string name = "model.safetensors.index.json";
    const std::string text = format::write_safetensors_index(index);
    sums.files[name] = sums_of(format::as_bytes(text));
    write_file(writer.partial() / name, text);
  }
  write_file(
      writer.partial() / std::string(kChecksumsName), write_checksums(sums));
  writer.commit();
}

void write_one_file(
    const Content& content,
    const fs::path& path,
    const TargetOptions& options,
    ProgressMeter& progress) {
  NewFile file(path, options.overwrite);
  EntryReader reader(content, progress);
  Entries entries;
  for (const auto& entry : content.tensors) {
    entries.push_back(&entry);
  }
  write_tensors(content, reader, entries, [&](format::ByteSpan bytes) {
    file.append(bytes);
  });
  file.commit();
}

} // namespace

void write_safetensors(
    const Content& content,
    const fs::path& path,
    const TargetOptions& options,
    ProgressMeter& progress) {
  if (!options.drop_values) {
    refuse_values(content);
  }
  progress.begin(content.bytes());
  if (path.extension() == ".safetensors") {
    write_one_file(content, path, options, progress);
  } else {
    write_folder(content, path, options, progress);
  }
}

} // namespace tessera::checkpoint
