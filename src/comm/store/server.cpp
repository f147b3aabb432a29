#include "comm/store/server.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <system_error>
#include <utility>

#include "comm/store/server_loop.h"

namespace tessera::comm {
namespace {

/// A thread that is started while this lives gets no signals, which are for the
/// program's threads. The thread does get the signals of its own faults.
class NoSignals {
 public:
  NoSignals() {
    sigset_t signals;
    sigfillset(&signals);
    for (const int fault :
         {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
      sigdelset(&signals, fault);
    }
    pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~NoSignals() {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

} // namespace

StoreServer::StoreServer(
    UniqueFd listener,
    std::string secret,
    const StoreLimits& limits)
    : owner_(getpid()), stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!stop_) {
    throw std::system_error(errno, std::generic_category());
  }
  auto loop = std::make_unique<ServerLoop>(
      std::move(listener), stop_.get(), std::move(secret), limits);
  const NoSignals none;
  thread_ = std::thread([loop = std::move(loop)] {
    pthread_setname_np(pthread_self(), "tessera_store");
    loop->run();
  });
}

StoreServer::~StoreServer() {
  if (getpid() != owner_) {
    thread_.detach();
    return;
  }
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

} // namespace tessera::comm
