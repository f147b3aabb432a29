// What the units of a group share.
#pragma once

#include "shard/buffer_pool.h"
#include "shard/side_stream.h"

namespace tessera::shard {

struct Resources {
  BufferPool pool;
  SideStream gathers;
  SideStream reductions;
};

} // namespace tessera::shard
