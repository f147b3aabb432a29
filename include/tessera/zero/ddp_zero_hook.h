#pragma once

#include <tessera/api.h>
#include <tessera/ddp/comm_hook.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

namespace tessera {

/// A communication hook that steps: a backward of `ddp` ends with parameters
/// that `zero` has updated on their owners and sent to all ranks. There is no
/// call of zero.step().
///
///   ZeroRedundancyOptimizer zero(
///       model->parameters(),
///       optimizer_class<optim::AdamW>(1e-3),
///       ZeroOptions().overlap_with_ddp(true));
///   ddp.register_comm_hook(
///       hook_with_zero_step(allreduce_hook(world), ddp, zero));
///
/// `hook` must average. A bucket belongs to one rank; with `shard_buckets`
/// large ones are cut between parameters, so that ranks have about as much. The
/// first backwards that reduce, two of them, three under static_graph, update
/// nothing: buckets have to be final. A parameter that no rank used is stepped
/// with a gradient of zeros. If a step throws on one rank, backward throws on
/// all, and the others' steps are made.
///
/// Throws c10::ValueError if `zero` was made without overlap_with_ddp, has
/// other ranks than `ddp`, or is in another hook. Both must outlive the
/// training; a backward without `zero` throws. Not collective.
TESSERA_API CommHook hook_with_zero_step(
    CommHook hook,
    detail::DDPHandle& ddp,
    ZeroRedundancyOptimizer& zero,
    bool shard_buckets = false);

/// The same with steps beside the rest of backward: a bucket is stepped and
/// sent when the one after it is ready. The parameters in it are then new while
/// backward goes on, so that one whose value is used past its gradient (a
/// detached copy in the graph) is an error of autograd.
TESSERA_API CommHook hook_with_zero_step_interleaved(
    CommHook hook,
    detail::DDPHandle& ddp,
    ZeroRedundancyOptimizer& zero,
    bool shard_buckets = false);

} // namespace tessera
