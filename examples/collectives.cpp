// Four ranks, a mesh, and one of each collective with its bandwidth.
//
//   tessera run -n 4 collectives
#include <tessera/tessera.h>

#include <ATen/ops/empty_like.h>
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
using tessera::ReduceOp;

constexpr int64_t kBytes = 16 << 20;
constexpr int64_t kNumel = kBytes / 4;

/// Seconds that `body` takes on the slowest rank; the best of three.
double time_of(const Group& world, const std::function<void()>& body) {
  body();
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    world.barrier();
    const auto start = std::chrono::steady_clock::now();
    body();
    auto seconds = at::full(
        {1},
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
            .count(),
        at::kDouble);
    world.all_reduce(seconds, ReduceOp::Max);
    best = std::min(best, seconds.item<double>());
  }
  return best;
}

void show_mesh(const Group& world) {
  const auto mesh =
      tessera::make_mesh({2, world.size() / 2}, {"replicate", "shard"});
  const std::string line = "rank " + std::to_string(world.rank()) + " is at (" +
      std::to_string(mesh.axis_rank("replicate")) + ", " +
      std::to_string(mesh.axis_rank("shard")) + ") and shards with ranks " +
      std::to_string(mesh.group("shard").global_ranks().front()) + " to " +
      std::to_string(mesh.group("shard").global_ranks().back());
  const auto* raw = reinterpret_cast<const uint8_t*>(line.data());
  for (const auto& bytes : world.gather_bytes({raw, line.size()}, 0)) {
    std::printf("  %s\n", std::string(bytes.begin(), bytes.end()).c_str());
  }
  if (world.rank() == 0) {
    std::printf(
        "%s over backend %s\n\n",
        mesh.to_string().c_str(),
        world.backend().c_str());
  }
}

void show_collectives(const Group& world) {
  const int64_t part = (kNumel + world.size() - 1) / world.size();
  auto full = at::full({part * world.size()}, world.rank() + 1.0f, at::kFloat);
  auto shard = at::full({part}, world.rank() + 1.0f, at::kFloat);
  auto other = at::empty_like(full);

  const double copy = time_of(world, [&] {
    std::memcpy(other.mutable_data_ptr(), full.const_data_ptr(), kBytes);
  });
  struct Row {
    const char* name;
    std::function<void()> body;
  };
  const std::vector<Row> rows{
      {"all_gather_into", [&] { world.all_gather_into(other, shard); }},
      {"reduce_scatter", [&] { world.reduce_scatter(shard, full); }},
      {"all_reduce", [&] { world.all_reduce(full, ReduceOp::Avg); }},
      {"broadcast", [&] { world.broadcast(full, 0); }},
      {"all_to_all", [&] { world.all_to_all(other, full); }},
  };
  auto print = [&](const char* name, double seconds) {
    if (world.rank() == 0) {
      std::printf(
          "  %-16s %7.2f ms  %6.2f GB/s  %5.1fx memcpy's time\n",
          name,
          seconds * 1e3,
          kBytes / seconds / 1e9,
          seconds / copy);
    }
  };
  if (world.rank() == 0) {
    std::printf("16 MB on each of %d ranks at once:\n", world.size());
  }
  print("memcpy", copy);
  for (const Row& row : rows) {
    print(row.name, time_of(world, row.body));
  }
  const double barrier = time_of(world, [&] {
    for (int i = 0; i < 100; ++i) {
      world.barrier();
    }
  });
  if (world.rank() == 0) {
    std::printf("  %-16s %7.1f us\n\n", "barrier", barrier * 1e4);
  }
}

} // namespace

int main() {
  const auto world = tessera::init();
  if (world.size() % 2 != 0) {
    if (world.rank() == 0) {
      std::fprintf(
          stderr,
          "collectives needs an even number of ranks: tessera run -n 4 ...\n");
    }
    return 1;
  }
  show_mesh(world);
  show_collectives(world);
  if (world.rank() == 0) {
    std::printf(
        "It runs the same under mpirun or torchrun. Sharded training builds on\n"
        "this: see examples/gpt, which `make demo` runs.\n");
  }
  return 0;
}
