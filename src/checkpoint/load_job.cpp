#include "checkpoint/load_job.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

#include "checkpoint/device_work.h"
#include "checkpoint/disk/read_region.h"
#include "checkpoint/values.h"

namespace tessera::checkpoint {

namespace {

/// How many bytes are converted or copied to a device at a time.
constexpr int64_t kReadAtOnceBytes = int64_t{16} << 20;

std::vector<int64_t> byte_strides(const at::Tensor& tensor) {
  std::vector<int64_t> strides = tensor.strides().vec();
  for (int64_t& stride : strides) {
    stride *= static_cast<int64_t>(tensor.element_size());
  }
  return strides;
}

/// Fills `to`, which begins at `begin`, through host memory of the stored
/// dtype, a part at a time, each filled by `straight`.
void convert(
    const at::Tensor& to,
    const std::vector<int64_t>& begin,
    at::ScalarType dtype,
    const std::function<
        void(const at::Tensor& to, const std::vector<int64_t>& begin)>&
        straight) {
  const int64_t bytes =
      to.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  int64_t dim = 0;
  while (dim < to.dim() && to.size(dim) == 1) {
    ++dim;
  }
  if (bytes <= kReadAtOnceBytes || dim == to.dim()) {
    const at::Tensor staged = at::empty(to.sizes(), dtype);
    straight(staged, begin);
    to.copy_(staged);
    return;
  }
  const int64_t rows =
      std::max<int64_t>(1, kReadAtOnceBytes / (bytes / to.size(dim)));
  for (int64_t i = 0; i < to.size(dim); i += rows) {
    std::vector<int64_t> at = begin;
    at[static_cast<size_t>(dim)] += i;
    convert(
        to.narrow(dim, i, std::min(rows, to.size(dim) - i)),
        at,
        dtype,
        straight);
  }
}

} // namespace

LoadJob::LoadJob(
    const Source& source,
    StateDict& target,
    const LoadOptions& options,
    LeftOutParts left_out,
    int num_threads)
    : source_(source),
      num_threads_(num_threads),
      verifies_(options.verify() != Verify::Never),
      progress_(options.progress()),
      matched_(match_target(source, target, options, left_out)) {}

void LoadJob::in_threads(
    const std::function<void(const PlannedRead& read, BlockReader& reader)>&
        body) {
  // Regions that are neighbours in a file stay together.
  const uint64_t share =
      matched_.report.bytes_read / static_cast<uint64_t>(num_threads_) + 1;
  std::vector<std::pair<size_t, size_t>> parts;
  uint64_t bytes = 0;
  size_t begin = 0;
  for (size_t i = 0; i < matched_.reads.size(); ++i) {
    bytes += static_cast<uint64_t>(matched_.reads[i].to.numel()) *
        static_cast<uint64_t>(
                 format::element_bytes(matched_.reads[i].tensor->dtype));
    if (bytes >= share || i + 1 == matched_.reads.size()) {
      parts.emplace_back(begin, i + 1);
      begin = i + 1;
      bytes = 0;
    }
  }
  std::vector<std::exception_ptr> errors(parts.size());
  std::atomic<bool> failed = false;
  const auto run = [&](size_t part) {
    at::NoGradGuard no_grad;
    try {
      BlockReader reader(source_, verifies_);
      for (size_t i = parts[part].first; i < parts[part].second && !failed;
           ++i) {
        body(matched_.reads[i], reader);
      }
    } catch (...) {
      errors[part] = std::current_exception();
      failed = true;
    }
  };
  std::vector<std::jthread> threads;
  for (size_t part = 1; part < parts.size(); ++part) {
    threads.emplace_back(run, part);
  }
  if (!parts.empty()) {
    run(0);
  }
  for (std::jthread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

void LoadJob::verify() {
  in_threads([&](const PlannedRead& read, BlockReader& reader) {
    const auto element = format::element_bytes(read.tensor->dtype);
    int64_t first = 0;
    int64_t last = 0;
    for (size_t dim = 0; dim < read.begin.size(); ++dim) {
      const int64_t stride = read.place.strides[dim] * element;
      first += (read.begin[dim] - read.box->offsets[dim]) * stride;
      last += (read.to.size(static_cast<int64_t>(dim)) - 1) * stride;
    }
    std::vector<uint8_t> scratch(kBlockBytes);
    const uint64_t begin = read.place.offset + static_cast<uint64_t>(first);
    const uint64_t end = begin + static_cast<uint64_t>(last + element);
    for (uint64_t at = begin; at < end; at += kBlockBytes) {
      reader.read(
          read.place.file, at, scratch.data(), std::min(kBlockBytes, end - at));
    }
  });
}

void LoadJob::read() {
  std::vector<at::Tensor> targets;
  for (const PlannedRead& read : matched_.reads) {
    targets.push_back(read.to);
    // Memory that a save still holds gets its copy here: if several threads
    // wrote to one storage, each of them would try to copy it.
    if (read.to.is_cpu()) {
      read.to.mutable_data_ptr();
    }
  }
  // Work that is still queued may read the old values, or write over the new
  // ones.
  wait_for_devices(targets);
  in_threads([&](const PlannedRead& read, BlockReader& reader) {
    fill(read, reader);
    if (progress_) {
      const MutexLock lock(progress_mutex_);
      done_bytes_ += static_cast<uint64_t>(read.to.numel()) *
          static_cast<uint64_t>(format::element_bytes(read.tensor->dtype));
      progress_(done_bytes_, matched_.report.bytes_read);
    }
  });
}

void LoadJob::fill(const PlannedRead& read, BlockReader& reader) {
  const at::ScalarType dtype = from_format(read.tensor->dtype);
  const auto straight = [&](const at::Tensor& to,
                            const std::vector<int64_t>& begin) {
    read_region(
        reader,
        *read.tensor,
        *read.box,
        read.place,
        begin,
        to.sizes().vec(),
        static_cast<uint8_t*>(to.mutable_data_ptr()),
        byte_strides(to));
  };
  if (read.to.is_cpu() && read.to.scalar_type() == dtype &&
      !read.to.is_conj() && !read.to.is_neg()) {
    straight(read.to, read.begin);
  } else {
    convert(read.to, read.begin, dtype, straight);
    // A device may still be moving the values into memory with gaps, on the
    // stream of this thread. The caller knows of no such stream.
    wait_for_devices({read.to});
  }
  if (!read.to.is_inference()) {
    read.to.unsafeGetTensorImpl()->bump_version();
  }
}

void LoadJob::replace_values() {
  for (auto& replacement : matched_.replacements) {
    *replacement.at = std::move(replacement.value);
  }
  matched_.replacements.clear();
}

} // namespace tessera::checkpoint
