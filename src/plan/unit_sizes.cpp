#include "plan/unit_sizes.h"

#include <algorithm>
#include <map>

#include "engine/layout.h"
#include "plan/checked.h"

namespace tessera::plan {
namespace {

using engine::Layout;
using format::DType;

/// engine::Layout does not check for overflow. Shapes that pass this check
/// cannot cause one: each sum in the layout is below the sum here.
void check_layout(const std::vector<engine::Shape>& shapes, int64_t ranks) {
  int64_t bound = 0;
  for (const engine::Shape& shape : shapes) {
    const Param param{.name = {}, .shape = shape};
    const int64_t numel = param.numel();
    const int64_t row =
        shape.empty() || shape.front() == 0 ? numel : numel / shape.front();
    // Padded to whole chunks of rows, and aligned.
    bound = plus(bound, plus(numel, times(plus(row, 64), ranks)));
  }
  times(bound, 16); // in bytes of any dtype
}

/// Complex parameters are not cast.
DType compute_dtype(DType dtype, const TrainingSetup& setup) {
  return is_floating(dtype) ? setup.param_dtype.value_or(dtype) : dtype;
}

BundleSizes bundle_of(
    DType dtype,
    const std::vector<engine::Shape>& shapes,
    const TrainingSetup& setup) {
  check_layout(shapes, setup.shards);
  const Layout layout(setup.layout, shapes, static_cast<int>(setup.shards));
  const int64_t shard_bytes = format::element_bytes(dtype);
  const DType compute = compute_dtype(dtype, setup);
  const DType reduce =
      is_floating(dtype) ? setup.reduce_dtype.value_or(dtype) : dtype;
  const bool keeps_cast = setup.keep_cast_shards && compute != dtype;
  BundleSizes sizes{
      .shard = layout.shard_numel() * shard_bytes,
      .cast = keeps_cast ? layout.shard_numel() * format::element_bytes(compute)
                         : 0,
      .gathered = layout.travel_numel() * format::element_bytes(compute),
      .full = layout.full_numel() * format::element_bytes(compute),
      .gradients = layout.travel_numel() * format::element_bytes(reduce),
      .reduced = layout.shard_numel() * format::element_bytes(reduce),
      .shard_gradient = layout.shard_numel() * shard_bytes,
      .shows_shard = setup.shards == 1 && !setup.offload &&
          (compute == dtype || keeps_cast),
      .converts_gradient =
          reduce != dtype || (setup.offload && setup.device != Device::Cpu),
      .copies_out = layout.travel() == Layout::Travel::Chunks,
      .travels_whole = layout.travel() == Layout::Travel::Whole};
  for (size_t param = 0; param < layout.num_params(); ++param) {
    const int64_t numel = layout.run(param, 0).numel; // no rank has more
    sizes.own += numel * shard_bytes;
    sizes.num_own += numel > 0 ? 1 : 0;
  }
  return sizes;
}

int64_t sum(
    const std::vector<BundleSizes>& bundles,
    int64_t BundleSizes::*member) {
  int64_t total = 0;
  for (const BundleSizes& bundle : bundles) {
    total = plus(total, bundle.*member);
  }
  return total;
}

} // namespace

int64_t UnitSizes::shard() const {
  return sum(bundles, &BundleSizes::shard);
}

int64_t UnitSizes::full() const {
  int64_t total = 0;
  for (const BundleSizes& bundle : bundles) {
    total = plus(total, bundle.shows_shard ? 0 : bundle.full);
  }
  return total;
}

int64_t UnitSizes::gradients() const {
  return sum(bundles, &BundleSizes::gradients);
}

int64_t UnitSizes::own() const {
  return sum(bundles, &BundleSizes::own);
}

UnitSizes sizes_of(const UnitKind& kind, const TrainingSetup& setup) {
  UnitSizes sizes;
  std::map<DType, std::vector<engine::Shape>> by_dtype;
  for (const Param& param : kind.params) {
    const DType dtype = setup.shard_dtype(param);
    by_dtype[dtype].push_back(param.shape);
    sizes.full_gradients.push_back(times(
        param.numel(), format::element_bytes(compute_dtype(dtype, setup))));
  }
  for (const auto& [dtype, shapes] : by_dtype) {
    sizes.bundles.push_back(bundle_of(dtype, shapes, setup));
  }
  return sizes;
}

std::vector<UnitSizes> sizes_of(
    const Model& model,
    const TrainingSetup& setup) {
  std::vector<UnitSizes> sizes;
  for (const UnitKind& kind : model.kinds) {
    sizes.push_back(sizes_of(kind, setup));
  }
  return sizes;
}

} // namespace tessera::plan
