// Makes ZIP archives, good and bad ones.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::format {

template <class T>
void append_number(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

/// Writes archives, with any field wrong.
struct ZipArchive {
  struct Entry {
    std::string name;
    std::string data;
    uint16_t flags = 0;
    uint16_t method = 0;
    bool wide = false; // sizes in a zip64 extra
    int64_t move = 0; // of the place in the directory
    int64_t grow = 0; // of the size in the directory
    std::string local_name = name;
  };
  std::vector<Entry> entries;
  bool zip64 = false;
  std::string comment;
  int extra_count = 0;
  uint16_t disk = 0;

  std::string bytes() const {
    std::string out;
    std::string directory;
    for (const auto& entry : entries) {
      const uint64_t place = out.size() + entry.move;
      const uint64_t size = entry.data.size() + entry.grow;
      append_number<uint32_t>(&out, 0x04034b50);
      out.append(22, '\0');
      append_number<uint16_t>(&out, entry.local_name.size());
      append_number<uint16_t>(&out, 5);
      out += entry.local_name + "extra" + entry.data;

      append_number<uint32_t>(&directory, 0x02014b50);
      append_number<uint32_t>(&directory, 0);
      append_number<uint16_t>(&directory, entry.flags);
      append_number<uint16_t>(&directory, entry.method);
      append_number<uint64_t>(&directory, 0); // time, crc
      append_number<uint32_t>(&directory, entry.wide ? UINT32_MAX : size);
      append_number<uint32_t>(&directory, entry.wide ? UINT32_MAX : size);
      append_number<uint16_t>(&directory, entry.name.size());
      append_number<uint16_t>(&directory, entry.wide ? 28 : 0);
      directory.append(10, '\0');
      append_number<uint32_t>(&directory, entry.wide ? UINT32_MAX : place);
      directory += entry.name;
      if (entry.wide) {
        append_number<uint16_t>(&directory, 1);
        append_number<uint16_t>(&directory, 24);
        append_number<uint64_t>(&directory, size);
        append_number<uint64_t>(&directory, size);
        append_number<uint64_t>(&directory, place);
      }
    }
    const uint64_t offset = out.size();
    const uint64_t count = entries.size() + extra_count;
    out += directory;
    if (zip64) {
      const uint64_t end64 = out.size();
      append_number<uint32_t>(&out, 0x06064b50);
      append_number<uint64_t>(&out, 44);
      out.append(12, '\0');
      append_number<uint64_t>(&out, count);
      append_number<uint64_t>(&out, count);
      append_number<uint64_t>(&out, directory.size());
      append_number<uint64_t>(&out, offset);
      append_number<uint32_t>(&out, 0x07064b50);
      append_number<uint32_t>(&out, 0);
      append_number<uint64_t>(&out, end64);
      append_number<uint32_t>(&out, 1);
    }
    append_number<uint32_t>(&out, 0x06054b50);
    append_number<uint16_t>(&out, disk);
    append_number<uint16_t>(&out, 0);
    append_number<uint16_t>(&out, zip64 ? UINT16_MAX : count);
    append_number<uint16_t>(&out, zip64 ? UINT16_MAX : count);
    append_number<uint32_t>(&out, zip64 ? UINT32_MAX : directory.size());
    append_number<uint32_t>(&out, zip64 ? UINT32_MAX : offset);
    append_number<uint16_t>(&out, comment.size());
    return out + comment;
  }
};

} // namespace tessera::format
