#pragma once

#include <tessera/api.h>
#include <tessera/ddp/comm_hook.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

namespace tessera {

/// A communication hook that steps: when a backward of `ddp` ends, `zero` has
/// updated the parameters on their owners and sent them to all ranks. Do not
/// call zero.step().
///
///   ZeroRedundancyOptimizer zero(
///       model->parameters(),
///       optimizer_class<optim::AdamW>(1e-3),
///       ZeroOptions().overlap_with_ddp(true));
///   ddp.register_comm_hook(
///       hook_with_zero_step(allreduce_hook(world), ddp, zero));
///
/// `hook` must average. A bucket belongs to one rank; with `shard_buckets`
/// large buckets are cut between parameters, so that ranks have about the same
/// amount. The first two backwards that reduce, or three under static_graph,
/// update nothing: buckets have to be final first. A parameter that no rank
/// used is stepped with a gradient of zeros. If a step throws on one rank,
/// backward throws on all ranks, and the other ranks' steps are made.
///
/// Throws c10::ValueError if `zero` was made without overlap_with_ddp, has
/// other ranks than `ddp`, or is used by another hook. Both must outlive the
/// training; a backward without `zero` throws. Not collective.
TESSERA_API CommHook hook_with_zero_step(
    CommHook hook,
    detail::DDPHandle& ddp,
    ZeroRedundancyOptimizer& zero,
    bool shard_buckets = false);

/// The same with steps that overlap with backward: a bucket is stepped and sent
/// when the next one is ready. Its parameters then change while backward still
/// runs, so using a parameter's value after its gradient (a detached copy in
/// the graph) is an error of autograd.
TESSERA_API CommHook hook_with_zero_step_interleaved(
    CommHook hook,
    detail::DDPHandle& ddp,
    ZeroRedundancyOptimizer& zero,
    bool shard_buckets = false);

} // namespace tessera
