// ddp::Reducer's buckets, as numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/format/dtype.h"

namespace tessera::plan {

struct BucketItem {
  int64_t bytes = 0;
  format::DType dtype = format::DType::Float32;
};

/// Bytes of the buckets that gradients which come in this order are put into,
/// with DDPOptions' default sizes.
std::vector<int64_t> buckets_of(const std::vector<BucketItem>& order);

} // namespace tessera::plan
