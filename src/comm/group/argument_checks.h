// What collectives require of their arguments. All but overlap() throw
// c10::ValueError, which names the group, the call and the argument.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/group/group_impl.h"
#include "comm/raw_access.h"

namespace tessera::comm {

/// The tensor must be dense, contiguous, and on a device that backends reach.
/// The engine is told of the access first, see [Note: raw access].
void check_tensor(
    const GroupImpl& group,
    const char* call,
    const char* name,
    const at::Tensor& tensor,
    RawAccess access);

/// check_tensor() of both, which must have one dtype and one device. `output`
/// will be written.
void check_pair(
    const GroupImpl& group,
    const char* call,
    const at::Tensor& output,
    const at::Tensor& input);

/// `whole` must hold size() parts of `part`, and the two must not overlap
/// except where `part` is the rank()-th part.
void check_parts(
    const GroupImpl& group,
    const char* call,
    const at::Tensor& whole,
    const char* whole_name,
    const at::Tensor& part,
    const char* part_name);

void check_root(const GroupImpl& group, const char* call, int root);

/// `peer` must be another rank of the group, and `tag` one that can be sent.
void check_peer(const GroupImpl& group, const char* call, int peer, int tag);

/// `splits` in bytes. They are sizes on dim 0, which must add up to the tensor.
std::vector<int64_t> bytes_of_splits(
    const GroupImpl& group,
    const char* call,
    const char* name,
    const at::Tensor& tensor,
    at::IntArrayRef splits);

/// Whether two tensors share memory.
bool overlap(const at::Tensor& a, const at::Tensor& b);

} // namespace tessera::comm
