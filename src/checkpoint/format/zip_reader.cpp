#include "checkpoint/format/zip_reader.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "checkpoint/format/format_error.h"
#include "checkpoint/format/path.h"
#include "checkpoint/format/utf8.h"

namespace tessera::format {
namespace {

constexpr uint32_t kLocalSignature = 0x04034b50;
constexpr uint32_t kDirectorySignature = 0x02014b50;
constexpr uint32_t kEndSignature = 0x06054b50;
constexpr uint32_t kEnd64Signature = 0x06064b50;
constexpr uint32_t kLocator64Signature = 0x07064b50;

constexpr uint64_t kLocalBytes = 30;
constexpr uint64_t kDirectoryBytes = 46;
constexpr uint64_t kEndBytes = 22;
constexpr uint64_t kEnd64Bytes = 56;
constexpr uint64_t kLocator64Bytes = 20;

constexpr uint16_t kZip64Extra = 1;
constexpr uint16_t kEncrypted = 1;

struct Directory {
  uint64_t offset;
  uint64_t bytes;
  uint64_t num_entries;
  uint64_t end; // entries lie before it
};

class Archive {
 public:
  explicit Archive(const RandomBytes& bytes) : bytes_(bytes) {}

  std::vector<ZipEntry> read() const {
    const Directory directory = find_directory();
    std::vector<ZipEntry> entries;
    uint64_t place = directory.offset;
    const uint64_t end = directory.offset + directory.bytes;
    // An entry takes at least kDirectoryBytes, so a false count cannot reserve
    // much memory.
    entries.reserve(
        std::min(directory.num_entries, directory.bytes / kDirectoryBytes));
    while (place < end) {
      entries.push_back(read_entry(&place, end, directory.offset));
    }
    if (entries.size() != directory.num_entries) {
      throw FormatError(
          directory.offset,
          "the directory has " + std::to_string(entries.size()) + " entries, " +
              std::to_string(directory.num_entries) + " are promised");
    }
    check_apart(entries);
    return entries;
  }

 private:
  template <class T>
  T get(uint64_t place) const {
    return bytes_.get<T>(place);
  }

  bool has(uint64_t place, uint64_t length, uint32_t signature) const {
    return fits(place, length, bytes_.size()) &&
        get<uint32_t>(place) == signature;
  }

  Directory find_directory() const {
    const uint64_t at = find_end();
    if (get<uint16_t>(at + 4) != get<uint16_t>(at + 6)) {
      throw UnsupportedFormat(at, "the archive is split over several files");
    }
    Directory found{
        .offset = get<uint32_t>(at + 16),
        .bytes = get<uint32_t>(at + 12),
        .num_entries = get<uint16_t>(at + 10),
        .end = at};
    // torch always writes the zip64 records, other programs only if they must.
    if (at >= kLocator64Bytes &&
        has(at - kLocator64Bytes, kLocator64Bytes, kLocator64Signature)) {
      found = find_directory64(at - kLocator64Bytes);
    }
    if (!fits(found.offset, found.bytes, found.end)) {
      throw FormatError(at, "the archive's directory lies outside the archive");
    }
    return found;
  }

  // The end record may be followed by a comment of up to 64 KiB.
  uint64_t find_end() const {
    constexpr uint64_t kLongestComment = UINT16_MAX;
    if (bytes_.size() >= kEndBytes) {
      const uint64_t last = bytes_.size() - kEndBytes;
      const uint64_t first = last - std::min(last, kLongestComment);
      for (uint64_t at = last + 1; at-- > first;) {
        if (get<uint32_t>(at) == kEndSignature &&
            get<uint16_t>(at + 20) == last - at) {
          return at;
        }
      }
    }
    throw FormatError(
        bytes_.size(),
        "this is not a ZIP archive, or its end is missing: was it cut off?");
  }

  Directory find_directory64(uint64_t locator) const {
    const auto at = get<uint64_t>(locator + 8);
    if (!has(at, kEnd64Bytes, kEnd64Signature) || at > locator) {
      throw FormatError(locator, "the zip64 record is not where it should be");
    }
    return {
        .offset = get<uint64_t>(at + 48),
        .bytes = get<uint64_t>(at + 40),
        .num_entries = get<uint64_t>(at + 32),
        .end = at};
  }

  ZipEntry read_entry(uint64_t* place, uint64_t end, uint64_t limit) const {
    const uint64_t at = *place;
    if (!fits(at, kDirectoryBytes, end) ||
        get<uint32_t>(at) != kDirectorySignature) {
      throw FormatError(at, "this is not an entry of an archive's directory");
    }
    const uint64_t name_bytes = get<uint16_t>(at + 28);
    const uint64_t extra_bytes = get<uint16_t>(at + 30);
    const uint64_t comment_bytes = get<uint16_t>(at + 32);
    const uint64_t extra = at + kDirectoryBytes + name_bytes;
    if (!fits(
            at + kDirectoryBytes,
            name_bytes + extra_bytes + comment_bytes,
            end)) {
      throw FormatError(at, "an entry goes beyond the archive's directory");
    }
    *place = extra + extra_bytes + comment_bytes;

    std::string name = bytes_.text(at + kDirectoryBytes, name_bytes);
    const auto refuse = [&](const std::string& what) {
      throw FormatError(at, "entry " + in_quotes(name) + " " + what);
    };
    if (const auto why = why_it_leaves(name); !why.empty()) {
      refuse(std::string(why));
    }
    if (!is_utf8(name)) {
      refuse("has a name that is not UTF-8");
    }
    if (get<uint16_t>(at + 8) & kEncrypted) {
      throw UnsupportedFormat(at, "entry " + in_quotes(name) + " is encrypted");
    }
    if (get<uint16_t>(at + 10) != 0) {
      throw UnsupportedFormat(
          at,
          "entry " + in_quotes(name) +
              " is compressed; torch.save stores entries as they are");
    }
    const Sizes sizes = read_sizes(at, bytes_.bytes(extra, extra_bytes));
    if (sizes.stored != sizes.plain) {
      refuse("is stored with another size than it has");
    }
    const auto data_offset = find_data(sizes.local_header, name, limit);
    if (!data_offset || !fits(*data_offset, sizes.plain, limit)) {
      refuse("lies outside the archive");
    }
    return {
        .name = std::move(name),
        .offset = *data_offset,
        .size = sizes.plain,
        .checksum = get<uint32_t>(at + 16)};
  }

  struct Sizes {
    uint64_t plain;
    uint64_t stored;
    uint64_t local_header;
  };

  // Fields that do not fit into 32 bits stand in the zip64 extra, in this
  // order.
  Sizes read_sizes(uint64_t at, ByteSpan extra) const {
    Sizes sizes{
        .plain = get<uint32_t>(at + 24),
        .stored = get<uint32_t>(at + 20),
        .local_header = get<uint32_t>(at + 42)};
    ByteSpan wide = find_extra(extra, kZip64Extra);
    for (auto* field : {&sizes.plain, &sizes.stored, &sizes.local_header}) {
      if (*field == UINT32_MAX) {
        if (wide.size() < sizeof(uint64_t)) {
          throw FormatError(at, "an entry lacks its zip64 sizes");
        }
        *field = load_le<uint64_t>(wide, 0);
        wide = wide.subspan(sizeof(uint64_t));
      }
    }
    return sizes;
  }

  static ByteSpan find_extra(ByteSpan extra, uint16_t wanted) {
    while (extra.size() >= 4) {
      const uint64_t length = load_le<uint16_t>(extra, 2);
      if (length > extra.size() - 4) {
        break;
      }
      if (load_le<uint16_t>(extra, 0) == wanted) {
        return extra.subspan(4, length);
      }
      extra = extra.subspan(4 + length);
    }
    return {};
  }

  // Only the lengths in the local header count: torch leaves its sizes empty.
  std::optional<uint64_t> find_data(
      uint64_t local,
      std::string_view name,
      uint64_t limit) const {
    if (!has(local, kLocalBytes, kLocalSignature) ||
        !fits(local, kLocalBytes, limit)) {
      return std::nullopt;
    }
    const uint64_t name_bytes = get<uint16_t>(local + 26);
    const uint64_t extra_bytes = get<uint16_t>(local + 28);
    if (!fits(local + kLocalBytes, name_bytes + extra_bytes, limit) ||
        bytes_.text(local + kLocalBytes, name_bytes) != name) {
      return std::nullopt;
    }
    return local + kLocalBytes + name_bytes + extra_bytes;
  }

  static void check_apart(std::vector<ZipEntry> entries) {
    std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
      return a.name < b.name;
    });
    for (size_t i = 1; i < entries.size(); ++i) {
      if (entries[i - 1].name == entries[i].name) {
        throw FormatError(
            entries[i].offset,
            "entry " + in_quotes(entries[i].name) + " appears twice");
      }
    }
    std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
      return a.offset < b.offset;
    });
    for (size_t i = 1; i < entries.size(); ++i) {
      if (entries[i - 1].size > entries[i].offset - entries[i - 1].offset) {
        throw FormatError(
            entries[i].offset,
            "entries " + in_quotes(entries[i - 1].name) + " and " +
                in_quotes(entries[i].name) + " overlap");
      }
    }
  }

  const RandomBytes& bytes_;
};

} // namespace

std::vector<ZipEntry> read_zip(const RandomBytes& bytes) {
  return Archive(bytes).read();
}

} // namespace tessera::format
