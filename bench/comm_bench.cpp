// Compares shared memory with Gloo, and with memcpy of the same bytes as the
// limit.
//
//   tessera run -n 2 comm_bench
//
// One row per collective and size. The sides take turns within each repeat.
#include <tessera/tessera.h>

#include <ATen/ops/full.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "harness.h"

namespace {

using bench::Arguments;
using tessera::Group;
using tessera::InitOptions;
using tessera::ReduceOp;

constexpr int kRepeats = 7;
constexpr int64_t kQuickBytes = 1 << 20; // --quick leaves larger ones out

struct Size {
  const char* name;
  int64_t bytes; // of the full tensor
  int iterations; // per repeat
};

constexpr Size kSizes[] = {
    {"1KB", 1 << 10, 200},
    {"64KB", 64 << 10, 100},
    {"256KB", 256 << 10, 50},
    {"1MB", 1 << 20, 20},
    {"4MB", 4 << 20, 8},
    {"16MB", 16 << 20, 3},
    {"64MB", 64 << 20, 1}};

struct Buffers {
  at::Tensor full;
  at::Tensor other;
  at::Tensor shard;
};

using Collective = std::function<void(const Group&, Buffers&)>;

void measure(
    const Arguments& arguments,
    const std::string& name,
    const Size& size,
    const Collective& collective,
    const Group& shm,
    const Group& gloo) {
  const int64_t numel = size.bytes / 4;
  Buffers buffers{
      at::full({numel}, 1.0f, at::kFloat),
      at::full({numel}, 0.0f, at::kFloat),
      at::full({numel / shm.size()}, 1.0f, at::kFloat)};
  const auto copy = [&] {
    std::memcpy(
        buffers.other.mutable_data_ptr(),
        buffers.full.const_data_ptr(),
        static_cast<size_t>(size.bytes));
  };
  const int iterations = arguments.times(size.iterations);
  /// Microseconds per iteration on the slowest rank.
  const auto microseconds = [&](const std::function<void()>& body) {
    return 1e3 / iterations * bench::milliseconds(shm, [&] {
             for (int i = 0; i < iterations; ++i) {
               body();
             }
           });
  };
  collective(shm, buffers);
  collective(gloo, buffers);
  bench::Row row{
      "comm/" + name + "/" + size.name + "/" + std::to_string(shm.size()),
      "us",
      {}};
  for (int repeat = 0; repeat < arguments.times(kRepeats); ++repeat) {
    row.ours.push_back(microseconds([&] { collective(shm, buffers); }));
    row.peers["gloo"].push_back(
        microseconds([&] { collective(gloo, buffers); }));
    row.limit.push_back(microseconds(copy));
  }
  if (shm.rank() == 0) {
    bench::print(row);
  }
}

/// What tessera::step_token() costs per step, compared with a barrier.
void measure_token(
    const Arguments& arguments,
    const Group& shm,
    const Group& gloo) {
  const int iterations = arguments.times(200);
  const auto microseconds = [&](const std::function<void(int64_t)>& body) {
    return 1e3 / iterations * bench::milliseconds(shm, [&] {
             for (int64_t i = 0; i < iterations; ++i) {
               body(i);
             }
           });
  };
  bench::Row row{"comm/step_token/" + std::to_string(shm.size()), "us", {}};
  for (int repeat = 0; repeat < arguments.times(kRepeats); ++repeat) {
    row.ours.push_back(
        microseconds([&](int64_t i) { tessera::step_token(i, shm); }));
    row.peers["gloo"].push_back(
        microseconds([&](int64_t i) { tessera::step_token(i, gloo); }));
    row.limit.push_back(microseconds([&](int64_t) { shm.barrier(); }));
  }
  if (shm.rank() == 0) {
    bench::print(row);
  }
}

} // namespace

int main(int argc, char** argv) {
  const Arguments arguments(argc, argv);
  // Two worlds of the same ranks, one over each backend.
  const auto shm = tessera::init(InitOptions().backend("shm"));
  tessera::shutdown();
  const auto gloo = tessera::init(InitOptions().backend("gloo"));
  struct Named {
    const char* name;
    Collective collective;
  };
  const std::vector<Named> collectives{
      {"all_gather",
       [](const Group& group, Buffers& b) {
         group.all_gather_into(b.full, b.shard);
       }},
      {"reduce_scatter",
       [](const Group& group, Buffers& b) {
         group.reduce_scatter(b.shard, b.full);
       }},
      {"all_reduce",
       [](const Group& group, Buffers& b) {
         group.all_reduce(b.full, ReduceOp::Avg);
       }},
      {"broadcast",
       [](const Group& group, Buffers& b) { group.broadcast(b.full, 0); }}};
  for (const auto& [name, collective] : collectives) {
    for (const Size& size : kSizes) {
      if (!arguments.is_quick() || size.bytes <= kQuickBytes) {
        measure(arguments, name, size, collective, shm, gloo);
      }
    }
  }
  measure_token(arguments, shm, gloo);
  return 0;
}
