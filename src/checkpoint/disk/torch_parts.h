// The parts of a torch file that LibTorch writes around bytes it never sees.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle_value.h"

namespace tessera::checkpoint {

/// [Note: a hole in a torch file]
///
/// The ZIP archive around a tensor is LibTorch's work, but its writer needs the
/// tensor's bytes in memory and passes them on in one piece. Our bytes may be
/// on a device, or come in parts from another file. So the writer is given
/// address space with no memory behind it. Without CRC sums, which torch does
/// not check, it hands the pointer through to our function, which leaves the
/// hole open or fills it; should the writer ever read the bytes, it reads
/// zeros.
class Hole {
 public:
  /// Throws FileError if there is no address space.
  explicit Hole(uint64_t bytes);
  ~Hole();
  Hole(const Hole&) = delete;
  Hole& operator=(const Hole&) = delete;

  const void* begin() const {
    return bytes_ > 0 ? begin_ : this;
  }

 private:
  uint64_t bytes_;
  void* begin_ = nullptr;
};

/// A tensor that is all of its storage. dtypes for which torch has no class of
/// storages have untyped ones, counted in bytes. Throws FileError if its bytes
/// are more than 63 bits can count.
format::Tensor row_major_tensor(
    format::DType dtype,
    const std::vector<int64_t>& sizes,
    const std::string& storage_key);

} // namespace tessera::checkpoint
