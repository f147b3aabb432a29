#include "plan/traffic.h"

#include "comm/wire_speed.h"
#include "plan/checked.h"

namespace tessera::plan {

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::GatherForward:
      return "all-gather, forward";
    case Operation::GatherBackward:
      return "all-gather, backward";
    case Operation::ReduceScatter:
      return "reduce-scatter";
    case Operation::AllReduce:
      return "all-reduce";
    case Operation::SendParams:
      return "owners' parameters";
    case Operation::Agreement:
      return "agreement";
  }
  return "?";
}

const char* key_of(Operation operation) {
  switch (operation) {
    case Operation::GatherForward:
      return "all_gather_forward";
    case Operation::GatherBackward:
      return "all_gather_backward";
    case Operation::ReduceScatter:
      return "reduce_scatter";
    case Operation::AllReduce:
      return "all_reduce";
    case Operation::SendParams:
      return "send_params";
    case Operation::Agreement:
      return "agreement";
  }
  return "?";
}

int64_t Wire::count(
    Operation operation,
    int64_t tensor_bytes,
    int64_t ranks,
    int64_t collectives) {
  const int64_t sent = comm::sent_of(tensor_bytes, ranks);
  if (ranks > 1) {
    add(operation, collectives, tensor_bytes, sent);
  }
  return sent;
}

int64_t Wire::count_sum(
    Operation operation,
    int64_t tensor_bytes,
    int64_t ranks) {
  const int64_t sent = times(comm::sent_of(tensor_bytes, ranks), 2);
  if (ranks > 1) {
    add(operation, 1, tensor_bytes, sent);
  }
  return sent;
}

void Wire::add(
    Operation operation,
    int64_t collectives,
    int64_t tensor_bytes,
    int64_t sent_bytes) {
  Traffic& traffic = traffic_[static_cast<size_t>(operation)];
  traffic.collectives = plus(traffic.collectives, times(collectives, repeats_));
  traffic.tensor_bytes =
      plus(traffic.tensor_bytes, times(tensor_bytes, repeats_));
  traffic.sent_bytes = plus(traffic.sent_bytes, times(sent_bytes, repeats_));
}

Traffic Wire::total() const {
  Traffic total;
  for (const Traffic& traffic : traffic_) {
    total.collectives = plus(total.collectives, traffic.collectives);
    total.tensor_bytes = plus(total.tensor_bytes, traffic.tensor_bytes);
    total.sent_bytes = plus(total.sent_bytes, traffic.sent_bytes);
  }
  return total;
}

} // namespace tessera::plan
