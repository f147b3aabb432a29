// A checkpoint to read from, whatever its format. Knows no LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/bytes.h"
#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/value.h"
#include "checkpoint/store/checksums.h"
#include "checkpoint/store/file_error.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;

enum class Format { kDcp, kSafetensors, kTorchFile };
/// "DCP", "safetensors", "torch file".
const char* name_of(Format format);

/// A box of a tensor that is stored as one.
struct StoredBox {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  size_t item = 0; // what Source::locate() takes

  int64_t numel() const;
};

struct StoredTensor {
  std::string name;
  std::vector<format::DcpPath::Key> keys; // what `name` joins
  format::DType dtype = format::DType::kFloat32;
  std::vector<int64_t> sizes;
  std::vector<StoredBox> boxes; // cover it exactly once; none without elements

  int64_t numel() const;
  uint64_t bytes() const;
};

/// Anything that is no tensor.
struct StoredValue {
  std::string name;
  std::vector<format::DcpPath::Key> keys;
  size_t item = 0; // what Source::value() takes
};

/// Where the elements of a box lie.
struct Place {
  size_t file = 0; // of Source::files()
  uint64_t offset = 0; // bytes, of the box's first element
  std::vector<int64_t> strides; // in elements
};

struct SourceFile {
  std::string name; // relative to root()
  uint64_t bytes = 0;
};

class Source {
 public:
  /// Finds out the format of `path`: a folder with .metadata, or with
  /// model.safetensors.index.json, or with one *.safetensors; an index; a
  /// safetensors file; a torch file. Throws FileError: for what is none of
  /// these (with what was found and what is read), for what is damaged or
  /// hostile (with the file), and for symbolic links below the folder that
  /// lead out of it.
  static std::unique_ptr<Source> open(const fs::path& path);
  virtual ~Source() = default;

  virtual Format format() const = 0;
  /// The path it was opened by.
  const fs::path& path() const {
    return path_;
  }
  /// The folder that names of files are relative to.
  const fs::path& root() const {
    return root_;
  }
  const std::vector<StoredTensor>& tensors() const {
    return tensors_;
  }
  const std::vector<StoredValue>& values() const {
    return values_;
  }
  const StoredTensor* find_tensor(std::string_view name) const;
  const StoredValue* find_value(std::string_view name) const;
  /// Data files. Their sizes were looked up when the source was opened.
  const std::vector<SourceFile>& files() const {
    return files_;
  }
  /// Null where there are none, as with checkpoints that others wrote.
  const Checksums* checksums() const {
    return checksums_ ? &*checksums_ : nullptr;
  }

  /// Reads what describes the box's bytes; throws FileError unless it has the
  /// tensor's dtype and the box's sizes and lies inside of its file. May be
  /// called from several threads.
  virtual Place locate(const StoredTensor& tensor, const StoredBox& box)
      const = 0;
  /// Throws FileError, DamageError. May be called from several threads.
  virtual format::Value value(const StoredValue& value) const = 0;

 protected:
  /// Sorts nothing, but makes find_*() work: call it when all are there.
  void index();

  fs::path path_;
  fs::path root_;
  std::vector<StoredTensor> tensors_;
  std::vector<StoredValue> values_;
  std::vector<SourceFile> files_;
  std::optional<Checksums> checksums_;

 private:
  std::map<std::string_view, size_t> tensor_index_;
  std::map<std::string_view, size_t> value_index_;
};

/// Reads bytes of a source's files and compares every block it touches with its
/// checksum, where there are some. Keeps one block, so that neighbours in a
/// file, read in their order, cost one read. For one thread.
class BlockReader {
 public:
  explicit BlockReader(const Source& source, bool verify = true);
  ~BlockReader();

  /// Throws DamageError with the file and the block's range, FileError for
  /// files that cannot be read or end too early.
  void read(size_t file, uint64_t offset, uint8_t* to, uint64_t bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Copies the part of `box` of `tensor` that begins at `begin` (in the tensor)
/// and has `sizes` to `to`, whose strides are in bytes. `place` is that of the
/// box.
void read_region(
    BlockReader& reader,
    const StoredTensor& tensor,
    const StoredBox& box,
    const Place& place,
    const std::vector<int64_t>& begin,
    const std::vector<int64_t>& sizes,
    uint8_t* to,
    const std::vector<int64_t>& strides);

} // namespace tessera::checkpoint
