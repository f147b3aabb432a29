// A solver with an MPI of its own trains a network on what it computes.
// docs/mpi.md explains it.
//
//   mpirun -np 4 mpi_solver
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <mpi.h>

#include <cmath>
#include <cstdio>
#include <vector>

constexpr int kCells = 64; // of a rank

// One step of heat flow along a rod. Rank r has its r-th part; the cells at the
// ends of a part come from its neighbours, by MPI as ever.
void advance(std::vector<double>& part, MPI_Comm solver) {
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(solver, &rank);
  MPI_Comm_size(solver, &size);
  const int left = rank == 0 ? MPI_PROC_NULL : rank - 1;
  const int right = rank == size - 1 ? MPI_PROC_NULL : rank + 1;
  double before = part.front();
  double after = part.back();
  MPI_Sendrecv(
      &part.back(),
      1,
      MPI_DOUBLE,
      right,
      0,
      &before,
      1,
      MPI_DOUBLE,
      left,
      0,
      solver,
      MPI_STATUS_IGNORE);
  MPI_Sendrecv(
      &part.front(),
      1,
      MPI_DOUBLE,
      left,
      1,
      &after,
      1,
      MPI_DOUBLE,
      right,
      1,
      solver,
      MPI_STATUS_IGNORE);
  std::vector<double> next(part);
  for (int i = 0; i < kCells; ++i) {
    const double l = i == 0 ? before : part[i - 1];
    const double r = i == kCells - 1 ? after : part[i + 1];
    next[i] += 0.4 * (l - 2 * part[i] + r);
  }
  part = next;
}

int main(int argc, char** argv) {
  // The solver's own, as before: its threads, its communicators.
  int threads = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &threads);
  MPI_Comm solver = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &solver);
  int rank = 0;
  MPI_Comm_rank(solver, &rank);

  // Tessera beside it. Both take their ranks from the launcher, so a rank has
  // the same number in both.
  const tessera::Group world = tessera::init();
  if (world.rank() != rank) {
    std::fprintf(stderr, "MPI and Tessera number the ranks differently\n");
    MPI_Abort(solver, 1);
  }

  // A network that predicts a cell after five steps from the five cells around
  // it. Each rank trains on its own part of the rod, and the parameters are
  // sharded over all ranks.
  tessera::seed(0); // the same network on every rank
  torch::nn::Sequential net(
      torch::nn::Linear(5, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  net->to(torch::kDouble);
  tessera::fully_shard(net);
  tessera::optim::AdamW optimizer(tessera::parameters(net), 1e-2);

  std::vector<double> part(kCells);
  for (int i = 0; i < kCells; ++i) {
    part[i] = std::sin(0.3 * (rank * kCells + i));
  }
  double first = 0;
  double last = 0;
  for (int step = 0; step < 60; ++step) {
    const auto now = torch::tensor(part, torch::kDouble);
    for (int i = 0; i < 5; ++i) {
      advance(part, solver);
    }
    const auto later = torch::tensor(part, torch::kDouble);
    const auto loss = torch::mse_loss(
        net->forward(now.unfold(0, 5, 1)), later.slice(0, 2, -2).unsqueeze(1));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    // The loss of all ranks, on rank 0: MPI_Reduce, over Tessera.
    auto mean = loss.detach().clone();
    world.reduce(mean, 0, tessera::ReduceOp::Avg);
    (step == 0 ? first : last) = mean.item<double>();
    for (double& cell : part) { // the rod is heated from outside
      cell += 0.2 * std::sin(0.1 * step);
    }
  }
  if (rank == 0) {
    std::printf("%d ranks: loss %.3f, then %.3f\n", world.size(), first, last);
  }

  // In either order; MPI is needed by neither the group nor its end.
  tessera::shutdown();
  MPI_Comm_free(&solver);
  MPI_Finalize();
  return rank == 0 && !(last < first / 4) ? 1 : 0;
}
