// A checkpoint to read from, whatever its format. Knows no LibTorch.
#pragma once

#include <tessera/engine/box.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/file_error.h"
#include "checkpoint/disk/files.h"
#include "checkpoint/format/bytes.h"
#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/value.h"

namespace tessera::checkpoint {

enum class Format { kDcp, kSafetensors, kTorchFile };
/// "DCP", "safetensors", "torch file".
const char* name_of(Format format);

/// A box of a tensor that is stored in one item of a source.
struct StoredBox : Box {
  size_t item = 0; // for Source::range_of() and locate()
};

/// The box that is all of a tensor.
Box whole_of(const std::vector<int64_t>& sizes);
/// The part that two boxes share, or nothing.
std::optional<Box> intersect(const Box& a, const Box& b);

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
  /// The item it was found in. What describes the data stands around it, and
  /// is compared with its checksums when the data is read.
  uint64_t item_begin = 0;
  uint64_t item_end = 0;
};

struct SourceFile {
  std::string name; // relative to root()
  uint64_t bytes = 0;
  fs::path path; // without symbolic links
};

/// Bytes of one of a source's files.
struct FileRange {
  size_t file = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

/// Whether a .checksums in the folder is used.
enum class Sums {
  kCompare,
  kIgnore, // for those who compare themselves
};

class Source {
 public:
  /// Finds out the format of `path`: a folder with .metadata, or with
  /// model.safetensors.index.json, or with one *.safetensors; an index; a
  /// safetensors file; a torch file. Throws FileError: for what is none of
  /// these (with what was found and what is read), for what is damaged or
  /// hostile (with the file), and for symbolic links below the folder that
  /// lead out of it. Throws DamageError for a .checksums that is damaged, and
  /// for files that have another size than it says, or are not in it.
  static std::unique_ptr<Source> open(
      const fs::path& path,
      Sums sums = Sums::kCompare);
  virtual ~Source() = default;

  virtual Format format() const = 0;
  /// The path it was opened by.
  const fs::path& path() const {
    return path_;
  }
  /// The folder that names of files are relative to, without symbolic links.
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
  UniqueFd open_file(size_t file) const;
  /// Null where there are none, as with checkpoints that others wrote.
  const Checksums* checksums() const {
    return checksums_ ? &*checksums_ : nullptr;
  }

  /// Names of dictionaries' keys that were ints ("state.0"): only a torch file
  /// can tell them from strings.
  const std::set<std::string>& int_keys() const {
    return int_keys_;
  }
  /// Dictionaries without items, which no tensor or value tells of.
  const std::vector<std::vector<format::DcpPath::Key>>& empty_dicts() const {
    return empty_dicts_;
  }
  /// What a safetensors file says about itself ("format": "pt").
  const std::map<std::string, std::string>& notes() const {
    return notes_;
  }

  /// Reads what describes the box's bytes; throws FileError unless it has the
  /// tensor's dtype and the box's sizes and lies inside of its file. May be
  /// called from several threads.
  virtual Place locate(const StoredTensor& tensor, const StoredBox& box)
      const = 0;
  /// Throws FileError, DamageError. May be called from several threads.
  virtual format::Value value(const StoredValue& value) const = 0;
  /// Where an item of a box or a value is kept; reads nothing.
  virtual FileRange range_of(size_t item) const = 0;

 protected:
  /// Looks up a file below root(); returns its number.
  size_t add_file(const std::string& name);
  /// Reads .checksums, if it is there, and compares with it the sizes of
  /// files() and all of those named in `read_whole`, which were read already.
  void use_checksums(const std::vector<std::string>& read_whole);
  /// Throws FileError unless names are there once and boxes cover their
  /// tensors; makes find_*() work. Call it when all are there.
  void index();

  fs::path path_;
  fs::path root_;
  std::vector<StoredTensor> tensors_;
  std::vector<StoredValue> values_;
  std::vector<SourceFile> files_;
  std::optional<Checksums> checksums_;
  std::set<std::string> int_keys_;
  std::vector<std::vector<format::DcpPath::Key>> empty_dicts_;
  std::map<std::string, std::string> notes_;

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
  /// Compares the blocks that hold these bytes, unless this reader did already.
  void check(size_t file, uint64_t begin, uint64_t end);

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
