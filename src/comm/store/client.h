#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "comm/host.h"
#include "comm/store/server.h"
#include "comm/store/store.h"

namespace tessera::comm {

/// A connection to a store, with the calls that Tessera and its backends make.
/// Any thread may make them, setTimeout() aside; they are made one after
/// another.
///
/// c10d's client looks up the name that belongs to the address it connects to,
/// which takes seconds where name servers do not answer, and waits for answers
/// without a limit. This one does not; a store that is gone, or says nothing
/// for as long as the timeout (five seconds at least), makes calls throw
/// c10::DistNetworkError: this one and all later ones. A key that nobody sets
/// in time is a c10::DistStoreError, and the store as good as before. A timeout
/// of zero, kNoTimeout, is none.
class StoreClient final : public c10d::Store {
 public:
  /// `socket` comes from connect_to_store(). `server` is the store where this
  /// process hosts it; it lives as long as this.
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

  const StoreEndpoint endpoint_;
  const std::shared_ptr<StoreServer> server_;
  std::mutex mutex_;
  UniqueFd socket_; // guarded by mutex_; none after the connection failed
};

/// One attempt to reach a store on one of `addresses`, over by `deadline`,
/// though a greeting gets half a second at least. None if it fails, with the
/// reason in `problem`; another user's store on this host is such a failure.
/// `secret` is proved where it is not empty. Throws c10::DistNetworkError if
/// the store has another one.
UniqueFd connect_to_store(
    const AddressList& addresses,
    const std::string& secret,
    std::chrono::steady_clock::time_point deadline,
    std::string& problem);

} // namespace tessera::comm
