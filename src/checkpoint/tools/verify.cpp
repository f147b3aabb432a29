#include "checkpoint/tools/verify.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/file_error.h"
#include "checkpoint/disk/input.h"
#include "checkpoint/disk/openers.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/tools/json_text.h"
#include "checkpoint/tools/name_filter.h"

namespace tessera::checkpoint {
namespace {

struct DamagedBytes {
  std::string file; // name in the folder
  uint64_t begin = 0;
  uint64_t end = 0;
};

class Verifier {
 public:
  Verifier(
      const fs::path& path,
      const std::vector<std::string>& exclude,
      ProgressMeter& progress)
      : path_(path), exclude_(exclude), progress_(progress) {}

  VerifyReport run() {
    const fs::path resolved = resolve_checkpoint(path_); // it must be there
    attempt([&] { source_ = Source::open(path_, Sums::Ignore); });
    root_ = source_                  ? source_->root()
        : fs::is_directory(resolved) ? resolved
                                     : resolved.parent_path();
    attempt([&] { take_checksums(); });
    progress_.begin(total_bytes());
    if (sums_) {
      for (const auto& file : sums_->files) {
        attempt([&] { compare(file.first, file.second); });
      }
    }
    if (source_) {
      describe_source();
      read_unsummed();
      report_damaged_bytes();
      check_items();
    } else {
      report_damaged_bytes();
    }
    return std::move(report_);
  }

 private:
  template <class Body>
  void attempt(const Body& body) {
    try {
      body();
    } catch (const UnsupportedError& error) {
      report_.unsupported.push_back(error.what());
    } catch (const FileError& error) {
      report_.damages.push_back(error.what());
    }
  }

  // Archives have no checksums, and a single file only if the folder's
  // checksums list it.
  void take_checksums() {
    if (source_ &&
        (source_->format() == Format::TorchFile ||
         source_->format() == Format::Exported)) {
      return;
    }
    sums_ = read_side_file(root_);
    if (sums_ && source_ && source_->format() == Format::Safetensors &&
        source_->files().size() == 1 &&
        !sums_->files.contains(source_->files()[0].name)) {
      sums_.reset();
    }
    report_.has_checksums = sums_.has_value();
    if (!sums_ || !source_) {
      return;
    }
    for (const auto& file : source_->files()) {
      if (!sums_->files.contains(file.name)) {
        report_.damages.push_back(
            quoted(file.path) + ": not in " + std::string(kChecksumsName) +
            ". The folder holds files of two checkpoints.");
      }
    }
  }

  uint64_t total_bytes() const {
    uint64_t sum = 0;
    if (sums_) {
      for (const auto& [name, sums] : sums_->files) {
        sum += sums.bytes;
      }
    } else if (source_) {
      for (const auto& file : source_->files()) {
        sum += file.bytes;
      }
    }
    return sum;
  }

  // Reads the whole file; `take` gets it in blocks.
  template <class Take>
  void read_blocks(const fs::path& path, const Take& take) {
    const Input input = open_input(path);
    std::vector<uint8_t> block(kBlockBytes);
    for (uint64_t at = 0; at < input.bytes; at += kBlockBytes) {
      const uint64_t count = std::min(kBlockBytes, input.bytes - at);
      read_at(input.file, path, at, block.data(), count);
      take(at, format::ByteSpan(block.data(), count));
      report_.bytes_read += count;
      progress_.add(count);
    }
  }

  void compare(const std::string& name, const FileSums& sums) {
    const fs::path path = resolve_below(root_, name);
    const uint64_t bytes = open_input(path).bytes;
    if (bytes != sums.bytes) {
      report_.damages.push_back(
          quoted(path) + ": " + std::to_string(bytes) + " bytes, " +
          std::to_string(sums.bytes) +
          " were written. The file was cut off or changed.");
    }
    read_blocks(path, [&](uint64_t at, format::ByteSpan block) {
      const uint64_t number = at / kBlockBytes;
      // After the expected end of the file there is nothing to compare with.
      if (number < sums.blocks.size() &&
          checksum(block) != sums.blocks[number]) {
        add_damage(name, at, at + block.size());
      }
    });
  }

  // Merges neighbouring ranges.
  void add_damage(const std::string& name, uint64_t begin, uint64_t end) {
    if (!damaged_.empty() && damaged_.back().file == name &&
        damaged_.back().end == begin) {
      damaged_.back().end = end;
    } else {
      damaged_.push_back({.file = name, .begin = begin, .end = end});
    }
  }

  void describe_source() {
    report_.format = name_of(source_->format());
    report_.num_files = source_->files().size();
    report_.num_tensors = source_->tensors().size();
    report_.num_values = source_->values().size();
  }

  // Bytes that no checksum covers must at least be readable.
  void read_unsummed() {
    for (const auto& file : source_->files()) {
      if (!sums_ || !sums_->files.contains(file.name)) {
        attempt([&] { read_blocks(file.path, [](uint64_t, auto) {}); });
      }
    }
  }

  bool lies_in(const DamagedBytes& bytes, size_t item) const {
    const FileRange range = source_->range_of(item);
    return range.begin < range.end &&
        source_->files()[range.file].name == bytes.file &&
        range.begin < bytes.end && bytes.begin < range.end;
  }

  std::vector<std::string> names_in(const DamagedBytes& bytes) const {
    std::vector<std::string> names;
    for (const auto& tensor : source_->tensors()) {
      const bool has_some = std::any_of(
          tensor.boxes.begin(), tensor.boxes.end(), [&](const auto& box) {
            return lies_in(bytes, box.item);
          });
      if (has_some) {
        names.push_back(tensor.name);
      }
    }
    for (const auto& value : source_->values()) {
      if (lies_in(bytes, value.item)) {
        names.push_back(value.name);
      }
    }
    return names;
  }

  void report_damaged_bytes() {
    for (const auto& bytes : damaged_) {
      auto names = source_ ? names_in(bytes) : std::vector<std::string>{};
      const bool has_names = !names.empty();
      std::erase_if(
          names, [&](const std::string& name) { return is_excluded(name); });
      if (has_names && names.empty()) {
        continue;
      }
      report_.damages.push_back(
          quoted(root_ / bytes.file) + ": bytes " +
          std::to_string(bytes.begin) + " to " + std::to_string(bytes.end) +
          " are not those that were written" +
          (names.empty() ? "" : "; there lies " + listed(names)) + ".");
    }
  }

  bool is_damaged(size_t item) const {
    return std::any_of(
        damaged_.begin(), damaged_.end(), [&](const auto& bytes) {
          return lies_in(bytes, item);
        });
  }

  bool is_excluded(const std::string& name) const {
    return begins_with_any(name, exclude_);
  }

  // Damage that was reported above is not reported again.
  void check_items() {
    for (const auto& tensor : source_->tensors()) {
      for (const auto& box : tensor.boxes) {
        if (!is_excluded(tensor.name) && !is_damaged(box.item)) {
          attempt([&] { source_->locate(tensor, box); });
        }
      }
    }
    for (const auto& value : source_->values()) {
      if (!is_excluded(value.name) && !is_damaged(value.item)) {
        attempt([&] { source_->value(value); });
      }
    }
  }

  const fs::path path_;
  const std::vector<std::string> exclude_;
  ProgressMeter& progress_;
  fs::path root_;
  std::unique_ptr<Source> source_;
  std::optional<Checksums> sums_;
  std::vector<DamagedBytes> damaged_;
  VerifyReport report_;
};

} // namespace

VerifyReport verify(
    const fs::path& path,
    const std::vector<std::string>& exclude,
    ProgressMeter& progress) {
  return Verifier(path, exclude, progress).run();
}

std::string verify_json(const VerifyReport& report) {
  const char* const verdict = !report.damages.empty() ? "damaged"
      : !report.unsupported.empty()                   ? "unsupported"
                                                      : "sound";
  return json_text(nlohmann::ordered_json{
      {"verdict", verdict},
      {"format", report.format},
      {"num_tensors", report.num_tensors},
      {"num_values", report.num_values},
      {"num_files", report.num_files},
      {"bytes_read", report.bytes_read},
      {"has_checksums", report.has_checksums},
      {"damages", report.damages},
      {"unsupported", report.unsupported}});
}

} // namespace tessera::checkpoint
