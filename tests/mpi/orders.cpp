// Ranks of MPI that are ranks of Tessera too, in every order of beginning and
// end.
//
//   mpirun -np 4 mpi_orders mpi|tessera mpi|tessera [multiple]
//
// The first word says who is initialized first, the second who ends first,
// "multiple" asks MPI for MPI_THREAD_MULTIPLE. Prints a line per rank and exits
// with 0 if all calls gave what they should.
#include <tessera/tessera.h>

#include <ATen/ops/full.h>

#include <mpi.h>

#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using tessera::Group;

void require(bool holds, const char* what) {
  if (!holds) {
    throw std::runtime_error(what);
  }
}

void init_mpi(bool multiple) {
  int provided = 0;
  const int wanted = multiple ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED;
  MPI_Init_thread(nullptr, nullptr, wanted, &provided);
  require(provided >= wanted, "this MPI has not enough threads");
}

int sum_over_mpi(MPI_Comm comm, int value) {
  int sum = 0;
  MPI_Allreduce(&value, &sum, 1, MPI_INT, MPI_SUM, comm);
  return sum;
}

int sum_over(const Group& group, int value) {
  auto tensor = at::full({70'000}, value, at::kInt);
  group.all_reduce(tensor);
  return tensor[69'999].item<int>();
}

/// The ranks of `comm` as ranks of MPI_COMM_WORLD.
std::vector<int> world_ranks(MPI_Comm comm) {
  MPI_Group of_comm = MPI_GROUP_NULL;
  MPI_Group of_world = MPI_GROUP_NULL;
  MPI_Comm_group(comm, &of_comm);
  MPI_Comm_group(MPI_COMM_WORLD, &of_world);
  int size = 0;
  MPI_Group_size(of_comm, &size);
  std::vector<int> own(static_cast<size_t>(size));
  std::vector<int> result(static_cast<size_t>(size));
  for (int i = 0; i < size; ++i) {
    own[static_cast<size_t>(i)] = i;
  }
  MPI_Group_translate_ranks(of_comm, size, own.data(), of_world, result.data());
  MPI_Group_free(&of_comm);
  MPI_Group_free(&of_world);
  return result;
}

/// A communicator and the group of the same ranks give the same sums, while
/// messages of both are under way.
void use_both(const Group& world) {
  int rank = -1;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  require(
      world.rank() == rank && world.size() == size, "ranks are numbered alike");

  const int color = rank % 2;
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, color, -rank, &half);
  const Group group = *world.split(color, -rank, "half");
  require(group.global_ranks() == world_ranks(half), "split as MPI does");
  // A communicator of which only its members know: by its ranks.
  const std::vector<int> first{0};
  require(world.subgroup(first).has_value() == (rank == 0), "rank 0 by itself");

  const int next = (rank + 1) % size;
  const int previous = (rank + size - 1) % size;
  auto ours = at::full({100'000}, rank, at::kInt);
  auto theirs = at::full({100'000}, -1, at::kInt);
  int mpi_theirs = -1;
  MPI_Request requests[2];
  auto receive = world.recv_async(theirs, previous, 3);
  MPI_Irecv(&mpi_theirs, 1, MPI_INT, previous, 3, MPI_COMM_WORLD, &requests[0]);
  auto send = world.send_async(ours, next, 3);
  MPI_Isend(&rank, 1, MPI_INT, next, 3, MPI_COMM_WORLD, &requests[1]);
  require(
      sum_over(group, rank) == sum_over_mpi(half, rank), "sums of the halves");
  require(
      sum_over(world, rank) == sum_over_mpi(MPI_COMM_WORLD, rank),
      "sums of all");
  receive.wait();
  send.wait();
  MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
  require(
      theirs[99'999].item<int>() == previous && mpi_theirs == previous,
      "messages of both");
  MPI_Comm_free(&half);
}

void run(const std::string& begins, const std::string& ends, bool multiple) {
  std::optional<Group> world;
  if (begins == "tessera") {
    world = tessera::init();
    require(sum_over(*world, 1) == world->size(), "a sum before MPI_Init");
  }
  init_mpi(multiple);
  if (!world) {
    world = tessera::init();
  }
  use_both(*world);
  const int rank = world->rank();
  const int size = world->size();
  if (ends == "mpi") {
    MPI_Finalize();
    require(sum_over(*world, 1) == size, "a sum after MPI_Finalize");
  }
  world.reset();
  tessera::shutdown();
  if (ends == "tessera") {
    require(sum_over_mpi(MPI_COMM_WORLD, 1) == size, "MPI after Tessera's end");
    MPI_Finalize();
  }
  std::printf("rank %d of %d: both agree\n", rank, size);
}

} // namespace

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> words(argv + 1, argv + argc);
    run(words.at(0), words.at(1), words.size() > 2);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ERROR %s\n", error.what());
    return 1;
  }
  return 0;
}
