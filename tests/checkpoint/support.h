// Folders and states for tests of checkpoints.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/engine/sharded_tensor.h>
#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/byte_vector.h"

namespace tessera::testing {

namespace fs = std::filesystem;

/// A folder that is removed at the end of the test. All ranks of a group get
/// the same one.
class TempFolder {
 public:
  TempFolder() : TempFolder(std::string(), true) {}
  explicit TempFolder(const Group& group)
      : TempFolder(
            [&] {
              const std::string mine = group.rank() == 0 ? make() : "";
              const Bytes bytes = group.broadcast_bytes(
                  {reinterpret_cast<const uint8_t*>(mine.data()), mine.size()},
                  0);
              return std::string(bytes.begin(), bytes.end());
            }(),
            group.rank() == 0) {
    group_ = group;
  }
  ~TempFolder() {
    if (group_.valid()) {
      try {
        group_.barrier("end of a test's folder");
      } catch (const std::exception&) {
        // The group died in the test; the folder is removed anyway.
      }
    }
    if (owns_) {
      fs::remove_all(path_);
    }
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  fs::path operator/(const std::string& name) const {
    return path_ / name;
  }
  const fs::path& path() const {
    return path_;
  }

 private:
  TempFolder(const std::string& path, bool owns)
      : path_(path.empty() ? make() : path), owns_(owns) {}

  static std::string make() {
    std::string name = (fs::temp_directory_path() / "tessera_XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::runtime_error("no temporary folder");
    }
    return name;
  }

  fs::path path_;
  bool owns_;
  Group group_;
};

inline std::string read_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_bytes(const fs::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
}

/// Names of all entries, sorted.
inline std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// How a tensor is divided over the ranks of a group.
enum class Cut { Whole, Rows, Columns, Flat, Last };

/// This rank's part of `whole`, in memory of its own.
inline StateValue cut(const at::Tensor& whole, Cut how, const Group& group) {
  const int64_t n = group.size();
  const int64_t r = group.rank();
  if (how == Cut::Whole || whole.dim() == 0) {
    return whole.clone();
  }
  std::vector<ShardedTensor::Piece> pieces;
  const auto add = [&](ShardedTensor::Box box) {
    at::Tensor part = whole;
    for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
      part = part.narrow(
          static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
    }
    if (part.numel() > 0) {
      pieces.push_back({std::move(box), part.clone()});
    }
  };
  const auto sizes = whole.sizes().vec();
  const auto along = [&](size_t dim, int64_t begin, int64_t end) {
    ShardedTensor::Box box{std::vector<int64_t>(sizes.size(), 0), sizes};
    box.offsets[dim] = std::min(begin, sizes[dim]);
    box.sizes[dim] = std::min(end, sizes[dim]) - box.offsets[dim];
    add(std::move(box));
  };
  const auto share = [&](int64_t size) { return (size + n - 1) / n; };
  switch (how) {
    case Cut::Rows:
      along(0, r * share(sizes[0]), (r + 1) * share(sizes[0]));
      break;
    case Cut::Columns: {
      const size_t dim = sizes.size() - 1;
      along(dim, r * share(sizes[dim]), (r + 1) * share(sizes[dim]));
      break;
    }
    case Cut::Last: // one rank has all of it
      if (r == n - 1) {
        along(0, 0, sizes[0]);
      }
      break;
    default: { // runs of elements, of two dims at most
      const int64_t columns = whole.numel() / std::max<int64_t>(sizes[0], 1);
      const int64_t all = whole.numel();
      int64_t at = std::min(all, r * share(all));
      const int64_t end = std::min(all, (r + 1) * share(all));
      while (at < end) {
        const int64_t row = at / columns;
        const int64_t column = at % columns;
        const int64_t rows = column == 0 ? (end - at) / columns : 0;
        ShardedTensor::Box box{std::vector<int64_t>(sizes.size(), 0), sizes};
        box.offsets[0] = row;
        box.sizes[0] = std::max<int64_t>(rows, 1);
        int64_t taken = rows * columns;
        if (rows == 0) {
          taken = std::min(columns - column, end - at);
          if (sizes.size() > 1) {
            box.offsets[1] = column;
            box.sizes[1] = taken;
          }
        }
        at += taken;
        add(std::move(box));
      }
    }
  }
  return ShardedTensor(sizes, whole.scalar_type(), std::move(pieces), group);
}

/// The same shape on this rank, with other values in it.
inline StateValue blank(const StateValue& like) {
  if (like.is_tensor()) {
    return at::empty_like(like.tensor())
        .fill_(like.tensor().scalar_type() == at::kBool ? 0 : 77);
  }
  std::vector<ShardedTensor::Piece> pieces;
  for (const auto& piece : like.sharded().pieces()) {
    pieces.push_back({piece.box, blank(piece.tensor).tensor()});
  }
  const ShardedTensor& sharded = like.sharded();
  return ShardedTensor(
      sharded.sizes(), sharded.dtype(), std::move(pieces), sharded.group());
}

} // namespace tessera::testing
