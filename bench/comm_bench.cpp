// Shared memory against Gloo, and memcpy of the same bytes as the limit.
//
//   tessera run -n 2 comm_bench
//
// One JSON row a collective and size, as bench/README.md says. The sides take
// turns within each repeat.
#include <tessera/tessera.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace {

using tessera::Group;
using tessera::InitOptions;
using tessera::ReduceOp;

constexpr int kRepeats = 7;

struct Size {
  const char* name;
  int64_t bytes; // of the full tensor
  int iterations; // a repeat
};

constexpr Size kSizes[] = {
    {"1KB", 1 << 10, 200},
    {"64KB", 64 << 10, 100},
    {"256KB", 256 << 10, 50},
    {"1MB", 1 << 20, 20},
    {"4MB", 4 << 20, 8},
    {"16MB", 16 << 20, 3},
    {"64MB", 64 << 20, 1}};

/// Microseconds an iteration on the slowest rank.
double measure(
    const Group& clock,
    int iterations,
    const std::function<void()>& body) {
  clock.barrier();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < iterations; ++i) {
    body();
  }
  const std::chrono::duration<double, std::micro> elapsed =
      std::chrono::steady_clock::now() - start;
  auto slowest = at::full({1}, elapsed.count() / iterations, at::kDouble);
  clock.all_reduce(slowest, ReduceOp::Max);
  return slowest.item<double>();
}

struct Samples {
  std::vector<double> values;

  double median() {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }
  double spread() {
    const double middle = median();
    return (values.back() - values.front()) / middle;
  }
};

struct Buffers {
  at::Tensor full;
  at::Tensor other;
  at::Tensor shard;
};

using Collective = std::function<void(const Group&, Buffers&)>;

void bench(
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
  Samples ours;
  Samples theirs;
  Samples limit;
  collective(shm, buffers);
  collective(gloo, buffers);
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    ours.values.push_back(
        measure(shm, size.iterations, [&] { collective(shm, buffers); }));
    theirs.values.push_back(
        measure(shm, size.iterations, [&] { collective(gloo, buffers); }));
    limit.values.push_back(measure(shm, size.iterations, [&] {
      std::memcpy(
          buffers.other.mutable_data_ptr(),
          buffers.full.const_data_ptr(),
          static_cast<size_t>(size.bytes));
    }));
  }
  if (shm.rank() == 0) {
    std::printf(
        "{\"name\": \"comm/%s/%s/%d\", \"unit\": \"us\", \"ours\": %.2f, "
        "\"peers\": {\"gloo\": %.2f}, \"limit\": %.2f, \"repeats\": %d, "
        "\"spread\": %.2f}\n",
        name.c_str(),
        size.name,
        shm.size(),
        ours.median(),
        theirs.median(),
        limit.median(),
        kRepeats,
        ours.spread());
    std::fflush(stdout);
  }
}

} // namespace

int main() {
  // Two worlds of the same ranks, one over each backend.
  const auto shm = tessera::init(InitOptions().backend("shm"));
  tessera::shutdown();
  const auto gloo = tessera::init(InitOptions().backend("gloo"));
  struct Row {
    const char* name;
    Collective collective;
  };
  const std::vector<Row> rows{
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
  for (const Row& row : rows) {
    for (const Size& size : kSizes) {
      bench(row.name, size, row.collective, shm, gloo);
    }
  }
  return 0;
}
