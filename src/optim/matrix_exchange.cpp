#include "optim/matrix_exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <numeric>
#include <optional>
#include <utility>

#include "comm/group/agreed_all_to_all.h"

namespace tessera::optim {
namespace {

std::vector<MatrixShape> shapes_of(const std::vector<CutMatrix>& matrices) {
  std::vector<MatrixShape> shapes;
  for (const CutMatrix& matrix : matrices) {
    shapes.push_back(
        {.rows = matrix.cut.shape[0],
         .columns = matrix.cut.shape[1],
         .ns_steps = matrix.iteration.num_steps});
  }
  return shapes;
}

int64_t sum_of(const std::vector<int64_t>& numels) {
  return std::accumulate(numels.begin(), numels.end(), int64_t{0});
}

} // namespace

MatrixExchange::MatrixExchange(
    Group group,
    at::Device device,
    std::vector<CutMatrix> matrices,
    int64_t batch_bytes)
    : group_(std::move(group)),
      device_(device),
      matrices_(std::move(matrices)),
      plan_(plan_matrices(
          shapes_of(matrices_),
          group_.size(),
          batch_bytes / static_cast<int64_t>(sizeof(at::BFloat16)))) {}

void MatrixExchange::run(const Give& give, const Take& take) {
  std::optional<Flight> last;
  std::optional<Flight> next;
  for (size_t i = 0; i < plan_.batches.size(); ++i) {
    Flight flight = next ? std::move(*next) : send(plan_.batches[i], give);
    next.reset();
    if (i + 1 < plan_.batches.size()) {
      next = send(plan_.batches[i + 1], give);
    }
    flight.work.wait();
    compute(flight);
    send_back(flight);
    if (last) {
      finish(*last, take);
    }
    last = std::move(flight);
  }
  if (last) {
    finish(*last, take);
  }
}

MatrixExchange::Flight MatrixExchange::send(
    const MatrixBatch& batch,
    const Give& give) const {
  const auto sends = sent_numels(batch);
  const auto receives = received_numels(batch);
  const auto options = at::TensorOptions(device_).dtype(at::kBFloat16);
  Flight flight{
      .batch = &batch,
      .parts = at::empty({sum_of(sends)}, options),
      .owned = at::empty({sum_of(receives)}, options),
      .work = {}};
  for_each_part(flight, give);
  flight.work = comm::start_agreed_all_to_all(
      group_, flight.owned, flight.parts, receives, sends, "Muon");
  return flight;
}

void MatrixExchange::compute(Flight& flight) const {
  const auto matrices = owned_in(*flight.batch, group_.rank());
  // By sender and then by matrix, as they arrived.
  std::vector<std::vector<at::Tensor>> pieces(matrices.size());
  int64_t begin = 0;
  for (size_t rank = 0; rank < static_cast<size_t>(group_.size()); ++rank) {
    for (size_t i = 0; i < matrices.size(); ++i) {
      const int64_t numel = matrices_[matrices[i]].cut.numels[rank];
      pieces[i].push_back(flight.owned.narrow(0, begin, numel));
      begin += numel;
    }
  }
  for (size_t i = 0; i < matrices.size(); ++i) {
    const CutMatrix& matrix = matrices_[matrices[i]];
    // The pieces of a matrix that came alone lie one after another.
    const at::Tensor whole =
        matrices.size() == 1 ? flight.owned : at::cat(pieces[i]);
    const at::Tensor result =
        matrix.iteration(whole.view(matrix.cut.shape)).reshape({-1});
    int64_t from = 0;
    for (const at::Tensor& piece : pieces[i]) {
      piece.copy_(result.narrow(0, from, piece.numel()));
      from += piece.numel();
    }
  }
}

void MatrixExchange::send_back(Flight& flight) const {
  flight.work = comm::start_agreed_all_to_all(
      group_,
      flight.parts,
      flight.owned,
      sent_numels(*flight.batch),
      received_numels(*flight.batch),
      "Muon, back");
}

void MatrixExchange::finish(Flight& flight, const Take& take) const {
  flight.work.wait();
  for_each_part(flight, take);
}

std::vector<size_t> MatrixExchange::owned_in(const MatrixBatch& batch, int rank)
    const {
  std::vector<size_t> owned;
  for (const size_t matrix : batch) {
    if (plan_.owners[matrix] == rank) {
      owned.push_back(matrix);
    }
  }
  return owned;
}

std::vector<int64_t> MatrixExchange::sent_numels(
    const MatrixBatch& batch) const {
  const auto rank = static_cast<size_t>(group_.rank());
  std::vector<int64_t> numels(static_cast<size_t>(group_.size()));
  for (const size_t matrix : batch) {
    numels[static_cast<size_t>(plan_.owners[matrix])] +=
        matrices_[matrix].cut.numels[rank];
  }
  return numels;
}

std::vector<int64_t> MatrixExchange::received_numels(
    const MatrixBatch& batch) const {
  std::vector<int64_t> numels(static_cast<size_t>(group_.size()));
  for (const size_t matrix : owned_in(batch, group_.rank())) {
    for (size_t rank = 0; rank < numels.size(); ++rank) {
      numels[rank] += matrices_[matrix].cut.numels[rank];
    }
  }
  return numels;
}

void MatrixExchange::for_each_part(
    const Flight& flight,
    const std::function<void(size_t matrix, const at::Tensor& part)>& visit)
    const {
  const auto mine = static_cast<size_t>(group_.rank());
  int64_t begin = 0;
  for (int owner = 0; owner < group_.size(); ++owner) {
    for (const size_t matrix : owned_in(*flight.batch, owner)) {
      const int64_t numel = matrices_[matrix].cut.numels[mine];
      visit(matrix, flight.parts.narrow(0, begin, numel));
      begin += numel;
    }
  }
}

} // namespace tessera::optim
