#include "checkpoint/tools/write_dcp.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/folder_writer.h"
#include "checkpoint/disk/item_file.h"
#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/tools/entry_reader.h"
#include "checkpoint/tools/plain_value.h"

namespace tessera::checkpoint {
namespace {

std::string file_of(int rank) {
  return "__" + std::to_string(rank) + "_0.distcp";
}

// The rows of a rank, as torch.chunk() divides them: the first ranks have the
// most. A single number or a tensor without elements goes to rank 0.
TensorBox region_of(const StoredTensor& tensor, int rank, int world) {
  TensorBox region = whole_of(tensor.sizes);
  if (region.sizes.empty() || region.numel() == 0) {
    return region;
  }
  const int64_t rows = region.sizes[0];
  const int64_t each = (rows + world - 1) / world;
  const int64_t begin = std::min(rows, rank * each);
  region.offsets[0] = begin;
  region.sizes[0] = std::min(rows, begin + each) - begin;
  return region;
}

bool is_written_by(
    const StoredTensor& tensor,
    int rank,
    const TensorBox& region) {
  return tensor.sizes.empty() || tensor.numel() == 0 ? rank == 0
                                                     : region.numel() > 0;
}

class DcpTarget {
 public:
  DcpTarget(const Content& content, fs::path folder, ProgressMeter& progress)
      : content_(content),
        folder_(std::move(folder)),
        reader_(content, progress) {
    metadata_.version = "1.0.0";
    metadata_.paths.emplace();
    for (const auto& entry : content.tensors) {
      metadata_.tensors.push_back(
          {.name = entry.name,
           .dtype = entry.dtype,
           .sizes = entry.tensor->sizes,
           .chunks = {}});
      metadata_.paths->push_back(
          {.name = entry.name, .keys = entry.path.plain()});
    }
  }

  void write_rank(int rank, int world) {
    ItemFile file(folder_ / file_of(rank));
    for (size_t i = 0; i < content_.tensors.size(); ++i) {
      const auto& tensor = *content_.tensors[i].tensor;
      const TensorBox region = region_of(tensor, rank, world);
      if (is_written_by(tensor, rank, region)) {
        add_tensor(file, rank, i, region);
      }
    }
    if (rank == 0) {
      add_values(file);
    }
    sums_.files[file_of(rank)] = file.finish();
  }

  void finish() {
    const std::string text = format::write_dcp_metadata(metadata_);
    sums_.files[".metadata"] = sums_of(format::as_bytes(text));
    write_file(folder_ / ".metadata", text);
    write_file(folder_ / std::string(kChecksumsName), write_checksums(sums_));
  }

 private:
  static format::DcpStorage storage_at(int rank, const ItemPlace& place) {
    return {
        .file = file_of(rank),
        .offset = static_cast<int64_t>(place.offset),
        .length = static_cast<int64_t>(place.length),
        .transforms = {}};
  }

  void add_tensor(ItemFile& file, int rank, size_t i, const TensorBox& region) {
    const auto& entry = content_.tensors[i];
    file.begin_tensor(entry.dtype, region.sizes);
    reader_.each_piece(entry, region, [&](format::ByteSpan piece) {
      file.append(piece);
      file.flush(); // the piece is about to be freed
    });
    metadata_.tensors[i].chunks.push_back(
        {.offsets = region.offsets,
         .sizes = region.sizes,
         .storage = storage_at(rank, file.end_tensor())});
  }

  void add_values(ItemFile& file) {
    for (const auto& entry : content_.values) {
      const auto place = file.add_value(plain_value(content_, entry));
      metadata_.bytes.push_back(
          {.name = entry.name, .storage = storage_at(0, place)});
      metadata_.paths->push_back(
          {.name = entry.name, .keys = entry.path.plain()});
    }
  }

  const Content& content_;
  const fs::path folder_;
  EntryReader reader_;
  format::DcpMetadata metadata_;
  Checksums sums_;
};

} // namespace

void write_dcp(
    const Content& content,
    const fs::path& folder,
    int world,
    const TargetOptions& options,
    ProgressMeter& progress) {
  FolderWriter writer(folder, options.overwrite);
  progress.begin(content.bytes());
  DcpTarget target(content, writer.partial(), progress);
  for (int rank = 0; rank < world; ++rank) {
    target.write_rank(rank, world);
  }
  target.finish();
  writer.commit();
}

} // namespace tessera::checkpoint
