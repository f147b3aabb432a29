#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "comm/store/server.h"
#include "comm/store/store.h"

namespace tessera::comm {

/// A connection to a store, with the calls that Tessera and its backends make.
/// Any thread may make a call, setTimeout() aside; calls run one after another.
///
/// c10d's client looks up the name that belongs to the address it connects to,
/// which takes seconds where name servers do not answer, and waits for answers
/// without a limit. This client does neither. A store that is gone, or that
/// does not answer within the timeout (five seconds at least), makes the call
/// and all later calls throw c10::DistNetworkError. A key that nobody sets in
/// time is a c10::DistStoreError, and the connection stays usable. A timeout of
/// zero, kNoTimeout, means no timeout.
class StoreClient final : public c10d::Store {
 public:
  /// `socket` comes from connect_to_store(). `server` is the store, if this
  /// process hosts it; the client keeps it alive.
  StoreClient(
      UniqueFd socket,
      StoreEndpoint endpoint,
      Milliseconds timeout,
      std::shared_ptr<StoreServer> server = nullptr);

  c10::intrusive_ptr<Store> clone() override;

  using Store::compareSet;
  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(
      const std::string& key,
      const std::vector<uint8_t>& expected,
      const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t amount) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const Milliseconds& timeout)
      override;
  void append(const std::string& key, const std::vector<uint8_t>& value)
      override;
  std::vector<std::vector<uint8_t>> multiGet(
      const std::vector<std::string>& keys) override;
  void multiSet(
      const std::vector<std::string>& keys,
      const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override {
    return true;
  }

 private:
  template <class Function>
  auto call(Function&& function);
  Milliseconds time_for_answer() const;

  // Constant after construction.
  const StoreEndpoint endpoint_;
  const std::shared_ptr<StoreServer> server_;

  Mutex mutex_;
  UniqueFd socket_ TESSERA_GUARDED_BY(mutex_); // none after a failure
};

} // namespace tessera::comm
