#include "engine/unit_start.h"

#include "engine/owners.h"

namespace tessera::engine {
namespace {

/// A range in a storage.
struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;

  bool overlaps(const ByteRange& other) const {
    return begin < other.end && other.begin < end;
  }
};

ByteRange bytes_of(const at::Tensor& view) {
  if (view.numel() == 0) {
    return {};
  }
  int64_t last = view.storage_offset();
  for (int64_t dim = 0; dim < view.dim(); ++dim) {
    last += (view.size(dim) - 1) * view.stride(dim);
  }
  const auto size = static_cast<int64_t>(view.element_size());
  return {view.storage_offset() * size, (last + 1) * size};
}

} // namespace

void UnitStart::add(const std::string& name, uint64_t digest) {
  const MutexLock lock(mutex_);
  if (is_open_) {
    params_.push_back({.name = name, .digest = digest});
  }
}

void UnitStart::note_written(
    const std::vector<Bundle>& bundles,
    int rank,
    const at::Tensor& written) {
  const MutexLock lock(mutex_);
  if (!is_open_) {
    return;
  }
  auto param = params_.begin();
  for (const Bundle& bundle : bundles) {
    const Layout& layout = bundle.layout();
    const auto size = static_cast<int64_t>(bundle.shard().element_size());
    const bool is_here =
        written.defined() && storage_of(written) == storage_of(bundle.shard());
    const ByteRange bytes = is_here ? bytes_of(written) : ByteRange();
    for (size_t index = 0; index < layout.num_params(); ++index, ++param) {
      const Run run = layout.run(index, rank);
      const ByteRange own{
          run.shard_begin * size, (run.shard_begin + run.numel) * size};
      if (!written.defined() || bytes.overlaps(own)) {
        param->was_written = true;
      }
    }
  }
}

void UnitStart::close() {
  const MutexLock lock(mutex_);
  is_open_ = false;
  params_.clear();
}

} // namespace tessera::engine
