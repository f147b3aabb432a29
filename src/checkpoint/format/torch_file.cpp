#include "checkpoint/format/torch_file.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <vector>

#include "checkpoint/format/extent.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/pickle_reader.h"
#include "checkpoint/format/zip_reader.h"

namespace tessera::format {
namespace {

// The entries below the archive's one folder, by their names in it.
class Records {
 public:
  explicit Records(const RandomBytes& bytes)
      : bytes_(bytes), entries_(read_zip(bytes)) {
    if (entries_.empty()) {
      throw FormatError("the archive is empty");
    }
    const std::string& first = entries_[0].name;
    prefix_ = first.substr(0, first.find('/') + 1);
  }

  const ZipEntry* find(std::string_view name) const {
    const auto found = std::find_if(
        entries_.begin(), entries_.end(), [&](const ZipEntry& entry) {
          return short_name(entry) == name;
        });
    return found == entries_.end() ? nullptr : &*found;
  }

  /// The name in the folder; empty for an entry of another folder.
  std::string_view short_name(const ZipEntry& entry) const {
    return entry.name.starts_with(prefix_)
        ? std::string_view(entry.name).substr(prefix_.size())
        : std::string_view();
  }

  /// Throws FormatError for an entry that is longer than an entry of its kind
  /// can be.
  std::string text(const ZipEntry& entry, uint64_t longest) const {
    if (entry.size > longest) {
      throw FormatError(
          entry.offset,
          "entry " + in_quotes(entry.name) + " has " +
              std::to_string(entry.size) + " bytes, more than " +
              std::to_string(longest));
    }
    return bytes_.text(entry.offset, entry.size);
  }

  const std::vector<ZipEntry>& all() const {
    return entries_;
  }

 private:
  const RandomBytes& bytes_;
  std::vector<ZipEntry> entries_;
  std::string prefix_;
};

// "3", "little".
constexpr uint64_t kLongestNote = 64;
constexpr uint64_t kLongestPickle = uint64_t{1} << 30;

void check_version(const Records& records) {
  constexpr int kOldest = 1;
  constexpr int kNewest = 10;
  const auto* entry = records.find("version");
  if (!entry) {
    throw FormatError("this archive has no version: it is not a torch file");
  }
  const std::string text = records.text(*entry, kLongestNote);
  int version = 0;
  std::from_chars(text.data(), text.data() + text.size(), version);
  if (version < kOldest || version > kNewest) {
    throw UnsupportedFormat(
        entry->offset,
        "version " + in_quotes(text) + " of the format, not 1 to 10");
  }
}

void check_byte_order(const Records& records) {
  const auto* entry = records.find("byteorder");
  const std::string order =
      entry ? records.text(*entry, kLongestNote) : "little";
  if (order != "little") {
    throw UnsupportedFormat(
        entry->offset, "byte order " + in_quotes(order) + ", not little");
  }
}

std::string in_pickle(const FormatError& error) {
  return "in data.pkl, " + std::string(error.what());
}

std::string describe(const Tensor& tensor) {
  return "a tensor of storage " + in_quotes(tensor.storage.key);
}

// One more than the last element that the tensor reaches; nothing if that
// overflows.
std::optional<int64_t> reach(const Tensor& tensor) {
  int64_t last = tensor.offset;
  for (size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
    int64_t step = 0;
    if (tensor.strides[dim] < 0 ||
        __builtin_mul_overflow(
            tensor.sizes[dim] - 1, tensor.strides[dim], &step) ||
        __builtin_add_overflow(last, step, &last)) {
      return std::nullopt;
    }
  }
  return last < INT64_MAX ? std::optional(last + 1) : std::nullopt;
}

class Checker {
 public:
  explicit Checker(const TorchFile& file) : file_(file) {}

  void check(const Value& value) const {
    if (const auto* storage = value.get<Box<Storage>>()) {
      check_storage(**storage);
    } else if (const auto* tensor = value.get<Box<Tensor>>()) {
      check_tensor(**tensor);
    } else if (const auto* list = value.get<List>()) {
      check_all(list->items);
    } else if (const auto* tuple = value.get<Tuple>()) {
      check_all(tuple->items);
    } else if (const auto* set = value.get<Set>()) {
      check_all(set->items);
    } else if (const auto* dict = value.get<Dict>()) {
      for (const auto& [key, item] : dict->items) {
        check(key);
        check(item);
      }
    } else if (const auto* object = value.get<Box<Object>>()) {
      check((*object)->state);
    }
  }

 private:
  void check_all(const std::vector<Value>& values) const {
    for (const auto& value : values) {
      check(value);
    }
  }

  // Returns the storage's bytes.
  int64_t check_storage(const Storage& storage) const {
    const auto found = file_.storages.find(storage.key);
    if (found == file_.storages.end()) {
      throw FormatError(
          "storage " + in_quotes(storage.key) + " is not in the archive");
    }
    const auto bytes = checked_bytes(
        {storage.numel}, storage.dtype ? element_bytes(*storage.dtype) : 1);
    if (!bytes || static_cast<uint64_t>(*bytes) > found->second.bytes) {
      throw FormatError(
          found->second.offset,
          "storage " + in_quotes(storage.key) + " has " +
              std::to_string(found->second.bytes) + " bytes, " +
              std::to_string(storage.numel) + " elements are promised");
    }
    return *bytes;
  }

  void check_tensor(const Tensor& tensor) const {
    const int64_t available =
        check_storage(tensor.storage) / element_bytes(tensor.dtype);
    const auto numel = checked_numel(tensor.sizes);
    if (tensor.strides.size() != tensor.sizes.size() || !numel ||
        tensor.offset < 0) {
      throw FormatError(describe(tensor) + " has an impossible shape");
    }
    if (*numel == 0) {
      return;
    }
    const auto end = reach(tensor);
    if (!end || *end > available) {
      throw FormatError(
          describe(tensor) + " reaches beyond its " +
          std::to_string(available) + " elements");
    }
    if (*numel > available) {
      throw UnsupportedFormat(
          describe(tensor) + " repeats elements: " + std::to_string(*numel) +
          " of " + std::to_string(available) +
          ". Save tensor.contiguous() instead.");
    }
  }

  const TorchFile& file_;
};

} // namespace

TorchFile read_torch_file(const RandomBytes& bytes) {
  if (bytes.size() > 0 && bytes.get<uint8_t>(0) == 0x80) {
    throw UnsupportedFormat(
        0,
        "a torch file of the format before 1.6. Load it and save it again with torch.save.");
  }
  const Records records(bytes);
  if (records.find("constants.pkl")) {
    throw UnsupportedFormat(
        "this is a TorchScript archive. Save the module's state_dict() with torch.save.");
  }
  check_version(records);
  check_byte_order(records);
  const auto* pickle = records.find("data.pkl");
  if (!pickle) {
    throw FormatError("this archive has no data.pkl: it is not a torch file");
  }

  TorchFile file;
  constexpr std::string_view kData = "data/";
  for (const auto& entry : records.all()) {
    const auto name = records.short_name(entry);
    if (name.starts_with(kData)) {
      file.storages.emplace(
          name.substr(kData.size()),
          TorchFile::StorageData{.offset = entry.offset, .bytes = entry.size});
    }
  }
  try {
    file.value = read_pickle(as_bytes(records.text(*pickle, kLongestPickle)));
  } catch (const UnsupportedFormat& error) {
    throw UnsupportedFormat(pickle->offset, in_pickle(error));
  } catch (const FormatError& error) {
    throw FormatError(pickle->offset, in_pickle(error));
  }
  Checker(file).check(file.value);
  return file;
}

} // namespace tessera::format
