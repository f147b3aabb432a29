#include "checkpoint/disk/read_region.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "checkpoint/format/dtype.h"

namespace tessera::checkpoint {
namespace {

// One dim of the copy; strides in bytes.
struct Dim {
  int64_t size;
  int64_t from;
  int64_t to;
};

// The dims of the copy in the order of the file; dims that form one run are
// merged. The last dim is then the longest possible run.
std::vector<Dim> ordered_dims(
    const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& from_strides,
    const std::vector<int64_t>& to_strides,
    int64_t element_bytes) {
  std::vector<Dim> dims;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] != 1) {
      dims.push_back(
          {.size = sizes[dim],
           .from = from_strides[dim] * element_bytes,
           .to = to_strides[dim]});
    }
  }
  std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) {
    return a.from > b.from;
  });
  std::vector<Dim> joined;
  for (const Dim& dim : dims) {
    if (!joined.empty() && joined.back().from == dim.size * dim.from &&
        joined.back().to == dim.size * dim.to) {
      joined.back() = {
          .size = joined.back().size * dim.size,
          .from = dim.from,
          .to = dim.to};
    } else {
      joined.push_back(dim);
    }
  }
  return joined;
}

void spread(
    const uint8_t* from,
    int64_t count,
    uint8_t* to,
    int64_t stride,
    int64_t element_bytes) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(
        to + i * stride,
        from + i * element_bytes,
        static_cast<size_t>(element_bytes));
  }
}

// The runs of one copy, starting at `place` in a file.
class RunCopier {
 public:
  RunCopier(BlockReader& reader, size_t file, Dim run, int64_t element_bytes)
      : reader_(reader),
        file_(file),
        run_(run),
        element_bytes_(element_bytes) {}

  void copy(uint64_t from, uint8_t* to) {
    if (run_.from == element_bytes_ && run_.to == element_bytes_) {
      reader_.read(
          file_, from, to, static_cast<uint64_t>(run_.size * element_bytes_));
    } else if (run_.from == element_bytes_) {
      copy_spread(from, to);
    } else {
      for (int64_t i = 0; i < run_.size; ++i) {
        reader_.read(
            file_,
            from + static_cast<uint64_t>(i * run_.from),
            to + i * run_.to,
            static_cast<uint64_t>(element_bytes_));
      }
    }
  }

 private:
  // Adjacent in the file, but not in memory.
  void copy_spread(uint64_t from, uint8_t* to) {
    std::array<uint8_t, 4096> piece;
    const int64_t most = static_cast<int64_t>(piece.size()) / element_bytes_;
    for (int64_t begin = 0; begin < run_.size; begin += most) {
      const int64_t count = std::min(most, run_.size - begin);
      reader_.read(
          file_,
          from + static_cast<uint64_t>(begin * element_bytes_),
          piece.data(),
          static_cast<uint64_t>(count * element_bytes_));
      spread(
          piece.data(), count, to + begin * run_.to, run_.to, element_bytes_);
    }
  }

  BlockReader& reader_;
  size_t file_;
  Dim run_;
  int64_t element_bytes_;
};

// One past the last byte of the box.
uint64_t end_of(
    const StoredBox& box,
    const Place& place,
    int64_t element_bytes) {
  int64_t last = 0;
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    last += (box.sizes[dim] - 1) * place.strides[dim];
  }
  return place.offset + static_cast<uint64_t>((last + 1) * element_bytes);
}

} // namespace

void read_region(
    BlockReader& reader,
    const StoredTensor& tensor,
    const StoredBox& box,
    const Place& place,
    const std::vector<int64_t>& begin,
    const std::vector<int64_t>& sizes,
    uint8_t* to,
    const std::vector<int64_t>& strides) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return;
  }
  const int64_t bytes = format::element_bytes(tensor.dtype);
  uint64_t from = place.offset;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    from += static_cast<uint64_t>(
        (begin[dim] - box.offsets[dim]) * place.strides[dim] * bytes);
  }
  auto outer = ordered_dims(sizes, place.strides, strides, bytes);
  const Dim run =
      outer.empty() ? Dim{.size = 1, .from = bytes, .to = bytes} : outer.back();
  if (!outer.empty()) {
    outer.pop_back();
  }
  reader.check(place.file, place.item_begin, place.offset);
  RunCopier copier(reader, place.file, run, bytes);
  std::vector<int64_t> at(outer.size(), 0);
  while (true) {
    copier.copy(from, to);
    size_t dim = outer.size();
    while (dim-- > 0) {
      from += static_cast<uint64_t>(outer[dim].from);
      to += outer[dim].to;
      if (++at[dim] < outer[dim].size) {
        break;
      }
      from -= static_cast<uint64_t>(outer[dim].from * outer[dim].size);
      to -= outer[dim].to * outer[dim].size;
      at[dim] = 0;
    }
    if (dim == SIZE_MAX) {
      break;
    }
  }
  reader.check(place.file, end_of(box, place, bytes), place.item_end);
}

} // namespace tessera::checkpoint
