// OpenMPI's collectives, for the rows of comm_bench. comm.py compiles and runs
// it; it needs nothing but an MPI.
//
//   mpirun -np 2 mpi_collectives [--quick]
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace {

constexpr int kRepeats = 7;

struct Size {
  const char* name;
  int bytes; // of the full tensor
  int iterations; // per repeat
};

// Those of comm_bench.cpp.
constexpr Size kSizes[] = {
    {"1KB", 1 << 10, 200},
    {"64KB", 64 << 10, 100},
    {"256KB", 256 << 10, 50},
    {"1MB", 1 << 20, 20},
    {"4MB", 4 << 20, 8},
    {"16MB", 16 << 20, 3},
    {"64MB", 64 << 20, 1}};

/// Microseconds per iteration on the slowest rank.
double measure(const std::function<void()>& body, int iterations) {
  MPI_Barrier(MPI_COMM_WORLD);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < iterations; ++i) {
    body();
  }
  const std::chrono::duration<double, std::micro> elapsed =
      std::chrono::steady_clock::now() - start;
  const double mine = elapsed.count() / iterations;
  double largest = 0;
  MPI_Allreduce(&mine, &largest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return largest;
}

void print(const std::string& name, const std::vector<double>& samples) {
  std::string text;
  for (const double sample : samples) {
    text += (text.empty() ? "" : ", ") + std::to_string(sample);
  }
  std::printf(
      "{\"name\": \"%s\", \"unit\": \"us\", \"peers\": {\"openmpi\": [%s]}}\n",
      name.c_str(),
      text.c_str());
  std::fflush(stdout);
}

} // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const bool is_quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto all = MPI_COMM_WORLD;
  for (const Size& at : kSizes) {
    if (is_quick && at.bytes > 1 << 20) {
      continue;
    }
    const int count = at.bytes / 4;
    const int part = count / size;
    std::vector<float> full(static_cast<size_t>(count), 1.0f);
    std::vector<float> shard(static_cast<size_t>(part), 1.0f);
    struct Named {
      const char* name;
      std::function<void()> body;
    };
    const Named collectives[] = {
        {"all_gather",
         [&] {
           MPI_Allgather(
               shard.data(),
               part,
               MPI_FLOAT,
               full.data(),
               part,
               MPI_FLOAT,
               all);
         }},
        {"reduce_scatter",
         [&] {
           MPI_Reduce_scatter_block(
               full.data(), shard.data(), part, MPI_FLOAT, MPI_SUM, all);
         }},
        {"all_reduce",
         [&] { // the average, as comm_bench computes it
           MPI_Allreduce(
               MPI_IN_PLACE, full.data(), count, MPI_FLOAT, MPI_SUM, all);
           for (float& value : full) {
             value /= static_cast<float>(size);
           }
         }},
        {"broadcast",
         [&] { MPI_Bcast(full.data(), count, MPI_FLOAT, 0, all); }}};
    for (const auto& [name, body] : collectives) {
      body(); // warms up
      std::vector<double> samples;
      for (int repeat = 0; repeat < (is_quick ? 1 : kRepeats); ++repeat) {
        samples.push_back(measure(body, is_quick ? 1 : at.iterations));
      }
      if (rank == 0) {
        print(
            std::string("comm/") + name + "/" + at.name + "/" +
                std::to_string(size),
            samples);
      }
    }
  }
  MPI_Finalize();
  return 0;
}
