#pragma once

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <thread>

namespace tessera {

/// The cores of this host, at least 1. Counts cores that this process is not
/// bound to: a rank that is bound to one core has peers on the others.
inline int host_cores() {
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

/// The cores that this process may run on, at least 1: what a launcher has to
/// give to its ranks.
inline int bound_cores() {
  // The kernel refuses a mask smaller than its own, so grow until it fits.
  for (int num_cpus = 1024; num_cpus <= (1 << 20); num_cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(num_cpus));
    if (set == nullptr) {
      break;
    }
    const size_t num_bytes = CPU_ALLOC_SIZE(static_cast<size_t>(num_cpus));
    const int rc = sched_getaffinity(0, num_bytes, set);
    const int error = errno;
    const int count = rc == 0 ? CPU_COUNT_S(num_bytes, set) : 0;
    CPU_FREE(set);
    if (rc == 0) {
      return std::max(1, count);
    }
    if (error != EINVAL) {
      break;
    }
  }
  return host_cores();
}

} // namespace tessera
