#include "checkpoint/tools/write_torch_file.h"

#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/disk/input.h"
#include "checkpoint/disk/torch_parts.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/pickle_value.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/tools/entry_reader.h"
#include "checkpoint/tools/new_file.h"
#include "checkpoint/tools/plain_value.h"
#include "checkpoint/tools/value_tree.h"

namespace tessera::checkpoint {
namespace {

using caffe2::serialize::PyTorchStreamWriter;

// Tensors that share memory in a torch file or an exported program still share
// it in the copy: tied weights.
using Identity = std::
    tuple<uint64_t, std::vector<int64_t>, std::vector<int64_t>, format::DType>;

struct StorageEntry {
  const TensorEntry* entry = nullptr;
  uint64_t bytes = 0;
};

class TorchTarget {
 public:
  TorchTarget(const Content& content, NewFile& file, ProgressMeter& progress)
      : content_(content), file_(file), reader_(content, progress) {
    ValueTree tree;
    for (const auto& entry : content.tensors) {
      tree.add(entry.path, tensor_value(entry));
    }
    for (const auto& entry : content.values) {
      tree.add(entry.path, plain_value(content, entry));
    }
    for (const auto& path : content.empty_dicts) {
      tree.add(path, format::Dict{});
    }
    pickle_ = parsing(quoted(content.source->path()), [&] {
      return format::write_pickle(std::move(tree).take());
    });
  }

  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const auto& storage : storages_) {
      sum += storage.bytes;
    }
    return sum;
  }

  void write() {
    uint64_t largest = 0;
    for (const auto& storage : storages_) {
      largest = std::max(largest, storage.bytes);
    }
    // See [Note: a hole in a torch file].
    const Hole hole(largest);
    std::exception_ptr error;
    const StorageEntry* current = nullptr;
    {
      // Nothing may be thrown through LibTorch's C functions, and its
      // destructor must not fail either: after an error the writer continues,
      // and its bytes are discarded.
      PyTorchStreamWriter writer(
          [&](const void* data, size_t size) {
            try {
              if (!error) {
                current&& data == hole.begin() ? fill(*current)
                                               : append(data, size);
              }
            } catch (...) {
              error = std::current_exception();
            }
            return size;
          },
          /*compute_crc32=*/false);
      const std::string byte_order = "little";
      writer.writeRecord("data.pkl", pickle_.data(), pickle_.size());
      writer.writeRecord("byteorder", byte_order.data(), byte_order.size());
      for (size_t i = 0; i < storages_.size() && !error; ++i) {
        current = &storages_[i];
        writer.writeRecord(
            "data/" + std::to_string(i), hole.begin(), storages_[i].bytes);
        current = nullptr;
      }
      writer.writeEndOfFile();
    }
    if (error) {
      std::rethrow_exception(error);
    }
  }

 private:
  format::Value tensor_value(const TensorEntry& entry) {
    const size_t number = storage_of(entry);
    return row_major_tensor(
        entry.dtype, entry.tensor->sizes, std::to_string(number));
  }

  size_t storage_of(const TensorEntry& entry) {
    const size_t number = storages_.size();
    const auto& tensor = *entry.tensor;
    const bool may_share = content_.source->format() == Format::TorchFile ||
        content_.source->format() == Format::Exported;
    if (may_share && !tensor.boxes.empty()) {
      const Place place = content_.source->locate(tensor, tensor.boxes[0]);
      const auto [found, is_new] = known_.emplace(
          Identity{place.offset, tensor.sizes, place.strides, tensor.dtype},
          number);
      if (!is_new) {
        return found->second;
      }
    }
    storages_.push_back({.entry = &entry, .bytes = entry.bytes()});
    return number;
  }

  void append(const void* data, size_t size) {
    file_.append({static_cast<const uint8_t*>(data), size});
  }

  void fill(const StorageEntry& storage) {
    reader_.each_piece(
        *storage.entry,
        whole_of(storage.entry->tensor->sizes),
        [&](format::ByteSpan piece) { file_.append(piece); });
  }

  const Content& content_;
  NewFile& file_;
  EntryReader reader_;
  std::map<Identity, size_t> known_;
  std::vector<StorageEntry> storages_;
  std::string pickle_;
};

} // namespace

void write_torch_file(
    const Content& content,
    const fs::path& path,
    const TargetOptions& options,
    ProgressMeter& progress) {
  NewFile file(path, options.overwrite);
  TorchTarget target(content, file, progress);
  progress.begin(target.bytes());
  target.write();
  file.commit();
}

} // namespace tessera::checkpoint
