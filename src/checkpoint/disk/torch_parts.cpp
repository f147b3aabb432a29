#include "checkpoint/disk/torch_parts.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/disk/files.h"
#include "checkpoint/format/extent.h"

namespace tessera::checkpoint {

Hole::Hole(uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0) {
    return;
  }
  begin_ = ::mmap(
      nullptr,
      bytes,
      PROT_READ,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
      -1,
      0);
  if (begin_ == MAP_FAILED) {
    throw FileError(
        "no address space for a tensor of " + std::to_string(bytes) +
        " bytes: " + system_reason(errno) + ".");
  }
}

Hole::~Hole() {
  if (bytes_ > 0) {
    ::munmap(begin_, bytes_);
  }
}

format::Tensor row_major_tensor(
    format::DType dtype,
    const std::vector<int64_t>& sizes,
    const std::string& storage_key) {
  const auto bytes = format::checked_bytes(sizes, format::element_bytes(dtype));
  if (!bytes) {
    throw FileError("a tensor whose size does not fit into 63 bits");
  }
  format::Tensor tensor;
  tensor.dtype = dtype;
  tensor.sizes = sizes;
  tensor.strides.resize(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    tensor.strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  const bool typed = !format::info(dtype).storage_name.empty();
  tensor.storage.key = storage_key;
  tensor.storage.location = "cpu";
  if (typed) {
    tensor.storage.dtype = dtype;
  }
  tensor.storage.numel = typed ? *bytes / format::element_bytes(dtype) : *bytes;
  return tensor;
}

} // namespace tessera::checkpoint
