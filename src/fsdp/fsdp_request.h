// What the options of FSDP ask for.
#pragma once

#include <tessera/fsdp/fsdp.h>

#include "fsdp/shard_request.h"

namespace tessera::fsdp {

/// The strategy that the options name. On one rank there is nothing to shard:
/// NoShard, with a warning.
ShardingStrategy strategy_of(const FSDPOptions& options);

/// Throws if the options contradict each other.
ShardRequest request_of(const FSDPOptions& options, ShardingStrategy strategy);

} // namespace tessera::fsdp
