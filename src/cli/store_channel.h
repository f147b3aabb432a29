// The launchers' shared values, in a store that node 0 hosts.
#pragma once

#include <future>
#include <memory>
#include <optional>
#include <string>

#include "comm/store/store.h"
#include "launch/channel.h"

namespace tessera::cli {

/// Calls wait as long as it takes for a store that is frozen or out of reach,
/// and may come back. So a thread makes them, in their order; where one hangs
/// the thread stays behind, and the launcher goes on.
class StoreChannel : public launch::Channel {
 public:
  /// Node 0's: of a store in this process.
  explicit StoreChannel(comm::StorePtr store);
  /// Of a store that connect() is to find.
  explicit StoreChannel(comm::StoreEndpoint endpoint);
  ~StoreChannel() override;

  std::optional<std::string> connect() override;
  void set(const std::string& key, const std::string& bytes) override;
  void set_unless_set(const std::string& key, const std::string& bytes)
      override;
  std::optional<std::string> get(const std::string& key) override;

 private:
  class Thread;
  Thread& thread();
  template <class Function>
  void start_and_wait_a_little(Function function);

  const comm::StoreEndpoint endpoint_;
  std::future<comm::StorePtr> connecting_;
  std::string problem_ = "not tried yet"; // of the last attempt to connect
  std::unique_ptr<Thread> thread_; // once connected
};

} // namespace tessera::cli
