// Tells the sharding engine that the memory of a tensor is about to be used.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::comm {

/// [Note: raw access]
///
/// The sharding engine sees what happens to parameters and shards through the
/// operators that receive them ([Note: first touch]). Our own code that takes
/// the address of a tensor goes around those operators: a collective, a
/// checkpoint that is read in place. Such code calls one of these functions
/// first, and the engine treats the access like an operator: a read gathers the
/// parameter, a write to a shard makes the unit stale, a write to a gathered
/// parameter is refused. The functions also stand for an operator that was left
/// out because this rank has no elements to work on: the engine sees the
/// operators of the other ranks, so it must see this rank's.
///
/// A plain tensor costs two loads. `call` is what errors name.
void before_raw_read(const at::Tensor& tensor, const char* call);
void before_raw_write(const at::Tensor& tensor, const char* call);

enum class RawAccess { Read, Write };
using RawAccessWatcher =
    void (*)(const at::Tensor& tensor, RawAccess access, const char* call);
/// Called by the engine, once.
void set_raw_access_watcher(RawAccessWatcher watcher);

} // namespace tessera::comm
