// A checkpoint to read from, whatever its format. Does not depend on LibTorch.
#pragma once

#include <tessera/engine/tensor_box.h>

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
#include "checkpoint/format/pickle_value.h"

namespace tessera::checkpoint {

enum class Format { Dcp, Safetensors, TorchFile, Exported };
/// "DCP", "safetensors", "torch file", "exported program".
const char* name_of(Format format);

/// A box of a tensor that is stored in one piece, an item of a source.
struct StoredBox : TensorBox {
  size_t item = 0; // for Source::range_of() and locate()
};

/// The box that is all of a tensor.
TensorBox whole_of(const std::vector<int64_t>& sizes);
/// The part that two boxes share, or nothing.
std::optional<TensorBox> intersect(const TensorBox& a, const TensorBox& b);

struct StoredTensor {
  std::string name;
  std::vector<format::DcpPath::Key> keys; // what `name` joins
  format::DType dtype = format::DType::Float32;
  std::vector<int64_t> sizes;
  std::vector<StoredBox> boxes; // cover it exactly once; none without elements
  // What only an exported program says:
  bool is_buffer = false; // or a parameter
  std::string tied_to; // an earlier tensor that has the same elements, or empty

  int64_t numel() const;
  uint64_t bytes() const;
};

/// Any value that is not a tensor.
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
  /// The item that holds the box. The bytes that describe the data surround it,
  /// and are compared with their checksums when the data is read.
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
  Compare,
  Ignore, // for callers that compare the checksums themselves
};

class Source {
 public:
  /// Finds out the format of `path`: a folder with .metadata, or with
  /// model.safetensors.index.json, or with one *.safetensors; an index; a
  /// safetensors file; a torch file; an archive of torch.export (.pt2), whose
  /// tensors are its parameters and persistent buffers. Throws FileError if the
  /// path is none of these (saying what was found and what is supported), if
  /// something is damaged or hostile (naming the file), and for symbolic links
  /// below the folder that lead out of it. Throws DamageError if .checksums is
  /// damaged, and for files whose size differs from the one in .checksums or
  /// that are not listed there.
  static std::unique_ptr<Source> open(
      const fs::path& path,
      Sums sums = Sums::Compare);
  virtual ~Source() = default;

  virtual Format format() const = 0;
  /// The path that was given to open().
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
  /// Null if the checkpoint has no checksums, as those of other programs.
  const Checksums* checksums() const {
    return checksums_ ? &*checksums_ : nullptr;
  }

  /// Names of dictionary keys that were ints ("state.0"): only a torch file
  /// distinguishes them from strings.
  const std::set<std::string>& int_keys() const {
    return int_keys_;
  }
  /// Empty dictionaries, which do not show in the name of any tensor or value.
  const std::vector<std::vector<format::DcpPath::Key>>& empty_dicts() const {
    return empty_dicts_;
  }
  /// What a safetensors file says about itself ("format": "pt"), and which
  /// programs an archive of torch.export holds.
  const std::map<std::string, std::string>& notes() const {
    return notes_;
  }

  /// Reads the description of the box's bytes; throws FileError unless it has
  /// the tensor's dtype and the box's sizes and lies inside its file. May be
  /// called from several threads.
  virtual Place locate(const StoredTensor& tensor, const StoredBox& box)
      const = 0;
  /// Throws FileError, DamageError. May be called from several threads.
  virtual format::Value value(const StoredValue& value) const = 0;
  /// Where the item of a box or a value lies; reads nothing.
  virtual FileRange range_of(size_t item) const = 0;

 protected:
  /// Looks up a file below root(); returns its number.
  size_t add_file(const std::string& name);
  /// Reads .checksums if it exists, and compares it with the sizes of files()
  /// and with all bytes of those named in `read_whole`, which were read
  /// already.
  void use_checksums(const std::vector<std::string>& read_whole);
  /// Throws FileError unless names are unique and boxes cover their tensors;
  /// makes find_*() work. Call it when all entries have been added.
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

} // namespace tessera::checkpoint
