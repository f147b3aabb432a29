// Ranks as threads on one mapping, so that TSan sees all of them.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "comm/shm/channel.h"
#include "comm/shm/segment.h"

namespace tessera::comm::shm {

class ThreadRanks {
 public:
  ThreadRanks(
      int size,
      size_t slot_bytes,
      Channel::Config base = default_config())
      : base_(std::move(base)),
        segment_(Segment::create(Channel::bytes_needed(size, slot_bytes))) {
    base_.size = size;
    base_.slot_bytes = slot_bytes;
  }

  static Channel::Config default_config() {
    return {
        .patience = {
            .spin = std::chrono::microseconds(0),
            .timeout = std::chrono::seconds(20)}};
  }

  std::unique_ptr<Channel> channel(int rank) const {
    Channel::Config config = base_;
    config.rank = rank;
    return std::make_unique<Channel>(segment_.data(), config);
  }

  /// Runs `body` once per rank, each on its own thread and channel.
  void run(const std::function<void(Channel&)>& body) const {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < base_.size; ++rank) {
      threads.emplace_back([this, rank, &body] { body(*channel(rank)); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

 private:
  Channel::Config base_;
  Segment segment_;
};

} // namespace tessera::comm::shm
