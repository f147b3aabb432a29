#pragma once

#include <tessera/comm/agree.h>
#include <tessera/comm/group.h>
#include <tessera/comm/init.h>
#include <tessera/comm/mesh.h>
#include <tessera/comm/reduce_op.h>
#include <tessera/error.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/recompute.h>
#include <tessera/fsdp/summon.h>
#include <tessera/fsdp/wrap_policy.h>
#include <tessera/optim/adamw.h>
#include <tessera/shard/deferred_init.h>
#include <tessera/shard/sharded_tensor.h>
#include <tessera/state/state_dict.h>
#include <tessera/version.h>
