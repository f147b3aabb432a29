#include "checkpoint/store/item_frame.h"

#include <caffe2/serialize/inline_container.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "checkpoint/format/extent.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/store/file_error.h"
#include "checkpoint/store/files.h"

namespace tessera::checkpoint {

namespace {

using caffe2::serialize::PyTorchStreamWriter;

/// [Note: a hole in a torch file]
///
/// The ZIP archive around a tensor is LibTorch's work, but its writer wants the
/// tensor's bytes at hand and passes them on in one piece. Ours may be on a
/// device, or come in parts from another file. So it is shown address space
/// with no memory behind it. Without CRC sums, which torch does not check, it
/// hands the pointer through to our function, which leaves the hole open;
/// should it ever read, it reads zeros.
class Hole {
 public:
  explicit Hole(uint64_t bytes) : bytes_(bytes) {
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
  ~Hole() {
    if (bytes_ > 0) {
      ::munmap(begin_, bytes_);
    }
  }
  Hole(const Hole&) = delete;
  Hole& operator=(const Hole&) = delete;

  const void* begin() const {
    return bytes_ > 0 ? begin_ : this;
  }

 private:
  uint64_t bytes_;
  void* begin_ = nullptr;
};

/// A tensor that is all of the file's storage. dtypes for which torch has no
/// class of storages have untyped ones, counted in bytes.
format::Value row_major(
    format::DType dtype,
    const std::vector<int64_t>& sizes,
    int64_t bytes) {
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
  tensor.storage.key = "0";
  tensor.storage.location = "cpu";
  if (typed) {
    tensor.storage.dtype = dtype;
  }
  tensor.storage.numel = typed ? bytes / format::element_bytes(dtype) : bytes;
  return tensor;
}

void write_record(
    PyTorchStreamWriter& writer,
    const std::string& name,
    const std::string& text) {
  writer.writeRecord(name, text.data(), text.size());
}

} // namespace

TensorFrame frame_tensor(
    format::DType dtype,
    const std::vector<int64_t>& sizes) {
  const auto bytes = format::checked_bytes(sizes, format::element_bytes(dtype));
  if (!bytes) {
    throw FileError("a tensor whose size does not fit into 63 bits");
  }
  TensorFrame frame;
  frame.data_bytes = static_cast<uint64_t>(*bytes);
  const Hole hole(frame.data_bytes);
  bool past_hole = false;
  PyTorchStreamWriter writer(
      [&](const void* data, size_t size) {
        if (data == hole.begin()) {
          past_hole = true;
        } else {
          (past_hole ? frame.tail : frame.head)
              .append(static_cast<const char*>(data), size);
        }
        return size;
      },
      /*compute_crc32=*/false);
  write_record(
      writer,
      "data.pkl",
      format::write_pickle(row_major(dtype, sizes, *bytes)));
  write_record(writer, "byteorder", "little");
  writer.writeRecord("data/0", hole.begin(), frame.data_bytes);
  writer.writeEndOfFile();
  return frame;
}

std::string value_item(const format::Value& value) {
  std::string item;
  PyTorchStreamWriter writer(
      [&](const void* data, size_t size) {
        item.append(static_cast<const char*>(data), size);
        return size;
      },
      /*compute_crc32=*/false);
  write_record(writer, "data.pkl", format::write_pickle(value));
  write_record(writer, "byteorder", "little");
  writer.writeEndOfFile();
  return item;
}

} // namespace tessera::checkpoint
