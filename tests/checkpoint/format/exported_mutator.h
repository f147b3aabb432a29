// Changes to exported programs for their fuzzer.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/bytes.h"
#include "checkpoint/format/json_spans.h"
#include "checkpoint/format/zip_archive.h"

namespace tessera::format {

/// Changes archives of torch.export, and the JSON in them, at random, and most
/// often so that what lies around the change stays whole: JSON stays JSON, also
/// where it is the text of a string, and an archive's directory says where its
/// entries lie. Bytes that are changed blindly are refused before a program is
/// read.
class ExportedMutator {
 public:
  /// Changes any bytes; what it gives has at most `max_size`.
  using ChangeBytes =
      std::function<std::string(std::string bytes, size_t max_size)>;

  ExportedMutator(uint32_t seed, ChangeBytes change_bytes);

  /// `bytes`, changed.
  std::string change(std::string_view bytes, size_t max_size);
  /// `bytes` with a part of `other`.
  std::string cross(
      std::string_view bytes,
      std::string_view other,
      size_t max_size);

 private:
  using Entries = std::vector<ZipArchive::Entry>;

  /// A random number below the limit.
  uint32_t below(size_t limit);
  std::string change_blindly(std::string_view bytes) const;
  std::string change_archive(std::string_view bytes, std::string_view other);
  void change_json_entry(Entries* entries, size_t from, const Entries& donors);
  std::string change_json(std::string_view text, std::string_view other);
  std::string change_scalar(std::string_view text, const JsonSpan& value);
  std::string change_text(std::string_view inner);

  uint32_t state_;
  ChangeBytes change_bytes_;
  size_t max_size_ = 0;
  int depth_ = 0; // of JSON in strings of JSON
};

} // namespace tessera::format
